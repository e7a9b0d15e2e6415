"""A plan's frequencies are drawn the same way into SVG and PNG."""

import struct
from xml.etree import ElementTree as ET

import pytest

from armillary.errors import UserError
from armillary.extension.figure import draw_frequencies, title_of
from armillary.extension.plan import plan
from support.models import config, layer

pytest.importorskip("matplotlib", reason="figures need matplotlib: pip install armillary[figures]")


def slow_pairs():
    """λ of the last of 5 pairs is 250 positions at base 100: more than 64."""
    return config()


def test_an_svg_is_drawn_whole_and_the_same_each_time(tmp_path):
    planned = plan(slow_pairs(), to=256)
    for name in ("a.svg", "b.svg"):
        draw_frequencies(planned, tmp_path / name)
    drawn = (tmp_path / "a.svg").read_bytes()
    assert ET.fromstring(drawn).tag == "{http://www.w3.org/2000/svg}svg"
    assert (tmp_path / "b.svg").read_bytes() == drawn


def test_a_png_is_as_large_as_it_says(tmp_path):
    draw_frequencies(plan(slow_pairs(), to=256, rule="ntk"), tmp_path / "a.png")
    drawn = (tmp_path / "a.png").read_bytes()
    assert drawn.startswith(b"\x89PNG\r\n\x1a\n")
    assert struct.unpack(">II", drawn[16:24]) == (1280, 768)


def test_the_title_says_what_is_seen():
    planned = plan(slow_pairs(), to=256)
    none, yarn = planned.rules[0], planned.recommended
    assert title_of(planned, none) == (
        "Without a rule: 2 of 5 pairs meet angles in 256 positions that 64 never showed"
    )
    assert (
        title_of(planned, yarn) == "yarn: no pair meets an angle in 256 positions that is new to it"
    )


def test_what_cannot_be_drawn_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"pairs\.gif: a figure's name ends in \.svg or \.png"):
        draw_frequencies(plan(slow_pairs(), to=256), tmp_path / "pairs.gif")
    with pytest.raises(UserError, match="nothing to draw; 64 positions are within the window"):
        draw_frequencies(plan(slow_pairs(), to=64), tmp_path / "pairs.svg")
    unrotated = plan(config(layer(attention={"rotary": None})), to=256)
    with pytest.raises(UserError, match="nothing to draw"):
        draw_frequencies(unrotated, tmp_path / "pairs.svg")
    assert not list(tmp_path.iterdir())
