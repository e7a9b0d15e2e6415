"""Rows → what they say: curves, rates and lengths, each with its interval.

Between the rows of `records` and everything that shows them: the terminal, the page, the card, a
comparison, the gates of an adaptation. Intervals are of 95 %.
"""

import itertools
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from armillary.evaluation.records import ChoiceRow, LossRow, QuestionRow, Row, Run, Setting
from armillary.evaluation.statistics import Estimate, weighted_mean, wilson

__all__ = [
    "EffectiveLength",
    "Estimate",
    "LossAt",
    "Rate",
    "ShortTask",
    "Summary",
    "summarise",
]

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)

BAR = 0.85  # of the short score is what a length has to hold
FACTORS = ("depth", "distractors", "hops")


@dataclass(frozen=True)
class LossAt:
    """Nats per token of the same targets under `at` tokens (or of those from position `at` on).

    `over_crop` is the paired difference to cropping at the original window: below 0, the longer
    context helps. None at that length itself, and where there is nothing to pair with.
    """

    at: int
    loss: Estimate
    tokens: int
    over_crop: Estimate | None


@dataclass(frozen=True)
class Rate:
    """How often questions of one kind are answered.

    distractors, hops, depth  what the questions share; None where they do not vary in it, or for
                              all of them together
    exact     share with every token of the answer likeliest (Wilson)
    first     share whose answer is the likeliest of the candidates; None without candidates
    chance    what `first` is for a model that knows nothing
    gain      mean nats that the needle gives the answer over the control; None without control
    """

    variant: str
    length: int
    depth: float | None
    distractors: int | None
    hops: int | None
    exact: Estimate
    first: Estimate | None
    chance: float | None
    gain: Estimate | None


@dataclass(frozen=True)
class EffectiveLength:
    """The largest length at which a variant holds, and what it had to hold against.

    `short` is the share of exact answers at the shortest length, `bar` 85 % of it. A length holds
    when the lower bound of its share is at the bar and all shorter ones hold; the shortest holds
    when its own lower bound is above chance. `length` is None when not even that does.
    """

    variant: str
    length: int | None
    longest_tried: int
    short: Estimate
    bar: float


@dataclass(frozen=True)
class ShortTask:
    """Accuracy on a short task; `normalised` by log-probability per character.

    `cut` counts the questions that were longer than the window, and lost their start.
    """

    task: str
    accuracy: Estimate
    normalised: Estimate | None
    cut: int = 0


@dataclass(frozen=True)
class Summary:
    """All that an evaluation of one model says.

    by_context    loss of the same targets by length of context, shortest first
    by_position   loss by position in one long context
    key_tokens    as by_context, for the targets that far context tells of
    rates         for each variant and length: over all questions, for each value of a factor that
                  varies, and for each combination where several vary
    effective     for each variant
    short_loss    on fixed short texts, nats per token
    """

    run: Run
    by_context: tuple[LossAt, ...] = ()
    by_position: tuple[LossAt, ...] = ()
    key_tokens: tuple[LossAt, ...] = ()
    rates: tuple[Rate, ...] = ()
    effective: tuple[EffectiveLength, ...] = ()
    short_tasks: tuple[ShortTask, ...] = ()
    short_loss: Estimate | None = None


def summarise(run: Run, rows: Iterable[Row]) -> Summary:
    """Say what the rows of one model say."""
    rows = list(rows)
    losses, questions, choices = (
        [row for row in rows if isinstance(row, LossRow)],
        [row for row in rows if isinstance(row, QuestionRow)],
        [row for row in rows if isinstance(row, ChoiceRow)],
    )
    groups = _grouped(losses, lambda row: row.group)
    rates = _rates(questions, run.seed)
    return Summary(
        run=run,
        by_context=_by_context(groups.get("all", []), run),
        by_position=_by_position(groups.get("position", []), run.seed),
        key_tokens=_by_context(groups.get("key", []), run),
        rates=rates,
        effective=_effective(rates),
        short_tasks=_short_tasks(choices),
        short_loss=_mean(groups["short"], run.seed) if "short" in groups else None,
    )


def _by_context(rows: Sequence[LossRow], run: Run) -> tuple[LossAt, ...]:
    """Loss by length, of the targets that were measured under every one of them."""
    by_length = {
        length: {(row.task, row.instance): row for row in each}
        for length, each in sorted(_grouped(rows, lambda row: row.length).items())
    }
    if not by_length:
        return ()
    everywhere = set.intersection(*(set(each) for each in by_length.values()))
    if not everywhere:
        return ()
    same = {
        length: [row for name, row in each.items() if name in everywhere]
        for length, each in by_length.items()
    }
    crop = by_length.get(run.original_window)
    return tuple(
        LossAt(
            at=length,
            loss=_mean(each, run.seed),
            tokens=sum(row.tokens for row in each),
            over_crop=None
            if crop is None or length == run.original_window
            else mean_difference([(crop[row.task, row.instance], row) for row in each], run.seed),
        )
        for length, each in same.items()
    )


def _by_position(rows: Sequence[LossRow], seed: int) -> tuple[LossAt, ...]:
    return tuple(
        LossAt(position, _mean(each, seed), sum(row.tokens for row in each), None)
        for position, each in sorted(_grouped(rows, lambda row: row.position).items())
    )


def units(pairs: Iterable[tuple[str, int, float]]) -> tuple[list[float], list[int]]:
    """(document, tokens, nats) → sums of nats and of tokens of each document."""
    nats: dict[str, float] = defaultdict(float)
    tokens: dict[str, int] = defaultdict(int)
    for document, count, value in pairs:
        nats[document] += value
        tokens[document] += count
    return list(nats.values()), list(tokens.values())


def mean_difference(pairs: Sequence[tuple[LossRow, LossRow]], seed: int) -> Estimate:
    """How many nats per token the second row's targets cost more than the first's."""
    return weighted_mean(
        *units((row.document, row.tokens, row.nats - first.nats) for first, row in pairs), seed
    )


def _mean(rows: Sequence[LossRow], seed: int) -> Estimate:
    return weighted_mean(*units((row.document, row.tokens, row.nats) for row in rows), seed)


def _rates(rows: Sequence[QuestionRow], seed: int) -> tuple[Rate, ...]:
    """For each variant and length: over everything, by each factor that varies, and by all."""
    rates = []
    for variant, asked in _grouped(rows, lambda row: row.variant).items():
        varying = [name for name in FACTORS if len({row.factors.get(name) for row in asked}) > 1]
        splits: list[tuple[str, ...]] = [(), *((name,) for name in varying)]
        if len(varying) > 1:
            splits.append(tuple(varying))
        by_length = sorted(_grouped(asked, lambda row: row.length).items())
        for (length, each), split in itertools.product(by_length, splits):
            for values, alike in _grouped(each, _values_of(split)).items():
                factors = dict(zip(split, values, strict=True))
                if None not in values:
                    rates.append(_rate(variant, length, factors, alike, seed))
    return tuple(rates)


def _values_of(split: Sequence[str]) -> Callable[[QuestionRow], tuple[Setting, ...]]:
    return lambda row: tuple(row.factors.get(name) for name in split)


def _rate(
    variant: str,
    length: int,
    factors: Mapping[str, Setting],
    rows: Sequence[QuestionRow],
    seed: int,
) -> Rate:
    chosen = [row for row in rows if row.candidates > 0]
    gains = [
        (row.instance, 1, row.logprob - row.control) for row in rows if row.control is not None
    ]
    depth, distractors, hops = (factors.get(name) for name in FACTORS)
    return Rate(
        variant=variant,
        length=length,
        depth=None if depth is None else float(depth),
        distractors=None if distractors is None else int(distractors),
        hops=None if hops is None else int(hops),
        exact=wilson(sum(row.exact for row in rows), len(rows)),
        first=wilson(sum(row.rank == 0 for row in chosen), len(chosen)) if chosen else None,
        chance=sum(1 / row.candidates for row in chosen) / len(chosen) if chosen else None,
        gain=weighted_mean(*units(gains), seed) if gains else None,
    )


def _effective(rates: Sequence[Rate]) -> tuple[EffectiveLength, ...]:
    totals = [
        rate
        for rate in rates
        if rate.depth is None and rate.distractors is None and rate.hops is None
    ]
    return tuple(
        _effective_of(variant, sorted(each, key=lambda rate: rate.length))
        for variant, each in _grouped(totals, lambda rate: rate.variant).items()
    )


def _effective_of(variant: str, rates: Sequence[Rate]) -> EffectiveLength:
    short = rates[0].exact
    bar = BAR * short.value
    held = None
    if short.low > (rates[0].chance or 0.0):
        held = rates[0].length
        for rate in itertools.takewhile(lambda rate: rate.exact.low >= bar, rates[1:]):
            held = rate.length
    return EffectiveLength(variant, held, rates[-1].length, short, bar)


def _short_tasks(rows: Sequence[ChoiceRow]) -> tuple[ShortTask, ...]:
    tasks = []
    for task, each in _grouped(rows, lambda row: row.task).items():
        normalised = [row.correct_normalised for row in each if row.correct_normalised is not None]
        tasks.append(
            ShortTask(
                task,
                wilson(sum(row.correct for row in each), len(each)),
                wilson(sum(normalised), len(normalised)) if normalised else None,
                sum(row.cut > 0 for row in each),
            )
        )
    return tuple(tasks)


def _grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Items of each key, both in the order in which they come first."""
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups
