"""One page about one or several evaluations: verdict, curves, grids, tables, how to do it again.

The page stands alone: no script, nothing from a network. Whatever text it is given is escaped.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from armillary import page
from armillary.charts.style import swatch
from armillary.diagnosis.frequencies import FrequencyChange
from armillary.evaluation import plots, tables
from armillary.evaluation.comparison import Comparison, Family
from armillary.evaluation.summary import Summary
from armillary.evaluation.telling import drawn_by, names_of
from armillary.evaluation.verdict import Gain, gains_of, variants, verdict
from armillary.files import write_atomically

if TYPE_CHECKING:
    from markupsafe import Markup

_LONGEST_TITLE = 60
TEMPLATE = Path(__file__).with_name("report.html.jinja")

_FAMILIES: dict[Family, str] = {
    "loss": "Loss, nats per token",
    "questions": "Questions, right answers in points of a hundred",
    "short tasks": "Short tasks, accuracy in points of a hundred",
}


def write_report(
    path: Path,
    summaries: Sequence[Summary],
    comparison: Comparison | None = None,
    *,
    frequencies: Sequence[FrequencyChange | None] = (),
    commands: Sequence[str] = (),
) -> None:
    """Write the page of evaluations.

    comparison   of the same models in the same order, when they were compared
    frequencies  of each model, in the same order, what its rule did to them; None where unknown
    commands     what to run for the same results
    Raises ValueError without a summary, and for a comparison or frequencies of other models;
    UserError when it cannot write.
    """
    html = render(summaries, comparison, frequencies=frequencies, commands=commands)
    with write_atomically(path) as file:
        file.write(html.encode())


def render(
    summaries: Sequence[Summary],
    comparison: Comparison | None = None,
    *,
    frequencies: Sequence[FrequencyChange | None] = (),
    commands: Sequence[str] = (),
) -> str:
    """Return the page as HTML; see `write_report`."""
    if comparison is not None and comparison.runs != tuple(each.run for each in summaries):
        raise ValueError("the comparison is of other models, or of these in another order")
    if frequencies and len(frequencies) != len(summaries):
        raise ValueError(f"{len(frequencies)} frequencies for {len(summaries)} models")
    gains = gains_of(summaries, comparison)
    contents = {
        "title": _title(summaries),
        "verdict": [_whole(sentence) for sentence in verdict(summaries, comparison)],
        "overview": _shown(tables.overview(summaries, gains, comparison)),
        "sections": [
            each
            for each in _sections(summaries, comparison, gains, frequencies)
            if each.figures or each.tables or each.grids
        ],
        "provenance": [(title, _shown(table)) for title, table in tables.provenance(summaries)],
        "commands": list(commands),
    }
    return page.render(TEMPLATE, contents)


@dataclass(frozen=True)
class _Section:
    """A part of the page: words, figures, titled grids of smaller figures, tables.

    folded  tables that one opens
    """

    key: str
    title: str
    words: str
    figures: list[tuple[str, "Markup"]] = field(default_factory=list)
    grids: list[tuple[str, list[tuple[str, "Markup"]]]] = field(default_factory=list)
    tables: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    folded: list[tuple[str, dict[str, Any]]] = field(default_factory=list)


def _title(summaries: Sequence[Summary]) -> str:
    if len(summaries) == 1:
        return f"Evaluation of {summaries[0].run.name}"
    names = ", ".join(names_of([each.run for each in summaries]))
    listed = f": {names}" if len(names) <= _LONGEST_TITLE else ""
    return f"Evaluation of {len(summaries)} models{listed}"


def _sections(
    summaries: Sequence[Summary],
    comparison: Comparison | None,
    gains: Sequence[Gain],
    frequencies: Sequence[FrequencyChange | None],
) -> Iterator[_Section]:
    yield _Section(
        "effective",
        "Effective length",
        "The largest length at which questions are still answered: the lower bound of their share "
        "is at least 85 % of the model's own share at the shortest length, there and at all "
        "lengths before. The pale ground goes to the longest that was tried.",
        _drawn(plots.effective_plots(summaries)),
        folded=_folded("Effective lengths in numbers", tables.effective(summaries)),
    )
    yield _losses(summaries, gains)
    retained = tables.short(summaries, comparison)
    yield _questions(summaries)
    yield _Section(
        "short",
        "Short texts",
        "What the model could do before: the loss of fixed short texts, and short tasks by the "
        "likeliest of their choices.",
        _drawn(plots.short_plots(summaries)),
        tables=[("In numbers", _shown(retained))] if retained.rows else [],
    )
    if comparison is not None:
        yield _compared(comparison, summaries)
    yield _Section(
        "frequencies",
        "Frequencies",
        "Of each channel pair, how many positions a turn takes: as trained, and after.",
        _drawn(plots.frequency_plot(summaries, frequencies)),
    )


def _questions(summaries: Sequence[Summary]) -> _Section:
    """All kinds of question: by length, where in the context, by what else varies."""
    asked = variants(summaries)
    places = [
        (f"{variant}: by length and place of the answer", _drawn(heats))
        for variant in asked
        if (heats := list(plots.heat_plots(summaries, variant)))
    ]
    return _Section(
        "questions",
        "Questions",
        "An answer is right when each of its tokens is the likeliest. Intervals are of 95 %, after "
        "Wilson. Depth is where in the context the answer stands: 0 % is its beginning.",
        _drawn([*plots.length_plots(summaries), *plots.factor_plots(summaries)]),
        places,
        folded=[
            each
            for variant in asked
            for each in _folded(f"{variant} in numbers", tables.rates(summaries, variant))
        ],
    )


def _losses(summaries: Sequence[Summary], gains: Sequence[Gain]) -> _Section:
    return _Section(
        "loss",
        "Loss and perplexity",
        "The same target tokens under growing context, weighted by tokens; what a longer context "
        "has to beat is cropping the text to the old window: below 0 is better. Bands are "
        f"intervals of 95 %, drawn over {drawn_by([s.run for s in summaries])}; they are wide "
        "because texts differ, and differences are paired. Perplexity is the exponential of the "
        "loss.",
        _drawn(plots.loss_plots(summaries, gains)),
        folded=[
            *_folded(
                "Loss by context in numbers",
                tables.losses(summaries, [s.by_context for s in summaries], "tokens of context"),
            ),
            *_folded(
                "Tokens that far context tells of, in numbers",
                tables.losses(summaries, [s.key_tokens for s in summaries], "tokens of context"),
            ),
            *_folded(
                "Loss by position in numbers",
                tables.losses(summaries, [s.by_position for s in summaries], "from position"),
            ),
        ],
    )


def _compared(comparison: Comparison, summaries: Sequence[Summary]) -> _Section:
    first = names_of([each.run for each in summaries])[0]
    families = [
        (title, tables.differences(comparison, summaries, of)) for of, title in _FAMILIES.items()
    ]
    return _Section(
        "comparison",
        "Which differences are real",
        f"Each model beside {first}, paired on the same instances. “Better” and “worse” stand "
        "where p is at most 0.05 after Holm's correction for how many differences were looked at; "
        "where nothing stands, no difference is shown, which does not show that there is none.",
        tables=[(title, _shown(table)) for title, table in families if table.rows],
        folded=[
            *_folded(
                "All differences with intervals and p",
                tables.all_differences(comparison, summaries),
            ),
            *_folded("What could not be compared", tables.unpaired(comparison)),
        ],
    )


def _drawn(drawn: Iterable[plots.Plot]) -> list[tuple[str, "Markup"]]:
    return [(_whole(each.title), page.ready(svg)) for each in drawn if (svg := plots.as_svg(each))]


def _folded(title: str, table: tables.Table) -> list[tuple[str, dict[str, Any]]]:
    count = f"{title} ({len(table.rows):,} row{'' if len(table.rows) == 1 else 's'})"
    return [(count, _shown(table, signs=False))] if table.rows else []


def _shown(table: tables.Table, signs: bool = True) -> dict[str, Any]:
    """A table for the template; models have their signs before their names."""
    rows = [[_cell(cell, signs) for cell in row] for row in table.rows]
    return {"heads": table.heads, "rows": rows}


def _cell(cell: tables.Cell, signs: bool) -> "str | Markup":
    if isinstance(cell, str):
        return _whole(cell).replace(" to ", "\N{NO-BREAK SPACE}to\N{NO-BREAK SPACE}")
    if not signs:
        return cell.name
    start, end = page.ready('<span class="model">'), page.ready("</span>")
    return start + page.ready(swatch(cell.place)) + f" {page.visible(cell.name)}" + end


def _whole(words: str) -> str:
    """Keep numbers with their signs on one line."""
    return words.replace(" %", "\N{NO-BREAK SPACE}%")
