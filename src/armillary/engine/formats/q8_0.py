"""Q8_0: 32 weights w = d·q as a float16 d and 32 int8 q. Source: ggml, `ggml-common.h`."""

from collections.abc import Sequence

from llvmlite import ir

from armillary.engine.emit import F32, FLOATS, I8, Emit, vector
from armillary.engine.formats.format import Format
from armillary.engine.formats.int8 import LANES, Rows, SignedBytes, Totals
from armillary.engine.machine import Machine


class Q8_0(Format):  # noqa: N801 — GGML's name
    """See the module."""

    name = "Q8_0"
    block = 32
    nbytes = 34
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
                q = SignedBytes(e, machine, e.load(vector(I8, 32), block, 2))
                for row in range(rows):
                    total.add(row, q.dot(xs.bytes(row, group)), scale, xs.scale(row, group))
        return [total.results() for total in totals]

    def decode(self, e: Emit, weights: ir.Value, k: ir.Value, out: ir.Value) -> None:
        """See Format."""
        floats = vector(F32, FLOATS)
        with e.loop(e.div(k, self.block)) as group:
            block = e.add(weights, e.mul(group, self.nbytes))
            place = e.add(out, e.mul(group, 4 * self.block))
            scale = e.half(block, FLOATS)
            for half in (0, FLOATS):
                q = e.load(vector(I8, FLOATS), block, 2 + half)
                e.store(e.builder.fmul(e.builder.sitofp(q, floats), scale), place, 4 * half)
