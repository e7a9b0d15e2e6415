"""Q4_1: 32 weights w = d·q + m as float16 d and m and 32 q of 4 bits.

Source: ggml, `ggml-common.h`.
"""

from collections.abc import Sequence

from llvmlite import ir

from armillary.engine.emit import I16, I32, Emit, vector
from armillary.engine.formats.blocks import Nibbles
from armillary.engine.formats.int8 import as_halves, numbers


class Q4_1(Nibbles):  # noqa: N801 — GGML's name
    """See the module."""

    name = "Q4_1"
    nbytes = 20
    head = 4
    parts = 2

    def numbers(self, e: Emit, blocks: Sequence[ir.Value]) -> tuple[ir.Value, ir.Value | None]:
        """See Nibbles."""
        b, both = e.builder, numbers(e, blocks, I32)
        shorts = vector(I16, len(blocks))
        d, m = b.trunc(both, shorts), b.trunc(b.lshr(both, e.constant(16, both.type)), shorts)
        return as_halves(e, d), as_halves(e, m)
