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
from armillary.engine.formats.blocks import Blocks, Meet, Nibbles
from armillary.engine.formats.int8 import LANES, Rows, SignedBytes, Totals, small_dot
from armillary.engine.machine import Machine

_HALF = 16


class A4(Nibbles):
    """d, m, and 16 bytes whose low halves are the first 16 q."""

    name = "A4"
    nbytes = 24
    head = 8

    @staticmethod
    def pack(
        d: NDArray[np.float32], m: NDArray[np.float32], q: NDArray[np.uint8]
    ) -> NDArray[np.uint8]:
        """d, m (N,) and q (N, 32) from 0 to 15 → (N, 24)."""
        out = np.empty((len(q), A4.nbytes), np.uint8)
        out[:, :8] = np.stack([d, m], -1).astype("<f4").view(np.uint8)
        out[:, 8:] = q[:, :_HALF] | q[:, _HALF:] << 4
        return out

    def scale(self, e: Emit, block: ir.Value, lanes: int) -> ir.Value:
        """See Nibbles."""
        return e.splat(e.load(F32, block), lanes)

    def offset(self, e: Emit, block: ir.Value, scale: ir.Value) -> ir.Value:
        """See Nibbles."""
        del scale
        return e.load(F32, block, 4)


class A8(Blocks):
    """d of each half, m of each half, and 32 int8 q."""

    name = "A8"
    nbytes = 48

    @staticmethod
    def pack(
        d: NDArray[np.float32], m: NDArray[np.float32], q: NDArray[np.int8]
    ) -> NDArray[np.uint8]:
        """d, m (N, 2) and q (N, 32) → (N, 48)."""
        out = np.empty((len(q), A8.nbytes), np.uint8)
        out[:, :16] = np.concatenate([d, m], -1).astype("<f4").view(np.uint8)
        out[:, 16:] = q.view(np.uint8)
        return out

    def meet(self, e: Emit, machine: Machine, block: ir.Value) -> Meet:
        """See Blocks."""
        # The products of a half come in half of the lanes.
        d, m = (_halves(e, block, at) for at in (0, 8))
        q = SignedBytes(e, machine, e.load(vector(I8, 32), block, 16))
        ones = e.constant(1, vector(I8, 32))

        def add(xs: Rows, row: int, group: ir.Value, total: Totals) -> None:
            x, s = xs.bytes(row, group), xs.scale(row, group)
            total.add(row, q.dot(x), d, s)
            total.add(row, small_dot(e, machine, ones, x), m, s)

        return add

    def halves(self, e: Emit, block: ir.Value) -> Sequence[ir.Value]:
        """See Blocks."""
        found = []
        for half in (0, 1):
            d, m = (e.splat(e.load(F32, block, at + 4 * half), FLOATS) for at in (0, 8))
            q = e.load(vector(I8, FLOATS), block, 16 + FLOATS * half)
            w = e.builder.fmul(e.builder.sitofp(q, vector(F32, FLOATS)), d)
            found.append(e.fadd(w, m))
        return found


def _halves(e: Emit, block: ir.Value, offset: int) -> ir.Value:
    """Two float32, each in half of the lanes."""
    first, second = (e.splat(e.load(F32, block, offset + at), LANES // 2) for at in (0, 4))
    return e.shuffle(first, second, range(LANES))
