"""In a browser the page fits a phone and a desk, and can be read in light and in dark."""

import re
from dataclasses import replace

import pytest

from armillary.charts.style import contrast
from armillary.evaluation.report import write_report
from support.browser import look_at
from support.summaries import changes, comparison, summaries

pytestmark = pytest.mark.browser

PHONE, DESK = 390, 1280


@pytest.fixture(scope="module", params=["light", "dark", "crowded", "alone"])
def seen(request, tmp_path_factory):
    """What was found by width; and whether it was dark."""
    folder = tmp_path_factory.mktemp(request.param)
    page = folder / "report.html"
    if request.param == "crowded":
        write_report(page, crowded())
    elif request.param == "alone":
        write_report(page, summaries()[3:4])
    else:
        commands = ["armillary evaluate runs/demo/yarn --out results/yarn --minutes 10"]
        write_report(page, summaries(), comparison(), frequencies=changes(), commands=commands)
    dark = request.param == "dark"
    return look_at(page, (PHONE, DESK), dark, folder / "browser"), dark


def crowded():
    """More models than there are hues, with long names, two of them the same."""
    several = [*summaries(), *summaries()[1:]]
    names = [f"experiments/2026/none-and-mamba-{n}/adapted-for-400-steps" for n in range(8)]
    runs = [
        replace(each.run, name=name) for each, name in zip(several, [*names, names[0]], strict=True)
    ]
    return [replace(each, run=run) for each, run in zip(several, runs, strict=True)]


def hexadecimal(colour):
    """rgb(1, 2, 3) → #010203."""
    red, green, blue = re.findall(r"\d+", colour)[:3]
    return f"#{int(red):02x}{int(green):02x}{int(blue):02x}"


@pytest.mark.parametrize("width", [PHONE, DESK])
def test_nothing_sticks_out_or_is_cut(seen, width):
    found = seen[0][width]
    assert found["scroll"] <= width
    assert found["outside"] == []
    assert found["cut"] == []


@pytest.mark.parametrize("width", [PHONE, DESK])
def test_no_words_of_a_chart_lie_over_each_other(seen, width):
    assert seen[0][width]["overlapping"] == []


@pytest.mark.parametrize("width", [PHONE, DESK])
def test_words_of_charts_are_neither_tiny_nor_huge(seen, width):
    heights = seen[0][width]["heights"]
    assert min(heights) > 11
    assert max(heights) < 22


def test_wide_tables_scroll_in_their_box_on_a_phone(seen):
    boxes = seen[0][PHONE]["scrolled"]
    assert all(shown <= PHONE and way == "auto" for shown, _, way in boxes)
    assert any(whole > shown for shown, whole, _ in boxes)


def test_words_and_lines_stand_out_from_the_ground(seen):
    found, dark = seen[0][DESK], seen[1]
    ground = hexadecimal(found["ground"])
    assert (contrast(ground, "#000000") < 2) == dark
    faint = [
        (what, colour)
        for what, colour in found["colours"]
        if contrast(hexadecimal(colour), ground) < 4.5
    ]
    assert faint == []


def test_numbers_can_be_read_on_their_heat(seen):
    cells = {tuple(map(hexadecimal, cell)) for cell in seen[0][DESK]["cells"]}
    assert len(cells) >= 5
    assert min(contrast(*cell) for cell in cells) >= 4.5
