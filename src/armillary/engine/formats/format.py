"""What kernels ask of a number format."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Literal

from llvmlite import ir

from armillary.engine.emit import Emit
from armillary.engine.machine import Machine

Activations = Literal["float32", "int8"]

ROWS = 16
"""Rows of activations that weights meet at most."""


class Format(ABC):
    """How weights are stored, and how they meet activations.

    A row of weights is `block` of them in `nbytes` bytes, again and again. Activations that they
    are multiplied by are float32, or the int8 of `formats/int8.py`.
    """

    name: ClassVar[str]
    block: ClassVar[int]
    nbytes: ClassVar[int]
    activations: ClassVar[Activations]

    def row_bytes(self, k: int) -> int:
        """Bytes of a row of k weights."""
        return k // self.block * self.nbytes

    @abstractmethod
    def together(self, machine: Machine, *, alone: bool) -> int:
        """Rows of weights that meet some rows of activations, or a row `alone`, at once."""

    def together_laid(self, machine: Machine) -> int:
        """The same for rows of weights that are laid out first; 0 where none are."""
        del machine
        return 0

    @abstractmethod
    def dots(
        self,
        e: Emit,
        machine: Machine,
        weights: Sequence[ir.Value],
        ahead: ir.Value,
        x: ir.Value,
        stride: ir.Value,
        k: ir.Value,
        rows: ir.Value,
        totals: ir.Value,
    ) -> None:
        """`together` rows of k weights times each of some rows of activations.

        Activations lie `stride` bytes apart; there are at most ROWS of them. `totals` gets the
        products, float32 (rows, together). `ahead`: where weights lie that will be read later, to
        be asked for.
        """

    def lay(self, e: Emit, weights: Sequence[ir.Value], k: ir.Value, panel: ir.Value) -> None:
        """`together_laid` rows of k weights to the layout that `dots_laid` reads.

        It takes no more than the bytes of `tiling.panel_bytes`.
        """
        raise NotImplementedError

    def dots_laid(
        self,
        e: Emit,
        machine: Machine,
        panel: ir.Value,
        x: ir.Value,
        stride: ir.Value,
        k: ir.Value,
        rows: ir.Value,
        totals: ir.Value,
    ) -> None:
        """As `dots`, to the last bit, with what `lay` has laid out."""
        raise NotImplementedError

    @abstractmethod
    def decode(self, e: Emit, weights: ir.Value, k: ir.Value, out: ir.Value) -> None:
        """Write a row of k weights as float32."""
