"""Small steps on rows of float32: add, pick, bound."""

import numpy as np

from armillary.engine.kernel import Address, Kernel, Live, Number, Size, kernel
from armillary.engine.kernels.common import floats, share, share_items, word
from armillary.engine.kernels.elementary import tanh


def add() -> Kernel:
    """x ← x + y."""

    def add(
        thread: int, threads: int, x: Address, y: Address, stride: Size, n: Size, rows: Live
    ) -> None:
        first, last = share_items(rows, thread, threads)
        for row in range(first, last):
            a, b = floats(x + row * stride), floats(y + row * stride)
            for i in range(n):
                a[i] += b[i]

    return kernel(add)


def pick() -> Kernel:
    """Row i of `out` becomes row numbers[i] of x."""

    def pick(
        thread: int,
        threads: int,
        x: Address,
        x_stride: Size,
        n: Size,
        numbers: Address,
        out: Address,
        out_stride: Size,
        rows: Live,
    ) -> None:
        first, last = share_items(rows, thread, threads)
        for row in range(first, last):
            a, b = floats(x + word(numbers + 8 * row) * x_stride), floats(out + row * out_stride)
            for i in range(n):
                b[i] = a[i]

    return kernel(pick)


def scale() -> Kernel:
    """x ← factor·x. Shared out by columns, as products are."""

    def scale(
        thread: int, threads: int, x: Address, stride: Size, n: Size, factor: Number, rows: Live
    ) -> None:
        first, last = share(n, thread, threads)
        for row in range(rows):
            a = floats(x + row * stride)
            for i in range(first, last):
                a[i] = factor * a[i]

    return kernel(scale)


def soft_cap() -> Kernel:
    """x ← cap·tanh(x / cap). Shared out by columns, as products are."""

    def soft_cap(
        thread: int, threads: int, x: Address, stride: Size, n: Size, cap: Number, rows: Live
    ) -> None:
        first, last = share(n, thread, threads)
        inverse = np.float32(1) / cap
        for row in range(rows):
            a = floats(x + row * stride)
            for i in range(first, last):
                a[i] = cap * tanh(a[i] * inverse)

    return kernel(soft_cap)
