"""Q8_0: 32 weights w = d·q as a float16 d and 32 int8 q. Source: ggml, `ggml-common.h`."""

from collections.abc import Sequence

from llvmlite import ir

from armillary.engine.emit import F32, FLOATS, I8, I16, Emit, vector
from armillary.engine.formats.blocks import Blocks, Meet, Vectors
from armillary.engine.formats.int8 import Weights, as_halves, in_lanes, numbers
from armillary.engine.machine import Machine


class Q8_0(Blocks):  # noqa: N801 — GGML's name
    """See the module."""

    name = "Q8_0"
    nbytes = 34
    parts = 1

    def read(self, e: Emit, blocks: Sequence[ir.Value]) -> tuple[Vectors, Vectors]:
        """See Blocks."""
        quads = in_lanes(e, blocks, 2) + in_lanes(e, blocks, 18)
        return quads, [as_halves(e, numbers(e, blocks, I16))]

    def meet(self, e: Emit, machine: Machine, quads: Vectors, numbers: Vectors) -> Meet:
        """See Blocks."""
        weights, [d] = Weights(e, machine, quads, signed=True), numbers
        return lambda x: e.builder.fmul(d, weights.dot(x))

    def halves(self, e: Emit, block: ir.Value) -> Sequence[ir.Value]:
        """See Blocks."""
        scale = e.half(block, FLOATS)
        qs = (e.load(vector(I8, FLOATS), block, 2 + first) for first in (0, FLOATS))
        return [e.builder.fmul(e.builder.sitofp(q, vector(F32, FLOATS)), scale) for q in qs]
