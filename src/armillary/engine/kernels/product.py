"""Rows of activations times a matrix, Y = X·Wᵀ; memory sets the pace, each weight is read once.

Weights lie as their format has them, (N, K); the threads share out the N. Every row of weights
meets all rows of activations while it is at hand, eight at a time.
"""

from functools import partial
from typing import Any

from llvmlite import ir
from numba.core import types

from armillary.engine.emit import F32, I64, Emit, emitted
from armillary.engine.formats import Format
from armillary.engine.kernel import Address, Kernel, Live, Size, kernel
from armillary.engine.kernels.common import share
from armillary.engine.machine import Machine

BAND = 16
"""Rows of weights that all rows of activations meet before the next ones come from memory."""


def product(form: Format, machine: Machine) -> Kernel:
    """Products with weights of a format."""
    # Rows of activations and of weights that meet at once, so that their sums are in registers.
    dots_8, dots_4 = _dots(form, machine, 8, 2), _dots(form, machine, 4, 2)
    dots_2, dots_1 = _dots(form, machine, 2, 2), _dots(form, machine, 1, 1)

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
        w, b, s, o = weights, bias, x_stride, out_stride
        while first < last:
            end, left = min(last, first + BAND), rows
            xs, to = x + thread * x_private, out
            while left >= 8:
                dots_8(w, row_bytes, order, first, end, xs, s, k, b, to, o, adds)
                left, xs, to = left - 8, xs + 8 * s, to + 8 * o
            if left >= 4:
                dots_4(w, row_bytes, order, first, end, xs, s, k, b, to, o, adds)
                left, xs, to = left - 4, xs + 4 * s, to + 4 * o
            if left >= 2:
                dots_2(w, row_bytes, order, first, end, xs, s, k, b, to, o, adds)
                left, xs, to = left - 2, xs + 2 * s, to + 2 * o
            if left:
                dots_1(w, row_bytes, order, first, end, xs, s, k, b, to, o, adds)
            first = end

    # What comes out of a row must not depend on how many others are computed with it.
    return kernel(product, form.name, exact=True)


def _dots(form: Format, machine: Machine, rows: int, many: int) -> Any:
    """Rows of weights, `many` at once, times so many rows of activations."""

    @emitted(types.void)
    def dots(
        e: Emit,
        weights: ir.Value,
        row_bytes: ir.Value,
        order: ir.Value,
        first: ir.Value,
        end: ir.Value,
        x: ir.Value,
        stride: ir.Value,
        k: ir.Value,
        bias: ir.Value,
        out: ir.Value,
        out_stride: ir.Value,
        adds: ir.Value,
    ) -> None:
        def compute(begin: ir.Value, count: int) -> None:
            numbers = [e.add(begin, one) for one in range(count)]
            places = []
            for number in numbers:
                address = e.add(order, e.mul(number, 8))
                stored = e.where(order, partial(e.load, I64, address), number)
                places.append(e.add(weights, e.mul(stored, row_bytes)))
            totals = form.dots(e, machine, places, x, stride, k, rows)
            for number, of_row in zip(numbers, totals, strict=True):
                address = e.add(bias, e.mul(number, 4))
                zero = e.constant(0.0, F32)
                start = e.where(bias, partial(e.load, F32, address), zero)
                for row, total in enumerate(of_row):
                    place = e.add(e.add(out, e.mul(out_stride, row)), e.mul(number, 4))
                    before = e.where(adds, partial(e.load, F32, place), zero)
                    e.store(e.fadd(e.fadd(total, start), before), place)

        count = e.sub(end, first)
        whole = e.div(count, many)
        with e.loop(whole) as index:
            compute(e.add(first, e.mul(index, many)), many)
        if many > 1:
            done = e.add(first, e.mul(whole, many))
            with e.loop(e.sub(end, done)) as index:
                compute(e.add(done, index), 1)

    return dots
