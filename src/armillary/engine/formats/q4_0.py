"""Q4_0: 32 weights w = d·(q − 8) as a float16 d and 32 q of 4 bits.

Source: ggml, `ggml-common.h`.
"""

from llvmlite import ir

from armillary.engine.emit import F32, Emit
from armillary.engine.formats.blocks import Nibbles


class Q4_0(Nibbles):  # noqa: N801 — GGML's name
    """See the module."""

    name = "Q4_0"
    nbytes = 18
    head = 2

    def scale(self, e: Emit, block: ir.Value, lanes: int) -> ir.Value:
        """See Nibbles."""
        return e.half(block, lanes)

    def offset(self, e: Emit, block: ir.Value, scale: ir.Value) -> ir.Value:
        """See Nibbles. Exact, as d·q is: float16 numbers times whole ones below 16."""
        del block
        return e.builder.fmul(e.number(scale), e.constant(-8.0, F32))
