"""Rows → what they say: curves, rates and lengths, each with its interval.

Between the rows of `records` and everything that shows them: the terminal, the page, the card, a
comparison, the gates of an adaptation. Intervals are of 95 %.
"""

from dataclasses import dataclass

from armillary.evaluation.records import Run


@dataclass(frozen=True)
class Estimate:
    """A value with the bounds of its interval, from `count` independent instances."""

    value: float
    low: float
    high: float
    count: int


@dataclass(frozen=True)
class LossAt:
    """Nats per token of the same targets under `length` tokens (or from `position` on).

    `over_crop` is the paired difference to cropping at the original window: below 0, the longer
    context helps. None where there is nothing to pair with.
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

    `length` is None when none holds. `bar` is 85 % of the score at the shortest length.
    """

    variant: str
    length: int | None
    longest_tried: int
    short: Estimate
    bar: float


@dataclass(frozen=True)
class ShortTask:
    """Accuracy on a short task; `normalised` by log-probability per byte."""

    task: str
    accuracy: Estimate
    normalised: Estimate | None


@dataclass(frozen=True)
class Summary:
    """All that an evaluation of one model says.

    by_context    loss of the same targets by length of context, shortest first
    by_position   loss by position in one long context
    key_tokens    as by_context, for the targets that far context tells of
    rates         for each task's variant: by length over all depths, and each depth alone
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
