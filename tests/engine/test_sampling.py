"""Weights of tokens by the kernel, against the sampler's own in float64."""

import math

import numpy as np
import pytest

from armillary.engine.library import library
from armillary.engine.sampling import Weigher
from armillary.generation.sampling import SamplingConfig, choose, temperature
from support.kernels import drawn, library_for, machines

INF = math.inf


@pytest.mark.parametrize("machine", machines())
@pytest.mark.parametrize("value", [0.05, 0.8, 1.0, 100.0])
def test_weights_are_those_of_float64(machine: str, value: float) -> None:
    weigh = Weigher(library_for(machine))
    for n in (1, 2, 15, 16, 17, 1000, 50_257):
        logits = 6 * drawn(n, seed=n)
        expected = temperature(logits, value)
        got = weigh(logits, value)
        assert got.dtype == np.float32
        assert got.shape == (n,)
        assert got.max() == 1
        # The exponent is rounded to float32, and e^x changes by as much as x does.
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-37)


def test_what_cannot_be_weighs_nothing_and_the_logits_stay() -> None:
    weigh = Weigher(library())
    logits = np.float32([1.0, -INF, 3.0, -3e38, 3.0, 3.0 - 89.0])
    before = logits.copy()
    assert weigh(logits, 1.0).tolist() == [pytest.approx(math.exp(-2)), 0, 1, 0, 1, 0]
    assert weigh(np.full(3, -3e38, np.float32), 1.0).tolist() == [1, 1, 1]
    assert logits.tolist() == before.tolist()


@pytest.mark.parametrize("value", [1e-300, 1e-38, 1e-8])
def test_a_tiny_temperature_leaves_the_greatest(value: float) -> None:
    weigh = Weigher(library())
    assert weigh(np.float32([1.0, 1.0 - 1e-6, 1.0, -INF]), value).tolist() == [1, 0, 1, 0]


def test_penalised_logits_and_parts_of_a_row_may_come() -> None:
    """The penalty gives float64; a row of several may be a view of every second number."""
    weigh = Weigher(library())
    logits = 3 * drawn(200)
    np.testing.assert_allclose(weigh(logits.astype(np.float64), 0.7), weigh(logits, 0.7), rtol=0)
    assert weigh(logits[::2], 0.7).tolist() == weigh(logits[::2].copy(), 0.7).tolist()


def test_results_stay_when_others_are_asked_for() -> None:
    weigh = Weigher(library())
    first = weigh(drawn(100), 1.0)
    kept = first.copy()
    weigh(drawn(100, seed=1), 2.0)
    assert first.tolist() == kept.tolist()


@pytest.mark.parametrize(
    "config",
    [
        SamplingConfig(temperature=0.8),
        SamplingConfig(temperature=1.3, top_k=40),
        SamplingConfig(temperature=0.9, top_p=0.9),
        SamplingConfig(temperature=1.1, min_p=0.02),
        SamplingConfig(temperature=0.7, top_k=300, top_p=0.95, min_p=0.01, repetition_penalty=1.2),
    ],
)
def test_draws_are_those_of_the_sampler_alone(config: SamplingConfig) -> None:
    """Rounding moves the limits between tokens by some 1e-7; none of these draws lies there."""
    weigh = Weigher(library())
    logits = 3 * drawn(5000)
    seen = np.arange(5000) % 7 == 0
    for draw in np.random.default_rng(1).random(300):
        assert choose(logits, config, draw, seen, weigh) == choose(logits, config, draw, seen)


def test_every_token_is_drawn_as_often_as_it_is_likely() -> None:
    """Evenly spread draws invert the distribution function: counts within one of what is due."""
    weigh = Weigher(library())
    logits, n = drawn(150), 20_000
    expected = temperature(logits, 0.9)
    expected *= n / expected.sum()
    config = SamplingConfig(temperature=0.9)
    drawn_tokens = [choose(logits, config, (i + 0.5) / n, None, weigh) for i in range(n)]
    counts = np.bincount(drawn_tokens, minlength=150)
    assert np.abs(counts - expected).max() <= 1
