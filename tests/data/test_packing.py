"""Rows keep documents apart, hold every token once, and can be made again at any step."""

import itertools
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy

from armillary.data.packing import (
    IGNORED,
    Batch,
    PackedBatches,
    plan_cropped,
    plan_packed,
)
from armillary.training.loss import next_token_loss
from support.datasets import END, made_up
from support.models import build, config

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=40)


def some_documents(lengths, seed=0):
    draw = np.random.default_rng(seed)
    return [[*draw.integers(3, 61, n - 1).tolist(), END] for n in lengths]


def pieces(batch: Batch):
    """Each piece of each row as (tokens, labels, positions)."""
    for row in range(len(batch.tokens)):
        for number in range(int(batch.documents[row].max()) + 1):
            at = batch.documents[row] == number
            assert (np.diff(np.flatnonzero(at)) == 1).all()
            yield batch.tokens[row][at], batch.labels[row][at], batch.positions[row][at]


# Plans


@given(LENGTHS, st.integers(2, 24), st.integers(1, 5), st.randoms(use_true_random=False))
def test_every_token_stands_in_one_place(lengths, length, open_rows, random):
    order = list(range(len(lengths)))
    random.shuffle(order)
    plan = plan_packed(np.array(lengths), length, np.array(order), open_rows=open_rows)
    seen = Counter()
    for row in range(len(plan.rows) - 1):
        held = range(plan.rows[row], plan.rows[row + 1])
        assert 1 <= sum(plan.lengths[piece] for piece in held) <= length
        for piece in held:
            start, count = plan.starts[piece], plan.lengths[piece]
            seen.update((plan.documents[piece], place) for place in range(start, start + count))
    assert plan.rows[0] == 0
    assert plan.rows[-1] == len(plan.documents)
    wanted = {(n, place) for n, count in enumerate(lengths) for place in range(count)}
    assert set(seen) == wanted
    assert set(seen.values()) == {1}


def test_a_piece_goes_where_it_leaves_the_least_room():
    """7 opens a row, 5 another; 3 fits both and goes to the 7, 5 to the 5; 2 opens a third."""
    plan = plan_packed(np.array([7, 5, 3, 5, 2]), 10, np.arange(5))
    rows = [plan.documents[a:b].tolist() for a, b in itertools.pairwise(plan.rows)]
    assert rows == [[0, 2], [1, 3], [4]]


def test_with_no_more_rows_allowed_open_the_fullest_is_closed():
    plan = plan_packed(np.array([6, 7, 3, 4]), 10, np.arange(4), open_rows=1)
    rows = [plan.documents[a:b].tolist() for a, b in itertools.pairwise(plan.rows)]
    assert rows == [[0, 2], [1], [3]]


def test_little_is_wasted_on_many_documents():
    lengths = np.maximum(1, np.exp(np.random.default_rng(0).normal(5, 1.2, 20_000))).astype(int)
    plan = plan_packed(lengths, 512, np.arange(len(lengths)))
    waste = 1 - lengths.sum() / (512 * (len(plan.rows) - 1))
    assert 0 <= waste < 0.01


def test_cropping_gives_each_document_a_row():
    plan = plan_cropped(np.array([3, 9, 4]), 5, np.array([2, 0, 1]))
    assert plan.documents.tolist() == [2, 0, 1]
    assert plan.lengths.tolist() == [4, 3, 5]
    assert plan.rows.tolist() == [0, 1, 2, 3]


# Rows


@pytest.fixture
def batches(tmp_path):
    count = itertools.count()

    def make(lengths, **options):
        dataset = made_up(tmp_path / str(next(count)), some_documents(lengths))
        return PackedBatches(dataset, **{"length": 8, "batch_size": 3} | options)

    return make


MIXED = [3, 5, 17, 1, 8, 2, 9, 4, 4, 16, 6]


def test_labels_are_the_next_token_of_the_same_document(batches):
    """Cut documents too: a piece's last label is the first token of the next piece."""
    made = batches(MIXED)
    documents = [made.dataset[n].tolist() for n in range(len(MIXED))]
    windows = [ids[start : start + 9] for ids in documents for start in range(len(ids) - 8)]
    found = Counter()
    for batch in made.once():
        for tokens, labels, positions in pieces(batch):
            assert positions.tolist() == list(range(len(tokens)))
            assert tokens[1:].tolist() == labels[:-1].tolist()
            at_end = labels[-1] == IGNORED
            assert at_end or [*tokens, labels[-1]] in windows
            assert (tokens[-1] == END) == at_end
            found.update(labels[labels != IGNORED].tolist())
    assert found == Counter(token for document in documents for token in document[1:])


def test_the_label_across_a_seam_is_ignored(batches):
    """Case 91: documents of 3 and 5 tokens in one row of 9."""
    made = batches([3, 5], length=9, batch_size=1, shuffle=False)
    (batch,) = made.once()
    a, b = (made.dataset[n].tolist() for n in (0, 1))
    assert batch.tokens.tolist() == [[*a, *b, END]]
    assert batch.labels.tolist() == [[*a[1:], IGNORED, *b[1:], IGNORED, IGNORED]]
    assert batch.documents.tolist() == [[0, 0, 0, 1, 1, 1, 1, 1, -1]]
    assert batch.positions.tolist() == [[0, 1, 2, 0, 1, 2, 3, 4, 0]]
    assert batch.n_targets == 6


def test_filling_up_goes_by_length_and_keeps_labels_that_are_end_tokens(batches):
    """Case 96: rows are filled up with the end token itself."""
    (batch,) = batches([3], length=6, batch_size=1).once()
    assert batch.tokens[0, 2:].tolist() == [END] * 4
    assert batch.labels[0, 1] == END
    assert (batch.labels[0, 2:] == IGNORED).all()


def test_a_row_without_labels_is_counted_as_such(batches):
    """Case 90: documents of one token have nothing to predict."""
    made = batches([1, 1, 1], batch_size=1)
    assert made.report.targets == 0
    assert made.batch(0).n_targets == 0


def losses(decoder, batch: Batch, *, apart: bool = True) -> torch.Tensor:
    """The loss of each label, row by row."""
    tokens, labels = torch.from_numpy(batch.tokens), torch.from_numpy(batch.labels)
    logits = decoder(
        tokens,
        positions=torch.from_numpy(batch.positions),
        documents=torch.from_numpy(batch.documents) if apart else None,
    )
    found = cross_entropy(logits.transpose(1, 2), labels, ignore_index=IGNORED, reduction="none")
    return found[labels != IGNORED]


def test_packed_documents_cost_what_they_cost_alone(batches):
    """Case 91, through a decoder; positions that begin anew do not keep documents apart alone."""
    decoder = build(config())
    made = batches([3, 5], length=9, batch_size=1, shuffle=False)
    alone = batches([3, 5], length=9, batch_size=1, shuffle=False, mode="cropped")
    with torch.no_grad():
        (packed,) = made.once()
        together = losses(decoder, packed)
        apart = torch.cat([losses(decoder, batch) for batch in alone.once()])
        mixed = losses(decoder, packed, apart=False)
    assert (together - apart).abs().max() < 1e-10
    assert (mixed - apart).abs().max() > 1e-3


def test_changing_one_document_leaves_the_logits_of_the_next_one(tmp_path):
    decoder = build(config())
    found = []
    for name, first in (("a", [5, 6, END]), ("b", [50, 60, END])):
        dataset = made_up(tmp_path / name, [first, [7, 8, 9, 10, END]])
        made = PackedBatches(dataset, length=9, batch_size=1, shuffle=False)
        (batch,) = made.once()
        with torch.no_grad():
            found.append(losses(decoder, batch))
    assert torch.equal(found[0][2:], found[1][2:])
    assert not torch.equal(found[0][:2], found[1][:2])


@pytest.mark.parametrize("mode", ["packed", "cropped"])
@pytest.mark.parametrize("chats", [False, True])
@given(lengths=LENGTHS, length=st.integers(2, 24))
def test_the_report_is_what_the_rows_show(tmp_path_factory, mode, chats, lengths, length):
    masks = some_masks(lengths) if chats else None
    dataset = made_up(tmp_path_factory.mktemp("d"), some_documents(lengths), masks=masks)
    made = PackedBatches(dataset, length=length, batch_size=4, mode=mode)
    rows = list(made.once())
    placed = sum(int((batch.documents >= 0).sum()) for batch in rows)
    filled = sum(int((batch.documents >= 0).any(axis=1).sum()) for batch in rows)
    report = made.report
    assert report.rows == filled == made.n_rows
    assert report.placed == placed
    assert report.padding == filled * length - placed
    assert report.waste == pytest.approx(1 - placed / (filled * length))
    assert report.targets == sum(batch.n_targets for batch in rows)
    assert report.cut == sum(n > length for n in lengths)
    assert report.dropped == (0 if mode == "packed" else sum(max(0, n - length) for n in lengths))
    assert report.documents == len(lengths)
    nothing = sum(
        int(((batch.labels == IGNORED).all(axis=1) & (batch.documents >= 0).any(axis=1)).sum())
        for batch in rows
    )
    assert report.unlabelled == nothing


# Chats


def some_masks(lengths, seed=1):
    draw = np.random.default_rng(seed)
    return [(draw.random(n) < 0.3).tolist() for n in lengths]


@pytest.mark.parametrize("mode", ["packed", "cropped"])
@pytest.mark.parametrize("length", [5, 8, 40])
def test_a_label_stands_where_the_next_token_is_learned_and_nowhere_else(tmp_path, mode, length):
    """Beside the same documents without masks; cut documents too, and several shards."""
    documents, masks = some_documents(MIXED), some_masks(MIXED)
    options = {"length": length, "batch_size": 3, "mode": mode}
    chats = PackedBatches(made_up(tmp_path / "chats", documents, masks=masks), **options)
    texts = PackedBatches(made_up(tmp_path / "texts", documents), **options)
    plan, row, kept = chats._plan, 0, 0
    for chat, text in zip(chats.once(), texts.once(), strict=True):
        for name in ("tokens", "documents", "positions"):
            assert np.array_equal(getattr(chat, name), getattr(text, name))
        for place in range(len(chat.tokens)):
            if not (chat.documents[place] >= 0).any():
                continue
            for number in range(plan.rows[row], plan.rows[row + 1]):
                at = chat.documents[place] == number - plan.rows[row]
                mask = np.array([*masks[plan.documents[number]], False])
                start = plan.starts[number] + 1
                wanted = np.where(mask[start : start + at.sum()], text.labels[place][at], IGNORED)
                assert chat.labels[place][at].tolist() == wanted.tolist()
                kept += int((wanted != IGNORED).sum())
            row += 1
    assert 0 < kept == chats.report.targets < texts.report.targets


def test_a_chat_whose_answers_are_cropped_away_has_no_labels_and_is_reported(tmp_path):
    """Case 90: 0 loss, counted. The second chat's answer begins just behind the row's end, so that
    its first token is still the label of the last place; the third one's a token later."""
    documents = [[5, 6, 7, END], [5, 6, 7, 8, 9, 10, END], [5, 6, 7, 8, 9, 10, END]]
    masks = [[False, False, True, True], [False] * 4 + [True] * 3, [False] * 5 + [True] * 2]
    dataset = made_up(tmp_path / "d", documents, masks=masks)
    made = PackedBatches(dataset, length=4, batch_size=1, mode="cropped", shuffle=False)
    counts = [batch.n_targets for batch in made.once()]
    assert counts == [2, 1, 0]
    assert (made.report.targets, made.report.unlabelled) == (3, 1)
    decoder = build(config())
    for batch, count in zip(made.once(), counts, strict=True):
        hidden = decoder.hidden(torch.from_numpy(batch.tokens))
        loss = next_token_loss(decoder, hidden, torch.from_numpy(batch.labels))
        assert int(loss.count) == count
        assert (float(loss.total.detach()) == 0.0) == (count == 0)


def test_nothing_is_lost_of_an_answer_that_is_cut_when_packed(tmp_path):
    documents, masks = [[*range(3, 23), END]], [[False] * 15 + [True] * 6]
    dataset = made_up(tmp_path / "d", documents, masks=masks)
    made = PackedBatches(dataset, length=8, batch_size=1, shuffle=False)
    found = [batch.labels[batch.labels != IGNORED].tolist() for batch in made.once()]
    assert found == [[], [18, 19], [20, 21, 22, END]]
    assert made.report.unlabelled == 1


# Steps


def same(a: Batch, b: Batch) -> bool:
    return all(np.array_equal(getattr(a, name), getattr(b, name)) for name in vars(a))


def test_any_step_can_be_made_again_without_the_others(batches):
    made, again = batches(MIXED), batches(MIXED)
    run = [made.batch(step) for step in range(20)]
    for step in (19, 3, 0, 11):
        assert same(again.batch(step), run[step])


def test_each_epoch_has_every_row_once_in_an_order_of_its_own(batches):
    """Seven rows by three: batches at the border of two epochs have rows of both."""
    made = batches(MIXED)
    n = made.n_rows
    assert n % made.batch_size
    steps = -(-3 * n // made.batch_size)
    rows = [row.tobytes() for step in range(steps) for row in made.batch(step).tokens]
    epochs = [rows[e * n : (e + 1) * n] for e in range(3)]
    assert len(set(epochs[0])) == n
    assert set(epochs[0]) == set(epochs[1]) == set(epochs[2])
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert made.epoch(0) == 0
    assert made.epoch(n) == made.batch_size


def test_seeds_give_other_orders_and_without_shuffling_there_is_one(batches):
    first = batches(MIXED, seed=1).batch(0)
    assert same(first, batches(MIXED, seed=1).batch(0))
    assert not same(first, batches(MIXED, seed=2).batch(0))
    plain = [batches(MIXED, seed=seed, shuffle=False) for seed in (1, 2)]
    assert same(plain[0].batch(4), plain[1].batch(4))
    assert same(plain[0].batch(0), next(plain[0].once()))


@pytest.mark.parametrize("ranks", [2, 3, 6])
def test_the_rows_of_a_step_do_not_depend_on_the_number_of_ranks(batches, ranks):
    whole = batches(MIXED, batch_size=6)
    shares = [batches(MIXED, batch_size=6, rank=rank, ranks=ranks) for rank in range(ranks)]
    for step in (0, 1, 7):
        parts = [share.batch(step).tokens for share in shares]
        assert np.array_equal(np.concatenate(parts), whole.batch(step).tokens)
    once = zip(*(share.once() for share in shares), strict=True)
    for parts, batch in zip(once, whole.once(), strict=True):
        assert np.array_equal(np.concatenate([part.labels for part in parts]), batch.labels)


def test_once_gives_every_row_once_in_batches_of_one_shape(batches):
    made = batches(MIXED, batch_size=4)
    rows = list(made.once())
    assert {batch.tokens.shape for batch in rows} == {(4, 8)}
    held = [row for batch in rows for row in batch.documents.max(axis=1) if row >= 0]
    assert len(held) == made.n_rows
    assert sum(batch.n_targets for batch in rows) == made.report.targets


def test_changing_a_document_leaves_the_other_rows_as_they_are(tmp_path):
    """Promised for a change of the same length."""
    documents = some_documents(MIXED)
    before = PackedBatches(made_up(tmp_path / "a", documents), length=8, batch_size=1)
    documents[10] = [*[60] * 5, END]
    after = PackedBatches(made_up(tmp_path / "b", documents), length=8, batch_size=1)
    changed = [
        row
        for row, (a, b) in enumerate(zip(before.once(), after.once(), strict=True))
        if not same(a, b)
    ]
    plan = before._plan
    holders = [
        row
        for row in range(before.n_rows)
        if 10 in plan.documents[plan.rows[row] : plan.rows[row + 1]]
    ]
    assert changed == holders
    ((first, last),) = (plan.rows[row : row + 2] for row in changed)
    assert last - first > 1  # another document stands beside it, whose tokens are as before


def test_the_fingerprint_tells_orders_apart(batches):
    prints = {
        batches(MIXED, **options).fingerprint
        for options in (
            {},
            {"seed": 1},
            {"length": 9},
            {"mode": "cropped"},
            {"shuffle": False},
        )
    }
    assert len(prints) == 5
    assert batches(MIXED).fingerprint == batches(MIXED, ranks=3, rank=1).fingerprint


def test_micro_batches_put_together_are_the_batch(batches):
    batch = batches(MIXED, batch_size=6).batch(1)
    parts = batch.split(3)
    assert [part.tokens.shape for part in parts] == [(2, 8)] * 3
    assert np.array_equal(np.concatenate([part.labels for part in parts]), batch.labels)
    with pytest.raises(ValueError, match="6 rows do not divide into 4"):
        batch.split(4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 1}, "length 1"),
        ({"batch_size": 0}, "batch_size 0"),
        ({"batch_size": 3, "ranks": 2}, "batch_size 3: rank 0 has no equal share of 2"),
        ({"rank": 1}, "rank 1 has no equal share of 1"),
        ({"mode": "padded"}, "mode 'padded'"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_the_numbers(batches, options, message):
    with pytest.raises(ValueError, match=message):
        batches(MIXED, **options)


def test_a_negative_step_is_refused(batches):
    with pytest.raises(ValueError, match="step -1"):
        batches(MIXED).batch(-1)
