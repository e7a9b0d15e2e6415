"""What the programs of a decoder are made of: the memory that they work in, products and norms.

Norms and the rounding to int8 are so short that each thread does them for itself, rather than wait
for the others' part. Products share out their columns, and elementwise steps after them the same
columns, so that neither waits for the other.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from armillary.config import DecoderConfig, NormConfig
from armillary.engine.buffers import Buffer, Inputs, Slots
from armillary.engine.formats import int8
from armillary.engine.kv_layout import Stored
from armillary.engine.library import Library
from armillary.engine.program import Program
from armillary.engine.weights import Matrix, Stack, Weights


class Steps:
    """A program that grows, and its memory. `rows`: of a pass at most."""

    alone = True
    """Whether each thread norms all rows, and rounds them, for itself."""
    _panels: NDArray[np.uint8] | None = None
    """Memory for products of more than ROWS rows, and how much of it is each thread's."""
    _panel_bytes = 0

    def __init__(
        self,
        config: DecoderConfig,
        weights: Weights,
        code: Library,
        threads: int,
        stored: Stored,
        rows: int,
    ) -> None:
        self.config, self.stored, self.rows = config, stored, rows
        self._weights, self._threads, self._code = weights, threads, code
        self.program = Program(code)
        self.inputs = Inputs.of(config.n_layers, rows)
        self.rotaries = config.rotaries
        for rotary in self.rotaries:
            self.inputs.cos.append(np.zeros((rows, rotary.d_rotary // 2), np.float32))
            self.inputs.sin.append(np.zeros((rows, rotary.d_rotary // 2), np.float32))
        self._whole: dict[Any, Buffer] = {}
        self._slots: dict[tuple[int, int], Slots] = {}

    # Memory. A buffer is named for its use, and used again by every layer of the same sizes.

    def _shared(self, use: str, width: int, slots: Slots | None = None) -> Buffer:
        return self._buffer(use, 4 * width, 0, slots)

    def _own(self, use: str, row_bytes: int, slots: Slots | None = None) -> Buffer:
        return self._buffer(use, row_bytes, self._threads, slots)

    def _buffer(self, use: str, row_bytes: int, threads: int, slots: Slots | None) -> Buffer:
        rows = self.rows if slots is None else slots.most
        key = (use, row_bytes, threads, rows)
        if key not in self._whole:
            self._whole[key] = Buffer(row_bytes, rows, threads)
        return self._whole[key]

    # Steps.

    def _products(
        self,
        wanted: Sequence[tuple[str, Buffer]],
        x: Buffer,
        k: int,
        *,
        wait: bool = True,
        adds: bool = False,
        slots: Slots | None = None,
    ) -> None:
        """x times matrices by their names, or those of experts times the rows in their slots."""
        find = self._weights.matrix if slots is None else self._weights.stack
        named = [
            (find(name + ".weight"), self._weights.optional(name + ".bias"), out)
            for name, out in wanted
        ]
        self._multiply(named, x, k, wait=wait, adds=adds, slots=slots)

    def _multiply(
        self,
        wanted: Sequence[tuple[Matrix | Stack, NDArray[np.float32] | None, Buffer]],
        x: Buffer,
        k: int,
        *,
        wait: bool = True,
        adds: bool = False,
        rows: NDArray[np.int64] | None = None,
        slots: Slots | None = None,
    ) -> None:
        """x times matrices, in the activations that each matrix's format asks for."""
        name, which = self._which("product", rows, slots)
        rounded: Buffer | None = None
        for number, (matrix, bias, out) in enumerate(wanted):
            from_ = x
            if matrix.format.activations == "int8":
                rounded = rounded or self._rounded(x, k, rows, slots)
                from_ = rounded
            self.program.add(
                f"{name}_{matrix.format.name}",
                wait=wait and number == len(wanted) - 1,
                **matrix.arguments(),
                k=k,
                x=from_.data,
                x_stride=from_.stride,
                x_private=from_.private,
                bias=bias,
                out=out.data,
                out_stride=out.stride,
                adds=int(adds),
                scratch=self._panels,
                scratch_bytes=self._panel_bytes,
                **which,
            )

    def _which(
        self, kernel: str, rows: NDArray[np.int64] | None, slots: Slots | None
    ) -> tuple[str, dict[str, Any]]:
        """The kernel that multiplies all rows or those of experts, and how it is told which."""
        if slots is None:
            return kernel, {"rows": self.inputs.rows if rows is None else rows}
        return f"experts_{kernel}", {"starts": slots.starts, "experts": slots.experts}

    def _rounded(
        self, x: Buffer, k: int, rows: NDArray[np.int64] | None, slots: Slots | None
    ) -> Buffer:
        """Rows as int8, which each thread makes for itself where they are few."""
        _, which = self._which("", rows, slots)
        out = self._buffer("int8", int8.row_bytes(k), self._threads if self.alone else 0, slots)
        self.program.add(
            "quantise",
            wait=not self.alone,
            x=x.data,
            x_stride=x.stride,
            x_private=x.private,
            k=k,
            out=out.data,
            out_stride=out.stride,
            private=out.private,
            rows=which["rows"] if slots is None else slots.rows,
        )
        return out

    def _norm(
        self,
        name: str,
        config: NormConfig,
        x: Buffer,
        d: int,
        use: str,
        *,
        shared: bool = False,
        rows: NDArray[np.int64] | None = None,
    ) -> Buffer:
        """Rows normalised, each thread for itself unless they are many or `shared`."""
        shared = shared or not self.alone
        out = self._shared(use, d) if shared else self._own(use, 4 * d)
        self._normalise(name, config, x, out, 1, d, rows, wait=shared)
        return out

    def _normalise(
        self,
        name: str,
        config: NormConfig,
        x: Buffer,
        out: Buffer,
        parts: int,
        d: int,
        rows: NDArray[np.int64] | None,
        *,
        wait: bool,
        part: slice = slice(None),
    ) -> None:
        """Norms of `parts` vectors of width d in each row; `part` says which of its channels."""
        more: dict[str, Any] = {}
        if config.kind == "layer":
            bias = self._weights.optional(name + ".bias")
            more["bias"] = None if bias is None else bias[part]
        skipped = 4 * (part.start or 0)
        self.program.add(
            f"{config.kind}_norm",
            wait=wait,
            x=x.data[skipped:],
            x_stride=x.stride,
            parts=parts,
            d=d,
            weight=self._weights.vector(name + ".weight", config.offset)[part],
            eps=config.eps,
            out=out.data[skipped:],
            out_stride=out.stride,
            private=out.private,
            rows=self.inputs.rows if rows is None else rows,
            **more,
        )

    def _scale(self, x: Buffer, n: int, factor: float, rows: NDArray[np.int64]) -> None:
        """Rows of n numbers times a factor."""
        self.program.add(
            "scale",
            wait=True,
            x=x.data,
            stride=x.stride,
            n=n,
            factor=factor,
            rows=rows,
        )

    def _add(self, x: Buffer, y: Buffer, n: int) -> None:
        self.program.add(
            "add", wait=True, x=x.data, y=y.data, stride=x.stride, n=n, rows=self.inputs.rows
        )
