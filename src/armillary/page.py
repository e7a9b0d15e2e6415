"""The frame of a page that stands alone: one file, no script, nothing from a network.

A page's template extends page.html.jinja (ground, type, light and dark, phone and paper, the style
of charts) and takes figures and tables from page_parts.html.jinja. Whatever text it is given is
escaped.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from armillary.charts.style import STYLE
from armillary.wording import escaped

if TYPE_CHECKING:
    from markupsafe import Markup

_FRAME = Path(__file__).parent


def render(template: Path, contents: Mapping[str, Any]) -> str:
    """Return the page that a template makes of its contents."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        finalize=visible,
        loader=FileSystemLoader([template.parent, _FRAME]),
    )
    page = environment.get_template(template.name)
    return page.render(**contents, chart_style=ready(STYLE))


def ready(text: str) -> "Markup":
    """Mark text as markup of ours, which is not escaped."""
    from markupsafe import Markup

    return Markup(text)


def visible(value: object) -> object:
    """Escape the control characters of all that is not markup of ours."""
    return escaped(value) if type(value) is str else value
