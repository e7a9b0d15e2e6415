"""The report's figures as files, drawn by matplotlib, which is an extra.

They are the page's own plots: the same titles, data, intervals and looks of models.
"""

import io
import math
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Any

from armillary.charts.bars import Bar
from armillary.charts.heat import HeatMap
from armillary.charts.lines import Chart, Series
from armillary.charts.style import DASHES, HUES, MARKERS, heat_colours
from armillary.diagnosis.frequencies import FrequencyChange
from armillary.errors import UserError
from armillary.evaluation import plots
from armillary.evaluation.comparison import Comparison
from armillary.evaluation.summary import Summary
from armillary.evaluation.verdict import gains_of, variants
from armillary.files import write_atomically

_GREY = "#555555"


def write_figures(
    directory: Path,
    summaries: Sequence[Summary],
    comparison: Comparison | None = None,
    *,
    frequencies: Sequence[FrequencyChange | None] = (),
    kinds: Sequence[str] = ("png",),
) -> list[Path]:
    """Write every figure, in each of `kinds` ("png", "svg"); return where they are.

    `directory` is made where it is not there. Equal evaluations give equal files.
    Raises UserError when matplotlib is not installed, and when it cannot write.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise UserError(
            "figures need matplotlib; install it with: pip install 'armillary[figures]'"
        ) from error
    directory.mkdir(parents=True, exist_ok=True)
    written = []
    with matplotlib.rc_context({"svg.hashsalt": "armillary", "svg.fonttype": "path"}):
        for plot in all_plots(summaries, comparison, frequencies):
            figure = draw(plot)
            for kind in kinds:
                path = directory / f"{_file_name(plot.name)}.{kind}"
                buffer = io.BytesIO()
                undated = {"Date": None} if kind == "svg" else {"Software": None}
                figure.savefig(buffer, format=kind, dpi=160, metadata=undated)
                with write_atomically(path) as file:
                    file.write(buffer.getvalue())
                written.append(path)
    return written


def all_plots(
    summaries: Sequence[Summary],
    comparison: Comparison | None = None,
    frequencies: Sequence[FrequencyChange | None] = (),
) -> Iterator[plots.Plot]:
    """Everything that the report draws, in its order."""
    yield from plots.effective_plots(summaries)
    yield from plots.loss_plots(summaries, gains_of(summaries, comparison))
    yield from plots.length_plots(summaries)
    for variant in variants(summaries):
        yield from plots.heat_plots(summaries, variant)
    yield from plots.factor_plots(summaries)
    yield from plots.short_plots(summaries)
    yield from plots.frequency_plot(summaries, frequencies)


def draw(plot: plots.Plot) -> Any:
    """Return a plot as a matplotlib figure."""
    from matplotlib.figure import Figure

    shown = plot.shown
    if isinstance(shown, tuple):
        figure = Figure(figsize=(7, 1 + 0.4 * len(shown)), layout="constrained")
        _draw_bars(figure.add_subplot(), shown)
    elif isinstance(shown, HeatMap):
        figure = Figure(figsize=(7, 1.4 + 0.45 * len(shown.rows)), layout="constrained")
        _draw_heat(figure.add_subplot(), shown)
    else:
        figure = Figure(figsize=(7, 4.6), layout="constrained")
        _draw_chart(figure.add_subplot(), shown)
    named = bool(getattr(shown, "marks", ()) or getattr(shown, "border_name", ""))
    title = textwrap.fill(plot.title, 72)
    figure.axes[0].set_title(title, fontsize=11, loc="left", pad=18 if named else 6)
    figure.axes[0].spines[["top", "right"]].set_visible(False)
    return figure


def _file_name(name: str) -> str:
    return re.sub(r"[^\w.-]+", "-", name)


def _draw_chart(axes: Any, chart: Chart) -> None:
    at = sorted({x for each in chart.series for x, _ in each.points})
    if chart.doubling:
        axes.set_xscale("log", base=2)
    if chart.doubling or chart.whiskers:
        axes.set_xticks(at, [f"{x:,.0f}" for x in at])
        axes.minorticks_off()
    if chart.logarithmic:
        axes.set_yscale("log")
    for place, each in enumerate(chart.series):
        beside = _beside(chart, at, place - (len(chart.series) - 1) / 2)
        _draw_series(axes, chart, each, beside)
    _draw_rules(axes, chart.rules)
    for value, name in chart.marks:
        axes.axvline(value, color=_GREY, linewidth=1, linestyle="--")
        _name_above(axes, value, name, ("data", "axes fraction"), 1)
    if chart.span is not None:
        low, high = chart.span
        axes.set_ylim(low, high)
        for place, each in enumerate(chart.series):
            beside = _beside(chart, at, place - (len(chart.series) - 1) / 2)
            _draw_beyond(axes, each, beside, low, high)
    axes.set_xlabel(chart.x_label)
    axes.set_ylabel(chart.y_label)
    if chart.also is not None:
        name, words = chart.also
        low, high = axes.get_ylim()
        at = [value for value in axes.get_yticks() if low <= value <= high]
        right = axes.secondary_yaxis("right")
        right.set_yticks(at, [words(value) for value in at])
        right.set_ylabel(name)
    if len(chart.series) + len(chart.rules) > 1:
        axes.legend(frameon=False, fontsize=9)


def _draw_rules(axes: Any, rules: Sequence[tuple[float, str]]) -> None:
    """Draw rules; one is told by the legend, several by words on them."""
    for value, name in rules:
        label = name if len(rules) == 1 else None
        axes.axhline(value, color=_GREY, linewidth=1, linestyle=":", label=label)
        if label is None:
            place = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
            axes.annotate(name, (0, value), xytext=(4, 3), fontsize=8, color=_GREY, **place)


def _name_above(axes: Any, x: float, name: str, coordinates: Any, y: float) -> None:
    place = {"xycoords": coordinates, "textcoords": "offset points"}
    axes.annotate(name, (x, y), xytext=(0, 4), fontsize=8, color=_GREY, ha="center", **place)


def _beside(chart: Chart, at: Sequence[float], steps: float) -> Callable[[float], float]:
    """How far aside a series stands, so that whiskers do not hide each other."""
    if chart.doubling:
        return lambda x: x * (1 + 0.015 * steps)
    gap = min((b - a for a, b in pairwise(at)), default=1.0)
    return lambda x: x + 0.03 * gap * steps


def _draw_series(axes: Any, chart: Chart, series: Series, beside: Callable[[float], float]) -> None:
    if not series.points:
        return
    xs, ys = zip(*series.points, strict=True)
    if series.look != "measured":
        axes.plot(xs, ys, color=_GREY, linewidth=1, label=series.name)
        return
    look = {
        "color": HUES[series.number % len(HUES)][0],
        "linestyle": _dashes(series.number),
        "marker": MARKERS[series.number % len(MARKERS)],
        "markersize": 5,
        "label": series.name,
    }
    bounds = [
        each if each and all(map(math.isfinite, each)) else (y, y)
        for each, y in zip_longest(series.bounds, ys)
    ]
    lows, highs = [low for low, _ in bounds], [high for _, high in bounds]
    if chart.whiskers:
        errors = [
            [max(0.0, y - low) for y, low in zip(ys, lows, strict=True)],
            [max(0.0, high - y) for y, high in zip(ys, highs, strict=True)],
        ]
        axes.errorbar([*map(beside, xs)], ys, yerr=errors, elinewidth=1, capsize=2, **look)
    else:
        axes.plot(xs, ys, markevery=max(1, -(-len(xs) // 12)), **look)
        axes.fill_between(xs, lows, highs, color=look["color"], alpha=0.16, linewidth=0)


def _draw_beyond(
    axes: Any, series: Series, beside: Callable[[float], float], low: float, high: float
) -> None:
    """Draw arrows at the edge where points lie beyond it."""
    colour = HUES[series.number % len(HUES)][0]
    for x, y in series.points:
        if not low <= y <= high:
            edge, arrow = (high, "^") if y > high else (low, "v")
            axes.plot([beside(x)], [edge], color=colour, marker=arrow, markersize=7, clip_on=False)


def _dashes(number: int) -> Any:
    dash = DASHES[number % len(DASHES)]
    return "-" if dash == "none" else (0, tuple(float(each) for each in dash.split()))


def _draw_bars(axes: Any, bars: Sequence[Bar]) -> None:
    for place, bar in enumerate(bars):
        colour = "none" if bar.number is None else HUES[bar.number % len(HUES)][0]
        axes.barh(place, bar.value, color=colour, edgecolor=_GREY, height=0.65)
        end = bar.value
        if bar.reach is not None:
            axes.barh(place, bar.reach, color="#eeeeee", height=0.65, zorder=0)
            end = max(end, bar.reach)
        if bar.bounds is not None:
            low, high = bar.bounds
            axes.plot([low, high], [place, place], color="white", linewidth=4, alpha=0.7)
            errors = [[max(0.0, bar.value - low)], [max(0.0, high - bar.value)]]
            axes.errorbar(bar.value, place, xerr=errors, color="black", capsize=3, elinewidth=1)
            end = max(end, high)
        axes.annotate(
            bar.words, (end, place), xytext=(6, 0), textcoords="offset points", va="center"
        )
    axes.set_yticks(range(len(bars)), [bar.name for bar in bars])
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.margins(x=0.15)
    axes.xaxis.set_visible(False)
    axes.spines["bottom"].set_visible(False)


def _draw_heat(axes: Any, heat: HeatMap) -> None:
    from matplotlib.patches import Rectangle

    colours = heat_colours(dark=False)
    for (row, column), cell in heat.cells.items():
        ground, ink = colours[round(cell.share * (len(colours) - 1))]
        axes.add_patch(Rectangle((column, row), 1, 1, facecolor=ground, edgecolor="#cccccc"))
        axes.text(column + 0.5, row + 0.5, cell.words, color=ink, ha="center", va="center")
    if heat.border is not None and 0 < heat.border < len(heat.columns):
        axes.axvline(heat.border, color="black", linewidth=1.5)
        _name_above(axes, heat.border, heat.border_name, "data", 0)
    axes.set_xlim(0, len(heat.columns))
    axes.set_ylim(len(heat.rows), 0)
    axes.set_xticks([each + 0.5 for each in range(len(heat.columns))], heat.columns)
    axes.set_yticks([each + 0.5 for each in range(len(heat.rows))], heat.rows)
    axes.set_xlabel(heat.x_label)
    axes.set_ylabel(heat.y_label)
