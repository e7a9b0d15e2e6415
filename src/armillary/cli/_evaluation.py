"""What `armillary evaluate` and `compare` show: how far it is, tables, or facts for programs."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from armillary.cli._options import one_line, output_console, print_json, progress_console
from armillary.cli._progress import BarOrLines
from armillary.wording import clock_text

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from armillary.evaluation.comparison import Comparison, Family
    from armillary.evaluation.run import Progress
    from armillary.evaluation.summary import LossAt, Rate, Summary
    from armillary.evaluation.tables import Table as Words


class EvaluationDisplay(BarOrLines):
    """A context, and a listener in it, that shows how far an evaluation is."""

    def __call__(self, progress: "Progress") -> None:
        """Show it."""
        ends = progress.cell is None
        self.show(progress_text(progress), progress.done, progress.cells, at_once=ends)


def progress_text(progress: "Progress") -> str:
    """Return how far an evaluation is: 12 of 40 cells, 0:03:10 left, retrieval/…."""
    parts = [f"{progress.done:,} of {progress.cells:,} cells"]
    if progress.cell is not None:
        if progress.seconds_left is not None:
            parts.append(f"{clock_text(progress.seconds_left)} left")
        parts.append(one_line(progress.cell))
    return ", ".join(parts)


def say(notices: Iterable[str]) -> None:
    """Say on standard error what a person should hear of."""
    console = progress_console()
    for notice in dict.fromkeys(notices):
        console.print(f"note: {one_line(notice)}", markup=False, highlight=False, soft_wrap=True)


# One model


def show_summary(summary: "Summary", files: Sequence[str], *, json: bool) -> None:
    """Print what an evaluation says, and where its files are."""
    from armillary.evaluation.verdict import verdict

    told = verdict([summary])
    if json:
        for facts in summary_facts(summary):
            print_json(facts)
        print_json({"kind": "result", "verdict": list(told), "files": list(files)})
        return
    console = output_console()
    run = summary.run
    before = "" if run.window == run.original_window else f", {run.original_window:,} before"
    console.print(f"{one_line(run.name)}: window {run.window:,}{before}", style="bold")
    _print_tables(console, _summary_tables(summary))
    console.print("\n" + "\n".join(told))
    for file in files:
        console.print(file, soft_wrap=True)


def summary_facts(summary: "Summary") -> Iterator[dict[str, Any]]:
    """Each thing that a summary says, as plain JSON values."""
    name = summary.run.name
    yield {"kind": "run", **asdict(summary.run)}
    for kind in ("by_context", "by_position", "key_tokens", "rates", "effective", "short_tasks"):
        for entry in getattr(summary, kind):
            yield {"kind": kind, "model": name, **asdict(entry)}
    if summary.short_loss is not None:
        yield {"kind": "short_loss", "model": name, "loss": asdict(summary.short_loss)}


def _print_tables(console: "Console", sections: Iterable[tuple[str, "Table"]]) -> None:
    for heading, table in sections:
        console.print(f"\n{heading}", style="bold")
        console.print(table)


def _summary_tables(summary: "Summary") -> Iterator[tuple[str, "Table"]]:
    from armillary.evaluation import tables

    one = [summary]
    if summary.by_context:
        yield "loss of the same tokens under more and more context", _losses(summary.by_context)
    if summary.key_tokens:
        yield "of them, those that far context tells of", _losses(summary.key_tokens)
    for variant in dict.fromkeys(rate.variant for rate in summary.rates):
        yield from _rate_tables(variant, [r for r in summary.rates if r.variant == variant])
    if summary.effective:
        yield "effective length", _rendered(tables.effective(one))
    if summary.short_tasks or summary.short_loss is not None:
        yield "short texts", _rendered(tables.short(one))


def _losses(entries: Sequence["LossAt"]) -> "Table":
    from armillary.evaluation.telling import with_bounds

    table = _table("context", "nats per token", "over cropping", "tokens")
    for each in entries:
        over = "–" if each.over_crop is None else with_bounds(each.over_crop, signed=True)
        table.add_row(f"{each.at:,}", with_bounds(each.loss), over, f"{each.tokens:,}")
    return table


def _rate_tables(variant: str, rates: Sequence["Rate"]) -> Iterator[tuple[str, "Table"]]:
    """A table of all questions by length, and one for each thing that these vary in."""

    def varies_in(rate: "Rate") -> list[str]:
        return [
            name for name in ("depth", "distractors", "hops") if getattr(rate, name) is not None
        ]

    yield variant, _lengths([rate for rate in rates if not varies_in(rate)])
    for factor in ("depth", "distractors", "hops"):
        entries = [rate for rate in rates if varies_in(rate) == [factor]]
        if entries:
            yield f"{variant}: exact answers by {factor}, %", _grid(factor, entries)


def _lengths(rates: Sequence["Rate"]) -> "Table":
    from armillary.evaluation.telling import number, percent, rate_with_bounds

    table = _table("length", "exact answers", "of", "likeliest", "by chance", "nats gained")
    for each in rates:
        table.add_row(
            f"{each.length:,}",
            rate_with_bounds(each.exact),
            f"{each.exact.count:,}",
            "–" if each.first is None else percent(each.first.value),
            "–" if each.chance is None else percent(each.chance),
            "–" if each.gain is None else number(each.gain.value, 2, signed=True),
        )
    return table


def _grid(factor: str, rates: Sequence["Rate"]) -> "Table":
    """Lengths down, the factor's values across; shares in percent."""
    shares = {(r.length, getattr(r, factor)): r.exact.value for r in rates}
    values = sorted({value for _, value in shares})
    table = _table("length", *(f"{value:.3g}" for value in values))
    for length in sorted({length for length, _ in shares}):
        cells = (shares.get((length, value)) for value in values)
        table.add_row(f"{length:,}", *("–" if c is None else f"{100 * c:.0f}" for c in cells))
    return table


# Several


def show_comparison(
    comparison: "Comparison", summaries: Sequence["Summary"], files: Sequence[str], *, json: bool
) -> None:
    """Print which differences between models are real."""
    from armillary.evaluation.verdict import verdict

    told = verdict(summaries, comparison)
    if json:
        for facts in comparison_facts(comparison):
            print_json(facts)
        print_json({"kind": "result", "verdict": list(told), "files": list(files)})
        return
    console = output_console()
    console.print(f"set against {one_line(comparison.names[0])}", style="bold")
    _print_tables(console, _comparison_tables(comparison, summaries))
    console.print("\n" + "\n".join(told))
    for file in files:
        console.print(file, soft_wrap=True)


def comparison_facts(comparison: "Comparison") -> Iterator[dict[str, Any]]:
    """Each thing that a comparison says, as plain JSON values."""
    for name, run in zip(comparison.names, comparison.runs, strict=True):
        yield {"kind": "run", **asdict(run), "name": name}
    for each in comparison.differences:
        facts = asdict(each) | {"real": each.real, "verdict": each.verdict}
        yield {"kind": "difference", **facts}
    for unpaired in comparison.unpaired:
        yield {"kind": "unpaired", **asdict(unpaired)}


def _comparison_tables(
    comparison: "Comparison", summaries: Sequence["Summary"]
) -> Iterator[tuple[str, "Table"]]:
    from armillary.evaluation import tables

    if len(comparison.names) == 2:
        yield "differences, and which of them are shown to be real", _differences(comparison)
    else:
        families: tuple[tuple[Family, str], ...] = (
            ("loss", "nats per token"),
            ("questions", "hundredths"),
            ("short tasks", "hundredths"),
        )
        for family, unit in families:
            table = tables.differences(comparison, summaries, family)
            if table.rows:
                yield f"{family}: differences in {unit}", _rendered(table)
    if comparison.unpaired:
        yield "not compared", _rendered(tables.unpaired(comparison))


def _differences(comparison: "Comparison") -> "Table":
    """Each difference of the one other model; losses in nats per token, shares in hundredths."""
    from armillary.evaluation.tables import SHARES
    from armillary.evaluation.telling import number, points, with_bounds
    from armillary.evaluation.verdict import side_of

    table = _table("measured", "tokens", "difference", "p", "shown")
    for each in comparison.differences:
        if each.adjusted is None:
            continue  # loss by position, which is for the page
        of = each.difference
        table.add_row(
            each.measure
            if each.family == "loss"
            else f"{each.variant or each.task}, {each.measure}",
            "" if each.at is None else f"{each.at:,}",
            f"{points(of.value)} ({points(of.low)} to {points(of.high)})"
            if each.measure in SHARES
            else with_bounds(of, signed=True),
            "< 0.001" if each.adjusted < 0.001 else number(each.adjusted),
            "–" if side_of(each) == "open" else side_of(each),
        )
    return table


def _rendered(table: "Words") -> "Table":
    """A table of words for the terminal; what names the one model of all rows is left out."""
    kept = [
        place
        for place, (head, _) in enumerate(table.heads)
        if head != "model" or len({str(row[place]) for row in table.rows}) > 1
    ]
    shown = _table(*(table.heads[place][0] for place in kept))
    for place, column in zip(kept, shown.columns, strict=True):
        column.justify = "right" if table.heads[place][1] == "n" else "left"
    for row in table.rows:
        shown.add_row(*(one_line(str(row[place])) for place in kept))
    return shown


def _table(*headings: str) -> "Table":
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="left" if not number else "right", vertical="bottom")
    return table
