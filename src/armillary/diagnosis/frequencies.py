"""What rotary frequencies mean for a window: wavelengths, turns, angles that were never trained.

Knows rules as `rope_scaling` has them, and nothing of weights or files.

Symbols: pair i turns by θ_i radians a position and has the wavelength λ_i = 2π/θ_i; L is the window
that a model was trained for, L' the one that it shall have.
"""

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from armillary.config import DecoderConfig, RotaryConfig
from armillary.rope_scaling import Frequencies, base_frequencies

_ROUNDING = 1e-9  # two frequencies that differ by less are the same one

# How `smallest_base` looks: in steps of half a hundredth, for a stretch of one hundredth.
_STEP, _STRETCH = 1.005, 3
_LARGEST_BASE = 1e12
# Distances are looked at first where bases just below failed.
_AROUND, _REMEMBERED = 24, 8


@dataclass(frozen=True)
class RotaryGroup:
    """Layers that rotate alike and read as far as each other.

    `window` w lets a layer read itself and the w − 1 positions before it; None reads all before.
    """

    layers: tuple[int, ...]
    rotary: RotaryConfig
    window: int | None

    def reads_beyond(self, window: int) -> bool:
        """Whether two positions can meet here that lie further apart than those of a window."""
        return self.window is None or self.window > window


def rotary_groups(config: DecoderConfig) -> tuple[RotaryGroup, ...]:
    """The layers that rotate, those alike together, in order of first use."""
    alike: dict[tuple[RotaryConfig, int | None], list[int]] = {}
    for index, layer in enumerate(config.layers):
        rotary = layer.attention.rotary
        if rotary is not None:
            alike.setdefault((rotary, layer.attention.window), []).append(index)
    return tuple(RotaryGroup(tuple(at), *key) for key, at in alike.items())


@dataclass(frozen=True, eq=False)
class FrequencyChange:
    """The frequencies of a layer in its window L, and in a window L' under other settings.

    Shapes: each array has an entry per channel pair, (d_rotary / 2,), in float64.
    before      radians a position, as trained: those for a text of L tokens
    after       those for a text of L' tokens under the new settings
    after_short those for a text of L tokens under the new settings
    """

    window: int
    target: int
    before: Frequencies
    after: Frequencies
    after_short: Frequencies
    attention_factor: float

    @property
    def wavelengths(self) -> Frequencies:
        """λ as trained, in positions."""
        return 2 * math.pi / self.before

    @property
    def new_wavelengths(self) -> Frequencies:
        """λ under the new settings, in positions."""
        return 2 * math.pi / self.after

    @property
    def turns(self) -> Frequencies:
        """Turns inside L as trained."""
        return self.before * self.window / (2 * math.pi)

    @property
    def new_turns(self) -> Frequencies:
        """Turns inside L' under the new settings."""
        return self.after * self.target / (2 * math.pi)

    @property
    def unseen(self) -> NDArray[np.bool_]:
        """Which pairs meet angles in L' that they never met in L.

        A pair that completes a turn in L has met them all; any other one meets new ones as soon as
        it turns further.
        """
        return (self.turns < 1) & (self.new_turns > self.turns * (1 + _ROUNDING))

    @property
    def change_in_short_texts(self) -> float:
        """The largest change of an angle between two positions of a text of L tokens, in turns."""
        return self._largest_change(self.after_short)

    @property
    def change_in_long_texts(self) -> float:
        """The same between positions as far apart as L, in a text of L' tokens."""
        return self._largest_change(self.after)

    def _largest_change(self, after: Frequencies) -> float:
        return float(np.abs(after - self.before).max()) * (self.window - 1) / (2 * math.pi)


def frequency_change(
    before: RotaryConfig, after: RotaryConfig, window: int, target: int
) -> FrequencyChange:
    """What other settings do to the channel pairs of a layer whose window L becomes L'.

    Raises ValueError for windows below 1 or settings that rotate another count of channels.
    """
    if min(window, target) < 1 or before.d_rotary != after.d_rotary:
        raise ValueError(
            f"windows {window} and {target} must be at least 1, and d_rotary {before.d_rotary} "
            f"and {after.d_rotary} the same"
        )
    return FrequencyChange(
        window=window,
        target=target,
        before=frequencies_at(before, window),
        after=frequencies_at(after, target),
        after_short=frequencies_at(after, window),
        attention_factor=after.scaling.attention_factor(),
    )


def frequencies_at(rotary: RotaryConfig, length: int) -> Frequencies:
    """θ of each pair for a text of `length` tokens, (d_rotary / 2,)."""
    return rotary.scaling.frequencies(rotary.base, rotary.d_rotary, length)


def smallest_base(d_rotary: int, window: int) -> float | None:
    """The smallest base b for which Σ_i cos(m·θ_i) ≥ 0 at all distances m < `window`.

    Where the sum is negative, a query prefers a random key to one like itself (Men et al. 2024,
    §4). Which bases pass is not a matter of size alone: some pass by chance that lie below others
    that fail. So a base counts only when those up to a hundredth above it pass too; it is found to
    half a hundredth. None when there is no such base up to 10¹².
    Raises ValueError for a d_rotary or window below 2 and 1.
    """
    if d_rotary < 2 or window < 1:
        raise ValueError(f"d_rotary {d_rotary} must be at least 2 and window {window} at least 1")
    # Once its slowest pair has turned, every sum has been negative somewhere.
    turned = (window / (2 * math.pi)) ** (d_rotary / max(d_rotary - 2, 1))
    base, passed = float(max(2.0, turned)), 0
    failures: deque[int] = deque(maxlen=_REMEMBERED)
    while base <= _LARGEST_BASE:
        failure = _first_failure(base_frequencies(base, d_rotary), window, failures)
        if failure is None:
            passed += 1
            if passed == _STRETCH:
                return base / float(_STEP ** (_STRETCH - 1))
        else:
            passed = 0
            if failure in failures:
                failures.remove(failure)
            failures.appendleft(failure)
        base *= _STEP
    return None


def _first_failure(theta: Frequencies, window: int, likely: Iterable[int]) -> int | None:
    """A distance at which the sum is negative, looked for around the likely ones first."""
    for at in likely:
        around = np.arange(max(0, at - _AROUND), min(window, at + _AROUND))
        sums = np.cos(around[:, None] * theta).sum(axis=1)
        if sums.min() < 0:
            return int(around[sums.argmin()])
    # m = S·a + k, and cos(x + y) = cos x · cos y − sin x · sin y: a product of two small matrices.
    step = math.isqrt(window - 1) + 1
    far, near = (np.arange(step)[:, None] * scale * theta for scale in (step, 1))
    left = np.concatenate([np.cos(far), -np.sin(far)], axis=1)
    right = np.concatenate([np.cos(near), np.sin(near)], axis=1)
    sums = (left @ right.T).ravel()[:window]
    least = int(sums.argmin())
    return least if sums[least] < 0 else None
