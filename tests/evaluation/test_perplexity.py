"""The same targets under every length; nothing scored twice, nothing skipped, nothing unsaid."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from armillary.config import DecoderConfig
from armillary.errors import UserError
from armillary.evaluation.decoder_scorer import DecoderScorer
from armillary.evaluation.perplexity import Document, Perplexity, ShortLoss, chosen_keys
from armillary.evaluation.records import LossRow, prompt_checksum
from support.models import build
from support.stub_scorer import StubScorer, costs_its_id, costs_less_with_context


def document(name: str, count: int, seed: int = 0, vocabulary: int = 61) -> Document:
    ids = np.random.default_rng([seed, count]).integers(3, vocabulary, count)
    return Document(name, tuple(ids.tolist()))


def rows_of(task, scorer) -> list[LossRow]:
    return [row for cell in task.cells() for row in task.run(cell, scorer)]


def group(rows, name: str) -> list[LossRow]:
    return [row for row in rows if row.group == name]


def mean(rows) -> float:
    return sum(row.nats for row in rows) / sum(row.tokens for row in rows)


TASK = Perplexity(
    documents=(document("a", 400, 1), document("b", 90, 2)),
    lengths=(16, 64),
    targets=8,
    stretches=1,
    windows=5,
    crop=32,
)


@pytest.mark.parametrize("stride", [1, 2, 3])
def test_each_token_is_scored_once_with_the_whole_context(stride):
    """Cases.md 107: token t costs t, 10 tokens, a window of 4; no seam skipped or counted twice."""
    ten = Document("ten", tuple(range(10)))
    task = Perplexity((ten,), lengths=(4,), targets=stride, windows=10)
    scorer = StubScorer(costs_its_id)
    rows = group(rows_of(task, scorer), "all")
    scored = sorted(
        token
        for context, (each,) in scorer.asked
        for token in (*context, *each.tokens)[4 - stride :]
    )
    assert scored == list(range(4 - stride, 10 - (10 - (4 - stride)) % stride))
    assert mean(rows) == pytest.approx(np.mean(scored))
    assert all(len(context) + len(each.tokens) == 4 for context, (each,) in scorer.asked)


def test_a_text_read_from_its_start_has_all_tokens_but_the_first():
    """Cases.md 107: each of the tokens 1 to 9 once, mean 5.0."""
    task = ShortLoss((Document("ten", tuple(range(10))),))
    (row,) = rows_of(task, StubScorer(costs_its_id))
    assert (row.tokens, row.nats / row.tokens) == (9, 5.0)


def test_short_texts_are_weighted_by_their_tokens():
    """Cases.md 107: 1,023 tokens at 2.0 and 100 at 4.0 are a perplexity of 8.83, not 20.09."""
    texts = (Document("long", (0,) + (2,) * 1023), Document("short", (0,) + (4,) * 100))
    rows = rows_of(ShortLoss(texts, length=1024), StubScorer(costs_its_id))
    assert round(math.exp(mean(rows)), 2) == 8.83


def test_every_length_scores_the_same_targets():
    scorer = StubScorer(costs_its_id)
    rows = group(rows_of(TASK, scorer), "all")
    assert {row.length for row in rows} == {16, 32, 64}
    for instance in {row.instance for row in rows}:
        alike = [row for row in rows if row.instance == instance]
        assert len(alike) == 3
        assert len({row.nats for row in alike}) == 1  # a cost of the token alone: the same tokens
        assert len({row.prompt for row in alike}) == 3
    assert {row.position for row in rows if row.length == 32} == {24}


def test_more_context_is_what_differs():
    rows = group(rows_of(TASK, StubScorer(costs_less_with_context)), "all")
    for length in (16, 32, 64):
        places = range(length - 8, length)
        expected = sum(6 / place**0.5 for place in places) * 5
        assert sum(row.nats for row in rows if row.length == length) == pytest.approx(expected)


def test_the_crop_is_added_below_the_longest():
    assert TASK.all_lengths == (16, 32, 64)
    assert replace(TASK, crop=128).all_lengths == (16, 64)
    assert replace(TASK, crop=64).all_lengths == (16, 64)


def test_targets_never_overlap_and_always_have_their_context():
    windows = replace(TASK, windows=1000).drawn
    for name, count in (("a", 400), ("b", 90)):
        taken = [
            place
            for window in windows
            if window.document.name == name
            for place in range(window.start, window.stop)
        ]
        assert len(taken) == len(set(taken))
        assert min(taken) >= 64 - 8
        assert max(taken) < count
        assert len(taken) == (count - 56) // 8 * 8  # every place that has its context


def test_windows_are_drawn_in_turn_from_each_document():
    names = [window.document.name for window in TASK.drawn]
    assert sorted(names[:2]) == sorted(names[2:4]) == ["a", "b"]


def test_fewer_windows_are_the_first_of_more():
    assert replace(TASK, windows=3).drawn == replace(TASK, windows=20).drawn[:3]


def test_windows_follow_the_seed():
    assert TASK.drawn == replace(TASK).drawn != replace(TASK, seed=1).drawn


@pytest.mark.parametrize("stretches", [1, 2])
def test_shorter_lengths_within_a_reach_have_the_same_targets(stretches):
    """A model of a window of 16 beside one of 64."""
    scorer = StubScorer(costs_its_id)
    task = replace(TASK, stretches=stretches)
    short = rows_of(replace(task, lengths=(16,), crop=None, reach=64), scorer)
    long = rows_of(task, scorer)
    ours = {row.instance: row for row in group(short, "all")}
    theirs = {row.instance: row for row in group(long, "all") if row.length == 16}
    assert ours == theirs
    positions = {(row.instance, row.position): row for row in group(long, "position")}
    assert len(group(short, "position")) == 8 * 5  # 16 of 64 positions, in steps of 2
    for row in group(short, "position"):
        assert positions[row.instance, row.position] == row


SEVERAL = replace(TASK, documents=(document("a", 4000, 1),), lengths=(32, 64, 256, 512), crop=128)


@pytest.mark.parametrize("bos", [None, 1])
def test_stretches_share_passes_that_score_a_quarter_at_most(bos):
    """16 stretches of 8: at 32 each in a pass of its own, at 64 two in one, near the reach all."""
    task = replace(SEVERAL, stretches=16, windows=2, bos=bos)
    scorer = StubScorer(costs_less_with_context)
    rows = group(rows_of(task, scorer), "all")
    passes = [len(context) + len(each.tokens) for context, (each,) in scorer.asked]
    assert passes == [new for cell in task.cells() for _, new in cell.work]
    assert [passes.count(length) // 2 for length in (32, 64, 128, 256, 512)] == [16, 8, 4, 2, 1]
    for row in rows:
        scored = {32: 8, 64: 16, 128: 32, 256: 64, 512: 128}[row.length]
        assert row.length - scored <= row.position <= row.length - 8
        assert row.nats == pytest.approx(
            sum(6 / place**0.5 for place in range(row.position, row.position + 8))
        )
    for length in (32, 64, 128, 256, 512):
        alike = [row.instance for row in rows if row.length == length]
        assert len(set(alike)) == len(alike) == 32
        assert set(alike) == {row.instance for row in rows}


def test_stretches_are_scored_once_each_in_order():
    task = replace(SEVERAL, stretches=16, windows=1)
    (window,) = task.drawn
    tokens = window.document.ids[window.start : window.stop]
    rows = group(rows_of(task, StubScorer(costs_its_id)), "all")
    for length in task.all_lengths:
        nats = [row.nats for row in rows if row.length == length]
        assert nats == [sum(tokens[first : first + 8]) for first in range(0, 128, 8)]


def test_a_stretchs_prompt_is_what_was_read_before_it():
    task = replace(SEVERAL, stretches=2, windows=1)
    (window,) = task.drawn
    ids = window.document.ids
    rows = group(rows_of(task, StubScorer(costs_its_id)), "all")
    for row in rows:
        start = int(row.instance.split(":")[1].partition("+")[0])
        context = ids[start - row.position : start]
        assert row.prompt == prompt_checksum(context, ids[start : start + 8])


def test_as_many_stretches_as_a_quarter_of_the_reach_holds_and_eight_at_most():
    assert replace(SEVERAL, stretches=None).settings["stretches"] == 8
    assert (
        replace(SEVERAL, stretches=None, reach=600, targets=40, lengths=(64,)).settings["stretches"]
        == 3
    )
    assert (
        replace(SEVERAL, stretches=None, targets=20, lengths=(32,), crop=None).settings["stretches"]
        == 1
    )


@pytest.mark.parametrize("longest", [300, 383, 384, 400, 511])
def test_no_pass_begins_before_the_reach(longest):
    """Lengths near the reach, and a document that has no more than that."""
    task = replace(
        SEVERAL,
        documents=(document("a", 512, 1),),
        lengths=(32, longest),
        reach=512,
        stretches=16,
        windows=1,
        crop=None,
    )
    scorer = StubScorer(costs_its_id)
    rows_of(task, scorer)
    assert {len(context) + len(each.tokens) for context, (each,) in scorer.asked} == {32, longest}


@pytest.mark.parametrize("bos", [None, 1])
def test_by_position_every_token_counts_once_and_stands_where_it_says(bos):
    task = replace(TASK, bos=bos, bucket=16, windows=1)
    scorer = StubScorer(costs_less_with_context)
    rows = group(rows_of(task, scorer), "position")
    assert [(row.position, row.tokens, row.length) for row in rows] == [
        (1, 15, 16),
        (16, 16, 32),
        (32, 16, 48),
        (48, 16, 64),
    ]
    for row in rows:
        places = range(row.position, row.length)
        assert row.nats == pytest.approx(sum(6 / place**0.5 for place in places))
    window = task.drawn[0]
    text = window.document.ids[window.stop - 64 : window.stop]
    if bos is not None:
        text = (bos, *text[1:])
    assert rows[1].prompt == prompt_checksum(text[:16], text[16:32])
    start = window.stop - 64 + 16
    assert rows[1].instance.startswith(f"{window.document.name}:{start}+16:")


def test_positions_come_with_the_longest_pass():
    scorer = StubScorer(costs_its_id)
    rows_of(replace(TASK, windows=1), scorer)
    assert [len(context) + len(each.tokens) for context, (each,) in scorer.asked] == [16, 32, 64]


@pytest.mark.parametrize(("lengths", "reach"), [((16, 64), None), ((16,), 64)])
def test_the_work_of_a_cell_is_what_it_takes_in(lengths, reach):
    task = replace(TASK, lengths=lengths, reach=reach, crop=None, windows=1)
    scorer = StubScorer(costs_its_id)
    rows_of(task, scorer)
    taken = [len(context) + len(each.tokens) for context, (each,) in scorer.asked]
    assert [new for _, new in task.cells()[0].work] == taken
    assert scorer.begun == 1


def test_bos_stands_before_every_cropped_text_inside_its_length():
    """Cases.md 107: BOS in the first window only. 100: never twice."""
    scorer = StubScorer(costs_its_id)
    rows = rows_of(replace(TASK, bos=1), scorer)
    for context, (each,) in scorer.asked:
        ids = (*context, *each.tokens)
        assert ids.count(1) == 1
        assert ids[0] == 1
        assert len(ids) in {16, 32, 64}
    assert {row.length for row in group(rows, "all")} == {16, 32, 64}


def far_helps(before: tuple[int, ...], token: int) -> float:
    """Tokens of 50 and more are known once 30 tokens are there, those of 40 and more a little."""
    if token >= 50:
        return 0.5 if len(before) >= 24 else 4.0
    if token >= 40:
        return 3.0 if len(before) >= 24 else 6.0
    return 1.0


def test_key_tokens_are_those_that_context_within_the_window_makes_likely():
    """Between 16 and the crop at 32; those that stay unlikely are none (−3 nats)."""
    rows = rows_of(TASK, StubScorer(far_helps))
    keys = group(rows, "key")
    assert keys
    for row in keys:
        name = row.instance.partition("#")[0]
        window = next(window for window in TASK.drawn if window.instance == name)
        ids = window.document.ids[window.start : window.stop]
        assert row.instance.partition("#")[2] == ",".join(
            str(place) for place, token in enumerate(ids) if token >= 50
        )
        assert row.tokens == sum(token >= 50 for token in ids)
        assert row.nats == pytest.approx(row.tokens * (4.0 if row.length == 16 else 0.5))
    assert {row.length for row in keys} == {16, 32, 64}


def test_what_one_model_chose_is_what_another_is_measured_on():
    chosen = chosen_keys(rows_of(TASK, StubScorer(far_helps)))
    other = rows_of(replace(TASK, keys=chosen), StubScorer(costs_its_id))
    assert chosen_keys(other) == chosen
    assert chosen_keys(rows_of(TASK, StubScorer(costs_its_id))) == {}


def test_without_two_lengths_in_the_window_there_are_no_key_tokens():
    assert not group(rows_of(replace(TASK, crop=16), StubScorer(far_helps)), "key")


def test_too_short_a_text_is_an_error_with_both_numbers():
    with pytest.raises(UserError, match=r"2 documents has 400 tokens, and 512 are needed"):
        replace(TASK, lengths=(16, 512))


def test_what_is_left_out_is_counted():
    task = replace(TASK, lengths=(16, 128), windows=100)
    assert task.notices == (
        "perplexity: 1 of 2 documents have fewer than 128 tokens and are left out",
        "perplexity: the documents hold 35 windows of the 100 asked for",
    )
    assert TASK.notices == ()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lengths": ()}, "0 lengths"),
        ({"windows": 0}, "0 windows"),
        ({"targets": 16}, "a length of 16 has no room"),
        ({"targets": 15, "bos": 1}, "beside 15 targets and BOS"),
        ({"reach": 63}, "reach of 63 is below the longest length of 64"),
        ({"bucket": 0}, "a bucket of 0"),
        ({"stretches": 0}, "0 stretches"),
        ({"stretches": 3}, "3 stretches of 8 targets are more than a quarter of the reach of 64"),
        ({"documents": (document("a", 400), document("a", 300))}, "named a"),
    ],
)
def test_settings_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(TASK, **changes)


def test_few_documents_are_drawn_by_stretch():
    rows = group(rows_of(TASK, StubScorer(costs_its_id)), "all")
    assert len({row.document for row in rows}) == 5
    rows = group(rows_of(replace(TASK, stretches=2), StubScorer(costs_its_id)), "all")
    assert len({row.document for row in rows}) == 10
    many = tuple(document(str(number), 80, number) for number in range(8))
    rows = group(
        rows_of(replace(TASK, documents=many, windows=16), StubScorer(costs_its_id)), "all"
    )
    assert {row.document for row in rows} == {str(number) for number in range(8)}


def test_a_length_beyond_the_window_is_refused():
    with pytest.raises(ValueError, match="window of 32"):
        rows_of(TASK, StubScorer(costs_its_id, window=32))


def test_settings_name_the_text():
    assert (
        TASK.settings["text"] != replace(TASK, documents=(document("a", 400, 9),)).settings["text"]
    )
    assert TASK.settings["lengths"] == "16, 32, 64"


def test_short_texts_are_cut_to_their_length_and_short_ones_counted():
    texts = (document("a", 40), Document("one", (5,)))
    task = ShortLoss(texts, length=12, bos=None)
    (row,) = rows_of(task, StubScorer(costs_its_id))
    assert (row.length, row.tokens, row.group) == (12, 11, "short")
    assert row.nats == sum(texts[0].ids[1:12])
    assert task.notices == ("short-loss: 1 of 2 texts are too short to score",)
    with_bos = rows_of(replace(task, bos=1), StubScorer(costs_its_id))
    assert [row.tokens for row in with_bos] == [11, 1]
    assert with_bos[0].nats == sum(texts[0].ids[:11])
    with pytest.raises(UserError, match="none of 1 short texts"):
        ShortLoss((Document("one", (5,)),))
    with pytest.raises(ValueError, match="a length of 1"):
        ShortLoss(texts, length=1)


def test_a_decoders_losses_are_its_cross_entropy():
    config = DecoderConfig.uniform(
        vocab_size=61,
        d_model=40,
        n_layers=2,
        n_heads=6,
        n_kv_heads=2,
        d_head=10,
        d_ff=24,
        max_positions=64,
    )
    decoder = build(config, dtype=torch.float32, std=0.3)
    rows = rows_of(replace(TASK, windows=2), DecoderScorer(decoder))
    window = TASK.drawn[0]
    for length in (16, 32, 64):
        ids = torch.tensor([window.document.ids[window.stop - length : window.stop]])
        with torch.no_grad():
            losses = torch.nn.functional.cross_entropy(
                decoder(ids)[0, :-1], ids[0, 1:], reduction="none"
            )
        (row,) = (
            row
            for row in group(rows, "all")
            if row.instance == window.instance and row.length == length
        )
        assert row.nats == pytest.approx(float(losses[-8:].sum()), abs=1e-4)
    positions = group(rows, "position")[:32]
    assert [row.nats for row in positions[1:]] == pytest.approx(
        losses[1:].view(31, 2).sum(1).tolist(), abs=1e-4
    )
