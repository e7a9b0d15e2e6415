"""A permutation of which each place is computed on its own."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from armillary.data.order import permuted


@given(st.integers(1, 600), st.integers(0, 2**40), st.integers(0, 3))
def test_it_is_a_permutation_of_any_size(count, seed, epoch):
    whole = permuted(np.arange(count), count, "rows", seed, epoch)
    assert sorted(whole.tolist()) == list(range(count))


def test_a_place_alone_is_as_among_all():
    whole = permuted(np.arange(1000), 1000, "rows", 5, 1)
    for place in (0, 1, 517, 999):
        assert permuted(np.array([place]), 1000, "rows", 5, 1) == [whole[place]]


def test_each_key_gives_another_order():
    orders = [
        permuted(np.arange(500), 500, *key).tolist()
        for key in [("rows", 0, 0), ("rows", 0, 1), ("rows", 1, 0), ("documents", 0, 0)]
    ]
    for number, order in enumerate(orders):
        for other in [*orders[:number], list(range(500))]:
            assert sum(a == b for a, b in zip(order, other, strict=True)) < 10


def test_the_order_looks_drawn():
    """Neighbours part, and each place is as likely to come early: both are seen in few rounds."""
    count, places = 1000, []
    for seed in range(200):
        order = permuted(np.arange(count), count, "rows", seed)
        places.append(order[:3])
        steps = np.abs(np.diff(order))
        assert 300 < steps.mean() < 367  # a third of the range, 333, for independent draws
    means = np.mean(places, axis=0)
    assert (np.abs(means - 499.5) < 5 * 288.7 / np.sqrt(200)).all()
    correlation = np.corrcoef(np.array(places).T)
    assert (np.abs(correlation[np.triu_indices(3, 1)]) < 0.3).all()


def test_an_order_stays_what_it_was():
    """Runs that are gone on with rely on it, whatever the machine and the version."""
    assert permuted(np.arange(10), 10, "rows", 7, 2).tolist() == [6, 1, 4, 8, 2, 5, 3, 9, 0, 7]


def test_ranges_of_any_size_are_taken():
    assert permuted(np.array([0]), 1, 0).tolist() == [0]
    large = 10**15 + 37
    values = permuted(np.array([0, 1, large - 1]), large, 3)
    assert len(set(values.tolist())) == 3
    assert (values < large).all()


@pytest.mark.parametrize("place", [-1, 10])
def test_a_place_outside_is_refused(place):
    with pytest.raises(ValueError, match="permutation of 10"):
        permuted(np.array([place]), 10, 0)
