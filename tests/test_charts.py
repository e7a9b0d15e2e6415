"""Charts are well-formed SVG whose axes hold all that is drawn and say their units."""

import math
import re
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from armillary.charts import (
    HEIGHT,
    STYLE,
    WIDTH,
    Chart,
    Series,
    bar_chart,
    line_chart,
    smoothed,
    thinned,
)

CURVE = [(step, 2 + 4 * 0.98**step) for step in range(10, 210, 10)]


def draw(*series, **options):
    return ET.fromstring(line_chart(Chart("step", "nats", series, **options), "a <b>"))


def texts(svg):
    return [text.text for text in svg.iter("text")]


def numbers(path):
    return [float(number) for number in re.findall(r"-?[\d.]+", path)]


def of_class(svg, name):
    return [each for each in svg.iter() if name in each.get("class", "").split()]


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


def test_bars_are_as_long_as_their_values():
    svg = ET.fromstring(bar_chart([("model", 1.0), ("gzip -9", 2.5)], "bits", "c"))
    first, second = (float(bar.get("width")) for bar in of_class(svg, "bar"))
    assert second == pytest.approx(2.5 * first, rel=0.01)
    assert WIDTH / 3 < second < WIDTH
    assert texts(svg) == ["model", "1.000 bits", "gzip -9", "2.500 bits"]
    assert [bar.get("class") for bar in of_class(svg, "bar")] == ["bar chosen", "bar"]


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
