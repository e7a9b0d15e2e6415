"""From the logits of one position to one token: pure functions, and the options that steer them.

Knows nothing of models, caches, tokenizers or batches: logits come in, a token id goes out, and
the only randomness is the number between 0 and 1 that the caller hands over. The steps are taken
in the order of transformers' processors, which is the order of the functions below:

    repetition penalty → temperature → top-k → top-p → min-p → draw

A token that a step excludes has the logit −inf from there on; no step excludes the likeliest one.
Equal logits rank by token id, the lower first, wherever a choice between them must be made.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real

import numpy as np
import torch
from torch import Tensor

from armillary.errors import UserError

MAX_TEMPERATURE = 100.0
PENALTY_RANGE = (0.01, 100.0)
MAX_LOGPROBS = 20


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


def generator(seed: int | None) -> np.random.Generator:
    """Make the random numbers of one request, for one `.random()` a token.

    Each request has its own, so what it draws does not depend on what else is in the batch.
    """
    return np.random.Generator(np.random.PCG64(seed))


def repetition_penalty(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Divide the positive and multiply the negative logits of the tokens seen.

    Shapes: logits and seen (boolean) (V,) or (B, V) → the same, in float32 at least.
    Source: Keskar et al. 2019, §4.1, with the sign rule that every library has added.
    """
    logits = _at_least_float32(logits)
    penalised = torch.where(logits < 0, logits * penalty, logits / penalty)
    return torch.where(seen, penalised, logits)


def temperature(logits: Tensor, value: float) -> Tensor:
    """Divide by a temperature above 0, after shifting the greatest logit to 0.

    The shift changes no probability and keeps a tiny temperature from overflowing to inf − inf.
    Shapes: (V,) or (B, V) → the same, in float32 at least.
    """
    logits = _at_least_float32(logits)
    return (logits - logits.amax(-1, keepdim=True)) / value


def top_k(logits: Tensor, k: int) -> Tensor:
    """Keep exactly the k likeliest tokens (all of them when k is 0 or V or more).

    Shapes: (V,) or (B, V) → the same, −inf for what is dropped. (transformers keeps more than k
    when the k-th has equals.)
    """
    if k == 0 or k >= logits.shape[-1]:
        return logits
    return logits.masked_fill(~_likeliest_mask(logits, logits.topk(k).values, k), -math.inf)


def top_p(logits: Tensor, p: float) -> Tensor:
    """Keep the fewest likeliest tokens whose probabilities sum to p or more; always at least one.

    Shapes: (V,) or (B, V) → the same, −inf for what is dropped. Sums are taken in float64.
    Source: Holtzman et al. 2020, §3.1 (nucleus sampling).
    """
    if p >= 1:
        return logits
    everything = logits.double().logsumexp(-1, keepdim=True)
    # Tokens below a V-th of 1 − p hold together no more than 1 − p: only the others are sorted.
    border = everything + math.log((1 - p) / logits.shape[-1])
    contenders = max(1, int((logits > border).sum(-1).max()))
    ranked = logits.topk(contenders).values
    probability = (ranked - everything).exp()
    mass_before = probability.cumsum(-1) - probability
    count = (mass_before < p).sum(-1, keepdim=True)
    return logits.masked_fill(~_likeliest_mask(logits, ranked, count), -math.inf)


def min_p(logits: Tensor, p: float) -> Tensor:
    """Drop the tokens that are less likely than p times the likeliest.

    Shapes: (V,) or (B, V) → the same, −inf for what is dropped.
    Source: Nguyen et al. 2024, §3 (min-p sampling).
    """
    if p == 0:
        return logits
    probability = logits.double().softmax(-1)
    return logits.masked_fill(probability < p * probability.amax(-1, keepdim=True), -math.inf)


def log_probabilities(logits: Tensor) -> Tensor:
    """Take the natural logarithm of each token's probability, in float64.

    Shapes: (V,) or (B, V) → the same. Reported ones are taken from the logits as the model gives
    them, before any of the steps above.
    """
    return logits.double().log_softmax(-1)


def likeliest(logits: Tensor, n: int) -> Tensor:
    """Rank the n likeliest tokens, best first. Shapes: (V,) or (B, V) → ids (n,) or (B, n)."""
    n = min(n, logits.shape[-1])
    if n == 0:
        return logits.new_zeros(*logits.shape[:-1], 0, dtype=torch.long)
    mask = _likeliest_mask(logits, logits.topk(n).values, n)
    ids = mask.nonzero()[:, -1].view(*logits.shape[:-1], n)
    order = logits.gather(-1, ids).sort(dim=-1, descending=True, stable=True).indices
    return ids.gather(-1, order)


def choose(logits: Tensor, config: SamplingConfig, draw: float, seen: Tensor | None = None) -> int:
    """Pick the next token under a request's options, inverting the distribution function.

    logits (V,); `draw` in [0, 1), unused at temperature 0; `seen` (V,) boolean, the tokens that
    the repetition penalty applies to (needed only when there is one). The probabilities drawn
    from are float64. Raises UserError when no logit is finite or one is NaN or +inf.
    """
    greatest = float(logits.max())
    if not math.isfinite(greatest):
        raise UserError(
            f"the model's logits for the next token have no finite maximum ({greatest}); "
            "its weights hold such values or the number type overflows: try float32"
        )
    logits = logits.double()
    if config.repetition_penalty != 1:
        if seen is None:
            raise TypeError("a repetition penalty needs the tokens that were seen")
        logits = repetition_penalty(logits, seen, config.repetition_penalty)
    if config.greedy:
        return int(logits.argmax())  # the first of equals, as torch documents
    logits = temperature(logits, config.temperature)
    logits = top_k(logits, config.top_k)
    logits = top_p(logits, config.top_p)
    logits = min_p(logits, config.min_p)
    cumulative = logits.softmax(-1).cpu().cumsum(-1)  # summed in order, so that it never falls
    return int(torch.searchsorted(cumulative, draw * cumulative[-1], right=True))


def _at_least_float32(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _likeliest_mask(logits: Tensor, ranked: Tensor, count: int | Tensor) -> Tensor:
    """Mark exactly `count` likeliest tokens a row, given at least that many greatest logits.

    torch.topk leaves open which of equal values it takes; here the lower ids win.
    """
    last = torch.as_tensor(count, device=logits.device).expand(*logits.shape[:-1], 1) - 1
    threshold = ranked.gather(-1, last)
    above, equal = logits > threshold, logits == threshold
    left_for_equals = count - above.sum(-1, keepdim=True)
    return above | (equal & (equal.cumsum(-1) <= left_for_equals))


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
