"""Q4_1: 32 weights w = d·q + m as float16 d and m and 32 q of 4 bits.

The low halves of the 16 bytes are the first 16 weights, the high halves the others.
Source: ggml, `ggml-common.h`.
"""

from collections.abc import Sequence

from llvmlite import ir

from armillary.engine.emit import F32, FLOATS, Emit, vector
from armillary.engine.formats.format import Format
from armillary.engine.formats.int8 import LANES, Rows, Totals, small_dot
from armillary.engine.formats.q4_0 import both_nibbles, nibbles
from armillary.engine.machine import Machine


class Q4_1(Format):  # noqa: N801 — GGML's name
    """See the module."""

    name = "Q4_1"
    block = 32
    nbytes = 20
    activations = "int8"

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
                block = e.add(begin, e.mul(group, self.nbytes))
                scale = e.half(block, LANES)
                offset = e.number(e.half(block, 1, 2))
                q = both_nibbles(e, block, 4)
                for row in range(rows):
                    products = small_dot(e, machine, q, xs.bytes(row, group))
                    total.add(row, products, scale, xs.scale(row, group))
                    total.add_offset(row, offset, xs.sum(row, group))
        return [total.results() for total in totals]

    def decode(self, e: Emit, weights: ir.Value, k: ir.Value, out: ir.Value) -> None:
        """See Format."""
        with e.loop(e.div(k, self.block)) as group:
            block = e.add(weights, e.mul(group, self.nbytes))
            place = e.add(out, e.mul(group, 4 * self.block))
            scale, offset = e.half(block, FLOATS), e.half(block, FLOATS, 2)
            for number, q in enumerate(nibbles(e, block, 4)):
                w = e.builder.fmul(e.builder.uitofp(q, vector(F32, FLOATS)), scale)
                e.store(e.builder.fadd(w, offset), place, 64 * number)
