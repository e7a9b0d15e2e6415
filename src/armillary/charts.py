"""Charts as SVG for a page: text stays text, colours follow the page's, nothing needs a script.

A chart says what is drawn; how that looks is in `STYLE`, which the page includes once. Series
differ in dashes and markers as well as in colour, so that grey print and colour-blind eyes tell
them apart. What is hovered over is told by `title` elements. A chart's own title belongs to the
page, where it can wrap.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal
from xml.etree import ElementTree as ET

from armillary.wording import escaped

Point = tuple[float, float]
Look = Literal["faint", "line", "points", "crosses"]

# A chart is this wide in its own units, and scaled to its place; a phone shows text at 0.9 of it.
WIDTH, HEIGHT = 390, 250
_CHARACTER, _LINE = 6.6, 17  # room for text of 12 units
_MOST_POINTS, _MOST_STRIPS = 400, 60

# Blue and vermilion of Okabe and Ito's palette, lighter on dark ground.
STYLE = """
.chart { --first: #0072b2; --second: #c14e00; display: block; width: 100%; height: auto; }
@media screen and (prefers-color-scheme: dark) {
  .chart { --first: #56b4e9; --second: #f0a060; }
}
.chart text { font-size: 12px; fill: currentColor; font-variant-numeric: tabular-nums; }
.chart .grid { stroke: currentColor; stroke-opacity: .15; }
.chart .axis { stroke: currentColor; stroke-opacity: .6; }
.chart .rule { stroke: currentColor; stroke-opacity: .7; stroke-dasharray: 1 3; }
.chart .faint, .chart .line, .chart .points, .chart .crosses { fill: none; stroke-linejoin: round; }
.chart .faint { stroke: var(--first); stroke-opacity: .4; stroke-width: 1; }
.chart .line { stroke: var(--first); stroke-width: 2; }
.chart .points { stroke: var(--second); stroke-width: 1.5; stroke-dasharray: 5 3; }
.chart .crosses { stroke: currentColor; stroke-width: 1.5; }
.chart .marker { fill: var(--second); stroke: none; }
.chart .bar { fill: none; stroke: currentColor; stroke-opacity: .6; }
.chart .chosen { fill: var(--first); stroke: var(--first); }
.chart .strip { fill: transparent; }
.chart .strip:hover { fill: currentColor; fill-opacity: .08; }
"""


@dataclass(frozen=True)
class Series:
    """Points in order of x, and how they look; what is no number is left out.

    faint     a thin pale line, for what is noisy
    line      a full line
    points    diamonds on a dashed line
    crosses   marks above the axis, for when something happened; their y is not looked at
    """

    name: str
    points: Sequence[Point]
    look: Look


@dataclass(frozen=True)
class Chart:
    """Series over common axes, x from zero. `rules` are horizontal lines with a name each."""

    x_label: str
    y_label: str
    series: Sequence[Series]
    rules: Sequence[tuple[float, str]] = ()
    logarithmic: bool = False
    from_zero: bool = False


@dataclass(frozen=True)
class _Axis:
    """Values low to high, drawn from `start` to `end`; each tick is a value with its text."""

    low: float
    high: float
    start: float
    end: float
    ticks: list[tuple[float, str]]
    logarithmic: bool = False

    def place(self, value: float) -> float:
        low, high = self.low, self.high
        if self.logarithmic:
            low, high, value = math.log(low), math.log(high), math.log(value)
        return self.start + (self.end - self.start) * (value - low) / (high - low)


def line_chart(chart: Chart, description: str) -> str:
    """Return a chart as an SVG element, or "" when there is nothing to draw."""
    drawn = [
        Series(each.name, points, each.look)
        for each in chart.series
        if (points := [p for p in each.points if _drawable(p, each.look, chart.logarithmic)])
    ]
    measured = [each for each in drawn if each.look != "crosses"]
    if not measured:
        return ""
    svg = _svg(HEIGHT, description)
    xs = [0.0, *(x for each in drawn for x, _ in each.points)]
    ys = [y for each in measured for _, y in each.points] + [y for y, _ in chart.rules]
    y_ticks, y_scale = _ticks(min(ys), max(ys), 5, chart.logarithmic, chart.from_zero)
    left = 10 + _CHARACTER * max(len(text) for _, text in y_ticks)
    legend = len(drawn) + len(chart.rules) > 1
    x_ticks, x_scale = _ticks(0.0, max(xs), 5)
    across = _Axis(0.0, max(xs) or 1.0, left, WIDTH - 12, x_ticks)
    values = [value for value, _ in y_ticks]
    up = _Axis(
        min(*values, *ys),
        max(*values, *ys),
        HEIGHT - 2.4 * _LINE,
        _LINE * (2.6 if legend else 1.6),
        y_ticks,
        chart.logarithmic,
    )
    _text(svg, 0, 12, chart.y_label + y_scale)
    if legend:
        _draw_legend(svg, drawn, chart.rules, 12 + _LINE)
    _draw_axes(svg, across, up, chart.x_label + x_scale)
    for value, _ in chart.rules:
        _line(svg, "rule", across.start, up.place(value), across.end, up.place(value))
    for each in drawn:
        _draw_series(svg, each, across, up)
    _draw_strips(svg, measured, chart.x_label, across, up)
    for each in measured:
        if each.look == "points":
            _draw_markers(svg, each, chart.x_label, across, up)
    return escaped(ET.tostring(svg, encoding="unicode"))


def bar_chart(bars: Sequence[tuple[str, float]], unit: str, description: str) -> str:
    """Return horizontal bars from zero, the first one filled, as an SVG element."""
    height = 30 * len(bars) + 4
    svg = _svg(height, description)
    texts = [f"{value:.3f} {unit}" for _, value in bars]
    left = 10 + _CHARACTER * max(len(name) for name, _ in bars)
    room = WIDTH - left - 12 - _CHARACTER * max(map(len, texts))
    largest = max(value for _, value in bars)
    for number, ((name, value), text) in enumerate(zip(bars, texts, strict=True)):
        top, width = 30 * number + 4, room * value / largest
        _text(svg, left - 8, top + 15, name, anchor="end")
        look = "bar chosen" if number == 0 else "bar"
        _add(svg, "rect", look, x=left, y=top, width=width, height=21)
        _text(svg, left + width + 8, top + 15, text)
    return escaped(ET.tostring(svg, encoding="unicode"))


def smoothed(points: Sequence[Point], width: int) -> list[Point]:
    """Return a running mean over the last `width` points that are numbers."""
    kept = [(x, y) for x, y in points if math.isfinite(y)]
    means = []
    for end in range(1, len(kept) + 1):
        window = kept[max(0, end - width) : end]
        means.append((kept[end - 1][0], sum(y for _, y in window) / len(window)))
    return means


def thinned(points: Sequence[Point], most: int) -> list[Point]:
    """Return at most `most` points that keep every peak and trough in sight, and both ends."""
    if len(points) <= most:
        return list(points)
    size = -(-2 * len(points) // (most - 2))
    kept = {0, len(points) - 1}
    for start in range(0, len(points), size):
        bucket = range(start, min(start + size, len(points)))
        kept.add(min(bucket, key=lambda i: points[i][1]))
        kept.add(max(bucket, key=lambda i: points[i][1]))
    return [points[i] for i in sorted(kept)]


def _drawable(point: Point, look: Look, logarithmic: bool) -> bool:
    x, y = point
    if look == "crosses":
        return math.isfinite(x)
    return math.isfinite(x) and math.isfinite(y) and (y > 0 or not logarithmic)


# Ticks


def _ticks(
    low: float, high: float, most: int, logarithmic: bool = False, from_zero: bool = False
) -> tuple[list[tuple[float, str]], str]:
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
    return texts


# Drawing


def _svg(height: float, description: str) -> ET.Element:
    return ET.Element(
        "svg",
        {
            "class": "chart",
            "viewBox": f"0 0 {WIDTH} {height:g}",
            "role": "img",
            "aria-label": description,
        },
    )


def _add(parent: ET.Element, tag: str, look: str, **attributes: float | str) -> ET.Element:
    texts = {
        name.replace("_", "-"): value if isinstance(value, str) else f"{value:.1f}"
        for name, value in attributes.items()
    }
    return ET.SubElement(parent, tag, {"class": look, **texts} if look else texts)


def _text(svg: ET.Element, x: float, y: float, words: str, anchor: str = "start") -> None:
    _add(svg, "text", "", x=x, y=y, text_anchor=anchor).text = words


def _line(svg: ET.Element, look: str, x1: float, y1: float, x2: float, y2: float) -> None:
    _add(svg, "line", look, x1=x1, y1=y1, x2=x2, y2=y2)


def _path(places: Iterable[Point]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places)


def _draw_axes(svg: ET.Element, across: _Axis, up: _Axis, x_label: str) -> None:
    for value, text in up.ticks:
        y = up.place(value)
        _line(svg, "grid", across.start, y, across.end, y)
        _text(svg, across.start - 6, y + 4, text, anchor="end")
    _line(svg, "axis", across.start, up.start, across.end, up.start)
    for value, text in across.ticks:
        if across.low <= value <= across.high:
            x = across.place(value)
            _line(svg, "axis", x, up.start, x, up.start + 4)
            half = _CHARACTER * len(text) / 2
            _text(svg, min(x, WIDTH - half), up.start + _LINE, text, anchor="middle")
    _text(svg, (across.start + across.end) / 2, HEIGHT - 4, x_label, anchor="middle")


def _draw_legend(
    svg: ET.Element, drawn: Sequence[Series], rules: Sequence[tuple[float, str]], y: float
) -> None:
    x, middle = 0.0, y - 4
    for look, name in [*((s.look, s.name) for s in drawn), *(("rule", n) for _, n in rules)]:
        if look == "crosses":
            _add(svg, "path", look, d=_cross(x + 9, middle))
        else:
            _line(svg, look, x, middle, x + 18, middle)
        if look == "points":
            _add(svg, "path", "marker", d=_diamond(x + 9, middle))
        _text(svg, x + 23, y, name)
        x += 23 + _CHARACTER * len(name) + 10


def _draw_series(svg: ET.Element, series: Series, across: _Axis, up: _Axis) -> None:
    if series.look == "crosses":
        for x, _ in series.points:
            mark = _add(svg, "path", "crosses", d=_cross(across.place(x), up.start - 7))
            ET.SubElement(mark, "title").text = f"{series.name}: {x:,.0f}"
        return
    places = [(across.place(x), up.place(y)) for x, y in thinned(series.points, _MOST_POINTS)]
    if len(places) == 1 and series.look != "points":
        (x, y) = places[0]
        places.append((x + 1, y))
    _add(svg, "path", series.look, d=_path(places))


def _draw_markers(svg: ET.Element, series: Series, x_label: str, across: _Axis, up: _Axis) -> None:
    for x, y in thinned(series.points, _MOST_STRIPS):
        mark = _add(svg, "path", "marker", d=_diamond(across.place(x), up.place(y)))
        ET.SubElement(mark, "title").text = f"{x_label} {x:,.0f}\n{series.name} {y:.4g}"


def _draw_strips(
    svg: ET.Element, measured: Sequence[Series], x_label: str, across: _Axis, up: _Axis
) -> None:
    """Draw upright strips that tell the values under the pointer."""
    lines = [each for each in measured if each.look != "points"]
    if not lines:
        return
    points = lines[-1].points
    every = -(-len(points) // _MOST_STRIPS)
    xs = [x for x, _ in points[::every]]
    places = [across.place(x) for x in xs]
    borders = [across.start, *((a + b) / 2 for a, b in pairwise(places)), across.end]
    for index, (x, (left, right)) in enumerate(zip(xs, pairwise(borders), strict=True)):
        strip = _add(
            svg, "rect", "strip", x=left, y=up.end, width=right - left, height=up.start - up.end
        )
        told = [
            f"{each.name} {each.points[index * every][1]:.4g}"
            for each in lines
            if len(each.points) == len(points)
        ]
        ET.SubElement(strip, "title").text = "\n".join([f"{x_label} {x:,.0f}", *told])


def _diamond(x: float, y: float) -> str:
    return _path([(x, y - 5), (x + 5, y), (x, y + 5), (x - 5, y)]) + "Z"


def _cross(x: float, y: float) -> str:
    return _path([(x - 4, y - 4), (x + 4, y + 4)]) + _path([(x - 4, y + 4), (x + 4, y - 4)])
