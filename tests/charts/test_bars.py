"""Bars begin at zero, and are as long as their values."""

from xml.etree import ElementTree as ET

import pytest

from armillary.charts.bars import Bar, bar_chart
from armillary.charts.svg import WIDTH
from support.svg import of_class, texts


def draw(*bars):
    return ET.fromstring(bar_chart(bars, "a <b>"))


def test_bars_are_as_long_as_their_values():
    svg = draw(Bar("model", 1.0, "1.0 bits", 0), Bar("gzip -9", 2.5, "2.5 bits"))
    first, second = (float(bar.get("width")) for bar in of_class(svg, "bar"))
    assert second == pytest.approx(2.5 * first, rel=0.01)
    assert WIDTH / 3 < second < WIDTH
    assert texts(svg) == ["model", "1.0 bits", "gzip -9", "2.5 bits"]
    assert [bar.get("class") for bar in of_class(svg, "bar")] == ["bar filled s0 d0", "bar"]


def test_an_interval_spans_its_bounds_on_the_bars_scale():
    svg = draw(Bar("a", 50.0, "50 %", 1, bounds=(25.0, 75.0), reach=100.0))
    (bar,) = of_class(svg, "bar")
    start, width = float(bar.get("x")), float(bar.get("width"))
    line = of_class(svg, "error")[0]
    assert float(line.get("x1")) == pytest.approx(start + width / 2, abs=0.2)
    assert float(line.get("x2")) == pytest.approx(start + width * 1.5, abs=0.2)
    reach = of_class(svg, "reach")[0]
    assert float(reach.get("width")) == pytest.approx(2 * width, abs=0.2)


def test_no_words_leave_the_chart():
    name = "a/very/long/path/to/a/checkpoint/that/nobody/would/type/out"
    svg = draw(Bar(name, 1.0, "8,192 of 16,384"), Bar("b", 2.0, "16,384", bounds=(1.5, 2.5)))
    first = next(svg.iter("text"))
    assert "…" in first.text
    assert 6.6 * len(first.text) <= float(first.get("x"))
    for text in svg.iter("text"):
        if text.get("text-anchor") == "start":
            assert float(text.get("x")) + 6.6 * len(text.text) <= WIDTH + 0.1


def test_without_bars_there_is_no_chart_and_zero_is_a_bar():
    assert bar_chart([], "") == ""
    (bar,) = of_class(draw(Bar("a", 0.0, "none")), "bar")
    assert float(bar.get("width")) == 0
