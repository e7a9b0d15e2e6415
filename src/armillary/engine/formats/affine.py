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
from armillary.engine.formats.format import Format
from armillary.engine.formats.int8 import LANES, Rows, SignedBytes, Totals, small_dot
from armillary.engine.formats.q4_0 import both_nibbles, nibbles
from armillary.engine.machine import Machine

_HALF = 16


class A4(Format):
    """d, m, and 16 bytes whose low halves are the first 16 q."""

    name = "A4"
    block = 32
    nbytes = 24
    activations = "int8"

    @staticmethod
    def pack(
        d: NDArray[np.float32], m: NDArray[np.float32], q: NDArray[np.uint8]
    ) -> NDArray[np.uint8]:
        """d, m (N,) and q (N, 32) from 0 to 15 → (N, 24)."""
        out = np.empty((len(q), A4.nbytes), np.uint8)
        out[:, :8] = np.stack([d, m], -1).astype("<f4").view(np.uint8)
        out[:, 8:] = q[:, :_HALF] | q[:, _HALF:] << 4
        return out

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
                scale, offset = e.splat(e.load(F32, block), LANES), e.load(F32, block, 4)
                q = both_nibbles(e, block, 8)
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
            d, m = (e.splat(e.load(F32, block, at), FLOATS) for at in (0, 4))
            for number, q in enumerate(nibbles(e, block, 8)):
                w = e.builder.fmul(e.builder.uitofp(q, vector(F32, FLOATS)), d)
                e.store(e.builder.fadd(w, m), place, 64 * number)


class A8(Format):
    """d of each half, m of each half, and 32 int8 q."""

    name = "A8"
    block = 32
    nbytes = 48
    activations = "int8"

    @staticmethod
    def pack(
        d: NDArray[np.float32], m: NDArray[np.float32], q: NDArray[np.int8]
    ) -> NDArray[np.uint8]:
        """d, m (N, 2) and q (N, 32) → (N, 48)."""
        out = np.empty((len(q), A8.nbytes), np.uint8)
        out[:, :16] = np.concatenate([d, m], -1).astype("<f4").view(np.uint8)
        out[:, 16:] = q.view(np.uint8)
        return out

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
        ones = e.constant(1, vector(I8, 32))
        with e.loop(e.div(k, self.block)) as group:
            for begin, total in zip(weights, totals, strict=True):
                block = e.add(begin, e.mul(group, self.nbytes))
                # The products of a half come in half of the lanes.
                d, m = (_halves(e, block, at) for at in (0, 8))
                q = SignedBytes(e, machine, e.load(vector(I8, 32), block, 16))
                for row in range(rows):
                    x_bytes, s = xs.bytes(row, group), xs.scale(row, group)
                    total.add(row, q.dot(x_bytes), d, s)
                    total.add(row, small_dot(e, machine, ones, x_bytes), m, s)
        return [total.results() for total in totals]

    def decode(self, e: Emit, weights: ir.Value, k: ir.Value, out: ir.Value) -> None:
        """See Format."""
        floats = vector(F32, FLOATS)
        with e.loop(e.div(k, self.block)) as group:
            block = e.add(weights, e.mul(group, self.nbytes))
            place = e.add(out, e.mul(group, 4 * self.block))
            for half in (0, 1):
                d, m = (e.splat(e.load(F32, block, at + 4 * half), FLOATS) for at in (0, 8))
                q = e.load(vector(I8, FLOATS), block, 16 + FLOATS * half)
                w = e.builder.fmul(e.builder.sitofp(q, floats), d)
                e.store(e.builder.fadd(w, m), place, 64 * half)


def _halves(e: Emit, block: ir.Value, offset: int) -> ir.Value:
    """Two float32, each in half of the lanes."""
    first, second = (e.splat(e.load(F32, block, offset + at), LANES // 2) for at in (0, 4))
    return e.shuffle(first, second, range(LANES))
