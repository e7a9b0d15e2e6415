"""Q8_0: 32 weights w = d·q as a float16 d and 32 int8 q. Source: ggml, `ggml-common.h`."""

from collections.abc import Sequence

from llvmlite import ir

from armillary.engine.emit import F32, FLOATS, I8, Emit, vector
from armillary.engine.formats.blocks import Blocks, Meet
from armillary.engine.formats.int8 import LANES, Rows, SignedBytes, Totals
from armillary.engine.machine import Machine


class Q8_0(Blocks):  # noqa: N801 — GGML's name
    """See the module."""

    name = "Q8_0"
    nbytes = 34

    def meet(self, e: Emit, machine: Machine, block: ir.Value) -> Meet:
        """See Blocks."""
        scale = e.half(block, LANES)
        q = SignedBytes(e, machine, e.load(vector(I8, 32), block, 2))

        def add(xs: Rows, row: int, group: ir.Value, total: Totals) -> None:
            total.add(row, q.dot(xs.bytes(row, group)), scale, xs.scale(row, group))

        return add

    def halves(self, e: Emit, block: ir.Value) -> Sequence[ir.Value]:
        """See Blocks."""
        scale = e.half(block, FLOATS)
        qs = (e.load(vector(I8, FLOATS), block, 2 + first) for first in (0, FLOATS))
        return [e.builder.fmul(e.builder.sitofp(q, vector(F32, FLOATS)), scale) for q in qs]
