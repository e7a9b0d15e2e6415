"""Queries and keys turned by their positions. Source: Su et al. 2021, §3.2."""

from typing import Literal

from armillary.engine.kernel import Address, Kernel, Live, Size, kernel
from armillary.engine.kernels.common import floats, share_items


def rotate(layout: Literal["half_split", "interleaved"]) -> Kernel:
    """Heads of rows, in place. `cos` and `sin` have d_rotary / 2 numbers for each row."""
    half_split = layout == "half_split"

    def rotate(
        thread: int,
        threads: int,
        x: Address,
        stride: Size,
        heads: Size,
        d_head: Size,
        half: Size,
        cos: Address,
        sin: Address,
        rows: Live,
    ) -> None:
        first, last = share_items(rows * heads, thread, threads)
        for item in range(first, last):
            row, head = item // heads, item % heads
            a = floats(x + row * stride + 4 * head * d_head)
            c, s = floats(cos + 4 * row * half), floats(sin + 4 * row * half)
            for i in range(half):
                j, k = (i, i + half) if half_split else (2 * i, 2 * i + 1)
                one, two = a[j], a[k]
                a[j] = one * c[i] - two * s[i]
                a[k] = one * s[i] + two * c[i]

    return kernel(rotate, layout)
