"""Positions skip as the paper's construction says, and over many pieces no distance is left out."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from armillary.data.skipping import Skip, skipped_positions


def constructed(lengths: list[int], biases: list[int]) -> list[int]:
    """Zhu et al. 2023, equations 3 and 4: PoSE(c_i) = {u_i + st_i, …, u_i + st_i + l_i − 1}."""
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    return [
        bias + start + j
        for length, start, bias in zip(lengths, starts, biases, strict=True)
        for j in range(length)
    ]


def taken_apart(positions: np.ndarray) -> tuple[list[int], list[int]]:
    """The lengths and biases of the chunks that positions show; a bias of 0 hides a border."""
    borders = np.flatnonzero(np.diff(positions) != 1) + 1
    starts = [0, *borders.tolist()]
    lengths = np.diff([*starts, len(positions)]).tolist()
    return lengths, [int(positions[start]) - start for start in starts]


@given(st.integers(1, 40), st.integers(2, 90), st.integers(2, 5), st.integers(0, 10**6))
def test_positions_are_those_of_the_papers_construction(size, to, chunks, key):
    positions = skipped_positions(size, Skip(to, chunks), key)
    lengths, biases = taken_apart(positions)
    assert positions.tolist() == constructed(lengths, biases)
    assert len(lengths) <= min(chunks, size)
    assert biases[0] == 0
    assert biases == sorted(biases)
    assert biases[-1] <= max(0, to - size)
    if size >= to:
        assert biases == [0]


@pytest.mark.parametrize("chunks", [2, 3])
def test_every_distance_of_the_target_is_met(chunks):
    """In rows of 8 out of 32: all distances 1 … 31 occur, and all positions."""
    met, stood = set(), set()
    for key in range(3000):
        positions = skipped_positions(8, Skip(32, chunks), key)
        met.update((positions[:, None] - positions[None, :]).ravel().tolist())
        stood.update(positions.tolist())
    assert met >= set(range(1, 32))
    assert stood == set(range(32))


def test_biases_are_drawn_evenly():
    """u_1 of two chunks is uniform over 0 … to − size: 25 values, a χ² of 24 degrees."""
    counts = np.zeros(25)
    for key in range(5000):
        positions = skipped_positions(8, Skip(32), key)
        counts[positions[-1] - 7] += 1
    assert ((counts - 200) ** 2 / 200).sum() < 60


def test_positions_are_a_function_of_the_key():
    first = skipped_positions(20, Skip(100), 3, 7, 0)
    assert np.array_equal(first, skipped_positions(20, Skip(100), 3, 7, 0))
    others = [skipped_positions(20, Skip(100), *key) for key in ((3, 7, 1), (3, 8, 0), (4, 7, 0))]
    assert not any(np.array_equal(first, other) for other in others)
    # So they are on every machine, whatever NumPy's generators are.
    assert first.tolist() == skipped_positions(20, Skip(100), 3, 7, 0).tolist()


@pytest.mark.parametrize(("to", "chunks"), [(32, 1), (1, 2)])
def test_what_cannot_skip_is_refused(to, chunks):
    with pytest.raises(ValueError, match="at least 2 of each"):
        Skip(to, chunks)
