"""Axes: which values they mark, and where a value lies on them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.etree import ElementTree as ET

from armillary.charts.svg import LINE, WIDTH, add_line, add_text, width_of

Ticks = list[tuple[float, str]]


@dataclass(frozen=True)
class Axis:
    """Values low to high, drawn from `start` to `end`; each tick is a value with its text."""

    low: float
    high: float
    start: float
    end: float
    ticks: Ticks
    logarithmic: bool = False

    def place(self, value: float) -> float:
        """Where a value lies."""
        low, high = self.low, self.high
        if self.logarithmic:
            low, high, value = math.log(low), math.log(high), math.log(value)
        return self.start + (self.end - self.start) * (value - low) / (high - low)


def draw_axes(svg: ET.Element, across: Axis, up: Axis, x_label: str) -> None:
    """Draw both axes, the grid of the upright one, and the name of the other below it."""
    for value, text in up.ticks:
        y = up.place(value)
        add_line(svg, "grid", across.start, y, across.end, y)
        add_text(svg, across.start - 6, y + 4, text, anchor="end")
    add_line(svg, "axis", across.start, up.start, across.end, up.start)
    taken = -math.inf
    for value, text in across.ticks:
        if across.low <= value <= across.high:
            x = across.place(value)
            add_line(svg, "axis", x, up.start, x, up.start + 4)
            half = width_of(text) / 2
            middle = min(x, WIDTH - half)
            if middle - half > taken:
                add_text(svg, middle, up.start + LINE, text, anchor="middle")
                taken = middle + half + 2
    middle = (across.start + across.end) / 2
    middle = max(min(middle, WIDTH - width_of(x_label) / 2), width_of(x_label) / 2)
    add_text(svg, middle, up.start + 2.2 * LINE, x_label, anchor="middle")


def doubling_ticks(values: Sequence[float]) -> Ticks:
    """Return the values themselves, or of many of them the powers of two."""
    distinct = sorted(set(values))
    if len(distinct) > 8:
        first, last = math.floor(math.log2(distinct[0])), math.ceil(math.log2(distinct[-1]))
        distinct = [2.0**power for power in range(first, last + 1)]
    return [(value, f"{value:,.0f}") for value in distinct]


def round_ticks(
    low: float, high: float, most: int, logarithmic: bool = False, from_zero: bool = False
) -> tuple[Ticks, str]:
    """Return values to mark, with their texts, and what the label says of their scale."""
    if from_zero:
        low = min(low, 0.0)
    if low == high:
        low, high = (
            (low / 2, high * 2) if logarithmic else (low - abs(low or 1), high + abs(low or 1))
        )
    values = _powers(low, high) if logarithmic else []
    if len(values) < 2:
        values = _steps(low, high, most)
        if logarithmic:
            values = [value for value in values if low <= value <= high] or [low, high]
    largest = max(map(abs, values))
    exponent = 0
    if largest < 0.01 or largest >= 1e6:
        exponent = 3 * math.floor(math.log10(largest) / 3)
    texts = _texts([value / 10**exponent for value in values])
    scale = f" × 10{str(exponent).translate(_SUPERSCRIPTS)}" if exponent else ""
    return list(zip(values, texts, strict=True)), scale


_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def _steps(low: float, high: float, most: int) -> list[float]:
    """Return round values, evenly spaced, that reach just beyond both ends."""
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= rough * 0.999999)
    first = math.floor(low / step + 1e-6)
    last = math.ceil(high / step - 1e-6)
    return [step * i for i in range(first, last + 1)]


def _powers(low: float, high: float) -> list[float]:
    """Return powers of ten, and between them 2 and 5 times those where they are few."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    factors = (1, 2, 5) if last - first <= 3 else (1,)
    values = [factor * 10.0**power for power in range(first, last + 1) for factor in factors]
    return [value for value in values if low <= value <= high]


def _texts(values: Sequence[float]) -> list[str]:
    for digits in range(7):
        texts = [f"{value + 0.0:,.{digits}f}" for value in values]
        if all(
            math.isclose(float(t.replace(",", "")), v, rel_tol=1e-3, abs_tol=1e-9)
            for t, v in zip(texts, values, strict=True)
        ):
            break
    return [text.replace("-", "−") for text in texts]
