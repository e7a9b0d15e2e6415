"""Normalised rows and heads against the specification."""

import numpy as np
import pytest

from armillary import reference
from support.kernels import call, count, drawn, spaced

WIDTHS = (1, 2, 10, 16, 40, 75)


def normalise(
    kind: str,
    x: np.ndarray,
    weight: np.ndarray,
    eps: float,
    *,
    parts: int = 1,
    threads: int = 1,
    private: bool = False,
    in_place: bool = False,
    **more: object,
) -> np.ndarray:
    """(threads or 1, R, parts · d) by the kernel."""
    copies = threads if private else 1
    xs = spaced(x)
    out = xs[None] if in_place else np.full((copies, *xs.shape), np.nan, np.float32)
    call(
        f"{kind}_norm",
        threads=threads,
        x=xs,
        x_stride=xs.strides[0],
        parts=parts,
        d=len(weight),
        weight=weight,
        eps=eps,
        out=out,
        out_stride=out.strides[1],
        private=out.strides[0] if private else 0,
        rows=count(len(x)),
        **more,
    )
    assert np.isnan(out[:, :, x.shape[1] :]).all()
    return out[:, :, : x.shape[1]]


@pytest.mark.parametrize("private", [False, True])
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_rows_are_those_of_the_specification(kind: str, threads: int, private: bool) -> None:
    for d in WIDTHS:
        for rows in (1, 5, 16):
            x = 3 * drawn(rows, d) + 1
            weight, bias = drawn(d, seed=1), drawn(d, seed=2)
            for eps in (1e-6, 0.1):
                exact = [each.astype(np.float64) for each in (x, weight)]
                biases = [None, bias] if kind == "layer" else [None]
                for b in biases:
                    if kind == "rms":
                        more, expected = {}, reference.rms_norm(*exact, eps)
                    else:
                        more, expected = {"bias": b}, reference.layer_norm(*exact, eps, b)
                    results = normalise(
                        kind, x, weight, eps, threads=threads, private=private, **more
                    )
                    for result in results:
                        # Where one number is all, its distance from the mean is only rounding.
                        loose = 1e-3 if kind == "layer" and d == 1 else 2e-6
                        np.testing.assert_allclose(result, expected, rtol=loose, atol=loose)


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_heads_are_normalised_each_alone_and_in_place(kind: str) -> None:
    x, weight, bias = drawn(3, 60), drawn(10, seed=1), drawn(10, seed=2)
    x[:, 10:20] *= 100
    more = {} if kind == "rms" else {"bias": bias}
    for threads in (1, 2):
        for in_place in (False, True):
            result = normalise(
                kind, x, weight, 1e-5, parts=6, threads=threads, in_place=in_place, **more
            )[0]
            heads = x.astype(np.float64).reshape(3, 6, 10)
            if kind == "rms":
                expected = reference.rms_norm(heads, weight, 1e-5)
            else:
                expected = reference.layer_norm(heads, weight, 1e-5, bias)
            np.testing.assert_allclose(result, expected.reshape(3, 60), rtol=2e-6, atol=2e-6)


def test_eps_stands_inside_the_root() -> None:
    """Case 69."""
    x = np.full((1, 16), 1e-4, np.float32)
    result = normalise("rms", x, np.ones(16, np.float32), 1e-5)
    np.testing.assert_allclose(result, 0.0316, atol=5e-5)


def test_rows_of_zeros_are_zeros() -> None:
    for kind, more in (("rms", {}), ("layer", {"bias": None})):
        result = normalise(kind, np.zeros((2, 40), np.float32), drawn(40), 1e-5, **more)
        assert not result.any()
