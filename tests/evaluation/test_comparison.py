"""Only rows of the same thing are compared, and a difference is real when chance is no account."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from armillary.errors import UserError
from armillary.evaluation.comparison import Comparison, Difference, compare
from armillary.evaluation.perplexity import Document, Perplexity, ShortLoss, chosen_keys
from armillary.evaluation.records import ChoiceRow, LossRow, QuestionRow, Row, Run
from support.stub_scorer import StubScorer

DOCUMENTS = tuple(
    Document(str(seed), tuple(np.random.default_rng(seed).integers(3, 61, 100).tolist()))
    for seed in range(14)
)
TASKS = {"perplexity": {"version": 1}, "retrieval": {"version": 1}, "piqa": {"version": 1}}
BASE = Run("base", {}, window=32, original_window=32, seed=0, tasks=TASKS)
LONG = replace(BASE, name="long", window=64)

Cost = Callable[[tuple[int, ...], int], float]


def losses(cost: Cost, lengths: Sequence[int] = (16, 32, 64), **changes: object) -> list[Row]:
    """Rows of a model whose costs are known: 14 documents, and their beginnings as short texts."""
    settings: dict = {
        "windows": 14,
        "targets": 8,
        "stretches": 1,
        "crop": 32,
        "reach": 64,
        "bucket": 16,
    } | changes
    long = Perplexity(DOCUMENTS, tuple(lengths), **settings)
    short = ShortLoss(DOCUMENTS, length=12)
    scorer = StubScorer(cost)
    return [
        row for task in (long, short) for cell in task.cells() for row in task.run(cell, scorer)
    ]


def by_context(gain: float, harm: float = 0.0) -> Cost:
    """A token costs its own part, less what context beyond 32 gives, more what is lost within."""
    return lambda before, token: token / 10 + (harm if len(before) < 32 else -gain)


def of(comparison: Comparison, measure: str, at: int | None = None) -> Difference:
    (found,) = (
        each
        for each in comparison.differences
        if each.measure == measure and (at is None or each.at == at)
    )
    return found


def test_a_longer_window_is_weighed_against_what_it_costs():
    """Cases.md 45 and 46: the extended model loses 0.1 inside the window, gains 0.5 beyond it."""
    base = losses(by_context(0.0), lengths=(16, 32))
    extended = losses(by_context(0.5, harm=0.1), lengths=(16, 32, 48, 64))
    comparison = compare([(BASE, base), (LONG, extended)])
    gains = [each.at for each in comparison.differences if each.measure == "loss over cropping"]
    assert gains == [48, 64]
    (trade,) = comparison.trades
    assert trade.short is not None
    assert trade.inside is not None
    assert trade.gain is not None
    assert trade.short.difference.value == pytest.approx(0.1)
    assert trade.inside.difference.value == pytest.approx(0.1)
    assert (trade.gain.at, trade.gain.pairs) == (64, 14)
    assert trade.gain.difference.value == pytest.approx(-0.5)
    assert (trade.short.verdict, trade.inside.verdict, trade.gain.verdict) == (
        "worse",
        "worse",
        "better",
    )


def test_positions_within_the_shorter_window_pair():
    """Both read the text from where the reach begins, so those positions hold the same tokens."""
    base = losses(by_context(0.0), lengths=(16, 32))
    comparison = compare([(BASE, base), (LONG, losses(by_context(0.5, harm=0.1)))])
    positions = [each for each in comparison.differences if each.measure == "loss by position"]
    assert [each.at for each in positions] == [1, 16]
    assert all(each.difference.value == pytest.approx(0.1) for each in positions)
    assert all(each.p is None and not each.real for each in positions)


def test_what_one_model_has_alone_is_counted():
    base, long = losses(by_context(0.0), lengths=(16, 32)), losses(by_context(0.5))
    (missing,) = compare([(replace(BASE, window=64), base), (LONG, long)]).unpaired
    assert (missing.model, missing.task, missing.reason) == ("long", "perplexity", "missing")
    assert missing.count == 14 + 2 * 14  # 64 tokens of context, and positions 32 to 63


def test_what_is_beyond_a_models_window_is_not_missed():
    base, long = losses(by_context(0.0), lengths=(16, 32)), losses(by_context(0.5))
    assert compare([(BASE, base), (LONG, long)]).unpaired == ()
    assert compare([(LONG, long), (BASE, base)]).unpaired == ()


def test_equal_models_do_not_differ():
    comparison = compare([(BASE, losses(by_context(0.0))), (LONG, losses(by_context(0.0)))])
    assert {each.verdict for each in comparison.differences} == {"no difference shown"}
    assert comparison.unpaired == ()


def noisy(size: float, seed: int) -> Cost:
    def cost(before: tuple[int, ...], token: int) -> float:
        rng = np.random.default_rng([seed, token, len(before), sum(before) % 97])
        return token / 10 + size * float(rng.normal())

    return cost


def test_noise_is_no_difference():
    comparison = compare([(BASE, losses(noisy(0.5, 1))), (LONG, losses(noisy(0.5, 2)))])
    assert not any(each.real for each in comparison.differences)


def test_a_difference_below_the_noise_of_texts_is_found_by_pairing():
    """Texts differ by about 1 nat, the models by 0.05 on each."""
    base, other = losses(by_context(0.0)), losses(by_context(0.05, harm=-0.05))
    found = of(compare([(BASE, base), (LONG, other)]), "loss", 64)
    assert found.verdict == "better"
    assert found.difference.value == pytest.approx(-0.05)
    assert found.first - found.other == pytest.approx(0.05)
    assert found.p == 2**-13


def test_other_versions_and_other_prompts_do_not_pair():
    rows = losses(by_context(0.0))
    newer = replace(LONG, tasks=TASKS | {"perplexity": {"version": 2}})
    comparison = compare([(BASE, rows), (newer, rows)])
    assert {each.measure for each in comparison.differences} == {"short loss"}
    assert [(each.reason, each.task) for each in comparison.unpaired] == [
        ("other task version", "perplexity")
    ]
    changed = [
        replace(row, prompt="changed") if row.group == "all" else row
        for row in rows
        if isinstance(row, LossRow)
    ]
    comparison = compare([(BASE, rows), (LONG, changed)])
    assert {each.measure for each in comparison.differences} == {"loss by position", "short loss"}
    assert [(each.reason, each.count) for each in comparison.unpaired] == [("other prompt", 42)]


def test_nothing_that_pairs_is_an_error():
    rows = losses(by_context(0.0))
    with pytest.raises(UserError, match=r"no row of base, long pairs \(.* missing"):
        compare([(BASE, rows), (LONG, [])])
    with pytest.raises(UserError, match="1 result"):
        compare([(BASE, rows)])
    with pytest.raises(ValueError, match="there twice"):
        compare([(BASE, rows), (LONG, rows + rows[:1])])


def question(number: int, exact: bool, **changes: object) -> QuestionRow:
    row = QuestionRow(
        task="retrieval",
        instance=str(number),
        prompt=str(number),
        variant="passkey",
        length=64,
        factors={"depth": 0.5},
        logprob=-1.0 if exact else -5.0,
        control=None,
        exact=exact,
        rank=0 if exact else 1,
        candidates=4,
    )
    return replace(row, **changes)  # type: ignore[arg-type]


def test_questions_are_paired_instance_by_instance():
    """20 questions: the first answers 1 to 12, the other 10 to 20, 9 lost and 8 won."""
    first = [question(number, number < 12) for number in range(20)]
    other = [question(number, number >= 9) for number in range(20)]
    comparison = compare([(BASE, first), (LONG, other)])
    exact = of(comparison, "exact")
    assert (exact.first, exact.other, exact.pairs) == (0.6, 0.55, 20)
    assert exact.difference.value == pytest.approx(-1 / 20)
    assert exact.p == 1.0
    assert of(comparison, "first").difference.value == pytest.approx(-1 / 20)
    assert of(comparison, "answer nats").difference.value == pytest.approx(-4 / 20)


def test_a_lost_ability_is_worse():
    first = [question(number, True) for number in range(20)]
    other = [question(number, number < 8) for number in range(20)]
    comparison = compare([(BASE, first), (LONG, other)])
    assert of(comparison, "exact").p == pytest.approx(2 * 2**-12)
    assert {each.verdict for each in comparison.differences} == {"worse"}
    (back,) = (
        e for e in compare([(BASE, other), (LONG, first)]).differences if e.measure == "exact"
    )
    assert back.verdict == "better"


def test_the_same_instance_at_another_depth_is_another_question():
    first = [question(0, True), question(0, False, factors={"depth": 1.0}, prompt="1")]
    comparison = compare([(BASE, first), (LONG, first)])
    assert of(comparison, "exact").pairs == 2
    assert of(comparison, "exact").first == 0.5


def test_questions_without_candidates_have_no_rank():
    rows = [question(number, True, candidates=0) for number in range(3)]
    measures = {each.measure for each in compare([(BASE, rows), (LONG, rows)]).differences}
    assert measures == {"exact", "answer nats"}


def choice(number: int, correct: bool, normalised: bool | None = None) -> ChoiceRow:
    return ChoiceRow("piqa", str(number), str(number), correct, normalised, (-1.0, -2.0), 0)


def test_short_tasks_are_paired_too():
    first = [choice(number, True, True) for number in range(12)]
    other = [choice(number, number < 2, True) for number in range(12)]
    comparison = compare([(BASE, first), (LONG, other)])
    assert of(comparison, "accuracy").verdict == "worse"
    assert of(comparison, "normalised accuracy").verdict == "no difference shown"
    plain = [choice(number, True) for number in range(12)]
    measures = {each.measure for each in compare([(BASE, plain), (LONG, plain)]).differences}
    assert measures == {"accuracy"}


def test_many_comparisons_are_corrected_within_their_family():
    """Six losses of one question each side: p = 2/64; five such tests are no finding."""
    first = [question(number, True) for number in range(6)]
    other = [question(number, False) for number in range(6)]
    runs = [(BASE, first)] + [(replace(LONG, name=str(number)), other) for number in range(2)]
    comparison = compare(runs)
    questions = [each for each in comparison.differences if each.family == "questions"]
    assert [each.p for each in questions] == [pytest.approx(2 / 64)] * 6
    assert [each.adjusted for each in questions] == [pytest.approx(6 * 2 / 64)] * 6
    assert not any(each.real for each in questions)
    tasks = (
        [choice(number, True) for number in range(6)],
        [choice(number, False) for number in range(6)],
    )
    alone = compare([(BASE, tasks[0]), (LONG, tasks[1])]).differences
    assert [each.adjusted for each in alone] == [pytest.approx(2 / 64)]
    both = compare([(BASE, [*first, *tasks[0]]), (LONG, [*other, *tasks[1]])]).differences
    assert [e.adjusted for e in both if e.family == "short tasks"] == [pytest.approx(2 / 64)]


def test_models_of_one_name_are_told_apart():
    rows = [choice(number, True) for number in range(3)]
    comparison = compare([(BASE, rows), (BASE, rows), (LONG, rows)])
    assert comparison.names == ("base (1)", "base (2)", "long")
    assert [each.model for each in comparison.differences] == ["base (2)", "long"]


def test_a_comparison_is_the_same_every_time():
    results = [(BASE, losses(noisy(0.5, 1))), (LONG, losses(noisy(0.5, 2)))]
    assert compare(results) == compare(results)


def test_key_tokens_that_were_chosen_alike_pair():
    """Each choosing its own, none pairs, not even where they agree; on one choice they do."""
    base = losses(lambda before, token: 4.0 if len(before) < 24 and token > 50 else 1.0)
    other = losses(lambda before, token: 4.0 if len(before) < 24 and token > 40 else 0.8)
    own = compare([(BASE, base), (LONG, other)])
    assert all(each.measure != "key-token loss" for each in own.differences)
    assert [each.reason for each in own.unpaired] == ["other key tokens"]
    shared = losses(lambda before, token: 0.8, keys=chosen_keys(base))
    found = of(compare([(BASE, base), (LONG, shared)]), "key-token loss", 64)
    assert found.difference.value == pytest.approx(-0.2)
    assert found.verdict == "better"
