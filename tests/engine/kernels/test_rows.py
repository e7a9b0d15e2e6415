"""Adding, choosing, scaling and bounding rows."""

import numpy as np
import pytest

from support.kernels import call, count, drawn, spaced

THREADS = pytest.mark.parametrize("threads", [1, 2, 3])


@THREADS
def test_rows_are_added(threads: int) -> None:
    for rows in (1, 2, 16):
        x, y = spaced(drawn(rows, 41)), spaced(drawn(rows, 41, seed=1))
        expected = x[:, :41] + y[:, :41]
        call("add", threads=threads, x=x, y=y, stride=x.strides[0], n=41, rows=count(rows))
        np.testing.assert_array_equal(x[:, :41], expected)


@THREADS
def test_rows_are_chosen(threads: int) -> None:
    x, numbers = spaced(drawn(16, 41)), np.array([15, 0, 7, 7, 3], dtype=np.int64)
    out = np.full((16, 47), np.nan, np.float32)
    call(
        "pick",
        threads=threads,
        x=x,
        x_stride=x.strides[0],
        n=41,
        numbers=numbers,
        out=out,
        out_stride=out.strides[0],
        rows=count(5),
    )
    np.testing.assert_array_equal(out[:5, :41], x[numbers, :41])
    assert np.isnan(out[5:]).all()
    assert np.isnan(out[:, 41:]).all()


@THREADS
def test_rows_are_scaled(threads: int) -> None:
    x = spaced(drawn(3, 37))
    expected = x[:, :37] * np.float32(0.22)
    call("scale", threads=threads, x=x, stride=x.strides[0], n=37, factor=0.22, rows=count(3))
    np.testing.assert_array_equal(x[:, :37], expected)
    assert np.isnan(x[:, 37:]).all()


@THREADS
@pytest.mark.parametrize("cap", [0.5, 1.5, 30.0])
def test_rows_are_bounded(threads: int, cap: float) -> None:
    """To 2e-7 of the bound, however large they are."""
    whole = np.concatenate([np.linspace(-4, 4, 501) * cap, [0, 1e-20, -1e5, 1e30]])
    x = spaced(np.tile(whole.astype(np.float32), (3, 1)))
    exact = cap * np.tanh(x[:, :505].astype(np.float64) / cap)
    call("soft_cap", threads=threads, x=x, stride=x.strides[0], n=505, cap=cap, rows=count(3))
    assert np.abs(x[:, :505] - exact).max() <= 3e-7 * cap
    assert np.isnan(x[:, 505:]).all()
