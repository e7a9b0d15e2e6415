"""Wavelengths, turns and unseen angles are those of the formulas; the base bound is the paper's."""

import math

import numpy as np
import pytest

from armillary.config import RotaryConfig
from armillary.diagnosis.frequencies import (
    RotaryGroup,
    frequency_change,
    rotary_groups,
    smallest_base,
)
from armillary.rope_scaling import (
    NTK,
    DynamicNTK,
    Llama3,
    PositionInterpolation,
    YaRN,
    base_frequencies,
)
from support.models import config, layer

PLAIN = RotaryConfig(d_rotary=64, base=1e4)
L, LONGER = 2048, 8192


def change(scaling=None, **entries):
    after = PLAIN if scaling is None else PLAIN.model_copy(update={"scaling": scaling})
    return frequency_change(PLAIN, after, **({"window": L, "target": LONGER} | entries))


def test_wavelengths_and_turns_of_known_pairs():
    """θ[31] = 1.3335215e-4 at d = 64, b = 1e4 (extension.md §1)."""
    plain = change()
    slowest = 2 * math.pi / 1.3335215e-4
    assert plain.wavelengths[[0, 31]] == pytest.approx([2 * math.pi, slowest])
    assert plain.turns[31] == pytest.approx(L / slowest)
    assert plain.new_turns[31] == pytest.approx(LONGER / slowest)


def test_pairs_that_complete_no_turn_meet_new_angles_without_a_rule():
    """λ[20] = 1,987 positions fits into 2,048, λ[21] = 2,650 does not."""
    assert np.flatnonzero(change().unseen).tolist() == list(range(21, 32))


@pytest.mark.parametrize(
    ("rule", "unseen"),
    [
        (PositionInterpolation(4.0), []),
        (YaRN(4.0, L), []),
        (Llama3(4.0, L), []),
        (DynamicNTK(4.0, L), []),
        # Only the last pair turns at exactly θ/s; the slow ones before it are short of that.
        (NTK(4.0), list(range(21, 31))),
    ],
    ids=lambda value: getattr(value, "kind", ""),
)
def test_which_pairs_a_rule_leaves_with_new_angles(rule, unseen):
    assert np.flatnonzero(change(rule).unseen).tolist() == unseen


def test_a_rule_for_too_small_a_factor_leaves_new_angles():
    assert change(YaRN(3.9, L)).unseen.sum() == 11
    assert change(YaRN(4.0, L), target=LONGER + 8).unseen.sum() == 11


def test_a_pair_that_turns_once_has_met_all_angles():
    """At base 10 every pair turns often inside the window."""
    fast = RotaryConfig(d_rotary=10, base=10.0)
    assert not frequency_change(fast, fast, 64, 4096).unseen.any()


def test_the_change_inside_the_old_window():
    """Interpolation moves pair 0, which turns at 1 radian, by three quarters of each angle."""
    linear = change(PositionInterpolation(4.0))
    assert linear.change_in_short_texts == pytest.approx(0.75 * (L - 1) / (2 * math.pi))
    assert change().change_in_short_texts == change().change_in_long_texts == 0
    order = [
        change(rule).change_in_short_texts for rule in (Llama3(4.0, L), YaRN(4.0, L), NTK(4.0))
    ]
    assert 0 < order[0] < order[1] < order[2] < linear.change_in_short_texts


def test_the_dynamic_rule_changes_long_texts_only():
    """Case 41: up to the original window the table is the unscaled one, exactly."""
    dynamic = change(DynamicNTK(4.0, L))
    assert np.array_equal(dynamic.after_short, base_frequencies(1e4, 64))
    assert dynamic.change_in_short_texts == 0 < dynamic.change_in_long_texts
    assert dynamic.after[31] == pytest.approx(1.0257858e-5, rel=1e-7)


def test_settings_that_cannot_be_compared_are_refused():
    narrow = RotaryConfig(d_rotary=32)
    with pytest.raises(ValueError, match="d_rotary 64 and 32"):
        frequency_change(PLAIN, narrow, L, LONGER)
    with pytest.raises(ValueError, match="windows 0 and 8192"):
        change(window=0)


def test_layers_that_rotate_alike_and_read_as_far_are_together():
    """Partial rotation and a window stand apart, in the order of their first use."""
    partial, local = layer(rotary={"d_rotary": 4}), layer(attention={"window": 4})
    unrotated = layer(attention={"rotary": None})
    groups = rotary_groups(config(layer(), local, partial, unrotated, local, layer()))
    assert [(g.layers, g.rotary.d_rotary, g.window) for g in groups] == [
        ((0, 5), 10, None),
        ((1, 4), 10, 4),
        ((2,), 4, None),
    ]
    assert [group.reads_beyond(64) for group in groups] == [True, False, True]
    assert RotaryGroup((0,), PLAIN, 65).reads_beyond(64)


@pytest.mark.parametrize(("window", "base"), [(1024, 7.9e3), (2048, 3.1e4), (4096, 1.1e5)])
def test_the_smallest_base_for_a_window(window, base):
    """extension.md §3, d = 64; the values there have two digits."""
    assert smallest_base(64, window) == pytest.approx(base, rel=0.05)


def sums(base, d_rotary, window):
    return np.cos(np.outer(np.arange(window), base_frequencies(base, d_rotary))).sum(1)


def test_no_distance_of_any_window_is_left_out():
    """Also the last ones, of windows that are no square."""
    for window in range(2, 60):
        assert sums(smallest_base(10, window), 10, window).min() >= 0


@pytest.mark.parametrize(("d_rotary", "window"), [(10, 64), (20, 300), (64, 1024)])
def test_it_passes_for_a_hundredth_and_not_just_below(d_rotary, window):
    found = smallest_base(d_rotary, window)
    for above in (1, 1.005, 1.01):
        assert sums(found * above, d_rotary, window).min() >= 0
    assert sums(found / 1.005, d_rotary, window).min() < 0


def test_one_pair_alone_never_passes():
    """cos(2) < 0 for every base."""
    assert smallest_base(2, 8) is None
    assert smallest_base(2, 1) is not None


def test_sizes_out_of_range_are_refused():
    with pytest.raises(ValueError, match="d_rotary 1 .* window 0"):
        smallest_base(1, 0)
