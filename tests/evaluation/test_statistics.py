"""Against scipy, worked values, and coverage counted out."""

import math

import numpy as np
import pytest
from scipy import stats

from armillary.evaluation.statistics import (
    RESAMPLES,
    exact_paired_test,
    holm,
    paired_rates,
    paired_test,
    weighted_mean,
    wilson,
)


@pytest.mark.parametrize(
    ("successes", "trials"), [(0, 1), (0, 20), (1, 20), (7, 10), (20, 20), (81, 263), (499, 500)]
)
def test_wilson_is_scipys(successes, trials):
    theirs = stats.binomtest(successes, trials).proportion_ci(method="wilson")
    ours = wilson(successes, trials)
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), abs=1e-12)
    assert (ours.value, ours.count) == (successes / trials, trials)


def test_wilson_as_newcombe_worked_it():
    """Newcombe 1998, table I: 81 of 263 gives 0.2553 to 0.3662."""
    ours = wilson(81, 263)
    assert (round(ours.low, 4), round(ours.high, 4)) == (0.2553, 0.3662)


@pytest.mark.parametrize(("successes", "trials"), [(3, 2), (-1, 2), (0, 0)])
def test_counts_that_are_no_rate_are_refused(successes, trials):
    with pytest.raises(ValueError, match=f"{successes} successes of {trials}"):
        wilson(successes, trials)


@pytest.mark.parametrize(("lost", "won"), [(0, 0), (0, 1), (0, 5), (3, 9), (12, 12), (40, 71)])
def test_the_exact_test_is_a_binomial_one(lost, won):
    expected = stats.binomtest(lost, lost + won).pvalue if lost + won else 1.0
    assert exact_paired_test(lost, won) == pytest.approx(expected, rel=1e-12)
    assert exact_paired_test(lost, won) == exact_paired_test(won, lost)


@pytest.mark.parametrize(("up", "down"), [(0.1, 0.1), (0.3, 0.05), (0.02, 0.02), (0.0, 0.0)])
def test_the_interval_of_paired_rates_covers_the_truth(up, down):
    """Every outcome of 24 pairs counted with its probability; 95 % nominal."""
    n, covered = 24, 0.0
    for won in range(n + 1):
        for lost in range(n + 1 - won):
            estimate = paired_rates(lost, won, n)
            assert estimate.low <= estimate.value <= estimate.high
            if estimate.low <= up - down <= estimate.high:
                covered += stats.multinomial.pmf(
                    (won, lost, n - won - lost), n, (up, down, 1 - up - down)
                )
    assert covered > 0.935


def test_paired_rates_as_worked_by_hand():
    """3 and 9 discordant of 40: centre 6/42, spread √((14/42 − (6/42)²)/42)."""
    estimate = paired_rates(3, 9, 40)
    spread = 1.959963984540054 * math.sqrt((14 / 42 - (6 / 42) ** 2) / 42)
    assert estimate.value == pytest.approx(0.15)
    assert estimate.low == pytest.approx(6 / 42 - spread)
    assert estimate.high == pytest.approx(6 / 42 + spread)


def test_no_discordant_pair_is_no_certainty():
    estimate = paired_rates(0, 0, 20)
    assert estimate.low < -0.05 < 0.05 < estimate.high


@pytest.mark.parametrize("counts", [(3, 4, 6), (-1, 0, 5), (0, 0, 0)])
def test_discordant_pairs_that_do_not_fit_are_refused(counts):
    with pytest.raises(ValueError, match="discordant"):
        paired_rates(*counts)


def skewed(n: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(5)
    tokens = rng.integers(20, 200, n).astype(float)
    return tokens * rng.gamma(2.0, 1.0, n), tokens


@pytest.mark.parametrize("n", [5, 12, 60])
def test_the_bootstrap_is_scipys(n):
    """The same draws of the same generator, so that even the last digits agree."""
    nats, tokens = skewed(n)
    theirs = stats.bootstrap(
        (nats, tokens),
        lambda nats, tokens, axis=-1: nats.sum(axis) / tokens.sum(axis),
        paired=True,
        vectorized=True,
        n_resamples=RESAMPLES,
        method="BCa",
        rng=np.random.default_rng(0),
    ).confidence_interval
    ours = weighted_mean(nats, tokens)
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), rel=1e-6)
    assert ours.value == pytest.approx(nats.sum() / tokens.sum())


def test_the_mean_is_weighted_by_tokens():
    """1,023 tokens at 2.0 and 100 at 4.0 (cases.md 107): e^2.178 = 8.83, and no mean of means."""
    mean = weighted_mean([1023 * 2.0, 100 * 4.0], [1023, 100]).value
    assert round(math.exp(mean), 2) == 8.83
    assert round(math.exp((2.0 + 4.0) / 2), 2) == 20.09


def test_the_bootstrap_follows_its_seed():
    units = skewed(12)
    assert weighted_mean(*units, 1) == weighted_mean(*units, 1) != weighted_mean(*units, 2)


def test_the_bootstrap_covers_the_truth():
    """200 samples of 16 skewed units: near 95 %, as far as so few units allow."""
    rng = np.random.default_rng(1)
    covered = 0
    for _ in range(200):
        tokens = rng.integers(50, 150, 16).astype(float)
        estimate = weighted_mean(tokens * rng.gamma(4.0, 0.5, 16), tokens)
        covered += estimate.low <= 2.0 <= estimate.high
    assert 0.87 < covered / 200 < 0.98


def test_one_unit_has_no_bounds():
    assert weighted_mean([6.0], [3]) == weighted_mean([6.0], [3], 7)
    assert (weighted_mean([6.0], [3]).low, weighted_mean([6.0], [3]).high) == (-math.inf, math.inf)


def test_units_that_are_alike_have_a_point_for_an_interval():
    estimate = weighted_mean([2.0, 4.0, 8.0], [1, 2, 4])
    assert (estimate.low, estimate.high) == (2.0, 2.0)


def test_many_units_are_drawn_in_batches():
    nats, tokens = skewed(2000)
    half = (weighted_mean(nats, tokens).high - weighted_mean(nats, tokens).low) / 2
    rate = nats / tokens
    ratio = nats.sum() / tokens.sum()
    expected = 1.96 * np.sqrt((tokens**2 * (rate - ratio) ** 2).sum()) / tokens.sum()
    assert half == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize(("sums", "weights"), [([], []), ([1.0], [1, 2]), ([1.0, 2.0], [1, 0])])
def test_units_that_do_not_fit_are_refused(sums, weights):
    with pytest.raises(ValueError, match=r"each|weight"):
        weighted_mean(sums, weights)


@pytest.mark.parametrize("n", [2, 7, 12])
def test_the_paired_test_is_scipys_permutation_test(n):
    differences = np.random.default_rng(n).normal(0.4, 1.0, n)
    theirs = stats.permutation_test(
        (differences, np.zeros(n)),
        lambda x, y, axis=-1: (x - y).sum(axis),
        permutation_type="samples",
        vectorized=True,
        n_resamples=np.inf,
    ).pvalue
    assert paired_test(differences) == pytest.approx(theirs, abs=1e-12)


def test_random_signs_say_what_all_signs_say():
    """17 units are the first that are not tried out; a t-test agrees on normal differences."""
    differences = np.random.default_rng(3).normal(0.5, 1.0, 40)
    theirs = stats.ttest_1samp(differences, 0.0).pvalue
    assert paired_test(differences) == pytest.approx(theirs, abs=0.01)
    assert paired_test(differences, 1) == paired_test(differences, 1)


def test_sums_of_equal_numbers_are_equal_in_any_order():
    """Eleven tenths add up to 1.1, or to the next number above it."""
    assert paired_test([0.1] * 11) == 2**-10
    assert paired_test([0.1, 0.7, 0.2, 0.3] * 3) == 2**-11


def test_random_signs_never_say_never():
    assert paired_test([1.0] * 40) == 1 / (RESAMPLES + 1)


def test_differences_of_nothing_are_no_evidence():
    assert paired_test(np.zeros(5)) == 1.0
    assert paired_test(np.zeros(40)) == 1.0


def test_few_units_cannot_show_much():
    assert paired_test([5.0, 6.0, 7.0]) == 0.25


def test_the_paired_test_is_level():
    """Where nothing differs, one p in twenty is below 0.05."""
    rng = np.random.default_rng(2)
    below = [paired_test(rng.normal(size=10)) <= 0.05 for _ in range(600)]
    assert np.mean(below) == pytest.approx(0.05, abs=0.02)


def test_holm_as_worked_by_hand():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([]) == []
