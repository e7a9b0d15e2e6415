"""Activations rounded to int8 are, byte for byte, what the rule says."""

import numpy as np
import pytest

from support.kernels import call, count, drawn
from support.quantised import packed


def quantised(x: np.ndarray, *, private: bool, threads: int) -> np.ndarray:
    """Rows by the kernel: (threads or 1, R, bytes of a row)."""
    copies, k = (threads if private else 1), x.shape[1]
    xs = np.ascontiguousarray(np.broadcast_to(x, (copies, *x.shape)))
    stride = k + k // 32 * 12 + 5
    out = np.full((copies, len(x), stride), 0xEE, np.uint8)
    call(
        "quantise",
        threads=threads,
        x=xs,
        x_stride=4 * k,
        x_private=4 * x.size if private else 0,
        k=k,
        out=out,
        out_stride=stride,
        private=stride * len(x) if private else 0,
        rows=count(len(x)),
    )
    assert (out[:, :, -5:] == 0xEE).all(), "written beyond a row"
    return out[:, :, :-5]


@pytest.mark.parametrize("private", [False, True])
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("rows", [1, 2, 5, 16])
def test_rows_are_rounded_by_groups_of_32(rows: int, threads: int, private: bool) -> None:
    x = drawn(rows, 96) * np.float32(10.0) ** np.arange(-1, 2).repeat(32).astype(np.float32)
    for copy in quantised(x, private=private, threads=threads):
        np.testing.assert_array_equal(copy, packed(x))


def test_a_group_of_zeros_is_zeros() -> None:
    x = drawn(2, 96)
    x[:, 32:64] = 0
    result = quantised(x, private=False, threads=1)[0]
    np.testing.assert_array_equal(result, packed(x))
    assert not result[:, 32:64].any()


@pytest.mark.parametrize("size", [1e-44, 1e-38, 1e-37, 2e-36, 1e-30, 1.0, 1e30, 3e38])
def test_numbers_of_any_size_are_rounded(size: float) -> None:
    """To zero where 127 divided by them would be no number."""
    x = drawn(3, 32)
    x = np.clip(x / np.abs(x).max(), -1, 1) * np.float32(size)
    x[:, 0] = 0
    result = quantised(x, private=False, threads=1)[0]
    np.testing.assert_array_equal(result, packed(x))
    assert np.abs(result[:, :32].view(np.int8)).max() == (127 if size > 1e-36 else 0)


def test_halves_go_to_the_even_number() -> None:
    x = np.zeros((1, 32), np.float32)
    x[0, :6] = 127, 0.5, 1.5, 2.5, -0.5, -3.5
    q = quantised(x, private=False, threads=1)[0, 0, :6].view(np.int8)
    assert q.tolist() == [127, 0, 2, 2, 0, -4]
