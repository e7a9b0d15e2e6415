"""Heads of rows sorted by head, for products with weights that each head has, and back."""

from armillary.engine.kernel import Address, Kernel, Live, Size, kernel
from armillary.engine.kernels.common import floats, set_word, share_items


def by_head() -> Kernel:
    """Slot head·R + row of `out` becomes n numbers of a row's head; heads lie `apart` bytes apart.

    `starts`: where the slots of each head begin, as `experts_product` reads it.
    """

    def by_head(
        thread: int,
        threads: int,
        x: Address,
        x_stride: Size,
        apart: Size,
        n: Size,
        heads: Size,
        out: Address,
        out_stride: Size,
        starts: Address,
        rows: Live,
    ) -> None:
        if thread == 0:
            for head in range(heads + 1):
                set_word(starts + 8 * head, head * rows)
        first, last = share_items(heads * rows, thread, threads)
        for slot in range(first, last):
            a, b = (
                floats(x + slot % rows * x_stride + slot // rows * apart),
                floats(out + slot * out_stride),
            )
            for i in range(n):
                b[i] = a[i]

    return kernel(by_head)


def by_row() -> Kernel:
    """Each row's heads side by side: n numbers of its slot, and `tail` more of a row's own head.

    Slots as `by_head` makes them; `own` are rows whose heads lie `own_apart` bytes apart.
    """

    def by_row(
        thread: int,
        threads: int,
        x: Address,
        x_stride: Size,
        n: Size,
        own: Address,
        own_stride: Size,
        own_apart: Size,
        tail: Size,
        heads: Size,
        out: Address,
        out_stride: Size,
        rows: Live,
    ) -> None:
        first, last = share_items(rows * heads, thread, threads)
        for item in range(first, last):
            row, head = item // heads, item % heads
            to = floats(out + row * out_stride + 4 * head * (n + tail))
            a = floats(x + (head * rows + row) * x_stride)
            b = floats(own + row * own_stride + head * own_apart)
            for i in range(n):
                to[i] = a[i]
            for i in range(tail):
                to[n + i] = b[i]

    return kernel(by_row)
