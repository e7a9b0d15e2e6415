"""Runs of learned tokens say of any stretch what a mask would say."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from armillary.data.learned import LearnedRuns, runs_of
from armillary.data.shards import ShardWriter, learned_name, map_array

MASKS = st.lists(st.lists(st.booleans(), min_size=1, max_size=12), min_size=1, max_size=6)


@given(MASKS)
def test_any_stretch_is_as_in_the_mask(tmp_path_factory, masks):
    """Through a shard, where the runs of documents next to each other may touch."""
    writer = ShardWriter(tmp_path_factory.mktemp("s"), 0, np.dtype(np.uint8), masked=True)
    for mask in masks:
        writer.append(np.zeros(len(mask), np.uint8), runs_of(mask))
        writer.end_document()
    path = writer.close()[-1]
    whole = np.concatenate(masks)
    n = len(whole)
    runs = LearnedRuns(map_array(path, "int64"), n)
    starts, stops = np.triu_indices(n + 1)
    for start, stop in zip(starts, stops, strict=True):
        found = runs.within(start, stop)
        assert found.dtype == np.bool_
        assert found.tolist() == whole[start:stop].tolist()
    assert runs.count(starts, stops).tolist() == [
        int(whole[start:stop].sum()) for start, stop in zip(starts, stops, strict=True)
    ]


def test_a_document_that_is_dropped_takes_its_runs_along(tmp_path):
    writer = ShardWriter(tmp_path, 7, np.dtype(np.uint8), masked=True)
    for mask in ([False, True], [True, False, True]):
        writer.append(np.zeros(len(mask), np.uint8), runs_of(mask))
        if len(mask) == 2:
            writer.end_document()
    writer.drop_document()
    writer.append(np.zeros(2, np.uint8), runs_of([True, False]))
    writer.end_document()
    files = [path.name for path in writer.close()]
    assert files == ["00007.tokens.npy", "00007.offsets.npy", learned_name(7)]
    assert np.load(tmp_path / learned_name(7)).tolist() == [1, 2, 2, 3]


@pytest.mark.parametrize("borders", [[1], [3, 1], [-1, 2], [2, 9]])
def test_what_are_no_runs_is_refused(borders):
    with pytest.raises(ValueError, match="are no runs of 8 tokens"):
        LearnedRuns(np.array(borders), 8)
