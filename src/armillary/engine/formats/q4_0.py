"""Q4_0: 32 weights w = d·(q − 8) as a float16 d and 32 q of 4 bits. Source: ggml, `ggml-common.h`.

The low halves of the 16 bytes are the first 16 weights, the high halves the others.
"""

from collections.abc import Sequence

from llvmlite import ir

from armillary.engine.emit import F32, FLOATS, I8, Emit, vector
from armillary.engine.formats.format import Format
from armillary.engine.formats.int8 import LANES, Rows, Totals, small_dot
from armillary.engine.machine import Machine


def nibbles(e: Emit, address: ir.Value, offset: int) -> list[ir.Value]:
    """16 bytes as the 16 low and the 16 high halves."""
    both = e.load(vector(I8, 16), address, offset)
    low = e.builder.and_(both, e.constant(15, both.type))
    return [low, e.builder.lshr(both, e.constant(4, both.type))]


def both_nibbles(e: Emit, address: ir.Value, offset: int) -> ir.Value:
    """The same in one vector."""
    low, high = nibbles(e, address, offset)
    return e.shuffle(low, high, range(32))


class Q4_0(Format):  # noqa: N801 — GGML's name
    """See the module."""

    name = "Q4_0"
    block = 32
    nbytes = 18
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
                q = both_nibbles(e, block, 2)
                offset = e.builder.fmul(e.number(scale), e.constant(-8.0, F32))
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
            scale = e.half(block, FLOATS)
            for number, q in enumerate(nibbles(e, block, 2)):
                shifted = e.builder.sub(q, e.constant(8, q.type))
                w = e.builder.fmul(e.builder.sitofp(shifted, vector(F32, FLOATS)), scale)
                e.store(w, place, 64 * number)
