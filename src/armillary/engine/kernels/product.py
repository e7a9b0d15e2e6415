"""Rows of activations times a matrix, Y = X·Wᵀ, where memory sets the pace: each weight is read once.

Weights lie as their format has them, (N, K); the threads share out the N. Every row of weights
meets all rows of activations while it is at hand, eight at a time.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types

from armillary.engine.emit import F32, Emit, emitted
from armillary.engine.formats import Format
from armillary.engine.kernel import Address, Kernel, Live, Size, kernel
from armillary.engine.kernels.common import floats, share, word
from armillary.engine.machine import Machine

AT_ONCE = (8, 4, 2, 1)


def product(form: Format, machine: Machine) -> Kernel:
    """Products with weights of a format."""
    dots_8, dots_4, dots_2, dots_1 = (_dots(form, machine, rows) for rows in AT_ONCE)

    def product(
        thread: int,
        threads: int,
        weights: Address,
        row_bytes: Size,
        order: Address,
        n: Size,
        k: Size,
        x: Address,
        x_stride: Size,
        x_private: Size,
        bias: Address,
        out: Address,
        out_stride: Size,
        adds: Size,
        rows: Live,
    ) -> None:
        # `order`: row i of W is stored row order[i]. `adds`: to what `out` holds.
        first, last = share(n, thread, threads)
        x += thread * x_private
        for i in range(first, last):
            stored = word(order + 8 * i) if order else i
            row = weights + stored * row_bytes
            start = floats(bias)[i] if bias else np.float32(0)
            place, xs, left = out + 4 * i, x, rows
            while left >= 8:
                dots_8(row, xs, x_stride, k, start, place, out_stride, adds)
                place, xs, left = place + 8 * out_stride, xs + 8 * x_stride, left - 8
            if left >= 4:
                dots_4(row, xs, x_stride, k, start, place, out_stride, adds)
                place, xs, left = place + 4 * out_stride, xs + 4 * x_stride, left - 4
            if left >= 2:
                dots_2(row, xs, x_stride, k, start, place, out_stride, adds)
                place, xs, left = place + 2 * out_stride, xs + 2 * x_stride, left - 2
            if left:
                dots_1(row, xs, x_stride, k, start, place, out_stride, adds)

    return kernel(product, form.name)


def _dots(form: Format, machine: Machine, rows: int) -> Any:
    """A row of weights times so many rows of activations, put where the results belong."""

    @emitted(types.void)
    def dots(
        e: Emit,
        weights: ir.Value,
        x: ir.Value,
        stride: ir.Value,
        k: ir.Value,
        start: ir.Value,
        out: ir.Value,
        out_stride: ir.Value,
        adds: ir.Value,
    ) -> None:
        b = e.builder
        add = b.icmp_signed("!=", adds, e.int(0))
        for row, total in enumerate(form.dots(e, machine, weights, x, stride, k, rows)):
            place = e.add(out, e.mul(out_stride, row))
            before = b.select(add, e.load(F32, place), e.constant(0.0, F32))
            e.store(b.fadd(b.fadd(total, start), before), place)

    return dots
