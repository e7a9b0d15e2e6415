"""Activations against float64, over all numbers that they may meet."""

import math
from collections.abc import Callable

import numpy as np
import pytest
from scipy.special import erfc, expit

from armillary.engine.kernels.elementary import ACTIVATIONS
from armillary.engine.library import Library
from support.kernels import call, count, drawn, library_for, machines, spaced

EXACT: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "silu": lambda x: x * expit(x),
    "gelu": lambda x: 0.5 * x * erfc(-x / math.sqrt(2)),
    "gelu_tanh": lambda x: x * expit(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)),
    "quick_gelu": lambda x: x * expit(1.702 * x),
    "relu": lambda x: np.maximum(x, 0),
    "sigmoid": expit,
    "identity": lambda x: x,
}


def activate(
    name: str,
    gate: np.ndarray,
    up: np.ndarray | None,
    threads: int = 1,
    code: Library | None = None,
    limit: float = float(np.finfo(np.float32).max),
    up_offset: float = 0.0,
) -> np.ndarray:
    """(R, N) by the kernel."""
    n = gate.shape[1]
    inside = spaced(gate)
    beside = None if up is None else spaced(up)
    call(
        f"activation_{name}",
        threads=threads,
        code=code,
        gate=inside,
        up=beside,
        stride=inside.strides[0],
        n=n,
        limit=limit,
        up_offset=up_offset,
        rows=count(len(gate)),
    )
    assert np.isnan(inside[:, n:]).all()
    return inside[:, :n]


def test_every_activation_has_a_kernel_and_an_expectation() -> None:
    assert ACTIVATIONS.keys() == EXACT.keys()


@pytest.mark.parametrize("name", EXACT)
def test_numbers_of_any_size(name: str) -> None:
    """Relative to x: what follows from an exp that is right to 2e-7."""
    near = np.linspace(-30, 30, 200_001)
    far = np.concatenate(
        [10.0 ** np.linspace(-30, 10, 2001), -(10.0 ** np.linspace(-30, 10, 2001))]
    )
    x = np.concatenate([near, far, [0.0, -0.0]]).astype(np.float32)[None]
    exact = EXACT[name](x.astype(np.float64))
    result = activate(name, x, None)
    size = np.ones_like(exact) if name == "sigmoid" else np.maximum(np.abs(x), 1e-30)
    assert (np.abs(result - exact) / size).max() <= 4e-7


@pytest.mark.parametrize("machine", machines())
def test_what_goes_to_zero_does_so_relatively_right(machine: str) -> None:
    """As far as exp goes, on any machine: it would not if its remainder were taken in one step."""
    x = np.linspace(-86, 0, 100_001).astype(np.float32)[None]
    result = activate("sigmoid", x, None, code=library_for(machine))
    np.testing.assert_allclose(result, expit(x.astype(np.float64)), rtol=3e-7)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("name", EXACT)
def test_gated_rows(name: str, threads: int) -> None:
    for n in (1, 16, 24, 75):
        gate, up = drawn(5, n), drawn(5, n, seed=1)
        expected = EXACT[name](gate.astype(np.float64)) * up
        np.testing.assert_allclose(activate(name, gate, up, threads), expected, atol=2e-6)
        np.testing.assert_allclose(
            activate(name, gate, None, threads), EXACT[name](gate.astype(np.float64)), atol=2e-6
        )


@pytest.mark.parametrize("threads", [1, 3])
def test_what_a_gated_unit_multiplies_may_be_bounded(threads: int) -> None:
    """The gate from above only, the other half on both sides, before the offset."""
    gate, up = 4 * drawn(3, 41), 4 * drawn(3, 41, seed=1)
    bounded, beside = np.minimum(gate, 1.5), np.clip(up, -1.5, 1.5) + 0.25
    result = activate("quick_gelu", gate, up, threads, limit=1.5, up_offset=0.25)
    np.testing.assert_allclose(result, EXACT["quick_gelu"](bounded) * beside, atol=3e-6)
    assert (gate < -1.5).any() and (gate > 1.5).any() and (np.abs(up) > 1.5).any()  # noqa: PT018
