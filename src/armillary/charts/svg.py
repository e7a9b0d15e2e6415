"""Elements of SVG, and how much room a text takes."""

import unicodedata
from collections.abc import Iterable
from xml.etree import ElementTree as ET

from armillary.wording import escaped

Point = tuple[float, float]

# A chart is this wide in its own units, and scaled to its place; a phone shows text at 0.9 of it.
WIDTH = 390
CHARACTER, LINE = 7.1, 17  # room for text of 12 units
_BROAD = "%mwMW@"


def drawing(height: float, description: str, width: float = WIDTH) -> ET.Element:
    """Return an empty chart."""
    return ET.Element(
        "svg",
        {
            "class": "chart",
            "viewBox": f"0 0 {width:g} {height:g}",
            "role": "img",
            "aria-label": description,
        },
    )


def markup(svg: ET.Element) -> str:
    """Return an element as text for a page."""
    return escaped(ET.tostring(svg, encoding="unicode"))


def add(parent: ET.Element, tag: str, look: str, **attributes: float | str) -> ET.Element:
    """Add an element of class `look`; numbers are rounded to a tenth of a unit."""
    texts = {
        name.replace("_", "-"): value if isinstance(value, str) else f"{value:.1f}"
        for name, value in attributes.items()
    }
    return ET.SubElement(parent, tag, {"class": look, **texts} if look else texts)


def add_text(
    svg: ET.Element, x: float, y: float, words: str, anchor: str = "start", look: str = ""
) -> None:
    """Add words whose start, middle or end is at x, and whose foot is at y."""
    add(svg, "text", look, x=x, y=y, text_anchor=anchor).text = words


def add_line(svg: ET.Element, look: str, x1: float, y1: float, x2: float, y2: float) -> None:
    """Add a straight line."""
    add(svg, "line", look, x1=x1, y1=y1, x2=x2, y2=y2)


def add_title(element: ET.Element, words: str) -> None:
    """Tell words when the pointer rests on the element."""
    ET.SubElement(element, "title").text = words


def path(places: Iterable[Point]) -> str:
    """Return the `d` of a path through places."""
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places)


def width_of(words: str) -> float:
    """Return the room that words need, a little more rather than less."""
    wide = sum(each in "…→" or unicodedata.east_asian_width(each) in "WF" for each in words)
    broad = sum(each in _BROAD for each in words)
    return CHARACTER * (len(words) + wide + broad / 2)


def fitted(words: str, room: float) -> str:
    """Return words, their middle left out where they need more room."""
    if width_of(words) <= room:
        return words
    kept = len(words)
    while kept > 1:
        kept -= 1
        head, tail = kept - kept // 2, kept // 2
        shorter = f"{words[:head]}…{words[len(words) - tail :]}"
        if width_of(shorter) <= room:
            return shorter
    return "…"
