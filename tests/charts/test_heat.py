"""A heat map has a cell for each pair, tells its counts, and can be read on its colour."""

from itertools import pairwise
from xml.etree import ElementTree as ET

from armillary.charts.heat import HeatCell, HeatMap, heat_map
from armillary.charts.svg import WIDTH
from support.svg import of_class, texts

CELLS = {
    (0, 0): HeatCell(1.0, "100", "20 of 20"),
    (0, 1): HeatCell(0.0, "0", "0 of 20"),
    (1, 0): HeatCell(0.52, "52", "13 of 25 <b>"),
}


def draw(**options):
    columns, rows = ["512", "1,024"], ["0 %", "100 %"]
    return ET.fromstring(heat_map(HeatMap("tokens", "depth", columns, rows, CELLS, **options), ""))


def test_each_cell_has_its_colour_its_number_and_its_counts():
    svg = draw()
    boxes = {box.get("class"): box.find("title").text for box in svg.iter("rect")}
    assert boxes == {
        "cell h10": "20 of 20",
        "cell h0": "0 of 20",
        "cell h5": "13 of 25 <b>",
        "cell gap": "not measured",
    }
    assert [text.text for text in of_class(svg, "over")] == ["100", "0", "52", "–"]
    assert texts(svg)[0] == "depth"
    assert texts(svg)[-3:] == ["512", "1,024", "tokens"]


def test_a_border_stands_between_its_columns():
    svg = draw(border=1, border_name="window 512")
    (line,) = of_class(svg, "axis")
    first, second = list(svg.iter("rect"))[:2]
    right = float(first.get("x")) + float(first.get("width"))
    assert right < float(line.get("x1")) < float(second.get("x"))
    assert "window 512" in texts(svg)
    assert of_class(draw(border=2, border_name="window 1,024"), "axis") == []


def test_many_columns_stay_inside_and_their_names_apart():
    columns = [f"{1000 * n:,}" for n in range(1, 33)]
    cells = {(0, n): HeatCell(0.5, "5", "") for n in range(32)}
    svg = ET.fromstring(heat_map(HeatMap("tokens", "depth", columns, ["0 %"], cells), ""))
    named = [text for text in svg.iter("text") if text.text in columns]
    halves = [(float(text.get("x")), 3.3 * len(text.text)) for text in named]
    assert len(named) >= 5
    assert all(a + half < b - other for (a, half), (b, other) in pairwise(halves))
    assert all(float(r.get("x")) + float(r.get("width")) <= WIDTH for r in svg.iter("rect"))


def test_without_cells_there_is_no_map():
    assert heat_map(HeatMap("x", "y", ["1"], ["2"], {}), "") == ""
