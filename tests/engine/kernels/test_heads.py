"""Heads sorted for products with weights of their own, and put back."""

import numpy as np
import pytest

from support.kernels import call, count, drawn, spaced


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("rows", [1, 3, 16])
def test_heads_are_sorted_and_put_back_with_what_is_their_own(rows: int, threads: int) -> None:
    heads, d, n, tail = 6, 10, 7, 3
    x = drawn(rows, heads * d)
    wide, slots = spaced(x), spaced(np.full((heads * rows, n), np.nan, np.float32))
    starts = np.full(heads + 1, -1)
    call(
        "by_head",
        threads=threads,
        x=wide,
        x_stride=wide.strides[0],
        apart=4 * d,
        n=n,
        heads=heads,
        out=slots,
        out_stride=slots.strides[0],
        starts=starts,
        rows=count(rows),
    )
    assert starts.tolist() == [head * rows for head in range(heads + 1)]
    by_head = x.reshape(rows, heads, d).swapaxes(0, 1)
    np.testing.assert_array_equal(slots[:, :n].reshape(heads, rows, n), by_head[..., :n])
    assert np.isnan(slots[:, n:]).all()

    # Seven numbers of a slot and the three that stand at the end of the row's own head.
    out = spaced(np.full((rows, heads * (n + tail)), np.nan, np.float32))
    for own, more in ((wide.reshape(-1)[n:], tail), (None, 0)):
        call(
            "by_row",
            threads=threads,
            x=slots,
            x_stride=slots.strides[0],
            n=n,
            own=own,
            own_stride=wide.strides[0],
            own_apart=4 * d,
            tail=more,
            heads=heads,
            out=out,
            out_stride=out.strides[0],
            rows=count(rows),
        )
        width = n + more
        expected = x.reshape(rows, heads, d)[..., :width].reshape(rows, -1)
        np.testing.assert_array_equal(out[:, : heads * width], expected)
    assert np.isnan(out[:, heads * (n + tail) :]).all()
