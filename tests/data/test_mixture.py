"""Long documents come more often, within their own source; short ones in every step."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from armillary.data.mixture import Draws, Mixture, groups, quotas, shares
from armillary.data.packing import IGNORED, PackedBatches, plan_short
from armillary.data.skipping import Skip, skipped_positions
from armillary.errors import UserError
from support.datasets import END, made_up

# Two sources: many short documents with a few long ones, and the other way round.
LENGTHS = [*[6, 9, 4, 7] * 9, 40, 33, *[50, 61, 47, 5, 38] * 3]
SOURCES = [38, 15]
LONG = 30


@pytest.fixture
def dataset(tmp_path):
    draw = np.random.default_rng(0)
    documents = [[*draw.integers(3, 61, n - 1).tolist(), END] for n in LENGTHS]
    return made_up(tmp_path / "data", documents, sources=SOURCES)


def batches(dataset, **options):
    return PackedBatches(dataset, **{"length": 16, "batch_size": 4, "seed": 5} | options)


def tokens_by(made, steps):
    """Tokens of the rows of some steps by (source, whether their document is long)."""
    counts = Counter()
    sources, lengths = made.dataset.sources, made.dataset.lengths
    for step in range(steps):
        for number in range(made.batch_size):
            row, _ = made._row_of(step, number)
            plan = made._plan
            for piece in range(plan.rows[row], plan.rows[row + 1]):
                document = plan.documents[piece]
                key = int(sources[document]), bool(lengths[document] >= LONG)
                counts[key] += int(plan.lengths[piece])
    return counts


def shares_of(counts):
    whole = sum(counts.values())
    return {key: count / whole for key, count in counts.items()}


@pytest.mark.parametrize("mode", ["packed", "cropped"])
def test_long_documents_get_their_share_and_each_source_keeps_its_own(dataset, mode):
    plain = batches(dataset, mode=mode)
    mixed = batches(dataset, mode=mode, mixture=Mixture(long=LONG, long_share=0.6))
    steps = round(8 * mixed.epoch_steps)
    before = shares_of(tokens_by(plain, round(8 * plain.epoch_steps)))
    after = shares_of(tokens_by(mixed, steps))
    for source in (0, 1):
        whole = before[source, True] + before[source, False]
        assert after[source, True] + after[source, False] == pytest.approx(whole, abs=0.02)
        wanted = max(0.6, before[source, True] / whole)
        assert after[source, True] / whole == pytest.approx(wanted, abs=0.03)
    assert before[0, True] / (before[0, True] + before[0, False]) < 0.5  # or nothing was shown


def test_a_source_of_few_long_documents_does_not_repeat_them_beyond_measure():
    tokens, divided = np.array([10, 990]), [group(0, True), group(0, False)]
    shared = shares(tokens, divided, Mixture(long=LONG, long_share=0.7, long_repeat=5))
    assert shared == pytest.approx([0.05, 0.95])
    shared = shares(tokens, divided, Mixture(long=LONG, long_share=0.7, long_repeat=1000))
    assert shared == pytest.approx([0.7, 0.3])


def group(source, is_long):
    return groups(np.array([40 if is_long else 4]), np.array([source]), np.array([0]), LONG)[0]


def test_a_source_that_is_long_throughout_is_left_alone():
    divided = [group(0, True), group(1, True), group(1, False)]
    shared = shares(np.array([300, 50, 650]), divided, Mixture(long=LONG, long_share=0.5))
    assert shared == pytest.approx([0.3, 0.25, 0.45])


def test_an_epoch_has_about_the_tokens_that_there_are():
    tokens, rows = np.array([1000, 3000]), np.array([10, 40])
    drawn = quotas(np.array([0.5, 0.5]), tokens, rows)
    assert drawn.tolist() == [20, 27]  # 2000 tokens of 100 a row, 2000 of 75


@given(st.integers(0, 50))
def test_each_place_is_computed_alone_and_pools_are_gone_through_evenly(seed):
    draws = Draws(np.array([0, 3]), np.array([3, 10]), np.array([6, 5]), "rows", seed)
    epoch = [draws.row(place) for place in range(11)]
    assert Counter(row < 3 for row in epoch) == {True: 6, False: 5}
    assert Counter(row for row in epoch if row < 3) == {0: 2, 1: 2, 2: 2}
    both = Counter(draws.row(place) for place in range(22) if draws.row(place) >= 3)
    assert both == dict.fromkeys(range(3, 13), 1)  # what an epoch left out the next one brings
    assert [draws.row(place) for place in (21, 4, 0)] == [draws.row(21), epoch[4], epoch[0]]


# Short sequences


def test_every_step_has_its_rows_of_short_sequences(dataset):
    made = batches(dataset, mixture=Mixture(short=8, short_share=0.25))
    steps = [made.batch(step) for step in range(30)]
    assert all(longest_piece(batch, 3) <= 8 for batch in steps)
    assert max(longest_piece(batch, 0) for batch in steps) == 16
    assert sum(batch.documents[3].max() >= 1 for batch in steps) > 25  # several, kept apart


def longest_piece(batch, row):
    return max(Counter(batch.documents[row][batch.documents[row] >= 0].tolist()).values())


def test_short_pieces_hold_every_token_once_and_go_on_over_the_cut(dataset):
    plan = plan_short(dataset.lengths, 16, np.arange(len(dataset)), 8)
    seen = Counter()
    for row in range(len(plan.rows) - 1):
        held = range(plan.rows[row], plan.rows[row + 1])
        assert 1 <= sum(plan.lengths[piece] for piece in held) <= 16
        for piece in held:
            start = plan.starts[piece]
            assert plan.lengths[piece] <= 8
            seen.update((plan.documents[piece], start + i) for i in range(plan.lengths[piece]))
    assert set(seen) == {(n, i) for n, count in enumerate(LENGTHS) for i in range(count)}
    assert set(seen.values()) == {1}


def test_cropped_rows_of_short_sequences_hold_one_document_each(dataset):
    made = batches(dataset, mode="cropped", mixture=Mixture(short=8, short_share=0.25))
    batch = made.batch(0)
    assert batch.documents[3].max() == 0
    assert (batch.documents[3] == 0).sum() <= 8


@pytest.mark.parametrize(("share", "rows"), [(0.01, 1), (0.25, 1), (0.5, 2), (0.7, 3)])
def test_a_share_is_rounded_to_whole_rows_and_never_to_none(share, rows):
    assert Mixture(short=8, short_share=share).short_rows(4) == rows


def test_short_rows_leave_room_for_others(dataset):
    with pytest.raises(ValueError, match="of 4 rows a step, 4 short ones leave none"):
        batches(dataset, mixture=Mixture(short=8, short_share=0.9))


@pytest.mark.parametrize(
    "settings", [{"long_share": 1.0}, {"short_share": -0.1}, {"short": 1}, {"long_repeat": 0.5}]
)
def test_what_makes_no_mixture_is_refused(settings):
    with pytest.raises(ValueError, match="must be at least"):
        Mixture(**settings)


# Steps and ranks

MIXED = {
    "mixture": Mixture(long=LONG, long_share=0.6, short=8, short_share=0.25),
    "skip": Skip(64, 3),
}


def same(a, b):
    return all(np.array_equal(getattr(a, name), getattr(b, name)) for name in vars(a))


@pytest.mark.parametrize("mode", ["packed", "cropped"])
def test_any_step_can_be_made_again_without_the_others(dataset, mode):
    made = batches(dataset, mode=mode, **MIXED)
    run = [made.batch(step) for step in range(40)]
    again = batches(dataset, mode=mode, **MIXED)
    for step in (39, 3, 0, 22):
        assert same(again.batch(step), run[step])


def test_a_step_is_the_same_on_any_number_of_ranks(dataset):
    whole = batches(dataset, **MIXED).batch(9)
    for ranks in (2, 4):
        parts = [batches(dataset, rank=r, ranks=ranks, **MIXED).batch(9) for r in range(ranks)]
        for name in vars(whole):
            joined = np.concatenate([getattr(part, name) for part in parts])
            assert np.array_equal(joined, getattr(whole, name))


def test_only_positions_skip_and_only_outside_the_short_rows(dataset):
    counted = batches(dataset, mixture=MIXED["mixture"])
    skipping = batches(dataset, **MIXED)
    reached = 0
    for step in range(20):
        a, b = counted.batch(step), skipping.batch(step)
        assert all(np.array_equal(getattr(a, n), getattr(b, n)) for n in ("tokens", "documents"))
        assert np.array_equal(a.labels, b.labels)
        assert np.array_equal(a.positions[3], b.positions[3])
        for row in range(3):
            for number in range(b.documents[row].max() + 1):
                at = b.documents[row] == number
                key = (5, step * 4 + row, number)
                wanted = skipped_positions(int(at.sum()), Skip(64, 3), *key)
                assert b.positions[row][at].tolist() == wanted.tolist()
                reached = max(reached, int(wanted.max()))
        assert (b.positions[b.documents < 0] == 0).all()
    assert 55 < reached < 64


def test_another_mixture_is_another_order_and_none_is_the_order_that_was(dataset):
    """Runs that were begun before mixtures go on: their checksums are what they were."""
    plain = batches(dataset)
    prints = {plain.fingerprint}
    for options in ({"mixture": MIXED["mixture"]}, {"skip": Skip(64)}, {"skip": Skip(32)}):
        prints.add(batches(dataset, **options).fingerprint)
    assert len(prints) == 4
    assert plain.epoch_steps == plain.n_rows / 4


def test_measuring_takes_every_row_once_as_if_nothing_were_mixed(dataset):
    made = batches(dataset, mixture=MIXED["mixture"], skip=MIXED["skip"])
    placed = sum(int((batch.documents >= 0).sum()) for batch in made.once())
    assert placed == made.report.placed == sum(LENGTHS)
    targets = sum(int((batch.labels != IGNORED).sum()) for batch in made.once())
    assert targets == made.report.targets


def test_a_mixture_needs_shuffling(dataset):
    with pytest.raises(ValueError, match="needs shuffle"):
        batches(dataset, shuffle=False, mixture=Mixture())


# Sources


def test_the_source_of_a_document_goes_by_the_order(dataset):
    assert dataset.sources.tolist() == [0] * 38 + [1] * 15


def test_data_of_several_sources_that_were_not_noted_cannot_be_mixed(tmp_path):
    documents = [[5, END], [6, END]]
    single = made_up(tmp_path / "one", documents)
    assert single.sources.tolist() == [0, 0]
    several = made_up(tmp_path / "two", documents, source_names=["a", "b"])
    with pytest.raises(UserError, match="which documents are of which source; prepare it anew"):
        _ = several.sources
