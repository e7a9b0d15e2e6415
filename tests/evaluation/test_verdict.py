"""Nothing is claimed that the intervals do not show, and what was not shown is said."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from armillary.evaluation.records import Run
from armillary.evaluation.summary import EffectiveLength, Estimate, LossAt, ShortTask, Summary
from armillary.evaluation.verdict import gains_of, verdict
from support.summaries import comparison, summaries


def run(name="m", window=1024, original=256):
    return Run(name, {}, window, original, 0)


def loss(at, value=2.0, over=None):
    return LossAt(at, Estimate(value, value - 0.1, value + 0.1, 12), 1200, over)


def over(low, high):
    return Estimate((low + high) / 2, low, high, 12)


def extended(low, high, name="m", **more):
    curve = (loss(256), loss(1024, over=over(low, high)))
    return Summary(run(name), by_context=curve, **more)


def held(variant, length, tried=1024):
    return EffectiveLength(variant, length, tried, Estimate(1.0, 0.8, 1.0, 20), 0.85)


def test_a_gain_whose_interval_is_below_zero_is_shown():
    shown, not_shown = verdict([extended(-0.04, -0.02)])
    assert shown == (
        "With 1,024 tokens of context m (−0.030 nats per token) predicts the same text better than "
        "when it is cropped to 256 tokens."
    )
    assert not_shown == (
        "Not shown is what became of short texts and anything on other text than these 12 "
        "documents or beyond 1,024 tokens."
    )


def test_a_loss_is_shown_too():
    shown, _ = verdict([extended(0.02, 0.04)])
    assert "no model is shown to predict better" in shown
    assert "m (+0.030 nats per token) predicts worse" in shown


def test_what_the_interval_leaves_open_is_not_shown():
    shown, not_shown = verdict([extended(-0.01, 0.02)])
    assert "no model is shown to predict better or worse than when it is cropped" in shown
    assert "a difference from cropping for m (−0.010 to +0.020)" in not_shown


def test_one_document_shows_nothing():
    (gain,) = gains_of([extended(-math.inf, math.inf)])
    assert gain.side == "open"


@given(st.floats(-1, 1), st.floats(0, 1))
def test_nothing_is_called_better_or_worse_whose_interval_holds_zero(low, width):
    summary = extended(low, low + width)
    (gain,) = gains_of([summary])
    shown, not_shown = verdict([summary])
    holds_zero = low <= 0 <= low + width
    assert (gain.side == "open") == holds_zero
    assert ("a difference from cropping" in not_shown) == holds_zero
    assert (" predicts " in shown) != holds_zero


def test_a_model_in_its_own_window_is_told_what_that_window_is_worth():
    curve = (loss(64, 2.4, over(0.3, 0.5)), loss(256))
    shown, not_shown = verdict([Summary(run(window=256), by_context=curve)])
    assert shown == (
        "With 256 tokens of context m predicts the same text 0.400 nats per token better than "
        "with 64."
    )
    assert "beyond 256 tokens" in not_shown


def test_questions_are_told_by_length_and_by_whom():
    one = extended(-0.2, -0.1, "a", effective=(held("passkey", 1024), held("chase", None)))
    other = extended(-0.2, -0.1, "b", effective=(held("passkey", 512), held("chase", None)))
    shown, _ = verdict([one, other])
    assert shown.endswith(
        "questions are answered: passkey to 1,024 tokens (a) and chase at no length."
    )
    alone, _ = verdict([one])
    assert alone.endswith("questions are answered: passkey to 1,024 tokens and chase at no length.")


def test_a_model_that_was_not_measured_beyond_its_old_window_is_named():
    _, not_shown = verdict([Summary(run("y"), by_context=(loss(256),))])
    assert "what text beyond the old window is worth to y" in not_shown


def test_few_documents_are_counted_as_such_though_intervals_draw_by_stretch():
    settings = {"perplexity": {"documents": 2, "intervals": "by stretch"}}
    summary = extended(-0.2, -0.1)
    _, not_shown = verdict([replace(summary, run=replace(summary.run, tasks=settings))])
    assert "these 2 documents" in not_shown


def test_without_measurements_nothing_is_shown():
    shown, not_shown = verdict([Summary(run())])
    assert shown == "Nothing was measured that tells what a longer context is worth."
    assert "anything on long context" in not_shown
    with pytest.raises(ValueError, match="a summary at least"):
        verdict([])


def test_short_texts_that_were_measured_are_not_said_to_be_unmeasured():
    tasks = (ShortTask("piqa", Estimate(0.6, 0.5, 0.7, 100), None),)
    _, not_shown = verdict([extended(-0.2, -0.1, short_tasks=tasks)])
    assert "short texts" not in not_shown


def test_a_comparison_sets_all_against_the_first_one_cropped_and_tells_the_price():
    shown, not_shown = verdict(summaries(), comparison())
    assert shown.startswith(
        "With 1,024 tokens of context llama3 (−0.120 nats per token) and yarn (−0.105) predict the "
        "same text better than none cropped to 256 tokens, ntk (+0.310), none (+1.382) and linear "
        "(+2.480) worse; "
    )
    assert not_shown.startswith(
        "Short texts cost linear 1.201, ntk 0.030 and yarn 0.004 nats per token beside none; no "
        "harm to short texts is shown for llama3 (at most 0.003 by the interval); not shown is "
    )


def test_of_many_models_that_lose_the_worst_are_named_and_the_others_bounded():
    first, *_ = summaries()
    losing = [replace(first, run=replace(first.run, name=f"m{number}")) for number in range(1, 7)]
    trade = comparison().trades[1]
    trades = tuple(
        replace(
            trade,
            model=each.run.name,
            short=replace(
                trade.short,
                difference=Estimate(number / 10, number / 10 - 0.01, number / 10 + 0.01, 100),
            ),
        )
        for number, each in enumerate(losing, 1)
    )
    compared = replace(
        comparison(),
        runs=tuple(each.run for each in [first, *losing]),
        names=(first.run.name, *(each.run.name for each in losing)),
        trades=trades,
    )
    _, not_shown = verdict([first, *losing], compared)
    assert "cost m6 0.600, m5 0.500, m4 0.400, m3 0.300 and 2 more up to 0.200 nats" in not_shown


def test_what_training_alone_may_have_done_is_not_put_down_to_longer_context():
    """A model that was adapted may be better at every length, and read no further than before."""
    first, *_, last = summaries()
    trade = replace(comparison().trades[-1], model=last.run.name)
    both = [first, last]
    compared = replace(
        comparison(),
        runs=tuple(each.run for each in both),
        names=("none", "llama3"),
        trades=(trade,),
    )
    _, sure = verdict(both, compared)
    assert "the longer context" not in sure
    entry = replace(last.by_context[-1], over_crop=over(-0.01, 0.02))
    unread = replace(last, by_context=(*last.by_context[:-1], entry))
    shown, not_shown = verdict([first, unread], compared)
    assert "llama3 (−0.120 nats per token) predicts the same text better" in shown
    assert (
        "that it is the longer context which helps llama3 (−0.010 to +0.020 over itself cropped)"
        in not_shown
    )


def test_where_no_short_texts_were_measured_the_shortest_context_is_not_called_so():
    several = [replace(each, short_loss=None, short_tasks=()) for each in summaries()]
    compared = comparison()
    shortest = [d for d in compared.differences if d.measure == "loss" and d.at == 64]
    trades = [replace(t, short=d) for t, d in zip(compared.trades, shortest, strict=True)]
    _, not_shown = verdict(several, replace(compared, trades=tuple(trades)))
    assert not_shown.startswith("Contexts of 64 tokens cost linear 1.204, ntk 0.031 and yarn 0.006")
    assert "no harm to contexts of 64 tokens is shown for llama3" in not_shown
    assert "not shown is what became of short texts" in not_shown


def test_many_models_make_no_endless_sentence():
    many = [extended(-0.2, -0.1, f"m{n}", effective=(held("passkey", 512),)) for n in range(30)]
    shown, not_shown = verdict(many)
    assert "and 26 more predict" in shown
    assert len(shown) < 400
    assert len(not_shown) < 300
