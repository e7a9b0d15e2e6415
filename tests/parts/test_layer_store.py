"""A layer's store by itself; tests/parts/test_kv_cache.py holds what caches make of it."""

import pytest
import torch
from torch import Tensor

from armillary.parts.layer_store import CacheError, LayerStore


@pytest.fixture(autouse=True)
def little_slack(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows wrap and memory grows within a few tokens."""
    monkeypatch.setattr("armillary.parts.layer_store.WINDOW_SLACK", 2)
    monkeypatch.setattr("armillary.parts.layer_store._GROWTH", 2)


def entries(start: int, count: int) -> Tensor:
    """Keys that are their own numbers, (1, 1, count, 1)."""
    return torch.arange(start, start + count).double().view(1, 1, count, 1)


@pytest.mark.parametrize("window", [1, 2, 3, 5])
def test_a_windowed_store_gives_every_query_its_window(window: int) -> None:
    """For every size of step, one after the other: what is given holds the last keys in order."""
    store = LayerStore(capacity=None, window=window)
    end = 0
    for count in (1, 1, 2, 1, 9, 1, 1, 1, 4, 1, 30, 1, 3, 3):
        new = entries(end, count)
        end += count
        k, v = store.append(new, -new)
        assert torch.equal(v, -k)
        given = k.flatten().tolist()
        assert given == list(range(end - len(given), end))
        assert len(given) >= min(end, count + window - 1)
        assert store.held <= window + 2
        assert store.can_trim(0)
    assert store.total == end


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("before", [0, 4])
def test_a_store_of_fixed_capacity_never_takes_more(before: int, window: int | None) -> None:
    store = LayerStore(capacity=6, window=window)
    if before:
        store.append(entries(0, before), entries(0, before))
    with pytest.raises(CacheError, match=f"{before} entries and {7 - before} new ones .* of 6"):
        store.append(entries(before, 7 - before), entries(before, 7 - before))
    assert store.total == before
    k, _ = store.append(entries(before, 6 - before), entries(before, 6 - before))
    assert k.flatten().tolist()[-3:] == [3, 4, 5]
