"""Formats that only memory has: what the K types of GGUF and others of odd bits are repacked to.

32 weights w = d·q + m with float32 d and m: exactly what the blocks of the file say, where a d is
the product of a block's scale and a group's. "A4" has one d and m and q of 4 bits; "A8" has a d and
m for each half and q of 8 bits.
"""

from collections.abc import Sequence

import numpy as np
from llvmlite import ir
from numpy.typing import NDArray

from armillary.engine.emit import F32, FLOATS, I8, Emit, vector
from armillary.engine.formats.blocks import Blocks, Meet, Nibbles, Vectors
from armillary.engine.formats.int8 import Group, Weights, in_lanes, numbers
from armillary.engine.machine import Machine

_HALF = 16


class A4(Nibbles):
    """d, m, and 16 bytes whose low halves are the first 16 q."""

    name = "A4"
    nbytes = 24
    head = 8
    parts = 2

    @staticmethod
    def pack(
        d: NDArray[np.float32], m: NDArray[np.float32], q: NDArray[np.uint8]
    ) -> NDArray[np.uint8]:
        """d, m (N,) and q (N, 32) from 0 to 15 → (N, 24)."""
        out = np.empty((len(q), A4.nbytes), np.uint8)
        out[:, :8] = np.stack([d, m], -1).astype("<f4").view(np.uint8)
        out[:, 8:] = q[:, :_HALF] | q[:, _HALF:] << 4
        return out

    def numbers(self, e: Emit, blocks: Sequence[ir.Value]) -> tuple[ir.Value, ir.Value | None]:
        """See Nibbles."""
        return numbers(e, blocks, F32), numbers(e, blocks, F32, 4)


class A8(Blocks):
    """d of each half, m of each half, and 32 int8 q."""

    name = "A8"
    nbytes = 48
    parts = 4

    @staticmethod
    def pack(
        d: NDArray[np.float32], m: NDArray[np.float32], q: NDArray[np.int8]
    ) -> NDArray[np.uint8]:
        """d, m (N, 2) and q (N, 32) → (N, 48)."""
        out = np.empty((len(q), A8.nbytes), np.uint8)
        out[:, :16] = np.concatenate([d, m], -1).astype("<f4").view(np.uint8)
        out[:, 16:] = q.view(np.uint8)
        return out

    def read(self, e: Emit, blocks: Sequence[ir.Value]) -> tuple[Vectors, Vectors]:
        """See Blocks."""
        quads = in_lanes(e, blocks, 16) + in_lanes(e, blocks, 32)
        return quads, [numbers(e, blocks, F32, at) for at in (0, 4, 8, 12)]

    def meet(self, e: Emit, machine: Machine, quads: Vectors, numbers: Vectors) -> Meet:
        """See Blocks."""
        b, (d0, d1, m0, m1) = e.builder, numbers
        weights = Weights(e, machine, quads, signed=True)

        def meet(x: Group) -> ir.Value:
            first = e.fma(m0, x.sum("first"), b.fmul(d0, weights.dot(x, "first")))
            second = e.fma(m1, x.sum("second"), b.fmul(d1, weights.dot(x, "second")))
            return e.fadd(first, second)

        return meet

    def halves(self, e: Emit, block: ir.Value) -> Sequence[ir.Value]:
        """See Blocks."""
        found = []
        for half in (0, 1):
            d, m = (e.splat(e.load(F32, block, at + 4 * half), FLOATS) for at in (0, 8))
            q = e.load(vector(I8, FLOATS), block, 16 + FLOATS * half)
            w = e.builder.fmul(e.builder.sitofp(q, vector(F32, FLOATS)), d)
            found.append(e.fadd(w, m))
        return found
