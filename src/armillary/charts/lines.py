"""Curves over common axes: one run's course, or several models side by side with intervals."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal
from xml.etree import ElementTree as ET

from armillary.charts.axes import Axis, doubling_ticks, draw_axes, round_ticks
from armillary.charts.style import look_of, marker
from armillary.charts.svg import (
    LINE,
    WIDTH,
    Point,
    add,
    add_line,
    add_text,
    add_title,
    drawing,
    fitted,
    markup,
    path,
    width_of,
)

Look = Literal["faint", "line", "points", "crosses", "reference", "measured"]
Bounds = tuple[float, float]

HEIGHT = 250  # with a legend of one line
_MOST_POINTS, _MOST_STRIPS, _MOST_SPOTS = 400, 60, 12
_KEY, _BETWEEN = 23, 12  # room of a legend's sign, and after its words
_ASIDE = 5  # between whiskers of series that stand side by side
_FREE = 14  # between the ends of a doubling axis and what is drawn


@dataclass(frozen=True)
class Series:
    """Points in order of x, and how they look; what is no number is left out.

    faint     a thin pale line, for what is noisy
    line      a full line
    points    diamonds on a dashed line
    crosses   marks above the axis, for when something happened; their y is not looked at
    reference a thin line, for what the others are set against
    measured  a line with markers in the look of series `number`, and the interval of each point
              from `bounds`, where there is one
    """

    name: str
    points: Sequence[Point]
    look: Look
    number: int = 0
    bounds: Sequence[Bounds | None] = ()


@dataclass(frozen=True)
class Chart:
    """Series over common axes.

    rules     horizontal lines with a name each; several have it on them, at their left end
    marks     upright lines with a name each
    doubling  x goes in equal ratios from the first to the last, not in equal steps from zero
    whiskers  intervals are upright bars, those of several series side by side; not bands
    span      the lowest and highest y in sight; what lies beyond is an arrow at the edge
    also      another name for y, and its ticks' words for it, to stand on the right
    """

    x_label: str
    y_label: str
    series: Sequence[Series]
    rules: Sequence[tuple[float, str]] = ()
    marks: Sequence[tuple[float, str]] = ()
    logarithmic: bool = False
    from_zero: bool = False
    doubling: bool = False
    whiskers: bool = False
    span: tuple[float, float] | None = None
    also: tuple[str, Callable[[float], str]] | None = None


def line_chart(chart: Chart, description: str) -> str:
    """Return a chart as an SVG element, or "" when there is nothing to draw."""
    drawn = [each for series in chart.series if (each := _drawable(series, chart)).points]
    measured = [each for each in drawn if each.look != "crosses"]
    if not measured:
        return ""
    signs = [_Sign(each.look, each.name, each.number) for each in drawn]
    if len(chart.rules) == 1:
        signs.append(_Sign("rule", chart.rules[0][1]))
    legend = _legend_rows(signs) if len(signs) > 1 else []
    top = LINE * (1.6 + len(legend) + bool(chart.marks))
    height = HEIGHT + LINE * max(0, len(legend) - 1) + LINE * bool(chart.marks)
    svg = drawing(height, description)
    up, y_scale = _upright(chart, measured, height - 2.4 * LINE, top)
    across, x_scale = _level(chart, drawn, up)
    add_text(svg, 0, 12, fitted(chart.y_label, WIDTH - width_of(y_scale)) + y_scale)
    _draw_also(svg, chart, up)
    _draw_legend(svg, legend)
    draw_axes(svg, across, up, chart.x_label + x_scale)
    _draw_rules(svg, chart.rules, across, up)
    _draw_marks(svg, chart.marks, across, up)
    _draw_values(svg, chart, drawn, across, up)
    _draw_strips(svg, measured, chart.x_label, across, up)
    for each in measured:
        if each.look == "points":
            _draw_markers(svg, each, chart.x_label, across, up)
    return markup(svg)


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


# What can be drawn, and on which axes


def _drawable(series: Series, chart: Chart) -> Series:
    kept = [i for i, point in enumerate(series.points) if _is_drawable(point, series.look, chart)]
    bounds = series.bounds or [None] * len(series.points)
    return Series(
        series.name,
        [series.points[i] for i in kept],
        series.look,
        series.number,
        [_drawable_bounds(bounds[i], chart) for i in kept],
    )


def _is_drawable(point: Point, look: Look, chart: Chart) -> bool:
    x, y = point
    if not math.isfinite(x) or (chart.doubling and x <= 0):
        return False
    return look == "crosses" or (math.isfinite(y) and (y > 0 or not chart.logarithmic))


def _drawable_bounds(bounds: Bounds | None, chart: Chart) -> Bounds | None:
    if bounds is None or not all(map(math.isfinite, bounds)):
        return None
    return bounds if bounds[0] > 0 or not chart.logarithmic else None


def _upright(
    chart: Chart, measured: Sequence[Series], bottom: float, top: float
) -> tuple[Axis, str]:
    ys = [y for each in measured for _, y in each.points] + [y for y, _ in chart.rules]
    ys += [y for each in measured for bounds in each.bounds if bounds for y in bounds]
    if chart.span is not None:
        ys = list(chart.span)
    ticks, scale = round_ticks(min(ys), max(ys), 5, chart.logarithmic, chart.from_zero)
    if chart.span is not None:
        ticks = [tick for tick in ticks if chart.span[0] <= tick[0] <= chart.span[1]] or ticks
    values = [value for value, _ in ticks]
    low, high = min(*values, *ys), max(*values, *ys)
    return Axis(low, high, bottom, top, ticks, chart.logarithmic), scale


def _level(chart: Chart, drawn: Sequence[Series], up: Axis) -> tuple[Axis, str]:
    left = 10 + max(width_of(text) for _, text in up.ticks)
    right: float = WIDTH
    if chart.also is not None:
        right -= 8 + max(width_of(chart.also[1](value)) for value, _ in up.ticks)
    xs = [x for each in drawn for x, _ in each.points] + [x for x, _ in chart.marks]
    if chart.doubling:
        low, high = min(xs), max(xs)
        if low == high:
            low, high = low / 2, high * 2
        # Markers and whiskers stand free of both ends.
        free = (high / low) ** (_FREE / (right - left - 2 * _FREE))
        low, high = low / free, high * free
        return Axis(low, high, left, right - 2, doubling_ticks(xs), logarithmic=True), ""
    if chart.whiskers:
        at = sorted(set(xs))
        gap = min((b - a for a, b in pairwise(at)), default=1.0)
        ticks = [(x, f"{x:g}") for x in at]
        return Axis(at[0] - gap / 2, at[-1] + gap / 2, left, right - 2, ticks), ""
    ticks, scale = round_ticks(0.0, max(xs), 5)
    return Axis(0.0, max(xs) or 1.0, left, right - 12, ticks), scale


# Drawing


@dataclass(frozen=True)
class _Sign:
    """An entry of the legend."""

    look: str
    name: str
    number: int = 0


def _legend_rows(signs: Sequence[_Sign]) -> list[list[tuple[float, _Sign]]]:
    """Break signs, each with its place, into rows that fit."""
    rows: list[list[tuple[float, _Sign]]] = []
    x = math.inf
    for sign in signs:
        width = _KEY + min(width_of(sign.name), WIDTH - _KEY)
        if x + width > WIDTH:
            rows.append([])
            x = 0.0
        rows[-1].append((x, sign))
        x += width + _BETWEEN
    return rows


def _draw_legend(svg: ET.Element, rows: Sequence[Sequence[tuple[float, _Sign]]]) -> None:
    for number, row in enumerate(rows, 1):
        y = 12 + LINE * number
        for x, sign in row:
            _draw_sign(svg, sign, x, y - 4)
            add_text(svg, x + _KEY, y, fitted(sign.name, WIDTH - _KEY))


def _draw_sign(svg: ET.Element, sign: _Sign, x: float, y: float) -> None:
    if sign.look == "crosses":
        add(svg, "path", sign.look, d=_cross(x + 9, y))
        return
    own = look_of(sign.number)
    add_line(svg, f"measured {own}" if sign.look == "measured" else sign.look, x, y, x + 18, y)
    if sign.look == "points":
        add(svg, "path", "marker", d=_diamond(x + 9, y))
    if sign.look == "measured":
        add(svg, "path", f"spot {own}", d=marker(sign.number, x + 9, y))


def _draw_also(svg: ET.Element, chart: Chart, up: Axis) -> None:
    if chart.also is not None:
        name, words = chart.also
        add_text(svg, WIDTH, 12, name, anchor="end")
        for value, _ in up.ticks:
            add_text(svg, WIDTH, up.place(value) + 4, words(value), anchor="end")


def _draw_rules(
    svg: ET.Element, rules: Sequence[tuple[float, str]], across: Axis, up: Axis
) -> None:
    for value, name in rules:
        if up.low <= value <= up.high:
            y = up.place(value)
            add_line(svg, "rule", across.start, y, across.end, y)
            if len(rules) > 1:
                add_text(svg, across.start + 4, y - 4, name)


def _draw_values(
    svg: ET.Element, chart: Chart, drawn: Sequence[Series], across: Axis, up: Axis
) -> None:
    shifts = _shifts(drawn)
    inside = svg if chart.span is None else _window(svg, up)
    for each in drawn:
        if each.look == "measured" and not chart.whiskers:
            _draw_band(inside, each, across, up)
    for each in drawn:
        shift = shifts.get(id(each), 0.0) if chart.whiskers else 0.0
        _draw_series(inside, each, across, up, shift, chart.whiskers)
    if chart.span is not None:
        for each in (each for each in drawn if each.look != "crosses"):
            _draw_beyond(svg, each, across, up, shifts.get(id(each), 0.0))


def _draw_marks(
    svg: ET.Element, marks: Sequence[tuple[float, str]], across: Axis, up: Axis
) -> None:
    for value, name in marks:
        x = across.place(value)
        add_line(svg, "mark", x, up.start, x, up.end - 3)
        half = width_of(name) / 2
        add_text(svg, min(max(x, half), WIDTH - half), up.end - 6, name, anchor="middle")


def _window(svg: ET.Element, up: Axis) -> ET.Element:
    """Return an element that cuts off what is drawn beyond the axes."""
    width, height = WIDTH, up.start - up.end
    inner = add(svg, "svg", "", x=0.0, y=up.end, width=width, height=height)
    inner.set("viewBox", f"0 {up.end:.1f} {width} {height:.1f}")
    return inner


def _shifts(drawn: Sequence[Series]) -> dict[int, float]:
    """How far each series stands aside, so that whiskers do not hide each other."""
    side = [each for each in drawn if each.look == "measured"]
    return {id(each): _ASIDE * (n - (len(side) - 1) / 2) for n, each in enumerate(side)}


def _draw_band(svg: ET.Element, series: Series, across: Axis, up: Axis) -> None:
    edges = [
        (across.place(x), bounds)
        for (x, _), bounds in zip(series.points, series.bounds, strict=True)
        if bounds is not None
    ]
    if len(edges) < 2:
        return
    there = [(x, up.place(high)) for x, (_, high) in edges]
    back = [(x, up.place(low)) for x, (low, _) in reversed(edges)]
    add(svg, "path", f"band {look_of(series.number)}", d=path(there + back) + "Z")


def _draw_series(
    svg: ET.Element, series: Series, across: Axis, up: Axis, shift: float, whiskers: bool
) -> None:
    if series.look == "crosses":
        for x, _ in series.points:
            mark = add(svg, "path", "crosses", d=_cross(across.place(x), up.start - 7))
            add_title(mark, f"{series.name}: {x:,.0f}")
        return
    if series.look == "measured":
        _draw_measured(svg, series, across, up, shift, whiskers)
        return
    places = [(across.place(x), up.place(y)) for x, y in thinned(series.points, _MOST_POINTS)]
    if len(places) == 1 and series.look != "points":
        (x, y) = places[0]
        places.append((x + 1, y))
    add(svg, "path", series.look, d=path(places))


def _draw_measured(
    svg: ET.Element, series: Series, across: Axis, up: Axis, shift: float, whiskers: bool
) -> None:
    look = look_of(series.number)
    places = [(across.place(x) + shift, up.place(y)) for x, y in series.points]
    for (x, _), bounds in zip(places, series.bounds, strict=True):
        if bounds is not None and (whiskers or len(places) == 1):
            low, high = (up.place(each) for each in bounds)
            add_line(svg, f"whisker {look}", x, low, x, high)
    if len(places) > 1:
        add(svg, "path", f"measured {look}", d=path(places))
    for x, y in places[:: -(-len(places) // _MOST_SPOTS)]:
        add(svg, "path", f"spot {look}", d=marker(series.number, x, y))


def _draw_beyond(svg: ET.Element, series: Series, across: Axis, up: Axis, shift: float) -> None:
    """Draw arrows where points lie beyond the edges."""
    for x, y in series.points:
        if not up.low <= y <= up.high:
            edge, way = (up.end, 1) if y > up.high else (up.start, -1)
            at = across.place(x) + shift
            tip = [(at - 4, edge + 9 * way), (at, edge + 2 * way), (at + 4, edge + 9 * way)]
            add(svg, "path", f"spot beyond {look_of(series.number)}", d=path(tip) + "Z")


def _draw_markers(svg: ET.Element, series: Series, x_label: str, across: Axis, up: Axis) -> None:
    for x, y in thinned(series.points, _MOST_STRIPS):
        mark = add(svg, "path", "marker", d=_diamond(across.place(x), up.place(y)))
        add_title(mark, f"{x_label} {x:,.0f}\n{series.name} {y:.4g}")


def _draw_strips(
    svg: ET.Element, measured: Sequence[Series], x_label: str, across: Axis, up: Axis
) -> None:
    """Draw upright strips that tell the values under the pointer."""
    lines = [each for each in measured if each.look != "points"]
    xs = sorted({x for each in lines for x, _ in each.points})
    xs = xs[:: -(-len(xs) // _MOST_STRIPS) or 1]
    places = [across.place(x) for x in xs]
    borders = [across.start, *((a + b) / 2 for a, b in pairwise(places)), across.end]
    if not xs:
        return
    for x, (left, right) in zip(xs, pairwise(borders), strict=True):
        strip = add(
            svg, "rect", "strip", x=left, y=up.end, width=right - left, height=up.start - up.end
        )
        add_title(strip, "\n".join([f"{x_label} {x:,.0f}", *_told(lines, x)]))


def _told(lines: Sequence[Series], at: float) -> Iterator[str]:
    for each in lines:
        for (x, y), bounds in zip(each.points, each.bounds, strict=True):
            if x == at:
                interval = "" if bounds is None else f" ({bounds[0]:.4g} to {bounds[1]:.4g})"
                yield f"{each.name} {y:.4g}{interval}"


def _diamond(x: float, y: float) -> str:
    return path([(x, y - 5), (x + 5, y), (x, y + 5), (x - 5, y)]) + "Z"


def _cross(x: float, y: float) -> str:
    return path([(x - 4, y - 4), (x + 4, y + 4)]) + path([(x - 4, y + 4), (x + 4, y - 4)])
