"""Horizontal bars from zero, each with its value in words."""

from collections.abc import Sequence
from dataclasses import dataclass

from armillary.charts.style import look_of
from armillary.charts.svg import (
    WIDTH,
    add,
    add_line,
    add_text,
    add_title,
    drawing,
    fitted,
    markup,
    width_of,
)

_PITCH, _THICK = 30, 21


@dataclass(frozen=True)
class Bar:
    """A value with its words; filled with the colour of series `number`, or open.

    bounds  its interval
    reach   how far the value could have come, as a pale ground
    title   what is told when the pointer rests on it
    """

    name: str
    value: float
    words: str
    number: int | None = None
    bounds: tuple[float, float] | None = None
    reach: float | None = None
    title: str = ""


def bar_chart(bars: Sequence[Bar], description: str) -> str:
    """Return bars as an SVG element, or "" when there are none."""
    if not bars:
        return ""
    svg = drawing(_PITCH * len(bars) + 4, description)
    left = 10 + min(max(width_of(bar.name) for bar in bars), WIDTH * 0.4)
    room = WIDTH - left - 12 - max(width_of(bar.words) for bar in bars)
    largest = max(max(bar.value, *(bar.bounds or ()), bar.reach or 0.0) for bar in bars) or 1.0
    for number, bar in enumerate(bars):
        top = _PITCH * number + 4
        middle, width = top + _THICK / 2, room * bar.value / largest
        add_text(svg, left - 8, top + 15, fitted(bar.name, left - 10), anchor="end")
        end = width
        if bar.reach is not None:
            end = room * bar.reach / largest
            add(svg, "rect", "reach", x=left, y=top, width=end, height=_THICK)
        look = "bar" if bar.number is None else f"bar filled {look_of(bar.number)}"
        drawn = add(svg, "rect", look, x=left, y=top, width=width, height=_THICK)
        if bar.title:
            add_title(drawn, bar.title)
        if bar.bounds is not None:
            low, high = (left + room * each / largest for each in bar.bounds)
            add_line(svg, "halo", low, middle, high, middle)
            add_line(svg, "error", low, middle, high, middle)
            for x in (low, high):
                add_line(svg, "error", x, middle - 4, x, middle + 4)
            end = max(end, high - left)
        add_text(svg, left + end + 8, top + 15, bar.words)
    return markup(svg)
