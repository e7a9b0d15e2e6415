"""Which differences between models are real: paired on the same instances, with p and interval.

Rows of two models pair when they are of the same task, instance and length, and were asked the same
tokens; what does not pair is counted, never compared. The first model is what the others are set
against.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from armillary.errors import UserError
from armillary.evaluation.records import ChoiceRow, LossRow, QuestionRow, Row, Run
from armillary.evaluation.statistics import (
    Estimate,
    exact_paired_test,
    holm,
    paired_rates,
    paired_test,
    weighted_mean,
)
from armillary.evaluation.summary import mean_difference, units

Family = Literal["loss", "questions", "short tasks"]
Measure = Literal[
    "loss",
    "key-token loss",
    "loss over cropping",
    "loss by position",
    "short loss",
    "exact",
    "first",
    "answer nats",
    "accuracy",
    "normalised accuracy",
]
Verdict = Literal["better", "worse", "no difference shown"]
Reason = Literal["missing", "other task version", "other prompt", "other key tokens"]

ALPHA = 0.05
_LOWER_IS_BETTER = {
    "loss",
    "key-token loss",
    "loss over cropping",
    "loss by position",
    "short loss",
}
_LOSSES: dict[str, Measure] = {
    "all": "loss",
    "key": "key-token loss",
    "position": "loss by position",
    "short": "short loss",
}


@dataclass(frozen=True)
class Difference:
    """How far a model is from the first one in one measure.

    measure     losses in nats per token (of answers: nats each), the others are shares.
                "loss over cropping" sets the model's loss under `at` tokens beside the first's of
                the same targets, cropped to the first's original window: what extending is for
    variant     of the task, where it has variants
    at          the length, or the position for loss by position; None where there is only one
    model       its name; `first` and `other` are both values on the `pairs` that were compared
    difference  other − first, with its interval
    p, adjusted before and after Holm's correction over all of a family (losses, questions, short
                tasks) in the comparison. Loss by position is shown without tests: None
    real        whether the adjusted p is at most 0.05
    """

    family: Family
    task: str
    measure: Measure
    variant: str | None
    at: int | None
    model: str
    first: float
    other: float
    difference: Estimate
    pairs: int
    p: float | None
    adjusted: float | None

    @property
    def real(self) -> bool:
        """Whether chance alone is no explanation for it."""
        return self.adjusted is not None and self.adjusted <= ALPHA

    @property
    def verdict(self) -> Verdict:
        """What it says of the model, set against the first."""
        if not self.real:
            return "no difference shown"
        lower = self.difference.value < 0
        return "better" if lower == (self.measure in _LOWER_IS_BETTER) else "worse"


@dataclass(frozen=True)
class Unpaired:
    """Rows of a task that are of one of two models alone, or not of the same tokens."""

    model: str
    task: str
    reason: Reason
    count: int


@dataclass(frozen=True)
class Trade:
    """What a model's longer window costs and gives, beside the first model.

    short   the loss of short texts; of the shortest length when there are no short texts
    inside  the loss at the first's original window
    gain    the loss at the model's longest length over cropping for the first
    None where it was not measured on both.
    """

    model: str
    short: Difference | None
    inside: Difference | None
    gain: Difference | None


@dataclass(frozen=True)
class Comparison:
    """Models set against the first of them."""

    runs: tuple[Run, ...]
    names: tuple[str, ...]
    differences: tuple[Difference, ...]
    trades: tuple[Trade, ...]
    unpaired: tuple[Unpaired, ...]


R = TypeVar("R", QuestionRow, ChoiceRow)
Key = tuple[Hashable, ...]
Rows = dict[Key, Row]


def compare(results: Sequence[tuple[Run, Sequence[Row]]]) -> Comparison:
    """Set each model's rows against the first model's.

    Raises UserError for fewer than two models and when no row pairs; ValueError when a run has the
    same row twice.
    """
    if len(results) < 2:
        raise UserError(f"{len(results)} result to compare; give two or more")
    names = _names([run for run, _ in results])
    tables = [_by_key(rows) for _, rows in results]
    base = results[0][0]
    differences: list[Difference] = []
    unpaired: list[Unpaired] = []
    for (run, _), table, name in zip(results[1:], tables[1:], names[1:], strict=True):
        pairs, left_out = _paired(base, run, tables[0], table)
        unpaired += _counted(name, left_out)
        differences += _differences(name, pairs, base.seed)
        differences += _over_cropping(name, base, tables[0], table, left_out)
    if not differences:
        reasons = ", ".join(f"{each.count:,} {each.reason}" for each in unpaired) or "no rows"
        raise UserError(
            f"nothing to compare: no row of {', '.join(names)} pairs ({reasons}); evaluate them "
            "with the same tasks, settings and seed"
        )
    differences = _corrected(differences)
    trades = tuple(_trade(name, base, differences) for name in names[1:])
    return Comparison(
        tuple(run for run, _ in results), names, tuple(differences), trades, tuple(unpaired)
    )


def _names(runs: Sequence[Run]) -> tuple[str, ...]:
    """The models' names, numbered where two are alike."""
    names = [run.name for run in runs]
    return tuple(
        name if names.count(name) == 1 else f"{name} ({names[: place + 1].count(name)})"
        for place, name in enumerate(names)
    )


def _by_key(rows: Iterable[Row]) -> Rows:
    table: Rows = {}
    for row in rows:
        key = _key(row)
        if key in table:
            raise ValueError(f"{row.task}: {row.instance} is there twice")
        table[key] = row
    return table


def _key(row: Row) -> Key:
    match row:
        case LossRow():
            return (row.task, row.group, row.instance, row.length, row.position)
        case QuestionRow():
            factors = tuple(sorted((name, str(value)) for name, value in row.factors.items()))
            return (row.task, row.variant, row.instance, row.length, factors)
        case ChoiceRow():
            return (row.task, row.instance)


def _paired(
    base: Run, run: Run, first: Rows, other: Rows
) -> tuple[list[tuple[Row, Row]], dict[Key, Reason]]:
    """Rows of both that are of the same thing; and why each other key is not.

    What only one can have, since it is beyond the other's window, is neither.
    """
    pairs: list[tuple[Row, Row]] = []
    left_out: dict[Key, Reason] = {}
    same_choice = _key_tokens(first, other) == _key_tokens(other, first)
    for key in dict.fromkeys([*first, *other]):
        task, row = str(key[0]), first.get(key) or other[key]
        if _version(base, task) != _version(run, task):
            left_out[key] = "other task version"
        elif isinstance(row, LossRow) and row.group == "key" and not same_choice:
            left_out[key] = "other key tokens"
        elif key not in first or key not in other:
            if _length(row) <= (base if key in other else run).window:
                left_out[key] = "missing"
        elif first[key].prompt != other[key].prompt:
            left_out[key] = "other prompt"
        else:
            pairs.append((first[key], other[key]))
    return pairs, left_out


def _length(row: Row) -> int:
    """The window that a row takes; short tasks fit into any."""
    return 0 if isinstance(row, ChoiceRow) else row.length


def _key_tokens(rows: Rows, others: Rows) -> set[str]:
    """What was chosen as key tokens, in windows that both measured.

    Where two models chose differently in one window, those in which they happen to agree would be
    a choice of their own.
    """
    measured = {
        row.instance for row in others.values() if isinstance(row, LossRow) and row.group == "all"
    }
    return {
        row.instance
        for row in rows.values()
        if isinstance(row, LossRow)
        and row.group == "key"
        and row.instance.partition("#")[0] in measured
    }


def _version(run: Run, task: str) -> object:
    return run.tasks.get(task, {}).get("version")


def _counted(model: str, left_out: dict[Key, Reason]) -> list[Unpaired]:
    counts: dict[tuple[str, Reason], int] = {}
    for key, reason in left_out.items():
        counts[str(key[0]), reason] = counts.get((str(key[0]), reason), 0) + 1
    return [Unpaired(model, task, reason, count) for (task, reason), count in counts.items()]


def _differences(model: str, pairs: Sequence[tuple[Row, Row]], seed: int) -> list[Difference]:
    losses: dict[tuple[str, str, int | None], list[tuple[LossRow, LossRow]]] = {}
    questions: dict[tuple[str, str, int], list[tuple[QuestionRow, QuestionRow]]] = {}
    choices: dict[str, list[tuple[ChoiceRow, ChoiceRow]]] = {}
    for first, other in pairs:
        if isinstance(first, LossRow) and isinstance(other, LossRow):
            at = {"position": first.position, "short": None}.get(first.group, first.length)
            losses.setdefault((first.task, first.group, at), []).append((first, other))
        elif isinstance(first, QuestionRow) and isinstance(other, QuestionRow):
            place = (first.task, first.variant, first.length)
            questions.setdefault(place, []).append((first, other))
        elif isinstance(first, ChoiceRow) and isinstance(other, ChoiceRow):
            choices.setdefault(first.task, []).append((first, other))
    found = []
    for (task, group, at), loss_pairs in losses.items():
        found.append(_loss(model, task, _LOSSES[group], at, loss_pairs, seed))
    for (task, variant, length), asked in questions.items():
        found += _questions(model, task, variant, length, asked, seed)
    for task, chosen in choices.items():
        found += _choices(model, task, chosen)
    return found


def _loss(
    model: str,
    task: str,
    measure: Measure,
    at: int | None,
    pairs: Sequence[tuple[LossRow, LossRow]],
    seed: int,
) -> Difference:
    tokens = sum(first.tokens for first, _ in pairs)
    apart, _ = units((row.document, row.tokens, row.nats - first.nats) for first, row in pairs)
    return Difference(
        family="loss",
        task=task,
        measure=measure,
        variant=None,
        at=at,
        model=model,
        first=sum(first.nats for first, _ in pairs) / tokens,
        other=sum(row.nats for _, row in pairs) / tokens,
        difference=mean_difference(pairs, seed),
        pairs=len(pairs),
        p=None if measure == "loss by position" else paired_test(apart, seed),
        adjusted=None,
    )


def _over_cropping(
    model: str, base: Run, first: Rows, other: Rows, left_out: dict[Key, Reason]
) -> list[Difference]:
    """The other's loss at each length beyond the first's window, over the first's crop to it.

    The prompts differ, as they should; that the targets are the same is in their instances.
    """
    crop = {
        (row.task, row.instance): row
        for key, row in first.items()
        if isinstance(row, LossRow)
        and row.group == "all"
        and row.length == base.original_window
        and left_out.get(key) not in ("other task version", "other prompt")
    }
    by_length: dict[tuple[str, int], list[tuple[LossRow, LossRow]]] = {}
    for row in other.values():
        if not isinstance(row, LossRow) or row.group != "all" or row.length <= base.original_window:
            continue
        if (row.task, row.instance) in crop:
            pair = (crop[row.task, row.instance], row)
            by_length.setdefault((row.task, row.length), []).append(pair)
    return [
        _loss(model, task, "loss over cropping", length, pairs, base.seed)
        for (task, length), pairs in sorted(by_length.items())
    ]


def _questions(
    model: str,
    task: str,
    variant: str,
    length: int,
    pairs: Sequence[tuple[QuestionRow, QuestionRow]],
    seed: int,
) -> list[Difference]:
    def rate(measure: Measure, met: Callable[[QuestionRow], bool]) -> Difference:
        return _rate("questions", model, task, measure, variant, length, pairs, met)

    found = [rate("exact", lambda row: row.exact)]
    if all(first.candidates and other.candidates for first, other in pairs):
        found.append(rate("first", lambda row: row.rank == 0))
    apart, asked = units((row.instance, 1, row.logprob - first.logprob) for first, row in pairs)
    found.append(
        replace(
            found[0],
            measure="answer nats",
            first=sum(first.logprob for first, _ in pairs) / len(pairs),
            other=sum(row.logprob for _, row in pairs) / len(pairs),
            difference=weighted_mean(apart, asked, seed),
            p=paired_test(apart, seed),
        )
    )
    return found


def _choices(
    model: str, task: str, pairs: Sequence[tuple[ChoiceRow, ChoiceRow]]
) -> list[Difference]:
    found = [
        _rate("short tasks", model, task, "accuracy", None, None, pairs, lambda row: row.correct)
    ]
    if all(
        first.correct_normalised is not None and other.correct_normalised is not None
        for first, other in pairs
    ):
        found.append(
            _rate(
                "short tasks",
                model,
                task,
                "normalised accuracy",
                None,
                None,
                pairs,
                lambda row: bool(row.correct_normalised),
            )
        )
    return found


def _rate(
    family: Family,
    model: str,
    task: str,
    measure: Measure,
    variant: str | None,
    at: int | None,
    pairs: Sequence[tuple[R, R]],
    met: Callable[[R], bool],
) -> Difference:
    both = [(met(first), met(other)) for first, other in pairs]
    lost, won = both.count((True, False)), both.count((False, True))
    return Difference(
        family=family,
        task=task,
        measure=measure,
        variant=variant,
        at=at,
        model=model,
        first=sum(first for first, _ in both) / len(both),
        other=sum(other for _, other in both) / len(both),
        difference=paired_rates(lost, won, len(both)),
        pairs=len(both),
        p=exact_paired_test(lost, won),
        adjusted=None,
    )


def _corrected(differences: Sequence[Difference]) -> list[Difference]:
    """Each family's p corrected for how many of it there are, over all models."""
    corrected = list(differences)
    for family in dict.fromkeys(each.family for each in differences):
        tested = [
            (place, each.p)
            for place, each in enumerate(differences)
            if each.family == family and each.p is not None
        ]
        adjusted = holm([p for _, p in tested])
        for (place, _), value in zip(tested, adjusted, strict=True):
            corrected[place] = replace(corrected[place], adjusted=value)
    return corrected


def _trade(model: str, base: Run, differences: Sequence[Difference]) -> Trade:
    def of(measure: Measure) -> list[Difference]:
        found = [each for each in differences if each.model == model and each.measure == measure]
        return sorted(found, key=lambda each: each.at or 0)

    losses, gains = of("loss"), of("loss over cropping")
    return Trade(
        model,
        short=next(iter(of("short loss") or losses), None),
        inside=next((each for each in losses if each.at == base.original_window), None),
        gain=gains[-1] if gains else None,
    )
