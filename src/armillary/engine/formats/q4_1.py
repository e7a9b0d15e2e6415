"""Q4_1: 32 weights w = d·q + m as float16 d and m and 32 q of 4 bits.

Source: ggml, `ggml-common.h`.
"""

from llvmlite import ir

from armillary.engine.emit import Emit
from armillary.engine.formats.blocks import Nibbles


class Q4_1(Nibbles):  # noqa: N801 — GGML's name
    """See the module."""

    name = "Q4_1"
    nbytes = 20
    head = 4

    def scale(self, e: Emit, block: ir.Value, lanes: int) -> ir.Value:
        """See Nibbles."""
        return e.half(block, lanes)

    def offset(self, e: Emit, block: ir.Value, scale: ir.Value) -> ir.Value:
        """See Nibbles."""
        del scale
        return e.number(e.half(block, 1, 2))
