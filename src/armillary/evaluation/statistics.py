"""Intervals and tests: how sure a rate, a loss or a difference is.

NumPy alone. Intervals are of 95 %, tests two-sided. Losses are drawn by unit (a document, or a
stretch of one), never by token, since tokens of one document are not independent. Everything that
draws does so from a seed, so that the same rows always say the same.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike, NDArray

RESAMPLES = 9_999
LEVEL = 0.95

_NORMAL = NormalDist()
_Z = _NORMAL.inv_cdf((1 + LEVEL) / 2)
_ENTRIES = 1 << 22  # numbers that a batch of draws may hold
_EXACT_UNITS = 16  # up to which all 2ⁿ signs are tried

Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Estimate:
    """A value with the bounds of its interval, from `count` independent instances.

    The bounds are infinite where one instance says nothing of how much they vary.
    """

    value: float
    low: float
    high: float
    count: int


def wilson(successes: int, trials: int) -> Estimate:
    """A rate and its score interval, sound for few trials and for rates of 0 and 1.

    Raises ValueError when the counts do not fit each other.
    Source: Wilson 1927.
    """
    if not 0 <= successes <= trials or trials < 1:
        raise ValueError(f"{successes} successes of {trials} trials are no rate")
    rate, share = successes / trials, _Z**2 / trials
    centre = (rate + share / 2) / (1 + share)
    half = _Z / (1 + share) * math.sqrt(rate * (1 - rate) / trials + share / (4 * trials))
    low = 0.0 if successes == 0 else centre - half
    high = 1.0 if successes == trials else centre + half
    return Estimate(rate, low, high, trials)


def paired_rates(first_only: int, other_only: int, pairs: int) -> Estimate:
    """How much higher the other's rate is, from pairs of which some were met by one side only.

    A Wald interval with one more pair in each of the two discordant cells, so that it stays open
    where none was discordant.
    Raises ValueError when the counts do not fit each other.
    Source: Bonett and Price 2012.
    """
    if min(first_only, other_only) < 0 or not first_only + other_only <= pairs or pairs < 1:
        raise ValueError(f"{first_only} and {other_only} discordant pairs do not fit {pairs} pairs")
    up, down = (other_only + 1) / (pairs + 2), (first_only + 1) / (pairs + 2)
    centre, spread = up - down, math.sqrt((up + down - (up - down) ** 2) / (pairs + 2))
    value = (other_only - first_only) / pairs
    low, high = max(-1.0, centre - _Z * spread), min(1.0, centre + _Z * spread)
    return Estimate(value, min(low, value), max(high, value), pairs)


def exact_paired_test(first_only: int, other_only: int) -> float:
    """p that two rates are equal, from the pairs in which they differ (McNemar's exact test)."""
    discordant = first_only + other_only
    if discordant == 0:
        return 1.0
    tail = sum(math.comb(discordant, k) for k in range(min(first_only, other_only) + 1))
    return min(1.0, float(2 * tail / (1 << discordant)))


def weighted_mean(sums: ArrayLike, weights: ArrayLike, seed: int = 0) -> Estimate:
    """Σ sums / Σ weights with a bootstrap interval over units, each a sum (nats) and a weight.

    Bias-corrected and accelerated (BCa): a ratio of few, skewed units is what percentiles alone
    are wrong about, and like them it keeps inside what the values can be.
    Raises ValueError when there is no unit, or the two differ in shape, or a weight is not above 0.
    Source: Efron 1987; Efron and Tibshirani 1993, §14.3.
    """
    totals, amounts = _units(sums, weights)
    value = float(totals.sum() / amounts.sum())
    if len(totals) == 1:
        return Estimate(value, -math.inf, math.inf, 1)
    rng = np.random.default_rng(seed)
    drawn = np.concatenate(
        [
            totals[rows].sum(1) / amounts[rows].sum(1)
            for rows in (
                rng.integers(0, len(totals), (batch, len(totals)))
                for batch in _batches(RESAMPLES, len(totals))
            )
        ]
    )
    without = (totals.sum() - totals) / (amounts.sum() - amounts)
    low, high = _bca(value, drawn, without)
    return Estimate(value, low, high, len(totals))


def paired_test(differences: ArrayLike, seed: int = 0) -> float:
    """p that units differ by nothing, from the sum of each one's differences.

    Under that hypothesis each sum could as well have the other sign. All signs are tried up to 16
    units, and random ones above; with n units p is never below 2^(1 − n).
    Raises ValueError when there is no unit.
    Source: Fisher 1935, §21; Phipson and Smyth 2010 for the p of random signs.
    """
    values = np.asarray(differences, np.float64)
    if values.ndim != 1 or len(values) == 0:
        raise ValueError(f"differences of shape {values.shape}; one for each unit is needed")
    # Sums in another order differ in their last digits, and must count as equal.
    least = abs(values.sum()) - 1e-12 * np.abs(values).sum()
    if len(values) <= _EXACT_UNITS:
        sums = np.zeros(1)
        for value in values:
            sums = np.concatenate([sums + value, sums - value])
        return float((np.abs(sums) >= least).mean())
    rng = np.random.default_rng(seed)
    extreme = 0
    for batch in _batches(RESAMPLES, len(values)):
        signs = rng.integers(0, 2, (batch, len(values))) * 2.0 - 1.0
        extreme += int((np.abs(signs @ values) >= least).sum())
    return (extreme + 1) / (RESAMPLES + 1)


def holm(p_values: Sequence[float]) -> list[float]:
    """The p of each of many tests, such that the chance of any false finding among them is kept.

    Source: Holm 1979.
    """
    adjusted, highest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda each: p_values[each])):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = highest
    return adjusted


def _units(sums: ArrayLike, weights: ArrayLike) -> tuple[Numbers, Numbers]:
    totals, amounts = np.asarray(sums, np.float64), np.asarray(weights, np.float64)
    if totals.ndim != 1 or totals.shape != amounts.shape or len(totals) == 0:
        raise ValueError(
            f"sums of shape {totals.shape} and weights of shape {amounts.shape}; "
            "one of each for each unit is needed"
        )
    if not (amounts > 0).all():
        raise ValueError(f"a weight is {amounts.min():g}; each must be above 0")
    return totals, amounts


def _batches(draws: int, units: int) -> list[int]:
    """How many draws to make at a time, so that memory stays bounded."""
    size = max(1, _ENTRIES // units)
    return [min(size, draws - start) for start in range(0, draws, size)]


def _bca(value: float, drawn: Numbers, without: Numbers) -> tuple[float, float]:
    """Bounds out of drawn values, and of values with each unit left out."""
    below = float(((drawn < value).mean() + (drawn <= value).mean()) / 2)
    if not 0 < below < 1:  # all draws are the value, or lie on one side of it
        return float(min(value, drawn.min())), float(max(value, drawn.max()))
    bias = _NORMAL.inv_cdf(below)
    apart = without.mean() - without
    squares = float((apart**2).sum())
    acceleration = 0.0 if squares == 0 else float((apart**3).sum() / (6 * squares**1.5))

    def at(z: float) -> float:
        moved = bias + (bias + z) / (1 - acceleration * (bias + z))
        return float(np.quantile(drawn, _NORMAL.cdf(moved)))

    return at(-_Z), at(_Z)
