"""Shares in a grid: each cell's number in it, the deeper its colour the larger."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from xml.etree import ElementTree as ET

from armillary.charts.style import heat_of
from armillary.charts.svg import (
    LINE,
    WIDTH,
    add,
    add_line,
    add_text,
    add_title,
    drawing,
    markup,
    width_of,
)

_HIGH, _WIDE = 27, 44
_NARROWEST = 300


@dataclass(frozen=True)
class HeatCell:
    """A share between 0 and 1, its words in the cell, and what is told when one rests on it."""

    share: float
    words: str
    title: str


@dataclass(frozen=True)
class HeatMap:
    """Cells by row and column; a cell that is not there was not measured.

    border  the number of columns left of an upright line, which `border_name` calls
    """

    x_label: str
    y_label: str
    columns: Sequence[str]
    rows: Sequence[str]
    cells: Mapping[tuple[int, int], HeatCell]
    border: int | None = None
    border_name: str = ""


def heat_map(heat: HeatMap, description: str) -> str:
    """Return a heat map as an SVG element, or "" when it has no cells."""
    if not heat.cells:
        return ""
    named = heat.border is not None and 0 < heat.border < len(heat.columns)
    top = LINE * (1.6 + named)
    bottom = top + _HIGH * len(heat.rows)
    left = 10 + max(map(width_of, heat.rows))
    width = min(max(left + _WIDE * len(heat.columns), _NARROWEST), WIDTH)
    svg = drawing(bottom + 2.6 * LINE, description, width)
    wide = (width - left - 1) / len(heat.columns)
    add_text(svg, 0, 12, heat.y_label)
    for row, name in enumerate(heat.rows):
        y = top + _HIGH * row
        add_text(svg, left - 6, y + _HIGH / 2 + 4, name, anchor="end")
        for column in range(len(heat.columns)):
            cell = heat.cells.get((row, column))
            x = left + wide * column
            heat_class = "gap" if cell is None else heat_of(cell.share)
            look = f"cell {heat_class}"
            box = add(svg, "rect", look, x=x + 0.5, y=y + 0.5, width=wide - 1, height=_HIGH - 1)
            words = "–" if cell is None else cell.words
            add_text(
                svg,
                x + wide / 2,
                y + _HIGH / 2 + 4,
                words,
                anchor="middle",
                look="over" if cell is None else f"over on-{heat_class}",
            )
            add_title(box, "not measured" if cell is None else cell.title)
    _draw_columns(svg, heat.columns, left, wide, bottom)
    add_text(svg, left + wide * len(heat.columns) / 2, bottom + 2.2 * LINE, heat.x_label, "middle")
    if named and heat.border is not None:
        x = left + wide * heat.border
        add_line(svg, "axis", x, top - 4, x, bottom + 4)
        half = width_of(heat.border_name) / 2
        add_text(svg, min(max(x, half), width - half), top - 7, heat.border_name, "middle")
    return markup(svg)


def _draw_columns(
    svg: ET.Element, columns: Sequence[str], left: float, wide: float, bottom: float
) -> None:
    width = left + wide * len(columns)
    every = math.ceil((max(map(width_of, columns)) + 4) / wide)
    for column in range(0, len(columns), every):
        x = left + wide * (column + 0.5)
        half = width_of(columns[column]) / 2
        add_text(svg, min(x, width - half), bottom + LINE, columns[column], "middle")
