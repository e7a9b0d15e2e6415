"""What formats of 32 weights have in common, which meet activations of int8.

Such a format says what it reads of a block; the loops over blocks and rows stand here.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

from llvmlite import ir

from armillary.engine.emit import F32, FLOATS, I8, Emit, vector
from armillary.engine.formats.format import Format
from armillary.engine.formats.int8 import GROUP, LANES, Rows, Totals, small_dot
from armillary.engine.machine import Machine

Meet = Callable[[Rows, int, ir.Value, Totals], None]
"""Add what a block gives with a group of a row of activations to that row's total."""


class Blocks(Format):
    """Blocks of 32 weights."""

    block = GROUP
    activations = "int8"

    @abstractmethod
    def meet(self, e: Emit, machine: Machine, block: ir.Value) -> Meet:
        """Read a block, once for all rows that it meets."""

    @abstractmethod
    def halves(self, e: Emit, block: ir.Value) -> Sequence[ir.Value]:
        """The 32 weights of a block as two float32 vectors."""

    def dots(
        self,
        e: Emit,
        machine: Machine,
        weights: Sequence[ir.Value],
        x: ir.Value,
        stride: ir.Value,
        k: ir.Value,
        rows: int,
    ) -> list[list[ir.Value]]:
        """See Format."""
        xs, totals = Rows(e, x, stride, k, rows), [Totals(e, rows) for _ in weights]
        with e.loop(e.div(k, self.block)) as group:
            for begin, total in zip(weights, totals, strict=True):
                add = self.meet(e, machine, e.add(begin, e.mul(group, self.nbytes)))
                for row in range(rows):
                    add(xs, row, group, total)
        return [total.results() for total in totals]

    def decode(self, e: Emit, weights: ir.Value, k: ir.Value, out: ir.Value) -> None:
        """See Format."""
        with e.loop(e.div(k, self.block)) as group:
            place = e.add(out, e.mul(group, 4 * self.block))
            block = e.add(weights, e.mul(group, self.nbytes))
            for number, half in enumerate(self.halves(e, block)):
                e.store(half, place, 4 * FLOATS * number)


class Nibbles(Blocks):
    """w = d·q + m with q of 4 bits: behind a head, 16 bytes whose low halves are the first 16 q."""

    head: ClassVar[int]
    """Bytes before the q."""

    @abstractmethod
    def scale(self, e: Emit, block: ir.Value, lanes: int) -> ir.Value:
        """d, in every lane of a float32 vector."""

    @abstractmethod
    def offset(self, e: Emit, block: ir.Value, scale: ir.Value) -> ir.Value:
        """m; `scale` is d in a vector."""

    def meet(self, e: Emit, machine: Machine, block: ir.Value) -> Meet:
        """See Blocks."""
        scale = self.scale(e, block, LANES)
        offset = self.offset(e, block, scale)
        q = e.shuffle(*self._q(e, block), range(GROUP))

        def add(xs: Rows, row: int, group: ir.Value, total: Totals) -> None:
            products = small_dot(e, machine, q, xs.bytes(row, group))
            total.add(row, products, scale, xs.scale(row, group))
            total.add_offset(row, offset, xs.sum(row, group))

        return add

    def halves(self, e: Emit, block: ir.Value) -> Sequence[ir.Value]:
        """See Blocks."""
        scale = self.scale(e, block, FLOATS)
        offset = e.splat(self.offset(e, block, scale), FLOATS)
        return [
            e.fadd(e.builder.fmul(e.builder.uitofp(q, vector(F32, FLOATS)), scale), offset)
            for q in self._q(e, block)
        ]

    def _q(self, e: Emit, block: ir.Value) -> tuple[ir.Value, ir.Value]:
        """The first 16 q and the others."""
        both = e.load(vector(I8, 16), block, self.head)
        low = e.builder.and_(both, e.constant(15, both.type))
        return low, e.builder.lshr(both, e.constant(4, both.type))
