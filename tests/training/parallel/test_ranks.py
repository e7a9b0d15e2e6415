"""Where a process stands, and that sums count everything once."""

import os

import pytest
import torch
from torch import distributed

from armillary.errors import UserError
from armillary.training.parallel.config import Sizes
from armillary.training.parallel.ranks import Ranks, start_ranks, world_size
from support.ranks import on_ranks


def test_one_process_has_no_group():
    ranks = Ranks.single()
    assert (ranks.world, ranks.data_rank, ranks.data_ranks, ranks.is_main) == (1, 0, 1, True)
    assert ranks.sum_of_rows([2.5, 1]) == [2.5, 1.0]
    assert ranks.sum_of_parts([3]) == [3.0]
    assert ranks.any_rank(True)
    assert not ranks.any_rank(False)
    ranks.barrier()
    assert not distributed.is_initialized()
    with start_ranks(Sizes()) as started:
        assert started == ranks


def test_places_follow_from_the_rank():
    """Tensor peers are neighbours, then context peers; rows differ by what is left."""
    sizes = Sizes(replicate=2, shard=3, context=2, tensor=2)
    places = [Ranks(sizes, rank, torch.device("cpu")) for rank in range(24)]
    assert [ranks.tensor_rank for ranks in places] == [0, 1] * 12
    assert [ranks.context_rank for ranks in places] == [0, 0, 1, 1] * 6
    assert [ranks.data_rank for ranks in places] == [number // 4 for number in range(24)]
    assert {ranks.data_ranks for ranks in places} == {6}


def test_only_tensor_peers_draw_the_same_random_numbers():
    sizes = Sizes(shard=2, context=2, tensor=2)
    seeds = [Ranks(sizes, rank, torch.device("cpu")).seed(7) for rank in range(8)]
    assert seeds[0::2] == seeds[1::2]
    assert len(set(seeds)) == 4
    assert not set(seeds) & {Ranks(sizes, rank, torch.device("cpu")).seed(8) for rank in range(8)}


def _sums() -> list[list[float]]:
    results = []
    for sizes in (Sizes(shard=2), Sizes(context=2), Sizes(tensor=2)):
        with start_ranks(sizes) as ranks:
            number = 10.0**ranks.rank
            results.append(
                [
                    *ranks.sum_of_rows([number]),
                    *ranks.sum_of_parts([number]),
                    *ranks.maximum([number]),
                    float(ranks.any_rank(ranks.rank == 1)),
                    float(ranks.any_rank(False)),
                ]
            )
    return results


def test_everything_is_counted_once():
    rows_apart = [11.0, 11.0, 10.0, 1.0, 0.0]
    parts_apart = [1.0, 11.0, 10.0, 1.0, 0.0]
    same = [1.0, 1.0, 10.0, 1.0, 0.0]
    for results in on_ranks(2, _sums):
        assert results == [rows_apart, parts_apart, same]


def _as_torchrun_does(port: int) -> tuple[int, float, bool]:
    rank, world = distributed.get_rank(), distributed.get_world_size()
    distributed.barrier()
    distributed.destroy_process_group()
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    with start_ranks(Sizes(shard=world_size())) as ranks:
        total = ranks.sum_of_rows([1.0])[0]
    return ranks.rank, total, distributed.is_initialized()


def test_the_environment_of_torchrun_is_enough(free_port):
    assert on_ranks(2, _as_torchrun_does, free_port) == [(0, 2.0, False), (1, 2.0, False)]


@pytest.fixture
def free_port() -> int:
    store = distributed.TCPStore("127.0.0.1", 0, is_master=True)
    return int(store.port)


def test_a_broken_environment_is_a_users_error(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(UserError, match="WORLD_SIZE is 'two'.*torchrun"):
        world_size()
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(UserError, match="RANK is None"), start_ranks(Sizes(shard=2)):
        pass


def test_sizes_are_those_of_the_world():
    with pytest.raises(ValueError, match="make 2 processes, but 1 were"), start_ranks(Sizes(2)):
        pass
