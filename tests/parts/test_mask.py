"""Which keys a query may read, against a rule spelt out pair by pair."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from armillary.parts.mask import Visibility, as_bool, counted_positions, split_mask, tree


def spelt_out(visibility: Visibility, batch: int) -> np.ndarray:
    """(batch, T, S): every rule asked about every pair."""
    shift = visibility.n_keys - visibility.n_queries
    may_read = np.zeros((batch, visibility.n_queries, visibility.n_keys), dtype=bool)
    places = range(visibility.n_keys) if visibility.places is None else visibility.places.tolist()
    for row, t, key in np.ndindex(*may_read.shape):
        query = t + shift
        before = places[query] - places[key]
        may_read[row, t, key] = (
            before >= 0
            and (visibility.window is None or before < visibility.window)
            and (visibility.readable is None or bool(visibility.readable[row, key]))
            and (
                visibility.documents is None
                or int(visibility.documents[row, key]) == int(visibility.documents[row, query])
            )
            and (
                visibility.allowed is None
                or bool(visibility.allowed[row % len(visibility.allowed), 0, t, key])
            )
        )
    return may_read


def put_together(visibility: Visibility, batch: int, size: int) -> np.ndarray:
    """(batch, T, S) from blocks of queries."""
    may_read = np.zeros((batch, visibility.n_queries, visibility.n_keys), dtype=bool)
    for start in range(0, visibility.n_queries, size):
        block = visibility.block(start, min(start + size, visibility.n_queries))
        part = may_read[:, block.start : block.stop, block.first : block.last]
        if block.mask is None:
            part[:] = True
        else:
            assert tuple(block.mask.shape[1:]) == (1, *part.shape[1:])
            assert block.mask.shape[0] in (1, batch)
            part[:] = block.mask[:, 0].numpy()
    return may_read


def booleans(*shape: int) -> st.SearchStrategy[torch.Tensor]:
    size = int(np.prod(shape))
    return st.lists(st.booleans(), min_size=size, max_size=size).map(
        lambda values: torch.tensor(values).view(shape)
    )


@st.composite
def visibilities(draw: st.DrawFn) -> tuple[Visibility, int]:
    batch, t, cached = draw(st.integers(1, 3)), draw(st.integers(1, 7)), draw(st.integers(0, 4))
    keys = t + cached
    lengths = st.lists(st.integers(0, 2), min_size=batch * keys, max_size=batch * keys)
    return (
        Visibility(
            n_queries=t,
            n_keys=keys,
            window=draw(st.none() | st.integers(1, keys + 1)),
            readable=draw(st.none() | booleans(batch, keys)),
            documents=draw(st.none() | lengths.map(lambda d: torch.tensor(d).view(batch, keys))),
            allowed=draw(st.none() | booleans(draw(st.sampled_from([1, batch])), 1, t, keys)),
        ),
        batch,
    )


@given(visibilities(), st.integers(1, 8))
def test_blocks_put_together_are_the_rule_spelt_out(
    drawn: tuple[Visibility, int], size: int
) -> None:
    """Causal order, window, padding, documents and a caller's pairs, all at once."""
    visibility, batch = drawn
    assert (put_together(visibility, batch, size) == spelt_out(visibility, batch)).all()


@given(visibilities(), st.integers(1, 5), st.data())
def test_a_layer_that_kept_the_last_keys_sees_the_same(
    drawn: tuple[Visibility, int], window: int, data: st.DataObject
) -> None:
    """A windowed layer holds fewer keys than the others, under one rule for all."""
    visibility, batch = drawn
    needed = min(visibility.n_keys, visibility.n_queries + window - 1)
    held = data.draw(st.integers(needed, visibility.n_keys))
    kept = visibility.within(window, held)
    whole = spelt_out(visibility.within(window, visibility.n_keys), batch)
    assert not whole[:, :, : visibility.n_keys - held].any()
    assert (put_together(kept, batch, 3) == whole[:, :, visibility.n_keys - held :]).all()


def test_what_is_said_of_forgotten_keys_goes_with_them() -> None:
    """Padding, documents and pairs stay beside their own keys, each in turn."""
    generator = torch.Generator().manual_seed(0)
    documents = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2, 2]])
    readable = torch.rand(1, 9, generator=generator) < 0.5
    allowed = torch.rand(1, 1, 4, 9, generator=generator) < 0.5
    for part in ({"documents": documents}, {"readable": readable}, {"allowed": allowed}):
        visibility = Visibility(4, 9, **part)
        kept = put_together(visibility.within(3, 6), 1, 3)
        assert (kept == spelt_out(visibility.within(3, 9), 1)[:, :, 3:]).all()


def counts(visibility: Visibility, size: int = 3) -> list[int]:
    return put_together(visibility, 1, size)[0].sum(-1).tolist()


def test_a_window_counts_the_query_itself() -> None:
    """Case 52: W = 4, n = 10; as a step sees it too, and W ≥ n is plain causal order."""
    assert counts(Visibility(10, 10, window=4)) == [1, 2, 3, 4, 4, 4, 4, 4, 4, 4]
    assert counts(Visibility(1, 10, window=4)) == [4]
    assert counts(Visibility(10, 10, window=1)) == [1] * 10
    for window in (10, 11, None):
        assert counts(Visibility(10, 10, window=window)) == list(range(1, 11))
        assert Visibility(10, 10, window=window).is_plainly_causal


@pytest.mark.parametrize(("queries", "keys"), [(1, 8), (3, 8), (8, 8)])
def test_the_last_query_stands_beside_the_last_key(queries: int, keys: int) -> None:
    """Case 49: aligned to the upper left, one query would read the first key only."""
    expected = list(range(keys - queries + 1, keys + 1))
    assert counts(Visibility(queries, keys)) == expected
    assert Visibility(queries, keys).is_plainly_causal == (queries == keys)


@pytest.mark.parametrize("window", [None, 3])
def test_queries_in_runs_read_what_they_read_among_all(window: int | None) -> None:
    """Runs of unequal lengths, out of order; every rule is cut to the keys of its run."""
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 2, 2, 2]])
    readable = torch.ones(2, 8, dtype=torch.bool)
    readable[0, 4] = False
    allowed = torch.ones(2, 1, 8, 8, dtype=torch.bool)
    allowed[1, 0, 6, 5] = False
    whole = Visibility(8, 8, window, readable, documents, allowed)
    runs = [range(5, 8), range(1, 3)]
    expected = spelt_out(whole, 2)[:, [5, 6, 7, 1, 2]]
    found = np.zeros_like(expected)
    narrowed = whole.at(runs)
    for part, rule in narrowed.by_run():
        found[:, part, : rule.n_keys] = put_together(rule, 2, size=2)
    np.testing.assert_array_equal(found, expected)
    assert narrowed.n_queries == 5
    assert not Visibility(4, 4).at([range(4)]).is_plainly_causal
    with pytest.raises(ValueError, match="by_run"):
        narrowed.block(0, 2)


def test_runs_are_places_among_all_queries() -> None:
    with pytest.raises(ValueError, match="3 queries do not stand at all of 8 keys"):
        Visibility(3, 8).at([range(2)])


def test_more_queries_than_keys_are_refused() -> None:
    with pytest.raises(ValueError, match="8 queries cannot stand beside 3 keys"):
        Visibility(8, 3)


def test_a_block_names_no_keys_that_none_of_its_queries_may_read() -> None:
    """So that a window costs what it reads, whatever the length."""
    block = Visibility(1000, 1000, window=8).block(500, 510)
    assert (block.first, block.last) == (493, 510)
    assert tuple(block.mask.shape) == (1, 1, 10, 17)
    block = Visibility(10, 1000).block(4, 6)
    assert (block.first, block.last) == (0, 996)


def test_there_is_no_mask_where_all_may_be_read() -> None:
    """A single step then needs none at all."""
    assert Visibility(1, 9).block(0, 1).mask is None
    assert Visibility(1, 9, window=4).block(0, 1).mask is None
    assert Visibility(2, 9).block(0, 2).mask is not None


def test_only_a_rule_on_single_keys_can_leave_a_query_with_nothing() -> None:
    every = torch.ones(1, 4, dtype=torch.bool)
    assert not Visibility(4, 4, window=2).may_be_empty
    assert Visibility(4, 4, readable=every).may_be_empty
    assert Visibility(4, 4, allowed=every.expand(1, 1, 4, 4)).may_be_empty
    assert not Visibility(4, 4, readable=every).is_plainly_causal
    assert not Visibility(4, 4, documents=every.long()).is_plainly_causal


# --- A caller's mask --------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bool, torch.long, torch.float32, torch.int8])
def test_one_and_true_mean_may_be_read(dtype: torch.dtype) -> None:
    mask = torch.tensor([[1, 0, 1]]).to(dtype)
    assert as_bool(mask).tolist() == [[True, False, True]]


@pytest.mark.parametrize("value", [float("-inf"), float("nan"), -1.0, 2.0, 0.5])
def test_other_numbers_are_refused(value: float) -> None:
    """An additive mask of 0 and −∞ would mean the opposite."""
    with pytest.raises(ValueError, match="hold only 0 and 1"):
        as_bool(torch.tensor([0.0, value]))


def test_a_mask_is_over_tokens_or_over_pairs() -> None:
    tokens = torch.ones(2, 3, dtype=torch.bool)
    readable, allowed = split_mask(tokens, 2, 3, 5)
    assert readable is tokens
    assert allowed is None
    for shape in ((2, 3, 5), (2, 1, 3, 5)):
        readable, allowed = split_mask(torch.ones(shape), 2, 3, 5)
        assert readable is None
        assert tuple(allowed.shape) == (2, 1, 3, 5)
    assert split_mask(None, 2, 3, 5) == (None, None)


@pytest.mark.parametrize(
    "shape",
    [(2, 5), (3,), (1, 3), (3, 5), (1, 3, 5), (2, 3, 3), (2, 6, 3, 5), (2, 5, 3), (2, 1, 1, 5)],
)
def test_a_mask_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    """Nothing is broadcast: for B = T, that would run."""
    with pytest.raises(ValueError, match=r"fits neither \(B, T\) = \(2, 3\) nor"):
        split_mask(torch.ones(shape), 2, 3, 5)


# --- Positions --------------------------------------------------------------------------------


@given(st.integers(1, 3), st.integers(1, 9), st.booleans(), st.data())
def test_positions_count_the_real_tokens_of_a_document(
    batch: int, length: int, with_documents: bool, data: st.DataObject
) -> None:
    """Documents may be interleaved, so that two of them begin again."""
    readable = data.draw(booleans(batch, length))
    documents = None
    if with_documents:
        numbers = st.lists(st.integers(-1, 2), min_size=length, max_size=length)
        documents = torch.tensor([data.draw(numbers) for _ in range(batch)])
    positions = counted_positions(readable, documents)
    for row in range(batch):
        for t in range(length):
            own = [
                readable[row, s] and (documents is None or documents[row, s] == documents[row, t])
                for s in range(t)
            ]
            assert positions[row, t] == (sum(own) if readable[row, t] else 0)


def test_left_padding_is_not_counted() -> None:
    """Case 54: a position is the count of real tokens before it."""
    readable = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 0]])
    assert counted_positions(readable).tolist() == [[0, 0, 0, 1, 2], [0, 1, 2, 3, 0]]


# --- Trees ------------------------------------------------------------------------------------


@given(
    st.integers(0, 4),
    st.lists(st.integers(0, 9), min_size=1, max_size=8),
    st.none() | st.integers(1, 9),
    st.integers(1, 8),
)
def test_what_goes_on_from_one_text_is_the_rule_spelt_out(
    cached: int, drawn: list[int], window: int | None, size: int
) -> None:
    """Each reads the cached text and its own way, within a window measured along that way."""
    parents = [number % (child + 1) - 1 for child, number in enumerate(drawn)]
    ways, depths = tree(parents)
    count = len(parents)
    visibility = Visibility(
        n_queries=count,
        n_keys=cached + count,
        window=window,
        allowed=torch.cat([torch.ones(count, cached, dtype=torch.bool), ways], 1)[None, None],
        places=torch.cat([torch.arange(cached), cached + depths]),
    )
    found = put_together(visibility, 1, size)
    assert (found == spelt_out(visibility, 1)).all()
    for child in range(count):
        text, at = list[int](), child
        while at >= 0:
            text.insert(0, cached + at)
            at = parents[at]
        text = [*range(cached), *text]
        assert np.flatnonzero(found[0, child]).tolist() == text[-(window or len(text)) :]


def test_a_tree_has_parents_before_children() -> None:
    for parents in ([0], [-1, 2, -1], [-2]):
        with pytest.raises(ValueError, match="cannot follow"):
            tree(parents)
