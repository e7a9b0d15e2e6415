"""Q4_0: 32 weights w = d·(q − 8) as a float16 d and 32 q of 4 bits.

Source: ggml, `ggml-common.h`.
"""

from collections.abc import Sequence

from llvmlite import ir

from armillary.engine.emit import I16, Emit
from armillary.engine.formats.blocks import Nibbles
from armillary.engine.formats.int8 import as_halves, numbers


class Q4_0(Nibbles):  # noqa: N801 — GGML's name
    """See the module."""

    name = "Q4_0"
    nbytes = 18
    head = 2
    parts = 1
    offset = -8

    def numbers(self, e: Emit, blocks: Sequence[ir.Value]) -> tuple[ir.Value, ir.Value | None]:
        """See Nibbles."""
        return as_halves(e, numbers(e, blocks, I16)), None
