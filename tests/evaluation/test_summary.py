"""What the rows say, on rows whose answer is known."""

from dataclasses import replace

import pytest

from armillary.evaluation.records import ChoiceRow, LossRow, QuestionRow, Run
from armillary.evaluation.summary import EffectiveLength, summarise

RUN = Run(name="m", model={}, window=64, original_window=32, seed=3)


def loss(
    document: str,
    length: int,
    nats: float,
    tokens: int = 10,
    *,
    group: str = "all",
    position: int = 0,
) -> LossRow:
    return LossRow(
        task="perplexity",
        instance=f"{document}@0" if group != "position" else f"{document}@{position}",
        prompt=f"{document}{length}",
        document=document,
        length=length,
        position=position,
        group=group,
        tokens=tokens,
        nats=nats,
    )


def question(
    number: int,
    length: int,
    exact: bool,
    *,
    variant: str = "passkey",
    control: float | None = -4.0,
    candidates: int = 4,
    rank: int = 0,
    **factors: float,
) -> QuestionRow:
    return QuestionRow(
        task="retrieval",
        instance=f"{variant}{number}",
        prompt=str(number),
        variant=variant,
        length=length,
        factors=factors,
        logprob=-1.0,
        control=control,
        exact=exact,
        rank=rank,
        candidates=candidates,
    )


def asked(length: int, right: int, of: int, **rest) -> list[QuestionRow]:
    return [question(number, length, number < right, **rest) for number in range(of)]


def test_losses_by_context_are_weighted_by_tokens_and_paired_with_the_crop():
    rows = [
        loss("a", 16, 30.0, 10),
        loss("b", 16, 90.0, 40),
        loss("a", 32, 20.0, 10),
        loss("b", 32, 70.0, 40),
        loss("a", 64, 15.0, 10),
        loss("b", 64, 55.0, 40),
    ]
    short, crop, long = summarise(RUN, rows).by_context
    assert (short.at, crop.at, long.at) == (16, 32, 64)
    assert short.loss.value == pytest.approx(120 / 50)
    assert (short.tokens, short.loss.count) == (50, 2)
    assert crop.over_crop is None
    assert short.over_crop is not None
    assert long.over_crop is not None
    assert short.over_crop.value == pytest.approx(30 / 50)
    assert long.over_crop.value == pytest.approx(-20 / 50)
    assert long.over_crop.high < 0 < short.over_crop.low


def test_the_difference_is_paired_and_so_surer_than_either_loss():
    rows = [
        row
        for number in range(9)
        for row in (
            loss(str(number), 32, 10.0 * number + 5),
            loss(str(number), 64, 10.0 * number + 4),
        )
    ]
    long = summarise(RUN, rows).by_context[-1]
    assert long.over_crop is not None
    assert long.over_crop.high - long.over_crop.low < 1e-9
    assert long.loss.high - long.loss.low > 2


def test_only_targets_that_every_length_has_are_compared():
    rows = [loss("a", 32, 1.0), loss("a", 64, 2.0), loss("b", 64, 50.0)]
    assert [at.loss.value for at in summarise(RUN, rows).by_context] == [0.1, 0.2]


def test_without_the_crop_there_is_nothing_to_pair_with():
    rows = [loss("a", 16, 1.0), loss("a", 64, 2.0)]
    assert all(at.over_crop is None for at in summarise(RUN, rows).by_context)


def test_windows_of_one_document_are_one_unit():
    rows = [replace(loss("a", 32, float(n)), instance=str(n)) for n in range(4)]
    assert summarise(RUN, rows).by_context[0].loss.count == 1


def test_positions_key_tokens_and_short_texts_stand_apart():
    rows = [
        loss("a", 64, 10.0, 10),
        loss("a", 16, 30.0, group="position", position=1),
        loss("b", 16, 50.0, group="position", position=1),
        loss("a", 32, 20.0, group="position", position=16),
        loss("a", 64, 4.0, 2, group="key"),
        loss("a", 9, 16.0, 8, group="short"),
        loss("b", 33, 64.0, 32, group="short"),
    ]
    summary = summarise(RUN, rows)
    assert [(at.at, at.loss.value) for at in summary.by_position] == [(1, 4.0), (16, 2.0)]
    assert [(at.at, at.loss.value, at.tokens) for at in summary.key_tokens] == [(64, 2.0, 2)]
    assert summary.short_loss is not None
    assert (summary.short_loss.value, summary.short_loss.count) == (2.0, 2)
    assert len(summary.by_context) == 1


def test_rates_are_by_length_by_each_factor_and_by_all_of_them():
    rows = [
        question(number, length, exact=depth < 0.9, depth=depth, distractors=distractors, hops=2)
        for length in (16, 64)
        for depth in (0.0, 0.5, 1.0)
        for distractors in (1, 3)
        for number in range(4)
    ]
    rates = summarise(RUN, rows).rates
    kinds = [(rate.length, rate.depth, rate.distractors, rate.hops) for rate in rates]
    assert len(kinds) == len(set(kinds)) == 2 * (1 + 3 + 2 + 6)
    by_kind = dict(zip(kinds, rates, strict=True))
    everything = by_kind[16, None, None, None]
    assert (everything.exact.value, everything.exact.count) == (pytest.approx(16 / 24), 24)
    assert by_kind[16, 1.0, None, None].exact.value == 0.0
    assert by_kind[64, None, 3, None].exact.count == 12
    assert by_kind[64, 0.5, 3, None].exact.count == 4


def test_chance_first_and_gain():
    rows = [
        question(0, 16, True, candidates=2),
        question(1, 16, True, candidates=4, rank=1, control=-2.0),
        question(2, 16, True, candidates=0, control=None),
    ]
    (rate,) = summarise(RUN, rows).rates
    assert rate.chance == pytest.approx((1 / 2 + 1 / 4) / 2)
    assert rate.first is not None
    assert (rate.first.value, rate.first.count) == (0.5, 2)
    assert rate.gain is not None
    assert (rate.gain.value, rate.gain.count) == ((3.0 + 1.0) / 2, 2)
    (bare,) = summarise(RUN, rows[2:]).rates
    assert (bare.first, bare.chance, bare.gain) == (None, None, None)


def effective(*scores: tuple[int, int, int], **rest) -> EffectiveLength:
    rows = [row for length, right, of in scores for row in asked(length, right, of, **rest)]
    (found,) = summarise(RUN, rows).effective
    return found


def test_the_effective_length_is_the_last_that_holds():
    found = effective((16, 100, 100), (32, 96, 100), (64, 90, 100), (128, 0, 100))
    assert (found.length, found.longest_tried, found.bar) == (32, 128, 0.85)  # 64: 0.826 < 0.85
    assert found.short.value == 1.0


def test_the_bar_is_of_the_models_own_short_score():
    """90 of 100 has a lower bound of 0.826: enough for 0.85 × 0.96."""
    assert effective((16, 96, 100), (64, 90, 100)).length == 64


def test_a_length_counts_only_when_all_shorter_ones_hold():
    assert effective((16, 100, 100), (32, 10, 100), (64, 100, 100)).length == 16


def test_few_questions_show_no_length():
    """Twenty of twenty have a lower bound of 0.839."""
    assert effective((16, 20, 20), (64, 20, 20)).length == 16
    assert effective((16, 22, 22), (64, 22, 22)).length == 64


def test_a_model_at_chance_has_no_effective_length():
    assert effective((16, 25, 100), (64, 100, 100), candidates=4).length is None
    assert effective((16, 0, 100), (64, 0, 100), candidates=0).length is None
    assert effective((16, 25, 100), (64, 24, 100), candidates=100).length == 16


def test_short_tasks():
    def choice(number: int, correct: bool, normalised: bool | None) -> ChoiceRow:
        return ChoiceRow("piqa", str(number), "", correct, normalised, (-1.0, -2.0), 0)

    rows = [choice(0, True, False), choice(1, False, False), choice(2, True, True)]
    (task,) = summarise(RUN, rows).short_tasks
    assert (task.task, task.accuracy.value) == ("piqa", pytest.approx(2 / 3))
    assert task.normalised is not None
    assert task.normalised.value == pytest.approx(1 / 3)
    (task,) = summarise(RUN, [choice(0, True, None)]).short_tasks
    assert task.normalised is None


def test_short_questions_that_lost_their_start_are_counted():
    whole = ChoiceRow("piqa", "0", "", True, True, (-1.0, -2.0), 0)
    rows = [whole, replace(whole, instance="1", cut=9), replace(whole, instance="2", cut=1)]
    assert [task.cut for task in summarise(RUN, rows).short_tasks] == [2]


def test_no_rows_say_nothing():
    summary = summarise(RUN, [])
    assert summary.run is RUN
    assert (summary.by_context, summary.rates, summary.short_loss) == ((), (), None)
