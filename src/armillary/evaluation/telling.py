"""Estimates and names in words, as the page, the card and the terminal say them."""

import math
from collections.abc import Iterable, Sequence

from armillary.evaluation.records import Run
from armillary.evaluation.summary import Estimate

_LONGEST_NAME = 26


def joined(words: Iterable[str]) -> str:
    """Return a, b and c."""
    words = list(words)
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def number(value: float, digits: int = 3, signed: bool = False) -> str:
    """Return a number with a minus that is as wide as a plus."""
    if not math.isfinite(value):
        return "no number" if math.isnan(value) else "∞" if value > 0 else "−∞"
    text = f"{value:+,.{digits}f}" if signed else f"{value:,.{digits}f}"
    if float(text.replace(",", "")) == 0:
        text = text.lstrip("+-")
    return text.replace("-", "−")


def percent(share: float, signed: bool = False) -> str:
    """Return a share of one in hundredths."""
    return f"{number(100 * share, 0, signed)} %"


def points(share: float) -> str:
    """Return a difference of shares, in hundredths with a sign."""
    return number(100 * share, 1, signed=True)


def bounds(estimate: Estimate, digits: int = 3, signed: bool = False) -> str:
    """Return an estimate's interval: 2.101 to 2.203."""
    if math.isinf(estimate.low) and math.isinf(estimate.high):
        return "one document gives no interval"
    low, high = (number(each, digits, signed) for each in (estimate.low, estimate.high))
    return f"{low} to {high}"


def with_bounds(estimate: Estimate, digits: int = 3, signed: bool = False) -> str:
    """Return an estimate with its interval: 2.150 (2.101 to 2.203)."""
    return f"{number(estimate.value, digits, signed)} ({bounds(estimate, digits, signed)})"


def rate_with_bounds(estimate: Estimate) -> str:
    """Return a rate with its interval: 85 % (64 to 95)."""
    low, high = (number(100 * each, 0) for each in (estimate.low, estimate.high))
    return f"{percent(estimate.value)} ({low} to {high})"


def counted(estimate: Estimate) -> str:
    """Return how many of a rate's instances were met: 17 of 20."""
    return f"{round(estimate.value * estimate.count):,} of {estimate.count:,}"


def tokens(length: int | None) -> str:
    """Return a length of context, or that there is none."""
    return "no length" if length is None else f"{length:,} tokens"


def names_of(runs: Sequence[Run]) -> tuple[str, ...]:
    """The models' names as a picture has room for them, numbered where two are alike."""
    names = [_short(run.name) for run in runs]
    return tuple(
        name if names.count(name) == 1 else f"{name} ({names[: place + 1].count(name)})"
        for place, name in enumerate(names)
    )


def _short(name: str) -> str:
    """Return a name, of a path its end."""
    if len(name) > _LONGEST_NAME and "/" in name.rstrip("/"):
        name = name.rstrip("/").rsplit("/", 1)[1]
    if len(name) > _LONGEST_NAME:
        half = _LONGEST_NAME // 2
        name = f"{name[: half - 1]}…{name[-half:]}"
    return name
