"""From the logits of one position to one token: pure functions, and the options that steer them.

Knows nothing of models, caches, tokenizers or batches: logits come in, a token id goes out, and
the only randomness is the number between 0 and 1 that the caller hands over. The steps are taken
in the order of transformers' processors, which is the order of the functions below:

    repetition penalty → temperature → top-k → top-p → min-p → draw

A filter gives the places of what it keeps, and the next step is handed nothing else; none drops
the likeliest token. Equal logits rank by token id, the lower first, wherever a choice between them
must be made.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from armillary.errors import UserError

Logits = NDArray[np.floating[Any]]
"""Of one position, (V,): float32, or float64 where the model computes in it."""
Weights = NDArray[np.floating[Any]]
"""Probabilities before they are divided by their sum; float32 where a kernel weighed them."""
Places = NDArray[np.intp]
Weigh = Callable[[Logits, float], Weights]
"""What `temperature` does, whoever does it."""

MAX_TEMPERATURE = 100.0
PENALTY_RANGE = (0.01, 100.0)
MAX_LOGPROBS = 20

_GROUP = 64
"""Tokens of which only the greatest logit, or the sum of the weights, is looked at first."""
_BIN_BITS = 52 - 7
"""The last bits of a float64, which weights in a bin may differ in: they agree to 1 in 128."""


@dataclass(frozen=True)
class SamplingConfig:
    """What one request asks of the sampler; the defaults leave the model's distribution as it is.

    max_tokens          tokens to generate at most, 1 or more
    temperature         divides the logits, 0 to 100; 0 always takes the likeliest token
    top_k               keep that many tokens; 0 keeps all
    top_p               keep the likeliest tokens that together reach this probability, (0, 1]
    min_p               drop what is less likely than this share of the likeliest, [0, 1]
    repetition_penalty  makes tokens of prompt and completion less likely above 1, 0.01 to 100
    seed                0 or more; None takes one from the operating system
    stop                strings that end the text and are not part of it; one string will do
    logprobs            report each token's log-probability with those of this many likeliest
                        ones, 0 to 20; None reports none
    ignore_eos          go on past end-of-sequence tokens

    Raises UserError naming the option, its value and the allowed range.
    """

    max_tokens: int = 256
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        low, high = PENALTY_RANGE
        _check_integer("max_tokens", self.max_tokens, 1)
        _check_integer("top_k", self.top_k, 0)
        _check_integer("seed", self.seed, 0, optional=True)
        _check_integer("logprobs", self.logprobs, 0, MAX_LOGPROBS, optional=True)
        _check_number("temperature", self.temperature, 0.0, MAX_TEMPERATURE)
        _check_number("top_p", self.top_p, 0.0, 1.0, above=True)
        _check_number("min_p", self.min_p, 0.0, 1.0)
        _check_number("repetition_penalty", self.repetition_penalty, low, high)
        if not isinstance(self.ignore_eos, bool):
            raise UserError(f"ignore_eos is {self.ignore_eos!r}; it must be true or false")
        object.__setattr__(self, "stop", _stop_strings(self.stop))

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken, so that nothing is drawn."""
        return self.temperature == 0


def generator(seed: int | None) -> "np.random.Generator":
    """Make the random numbers of one request, for one `.random()` a token.

    Each request has its own, so what it draws does not depend on what else is in the batch.
    """
    return np.random.Generator(np.random.PCG64(seed))


def repetition_penalty(logits: Logits, seen: NDArray[np.bool_], penalty: float) -> Logits:
    """Divide the positive and multiply the negative logits of the tokens seen.

    Shapes: logits and seen (V,) → (V,), in float64.
    Source: Keskar et al. 2019, §4.1, with the sign rule that every library has added.
    """
    penalised = logits.astype(np.float64)
    ids = np.flatnonzero(seen)
    before = penalised[ids]
    penalised[ids] = np.where(before < 0, before * penalty, before / penalty)
    return penalised


def temperature(logits: Logits, value: float) -> Weights:
    """Weigh tokens at a temperature above 0: probabilities times what gives the likeliest 1.

    The greatest logit is shifted to 0 first, so that a tiny temperature does not overflow to
    inf − inf. Shapes: (n,) → (n,).
    """
    weights = logits.astype(np.float64)
    weights -= weights.max()
    with np.errstate(over="ignore"):  # to −inf, which is right
        weights /= value
    return np.exp(weights, out=weights)


def top_k(logits: Logits, k: int) -> Places:
    """Find exactly the k likeliest tokens (all of them when k is 0 or n or more).

    Shapes: (n,) → (k,), ascending. (transformers keeps more than k when the k-th has equals.)
    """
    n = len(logits)
    if k == 0 or k >= n:
        return np.arange(n)
    contenders = logits
    groups = n // _GROUP
    if k < groups:
        # Of k groups the greatest is no less than this, so that the k-th of all is not either.
        best = logits[: groups * _GROUP].reshape(_GROUP, groups).max(axis=0)
        contenders = logits[logits >= np.partition(best, -k)[-k]]
    return _greatest(logits, k, np.partition(contenders, -k)[-k])


def top_p(weights: Weights, p: float) -> Places:
    """Find the fewest likeliest tokens whose probabilities sum to p or more; always at least one.

    Shapes: (n,) → as many as are kept, ascending.
    Source: Holtzman et al. 2020, §3.1 (nucleus sampling).
    """
    if p >= 1:
        return np.arange(len(weights))
    total = weights.sum()
    # Tokens below an n-th of 1 − p hold together no more than 1 − p.
    border = min(total * (1 - p) / len(weights), weights.max())
    contenders = np.flatnonzero(weights >= border)
    weights = weights[contenders].astype(np.float64)
    # By their leading bits weights fall into bins in the order of their size; only the bin that
    # p is reached in has to be sorted.
    bins = weights.view(np.int64) >> _BIN_BITS
    bins -= bins.min()
    reached = np.cumsum(np.bincount(bins, weights=weights)[::-1])
    crossed = min(int(np.searchsorted(reached, p * total)), len(reached) - 1)
    place = len(reached) - 1 - crossed
    mass = reached[crossed - 1] if crossed else 0.0
    ranked = np.sort(weights[bins == place])[::-1]
    before = mass + np.cumsum(ranked) - ranked
    count = max(1, int(np.count_nonzero(before < p * total)))
    above = int(np.count_nonzero(bins > place))
    return contenders[_greatest(weights, above + count, ranked[count - 1])]


def min_p(weights: Weights, p: float) -> Places:
    """Find the tokens that are no less likely than p times the likeliest.

    Shapes: (n,) → as many as are kept, ascending.
    Source: Nguyen et al. 2024, §3 (min-p sampling).
    """
    return np.flatnonzero(weights >= p * weights.max())


def log_probabilities(logits: Logits) -> NDArray[np.float64]:
    """Take the natural logarithm of each token's probability.

    Shapes: (V,) → (V,). Reported ones are taken from the logits as the model gives them, before
    any of the steps above.
    """
    shifted = logits.astype(np.float64)
    shifted -= shifted.max()
    shifted -= math.log(np.exp(shifted).sum())
    return shifted


def likeliest(logits: Logits, n: int) -> Places:
    """Rank the n likeliest tokens, best first. Shapes: (V,) → ids (n,)."""
    ids = top_k(logits, n) if n else np.arange(0)
    return ids[np.argsort(-logits[ids], kind="stable")]


def choose(
    logits: Logits,
    config: SamplingConfig,
    draw: float,
    seen: NDArray[np.bool_] | None = None,
    weigh: Weigh = temperature,
) -> int:
    """Pick the next token under a request's options, inverting the distribution function.

    logits (V,); `draw` in [0, 1), unused at temperature 0; `seen` (V,), the tokens that the
    repetition penalty applies to (needed only when there is one); `weigh` takes the temperature's
    step. Raises UserError when no logit is finite or one is NaN or +inf.
    """
    best = int(logits.argmax())  # the first of equals; a NaN is taken for the greatest
    if not math.isfinite(logits[best]):
        raise UserError(
            "the model's logits for the next token have no finite maximum "
            f"({float(logits[best])}); its weights hold such values or the number type overflows: "
            "try float32"
        )
    if config.repetition_penalty != 1:
        if seen is None:
            raise TypeError("a repetition penalty needs the tokens that were seen")
        logits = repetition_penalty(logits, seen, config.repetition_penalty)
        best = int(logits.argmax())
    if config.greedy:
        return best
    kept: list[Places] = []
    if 0 < config.top_k < len(logits):
        # A temperature changes no order: what top-k drops need not be weighed.
        kept.append(top_k(logits, config.top_k))
        logits = logits[kept[-1]]
    weights = weigh(logits, config.temperature)
    for step, value, without in ((top_p, config.top_p, 1), (min_p, config.min_p, 0)):
        if value != without:
            kept.append(step(weights, value))
            weights = weights[kept[-1]]
    place = _drawn(weights, draw)
    for places in reversed(kept):
        place = int(places[place])
    return place


def _drawn(weights: Weights, draw: float) -> int:
    """The place at which the sum of the weights up to it is first above `draw` of the whole.

    Summed by groups, then within one: each sum of a long row waits for the one before it.
    """
    whole = len(weights) // _GROUP * _GROUP
    groups = weights[:whole].reshape(-1, _GROUP).sum(axis=1)
    ends = np.cumsum(np.append(groups, weights[whole:].sum()), dtype=np.float64)
    wanted = min(draw * ends[-1], np.nextafter(ends[-1], 0))
    group = int(np.searchsorted(ends, wanted, side="right"))
    start, before = group * _GROUP, ends[group - 1] if group else 0.0
    own = weights[start : start + _GROUP]
    sums = before + np.cumsum(own, dtype=np.float64)
    place = int(np.searchsorted(sums, wanted, side="right"))
    # Summed in another order a group may end a rounding before what is wanted.
    return start + min(place, int(np.flatnonzero(own)[-1]))


def _greatest(values: NDArray[np.floating[Any]], count: int, last: float) -> Places:
    """Where exactly `count` greatest values lie, given the least of them; of equals the first."""
    places = np.flatnonzero(values >= last)
    surplus = len(places) - count
    if surplus:
        equal = np.flatnonzero(values[places] == last)
        places = np.delete(places, equal[-surplus:])
    return places


def _check_integer(
    name: str, value: object, low: int, high: float = math.inf, *, optional: bool = False
) -> None:
    whole = isinstance(value, Integral) and not isinstance(value, bool)
    inside = isinstance(value, Real) and not value < low and value <= high
    if not (optional and value is None) and not (whole and inside):
        bounds = f"of {low} or more" if high == math.inf else f"from {low} to {high}"
        or_none = " or None" if optional else ""
        raise UserError(f"{name} is {value!r}; it must be a whole number {bounds}{or_none}")


def _check_number(
    name: str, value: object, low: float, high: float, *, above: bool = False
) -> None:
    number = isinstance(value, Real) and not isinstance(value, bool)
    inside = isinstance(value, Real) and not value < low and value <= high  # false for NaN
    if not (number and inside) or (above and value == low):
        bounds = f"above {low:g} and at most {high:g}" if above else f"from {low:g} to {high:g}"
        raise UserError(f"{name} is {value!r}; it must be a number {bounds}")


def _stop_strings(stop: object) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else stop
    if not isinstance(strings, Sequence) or not all(isinstance(s, str) and s for s in strings):
        raise UserError(f"stop is {stop!r}; it must be one or more non-empty strings")
    if any("\ud800" <= character <= "\udfff" for s in strings for character in s):
        raise UserError(f"stop is {stop!r}; it must be valid Unicode, as every text is")
    return tuple(strings)
