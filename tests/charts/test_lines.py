"""Charts are well-formed SVG whose axes hold all that is drawn and say their units."""

import math
import re
from itertools import pairwise
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from armillary.charts.lines import HEIGHT, Chart, Series, line_chart, smoothed, thinned
from armillary.charts.style import STYLE
from armillary.charts.svg import WIDTH
from support.svg import numbers, of_class, texts

CURVE = [(step, 2 + 4 * 0.98**step) for step in range(10, 210, 10)]


def draw(*series, **options):
    return ET.fromstring(line_chart(Chart("step", "nats", series, **options), "a <b>"))


def test_a_curve_goes_down_as_its_values_do():
    svg = draw(Series("loss", [(0, 4.0), (5, 2.0), (10, 0.0)], "line"))
    (curve,) = of_class(svg, "line")
    x0, y0, x1, y1, x2, y2 = numbers(curve.get("d"))
    assert x0 < x1 < x2
    assert y0 < y1 < y2
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2)
    assert y1 - y0 == pytest.approx(y2 - y1, abs=0.2)


def test_on_a_logarithmic_axis_equal_ratios_are_equal_distances():
    svg = draw(Series("a", [(0, 1.0), (5, 10.0), (10, 100.0)], "line"), logarithmic=True)
    (curve,) = of_class(svg, "line")
    _, y0, _, y1, _, y2 = numbers(curve.get("d"))
    assert y1 - y0 == pytest.approx(y2 - y1, abs=0.2)


def test_a_value_lies_on_the_line_of_its_tick():
    """On both kinds of axis; a rule at 2 must lie on the grid line that is called 2."""
    for logarithmic in (False, True):
        svg = draw(
            Series("a", [(0, 0.5), (100, 10.0)], "line"),
            rules=[(2.0, "two")],
            logarithmic=logarithmic,
        )
        drawn = [rule.get("y1") for rule in of_class(svg, "rule")]
        label = next(text for text in svg.iter("text") if text.text in ("2", "2.0"))
        assert f"{float(label.get('y')) - 4:.1f}" in drawn


def test_axes_have_units_and_round_ticks():
    svg = draw(Series("loss", CURVE, "line"))
    assert texts(svg)[0] == "nats"
    assert texts(svg)[-1] == "step"
    assert texts(svg)[1:-1] == ["2", "3", "4", "5", "6", "0", "50", "100", "150", "200"]
    assert svg.get("aria-label") == "a <b>"


def test_large_and_small_values_share_a_power_that_the_label_says():
    small = texts(draw(Series("rate", [(1, 0.0), (2, 3e-4)], "line"), from_zero=True))
    assert small[0] == "nats × 10⁻⁶"
    assert small[1:5] == ["0", "100", "200", "300"]
    large = texts(draw(Series("rate", [(1, 0.0), (2, 3e6)], "line")))
    assert (large[0], large[1:5]) == ("nats × 10⁶", ["0", "1", "2", "3"])


def test_one_series_needs_no_legend_and_several_have_one():
    line = Series("training", CURVE, "line")
    assert "training" not in texts(draw(line))
    told = texts(draw(line, Series("held out", CURVE, "points"), rules=[(2.0, "at 2")]))
    assert [word for word in told if word in ("training", "held out", "at 2")] == [
        "training",
        "held out",
        "at 2",
    ]


def test_series_differ_in_more_than_colour():
    for look in ("points", "rule"):
        assert re.search(rf"\.chart \.{look} {{[^}}]*stroke-dasharray", STYLE)
    svg = draw(Series("a", CURVE, "line"), Series("b", CURVE, "points"))
    assert len(of_class(svg, "marker")) == len(CURVE) + 1  # one in the legend


def test_values_can_be_hovered_over():
    svg = draw(Series("raw", CURVE, "faint"), Series("mean", CURVE, "line"))
    first = of_class(svg, "strip")[0]
    assert first.find("title").text == "step 10\nraw 5.268\nmean 5.268"
    svg = draw(Series("held out", CURVE[:1], "points"))
    assert of_class(svg, "marker")[0].find("title").text == "step 10\nheld out 5.268"


def test_what_is_no_number_is_left_out():
    svg = draw(Series("a", [(0, math.nan), (1, 1.0), (2, math.inf), (3, 2.0)], "line"))
    assert len(numbers(of_class(svg, "line")[0].get("d"))) == 4
    svg = draw(Series("a", [(1, 1.0), (2, 0.0), (3, 2.0)], "line"), logarithmic=True)
    assert len(numbers(of_class(svg, "line")[0].get("d"))) == 4


def test_marks_stand_where_something_happened_whatever_its_value():
    svg = draw(Series("a", CURVE, "line"), Series("skipped", [(117, math.nan)], "crosses"))
    assert [mark.find("title").text for mark in of_class(svg, "crosses") if len(mark)] == [
        "skipped: 117"
    ]


def test_without_anything_to_measure_there_is_no_chart():
    assert line_chart(Chart("step", "nats", []), "") == ""
    nothing = [Series("a", [(1, math.nan)], "line"), Series("b", [(1, 0.0)], "crosses")]
    assert line_chart(Chart("step", "nats", nothing), "") == ""


def test_names_are_text():
    hostile = "</text><script>&"
    names = hostile + "\x1b\ud800"
    svg = draw(Series(names, CURVE, "line"), Series(names, CURVE, "points"))
    assert texts(svg).count(hostile + "\\x1b\\ud800") == 2
    assert list(svg.iter("script")) == []


values = st.floats(allow_nan=True, allow_infinity=True, min_value=None, max_value=None, width=32)


@given(
    ys=st.lists(values, min_size=1, max_size=40),
    logarithmic=st.booleans(),
    look=st.sampled_from(["faint", "line", "points"]),
)
def test_whatever_is_drawn_stays_inside(ys, logarithmic, look):
    series = Series("a", list(enumerate(ys)), look)
    drawn = line_chart(Chart("x", "y", [series], logarithmic=logarithmic), "")
    if not drawn:
        assert not any(math.isfinite(y) and (y > 0 or not logarithmic) for y in ys)
        return
    svg = ET.fromstring(drawn)
    assert len(texts(svg)) >= 5
    for path in of_class(svg, look):
        if path.tag == "path":
            places = numbers(path.get("d"))
            assert all(0 <= x <= WIDTH for x in places[::2])
            assert all(0 <= y <= HEIGHT for y in places[1::2])


def test_a_running_mean_is_over_the_last_points_that_are_numbers():
    points = [(1, 1.0), (2, math.nan), (3, 3.0), (4, 8.0)]
    assert smoothed(points, 2) == [(1, 1.0), (3, 2.0), (4, 5.5)]


@pytest.mark.parametrize("count", [399, 400, 401, 5000, 5001])
def test_thinned_points_keep_peaks_and_both_ends(count):
    points = [(x, 1.0) for x in range(count)]
    points[123], points[234] = (123, 9.0), (234, -9.0)
    kept = thinned(points, 400)
    assert len(kept) <= 400
    assert kept == sorted(kept)
    assert {points[0], points[123], points[234], points[-1]} <= set(kept)


def measured(name, points, number=0, bounds=()):
    return Series(name, points, "measured", number, bounds)


LENGTHS = [512, 1024, 2048, 4096]
BOUNDS = [(2.8, 3.2), (2.6, 3.0), None, (2.2, 2.6)]
LOSSES = list(zip(LENGTHS, [3.0, 2.8, 2.6, 2.4], strict=True))


def test_lengths_that_double_are_equally_far_apart_and_named():
    svg = draw(measured("a", LOSSES), doubling=True)
    (curve,) = of_class(svg, "measured")
    xs = numbers(curve.get("d"))[::2]
    steps = [after - before for before, after in pairwise(xs)]
    assert steps == pytest.approx([steps[0]] * 3, abs=0.2)
    assert texts(svg)[-5:-1] == ["512", "1,024", "2,048", "4,096"]


def test_a_band_goes_through_the_bounds():
    svg = draw(measured("a", LOSSES, 3, BOUNDS), rules=[(2.8, "low"), (3.2, "high")])
    (band,) = of_class(svg, "band")
    places = numbers(band.get("d"))
    low, high = (float(rule.get("y1")) for rule in of_class(svg, "rule")[-2:])
    assert len(places) == 12  # three points have bounds
    assert places[1] == pytest.approx(high, abs=0.11)
    assert places[-1] == pytest.approx(low, abs=0.11)
    assert "s3" in band.get("class")


def test_whiskers_of_several_series_stand_side_by_side():
    series = [measured(name, LOSSES, n, BOUNDS) for n, name in enumerate("abc")]
    svg = draw(*series, doubling=True, whiskers=True)
    assert of_class(svg, "band") == []
    whiskers = of_class(svg, "whisker")
    assert len(whiskers) == 9
    assert len({line.get("x1") for line in whiskers}) == 9


def test_a_point_alone_shows_its_interval():
    svg = draw(measured("a", LOSSES[:1], 0, BOUNDS[:1]), doubling=True)
    assert len(of_class(svg, "whisker")) == 1


def test_what_lies_beyond_the_span_is_an_arrow_at_its_edge():
    series = measured("a", [(1, 0.5), (2, 7.0), (3, -9.0)])
    svg = draw(series, span=(0.0, 1.0))
    up, down = of_class(svg, "beyond")
    top = float(of_class(svg, "grid")[-1].get("y1"))
    bottom = float(of_class(svg, "axis")[0].get("y1"))
    assert min(numbers(up.get("d"))[1::2]) == pytest.approx(top + 2)
    assert max(numbers(down.get("d"))[1::2]) == pytest.approx(bottom - 2)
    (inner,) = svg.iter("svg") if svg.tag != "svg" else list(svg.iter("svg"))[1:]
    assert of_class(inner, "measured")  # which cuts it off
    assert "a 7" in of_class(svg, "strip")[1].find("title").text


def test_a_mark_stands_where_its_value_is():
    svg = draw(measured("a", LOSSES), doubling=True, marks=[(1024, "window 1,024")])
    (mark,) = of_class(svg, "mark")
    assert mark.get("x1") == next(t for t in svg.iter("text") if t.text == "1,024").get("x")
    assert "window 1,024" in texts(svg)


def test_intervals_are_told_under_the_pointer():
    svg = draw(measured("a", LOSSES, 0, BOUNDS), measured("b", LOSSES[1:], 1), doubling=True)
    told = [strip.find("title").text for strip in of_class(svg, "strip")]
    assert told[0] == "step 512\na 3 (2.8 to 3.2)"
    assert told[1] == "step 1,024\na 2.8 (2.6 to 3)\nb 2.8"


def test_a_legend_breaks_into_rows_that_stay_inside():
    names = [f"model no. {n}" for n in range(7)] + ["x" * 200]
    svg = draw(*(measured(name, LOSSES, n) for n, name in enumerate(names)))
    words = [text for text in svg.iter("text") if text.text.startswith(("model", "x"))]
    assert len(words) == 8
    assert len({text.get("y") for text in words}) == 4
    assert all(float(text.get("x")) + 6.6 * len(text.text) <= WIDTH for text in words)
    lowest = max(float(text.get("y")) for text in words)
    assert lowest < min(float(line.get("y1")) for line in of_class(svg, "grid"))


def test_another_name_for_the_values_stands_on_the_right_of_their_lines():
    doubled = ("doubled", lambda value: f"{2 * value:g} x")
    svg = draw(measured("a", LOSSES), doubling=True, also=doubled)
    assert texts(svg)[:2] == ["nats", "doubled"]
    right = {text.get("y"): text.text for text in svg.iter("text") if text.text.endswith(" x")}
    for text in svg.iter("text"):
        if text.get("text-anchor") == "end" and text.get("y") in right and text.get("x") != "390.0":
            assert right[text.get("y")] == f"{2 * float(text.text):g} x"
    assert len(right) >= 4
    (curve,) = of_class(svg, "measured")
    assert max(numbers(curve.get("d"))[::2]) < WIDTH - 7 * len("6.4 x")
