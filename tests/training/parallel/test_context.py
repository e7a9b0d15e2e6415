"""Parts of a sequence: every place in one of them, and as much to read in each."""

from unittest import mock

import pytest
import torch

from armillary.parts.mask import Visibility
from armillary.training.parallel.context import ContextPart


def part(rank: int, size: int) -> ContextPart:
    return ContextPart(mock.Mock(get_local_rank=lambda: rank, size=lambda: size))


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_place_is_in_one_part(size):
    places = torch.arange(24).expand(2, 24)
    taken = torch.cat([part(rank, size).take(places) for rank in range(size)], dim=-1)
    assert taken[1].sort().values.tolist() == list(range(24))


@pytest.mark.parametrize("size", [2, 3, 4])
def test_each_part_reads_as_many_keys(size):
    """A contiguous split would leave the last part (2c − 1) times the work of the first."""
    reads = []
    for rank in range(size):
        rule = part(rank, size).narrow(Visibility(24, 24))
        pieces = [(piece.n_queries, piece.n_keys) for _, piece in rule.by_run()]
        reads.append(sum(queries * (2 * keys - queries + 1) // 2 for queries, keys in pieces))
    assert len(set(reads)) == 1
    assert sum(reads) == 24 * 25 // 2


def test_a_length_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match="22 tokens do not divide into 4 pieces"):
        part(0, 2).take(torch.arange(22))
