"""How charts look: the colours of series and of heat, in light, in dark and on paper.

The hues are Okabe and Ito's, darkened for light ground and lightened for dark ground until they
have a contrast of 4.5 to it. Beside its hue a series has a dash and a marker; no two of the three
counts have a common divisor, so that it takes long until two series look alike.
"""

from armillary.charts.svg import Point, path

# On light ground, on dark ground.
HUES = (
    ("#0072b2", "#56b4e9"),
    ("#c14e00", "#f0a060"),
    ("#00805e", "#2cc79a"),
    ("#a8478a", "#e39ac6"),
    ("#7d6500", "#f0e442"),
    ("#4d4d4d", "#d0d0d0"),
    ("#5a4fcf", "#a9a4ff"),
)
DASHES = ("none", "7 3", "2 2.5", "10 3 2 3", "5 2 1.5 2 1.5 2")
MARKERS = "os^DvP"  # as matplotlib calls them
_HEATS = 11  # 0 %, 10 %, … 100 %
_HEAT_ENDS = (("#ffffff", "#08519c"), ("#161616", "#8fd0f7"))


def look_of(number: int) -> str:
    """The classes of a series."""
    return f"s{number % len(HUES)} d{number % len(DASHES)}"


def heat_of(share: float) -> str:
    """The class of a share between 0 and 1."""
    return f"h{round(min(max(share, 0.0), 1.0) * (_HEATS - 1))}"


def marker(number: int, x: float, y: float, size: float = 4.0) -> str:
    """Return the `d` of the path of a series' marker around (x, y)."""
    a, b, c = size * 1.1, size * 0.9, size * 0.45
    shapes: dict[str, list[Point]] = {
        "s": [(-b, -b), (b, -b), (b, b), (-b, b)],
        "^": [(-a, b), (0, -a), (a, b)],
        "D": [(0, -a * 1.25), (a * 1.25, 0), (0, a * 1.25), (-a * 1.25, 0)],
        "v": [(-a, -b), (0, a), (a, -b)],
        "P": [
            *((-c, -a), (c, -a), (c, -c), (a, -c), (a, c), (c, c)),
            *((c, a), (-c, a), (-c, c), (-a, c), (-a, -c), (-c, -c)),
        ],
    }
    shape = shapes.get(MARKERS[number % len(MARKERS)])
    if shape is None:
        half = f"a{b:.1f} {b:.1f} 0 1 0"
        return f"M{x - b:.1f} {y:.1f}{half} {2 * b:.1f} 0{half} {-2 * b:.1f} 0Z"
    return path([(x + dx, y + dy) for dx, dy in shape]) + "Z"


def swatch(number: int) -> str:
    """Return the sign of a series as a small SVG element, to stand beside its name in a text."""
    own = look_of(number)
    return (
        f'<svg class="swatch" viewBox="0 0 34 12" aria-hidden="true">'
        f'<line class="measured {own}" x1="1" y1="6" x2="33" y2="6"/>'
        f'<path class="spot {own}" d="{marker(number, 17, 6)}"/></svg>'
    )


def contrast(one: str, other: str) -> float:
    """How far two colours (#rrggbb) differ in brightness, 1 to 21.

    Source: Web Content Accessibility Guidelines 2.2, "contrast ratio".
    """
    low, high = sorted((_luminance(one), _luminance(other)))
    return (high + 0.05) / (low + 0.05)


def _luminance(colour: str) -> float:
    def linear(value: float) -> float:
        return value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4

    red, green, blue = (linear(value / 255) for value in _channels(colour))
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _channels(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def heat_colours(dark: bool) -> list[tuple[str, str]]:
    """The ground and the text of each step of heat."""
    low, high = _HEAT_ENDS[dark]
    colours = []
    for step in range(_HEATS):
        share = step / (_HEATS - 1)
        mixed = (
            round(a + (b - a) * share) for a, b in zip(_channels(low), _channels(high), strict=True)
        )
        ground = "#" + "".join(f"{value:02x}" for value in mixed)
        text = "#000000"
        if contrast(text, ground) < contrast("#ffffff", ground):
            text = "#ffffff"
        colours.append((ground, text))
    return colours


def _properties(dark: bool) -> str:
    hues = "".join(f" --hue-{n}: {hue[dark]};" for n, hue in enumerate(HUES))
    heats = "".join(
        f" --heat-{n}: {ground}; --on-heat-{n}: {text};"
        for n, (ground, text) in enumerate(heat_colours(dark))
    )
    return f".chart, .swatch {{{hues}{heats} }}"


STYLE = "\n".join(
    [
        "",
        _properties(dark=False),
        f"@media screen and (prefers-color-scheme: dark) {{ {_properties(dark=True)} }}",
        *(f".s{n} {{ --own: var(--hue-{n}); }}" for n in range(len(HUES))),
        *(f".d{n} {{ --dash: {dash}; }}" for n, dash in enumerate(DASHES)),
        *(
            f".chart .h{n} {{ fill: var(--heat-{n}); }} "
            f".chart .on-h{n} {{ fill: var(--on-heat-{n}); }}"
            for n in range(_HEATS)
        ),
        """\
.chart { display: block; width: 100%; height: auto; }
.swatch { display: inline-block; width: 34px; height: 12px; vertical-align: -1px; }
.chart text { font-size: 12px; fill: currentColor; font-variant-numeric: tabular-nums; }
.chart .grid { stroke: currentColor; stroke-opacity: .15; }
.chart .axis { stroke: currentColor; stroke-opacity: .6; }
.chart .rule { stroke: currentColor; stroke-opacity: .7; stroke-dasharray: 1 3; }
.chart .mark { stroke: currentColor; stroke-opacity: .5; stroke-dasharray: 4 3; }
.chart .faint, .chart .line, .chart .points, .chart .crosses { fill: none; stroke-linejoin: round; }
.chart .faint { stroke: var(--hue-0); stroke-opacity: .4; stroke-width: 1; }
.chart .reference { fill: none; stroke: currentColor; stroke-opacity: .7; stroke-width: 1.3; }
.chart .line { stroke: var(--hue-0); stroke-width: 2; }
.chart .points { stroke: var(--hue-1); stroke-width: 1.5; stroke-dasharray: 5 3; }
.chart .crosses { stroke: currentColor; stroke-width: 1.5; }
.chart .marker { fill: var(--hue-1); stroke: none; }
.measured { fill: none; stroke: var(--own); stroke-width: 1.8; stroke-dasharray: var(--dash);
  stroke-linejoin: round; }
.spot { fill: var(--own); stroke: none; }
.chart .band { fill: var(--own); fill-opacity: .16; stroke: none; }
.chart .whisker { stroke: var(--own); stroke-width: 1.3; }
.chart .bar { fill: none; stroke: currentColor; stroke-opacity: .6; }
.chart .filled { fill: var(--own); stroke: var(--own); }
.chart .reach { fill: currentColor; fill-opacity: .07; }
.chart .error { stroke: currentColor; stroke-width: 1.3; }
.chart .halo { stroke: var(--ground, #fff); stroke-opacity: .7; stroke-width: 5; }
.chart .cell { stroke: currentColor; stroke-opacity: .18; }
.chart .over { pointer-events: none; }
.chart .gap { fill: currentColor; fill-opacity: .06; }
.chart .strip { fill: transparent; }
.chart .strip:hover { fill: currentColor; fill-opacity: .08; }
""",
    ]
)
