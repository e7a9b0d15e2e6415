import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from armillary.rope_layout import half_split_from_interleaved, interleaved_from_half_split

sizes = st.tuples(st.integers(1, 9), st.integers(1, 12), st.integers(0, 5)).map(
    lambda drawn: (drawn[0], 2 * drawn[1] + drawn[2], 2 * drawn[1])
)


def test_a_head_of_four_channels() -> None:
    """Adjacent pairs (0, 1), (2, 3) become (0, 2), (1, 3): channels in the order 0, 2, 1, 3."""
    assert half_split_from_interleaved(1, 4, 4).tolist() == [0, 2, 1, 3]


def test_each_head_is_permuted_within_itself_and_the_rest_stays() -> None:
    order = half_split_from_interleaved(2, 8, 6)
    assert order.tolist() == [0, 2, 4, 1, 3, 5, 6, 7, 8, 10, 12, 9, 11, 13, 14, 15]
    back = interleaved_from_half_split(2, 8, 6)
    assert back.tolist() == [0, 3, 1, 4, 2, 5, 6, 7, 8, 11, 9, 12, 10, 13, 14, 15]


@given(sizes)
def test_the_two_undo_each_other(size: tuple[int, int, int]) -> None:
    there, back = half_split_from_interleaved(*size), interleaved_from_half_split(*size)
    rows = np.arange(size[0] * size[1])
    assert (rows[there][back] == rows).all()
    assert (rows[back][there] == rows).all()


@pytest.mark.parametrize("d_head", [4, 6, 64])
def test_six_heads_or_two_are_not_three(d_head: int) -> None:
    """Case 12: the count of a matrix's own heads, never h / h_kv, unless they happen to agree."""
    right = half_split_from_interleaved(2, d_head, d_head)
    wrong = half_split_from_interleaved(1, 2 * d_head, 2 * d_head)
    assert sorted(right) == sorted(wrong)
    assert (right != wrong).any()


@pytest.mark.parametrize(("d_head", "d_rotary"), [(8, 5), (8, 10), (8, 0)])
def test_impossible_widths_are_refused(d_head: int, d_rotary: int) -> None:
    with pytest.raises(ValueError, match=f"d_rotary {d_rotary} must be even and at most d_head 8"):
        half_split_from_interleaved(2, d_head, d_rotary)
