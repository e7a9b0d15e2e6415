"""Series can be told apart and seen on both grounds; numbers can be read on every heat."""

import pytest

from armillary.charts.style import (
    DASHES,
    HUES,
    MARKERS,
    contrast,
    heat_colours,
    heat_of,
    look_of,
    marker,
)


def test_contrast_is_that_of_the_guidelines():
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)
    assert contrast("#ffffff", "#777777") == contrast("#777777", "#ffffff")


@pytest.mark.parametrize(("dark", "ground"), [(False, "#ffffff"), (True, "#161616")])
def test_lines_and_numbers_stand_out(dark, ground):
    assert min(contrast(hue[dark], ground) for hue in HUES) >= 4.5
    assert min(contrast(text, cell) for cell, text in heat_colours(dark)) >= 4.5


def test_heat_goes_one_way():
    """So that it says the same in grey."""
    for dark in (False, True):
        towards = [contrast(cell, "#000000") for cell, _ in heat_colours(dark)]
        assert towards == sorted(towards, reverse=not dark)
        assert len(set(towards)) == len(towards)


def test_many_series_look_different_even_without_colour():
    in_grey = {(DASHES[n % len(DASHES)], MARKERS[n % len(MARKERS)]) for n in range(30)}
    assert len(in_grey) == 30
    assert len({look_of(n) for n in range(35)}) == 35
    assert len({marker(n, 0, 0) for n in range(len(MARKERS))}) == len(MARKERS)


def test_a_share_has_the_nearest_heat():
    assert [heat_of(share) for share in (0, 0.04, 0.06, 0.5, 1, 1.1)] == [
        "h0",
        "h0",
        "h1",
        "h5",
        "h10",
        "h10",
    ]
