"""Angles of positions: right in float32 everywhere, and no more of them kept than are of use."""

import numpy as np
import pytest

from armillary import reference
from armillary.config import RotaryConfig
from armillary.engine.positions import Angles, position_rows
from armillary.engine.weights import Weights
from armillary.parts.rotary import rotation
from support.engine import stored_tensors, weights_of
from support.models import SCALINGS, VARIANTS


def turn(rotary: RotaryConfig, positions: range, length: int) -> np.ndarray:
    """(2, T, d_rotary / 2): cos and sin."""
    angles, half = Angles(rotary), rotary.d_rotary // 2
    out = np.full((2, len(positions), half), np.nan, np.float32)
    # A few positions at a time: blocks of angles are begun and ended within.
    for row in range(0, len(positions), 100):
        part = slice(row, row + 100)
        angles.write(positions[row], length, out[0, part], out[1, part])
    return out


WIDE = RotaryConfig(d_rotary=64)


def test_angles_are_exact_to_a_thousandth_of_a_radian() -> None:
    """Case 1: positions 0 to 4095 at d 64, base 1e4."""
    found = turn(WIDE, range(4096), 4096)
    exact = np.arange(4096)[:, None] * 10000.0 ** (-np.arange(0, 64, 2) / 64)
    assert np.abs(found - np.stack([np.cos(exact), np.sin(exact)])).max() < 1e-3


@pytest.mark.parametrize("start", [0, 65_536, 1_000_000])
def test_positions_do_not_collide(start: int) -> None:
    """Cases 3 and 4: every position has angles of its own."""
    found = turn(WIDE, range(start, start + 600), start + 600)
    assert len(np.unique(found.transpose(1, 0, 2).reshape(600, -1), axis=0)) == 600


def test_an_offset_shows() -> None:
    """Case 7."""
    whole, later = turn(WIDE, range(300), 300), turn(WIDE, range(250, 300), 300)
    np.testing.assert_array_equal(later, whole[:, 250:])
    assert np.abs(later - whole[:, :50]).max() > 0.1


@pytest.mark.parametrize("length", [4, 8, 9, 300])
@pytest.mark.parametrize("name", SCALINGS)
def test_angles_are_those_of_the_torch_decoder_and_the_specification(
    name: str, length: int
) -> None:
    import torch

    rotary = RotaryConfig(d_rotary=10, base=100.0, scaling=SCALINGS[name])
    found = turn(rotary, range(300), length)
    theirs = rotation(rotary, torch.arange(300), lengths=length)
    assert np.abs(found - np.stack([theirs.cos[0], theirs.sin[0]])).max() <= 2e-7
    plain = rotary.model_dump(mode="json")
    angles = np.arange(300)[:, None] * reference.rotary_frequencies(plain, length)
    factor = reference.rotary_attention_factor(plain)
    assert np.abs(found - factor * np.stack([np.cos(angles), np.sin(angles)])).max() <= 1e-4


def test_a_rule_that_varies_does_not_fill_the_memory() -> None:
    """Each length has angles of its own, of which only the last are wanted again."""
    angles = Angles(RotaryConfig(d_rotary=10, base=100.0, scaling=SCALINGS["dynamic"]))
    cos, sin = np.zeros((2, 1, 5), np.float32)
    for length in range(1, 300):
        angles.write(length - 1, length, cos, sin)
    assert len(angles._blocks) <= 64
    again = Angles(angles._rotary)
    for position, length in ((0, 5), (299, 300)):
        expected = np.zeros((2, 1, 5), np.float32)
        angles.write(position, length, cos, sin)
        again.write(position, length, *expected)
        np.testing.assert_array_equal([cos, sin], expected)


def test_rows_of_position_tables() -> None:
    for name in ("learned", "sinusoidal"):
        of, weights = VARIANTS[name], weights_of(VARIANTS[name])
        row = position_rows(of, Weights(stored_tensors(weights), "stored", print))
        assert row is not None
        for position in (0, 1, 63):
            if name == "learned":
                expected = weights["position_table.weight"][position]
            else:
                expected = reference.sinusoidal_table(np.array([position]), 40)[0]
            np.testing.assert_allclose(row(position), expected, atol=1e-7)
    assert position_rows(VARIANTS["plain"], Weights({}, "stored", print)) is None
