"""Estimates and names in words, as the page, the card and the terminal say them."""

import math
import re
from collections.abc import Iterable, Sequence

from armillary.evaluation.records import Run
from armillary.evaluation.summary import Estimate

_LONGEST_NAME, _FEW = 26, 3
_SEPARATORS = re.compile(r"([/_.-])")


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


def perplexity(loss: float) -> str:
    """Return the perplexity that a loss in nats per token is, to four digits or a hundredth."""
    value = math.exp(loss) if loss < 50 else math.inf
    return number(value, 2 if value < 100 else 1 if value < 1000 else 0)


def points(share: float) -> str:
    """Return a difference of shares, in hundredths with a sign."""
    return number(100 * share, 1, signed=True)


def bounds(estimate: Estimate, digits: int = 3, signed: bool = False) -> str:
    """Return an estimate's interval: 2.101 to 2.203."""
    if math.isinf(estimate.low) and math.isinf(estimate.high):
        return "one text gives no interval"
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


def drawn_by(runs: Sequence[Run]) -> str:
    """What the intervals of losses were drawn by: documents, or stretches of few documents."""
    perplexity = [run.tasks.get("perplexity", {}) for run in runs]
    stretches = any(each.get("intervals") == "by stretch" for each in perplexity)
    return "stretches" if stretches else "documents"


def few(names: Sequence[str], of: int) -> str:
    """Return some of `of` models: their names when they are few, or how many."""
    if len(names) == of > 1:
        return "all models"
    return joined(names) if len(names) <= _FEW else f"{len(names)} of {of} models"


def names_of(runs: Sequence[Run]) -> tuple[str, ...]:
    """The models' names as a picture has room for them, numbered where two are alike.

    Where one is long, all lose the parts at both ends that all share.
    """
    names = [" ".join(run.name.split()) for run in runs]
    if max(map(len, names), default=0) > _LONGEST_NAME:
        names = [_short(name) for name in _without_shared_ends(names)]
    return tuple(
        name if names.count(name) == 1 else f"{name} ({names[: place + 1].count(name)})"
        for place, name in enumerate(names)
    )


def _without_shared_ends(names: Sequence[str]) -> list[str]:
    parts = [_SEPARATORS.split(name.rstrip("/")) for name in names]  # part, separator, part, …
    shortest = min(map(len, parts))
    head = next((i for i in range(shortest) if len({each[i] for each in parts}) > 1), 0)
    tail = next((i for i in range(shortest) if len({each[-1 - i] for each in parts}) > 1), 0)
    tail = min(tail, shortest - head - 1)
    return [
        ("…" if head else "") + "".join(each[head : len(each) - tail]) + ("…" if tail else "")
        for each in parts
    ]


def _short(name: str) -> str:
    """Return a name; of a long path its end, of any long name its two ends."""
    if len(name) > _LONGEST_NAME and "/" in name:
        name = name.rsplit("/", 1)[1]
    if len(name) > _LONGEST_NAME:
        half = _LONGEST_NAME // 2
        name = f"{name[: half - 1]}…{name[-half:]}"
    return name
