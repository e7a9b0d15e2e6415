"""Rotations of both layouts against the specification."""

import numpy as np
import pytest

from armillary import reference
from support.kernels import call, count, drawn, spaced


def turned(x: np.ndarray, angles: np.ndarray, layout: str, heads: int, threads: int) -> np.ndarray:
    """(R, h · d_h) by the kernel."""
    wide, half = spaced(x), angles.shape[1]
    cos, sin = (part(angles).astype(np.float32) for part in (np.cos, np.sin))
    call(
        f"rotate_{layout}",
        threads=threads,
        x=wide,
        stride=wide.strides[0],
        heads=heads,
        d_head=x.shape[1] // heads,
        half=half,
        cos=cos,
        sin=sin,
        rows=count(len(x)),
    )
    assert np.isnan(wide[:, x.shape[1] :]).all()
    return wide[:, : x.shape[1]]


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("layout", ["half_split", "interleaved"])
def test_heads_are_turned_as_the_specification_turns_them(layout: str, threads: int) -> None:
    """Every width of rotation within heads of 10, each row by its own angles."""
    for half in (1, 2, 3, 5):
        for rows in (1, 4, 16):
            x = drawn(rows, 60)
            angles = np.random.default_rng(1).uniform(-3, 3, (rows, half))
            heads = x.astype(np.float64).reshape(1, rows, 6, 10).swapaxes(1, 2)
            expected = reference.rotate(heads, angles[None], layout)
            expected = expected.swapaxes(1, 2).reshape(rows, 60)
            np.testing.assert_allclose(turned(x, angles, layout, 6, threads), expected, atol=1e-6)


def test_the_layouts_differ() -> None:
    x, angles = drawn(1, 10), np.ones((1, 5))
    both = [turned(x, angles, layout, 1, 1) for layout in ("half_split", "interleaved")]
    assert np.abs(both[0] - both[1]).max() > 0.1
