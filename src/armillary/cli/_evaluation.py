"""What `armillary evaluate` and `compare` show: how far it is, tables, or facts for programs."""

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from armillary.cli._options import one_line, output_console, print_json, progress_console
from armillary.cli._progress import SECONDS_BETWEEN_LINES
from armillary.wording import clock_text

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bars
    from rich.progress import TaskID
    from rich.table import Table

    from armillary.evaluation.comparison import Comparison, Difference
    from armillary.evaluation.run import Progress
    from armillary.evaluation.summary import LossAt, Rate, Summary


class EvaluationDisplay:
    """A context, and a listener in it, that shows on standard error how far an evaluation is.

    A bar on a terminal, else a line now and then.
    """

    def __init__(self) -> None:
        self._console = progress_console()
        self._bars: Bars | None = None
        self._bar: TaskID | None = None
        self._last_line: float | None = None

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            from rich.progress import BarColumn, Progress, TextColumn

            self._bars = Progress(
                BarColumn(),
                TextColumn("{task.description}", markup=False),
                console=self._console,
                transient=True,
                redirect_stdout=False,
            )
            self._bars.start()
            self._bar = self._bars.add_task("", total=None)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bars is not None:
            self._bars.stop()

    def __call__(self, progress: "Progress") -> None:
        """Show it."""
        said = progress_text(progress)
        if self._bars is not None and self._bar is not None:
            self._bars.update(
                self._bar, completed=progress.done, total=progress.cells, description=said
            )
            return
        now = time.monotonic()
        ends = progress.cell is None
        if ends or self._last_line is None or now - self._last_line >= SECONDS_BETWEEN_LINES:
            self._last_line = now
            self._console.print(said, markup=False, highlight=False, soft_wrap=True)


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
        console.print(file)


def summary_facts(summary: "Summary") -> Iterator[dict[str, Any]]:
    """Each thing that a summary says, as plain JSON values."""
    name = summary.run.name
    yield {"kind": "run", **asdict(summary.run)}
    for kind in ("by_context", "by_position", "key_tokens", "rates", "effective", "short_tasks"):
        for entry in getattr(summary, kind):
            yield {"kind": kind, "model": name, **asdict(entry)}
    if summary.short_loss is not None:
        yield {"kind": "short_loss", "model": name, "loss": asdict(summary.short_loss)}


Sections = list[tuple[str, "Table"]]


def _print_tables(console: "Console", sections: Iterable[tuple[str, "Table"]]) -> None:
    for heading, table in sections:
        console.print(f"\n{heading}", style="bold")
        console.print(table)


def _summary_tables(summary: "Summary") -> Iterator[tuple[str, "Table"]]:
    crop = summary.run.original_window
    if summary.by_context:
        yield "loss of the same tokens, nats", _losses(summary.by_context, crop)
    if summary.key_tokens:
        yield "loss of those that far context tells of, nats", _losses(summary.key_tokens, crop)
    for variant in dict.fromkeys(rate.variant for rate in summary.rates):
        yield from _rate_tables(variant, [r for r in summary.rates if r.variant == variant])
    if summary.effective:
        yield "effective length", _effective(summary)
    if summary.short_tasks or summary.short_loss is not None:
        yield "short texts", _short(summary)


def _losses(entries: Sequence["LossAt"], crop: int) -> "Table":
    from armillary.evaluation.telling import bounds, number, with_bounds

    table = _table("tokens of context", "loss", "95 % interval", f"over cropping to {crop:,}")
    for each in entries:
        over = "–" if each.over_crop is None else with_bounds(each.over_crop, signed=True)
        table.add_row(f"{each.at:,}", number(each.loss.value), bounds(each.loss), over)
    return table


def _rate_tables(variant: str, rates: Sequence["Rate"]) -> Iterator[tuple[str, "Table"]]:
    """A table of all questions by length, and one for each thing that these vary in."""
    alone = [r for r in rates if r.depth is None and r.distractors is None and r.hops is None]
    grids = [
        ("depth", [r for r in rates if r.depth is not None and r.distractors is r.hops is None]),
        ("distractors", [r for r in rates if r.distractors is not None and r.depth is None]),
        ("hops", [r for r in rates if r.hops is not None and r.depth is None]),
    ]
    yield f"{variant}: share of answers that are exact", _lengths(alone)
    for factor, entries in grids:
        if entries:
            yield f"{variant}: exact by {factor}", _grid(factor, entries)


def _lengths(rates: Sequence["Rate"]) -> "Table":
    from armillary.evaluation.telling import number, percent, rate_with_bounds

    table = _table("length", "exact (95 %)", "questions", "likeliest", "by chance", "nats gained")
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
    from armillary.evaluation.telling import percent

    shares = {(r.length, getattr(r, factor)): r.exact.value for r in rates}
    values = sorted({value for _, value in shares})
    table = _table("length", *(f"{value:.3g}" for value in values))
    for length in sorted({length for length, _ in shares}):
        cells = (shares.get((length, value)) for value in values)
        table.add_row(f"{length:,}", *("–" if cell is None else percent(cell) for cell in cells))
    return table


def _effective(summary: "Summary") -> "Table":
    from armillary.evaluation.telling import percent, rate_with_bounds

    table = _table("questions", "holds up to", "tried up to", "at the shortest", "bar")
    for each in summary.effective:
        table.add_row(
            each.variant,
            "no length" if each.length is None else f"{each.length:,}",
            f"{each.longest_tried:,}",
            rate_with_bounds(each.short),
            percent(each.bar),
        )
    return table


def _short(summary: "Summary") -> "Table":
    from armillary.evaluation.telling import rate_with_bounds, with_bounds

    table = _table("", "value (95 %)", "per character", "count")
    for each in summary.short_tasks:
        normalised = "–" if each.normalised is None else rate_with_bounds(each.normalised)
        accuracy = rate_with_bounds(each.accuracy)
        table.add_row(each.task, accuracy, normalised, f"{each.accuracy.count:,}")
    loss = summary.short_loss
    if loss is not None:
        table.add_row("loss, nats", with_bounds(loss), "–", f"{loss.count:,}")
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
    _print_tables(console, _comparison_tables(comparison))
    for each in comparison.unpaired:
        console.print(
            f"not compared: {each.count:,} rows of {each.task}, {one_line(each.model)} "
            f"({each.reason})"
        )
    console.print("\n" + "\n".join(told))
    for file in files:
        console.print(file)


def comparison_facts(comparison: "Comparison") -> Iterator[dict[str, Any]]:
    """Each thing that a comparison says, as plain JSON values."""
    for name, run in zip(comparison.names, comparison.runs, strict=True):
        yield {"kind": "run", **asdict(run), "name": name}
    for each in comparison.differences:
        facts = asdict(each) | {"real": each.real, "verdict": each.verdict}
        yield {"kind": "difference", **facts}
    for unpaired in comparison.unpaired:
        yield {"kind": "unpaired", **asdict(unpaired)}


def _comparison_tables(comparison: "Comparison") -> Iterator[tuple[str, "Table"]]:
    """A table for each model and measure; loss by position is for the page."""
    shown = [each for each in comparison.differences if each.measure != "loss by position"]
    for model in comparison.names[1:]:
        own = [each for each in shown if each.model == model]
        for family in dict.fromkeys(each.family for each in own):
            yield (
                f"{one_line(model)}: {family}",
                _differences([each for each in own if each.family == family]),
            )


def _differences(differences: Sequence["Difference"]) -> "Table":
    from armillary.evaluation.telling import number, with_bounds

    table = _table("what", "at", "first", "this", "difference (95 %)", "p", "pairs", "")
    for each in differences:
        variant = each.task if each.variant is None else each.variant
        what = each.measure if each.family == "loss" else f"{variant}, {each.measure}"
        table.add_row(
            what,
            "–" if each.at is None else f"{each.at:,}",
            number(each.first),
            number(each.other),
            with_bounds(each.difference, signed=True),
            "–" if each.adjusted is None else f"{each.adjusted:.2g}",
            f"{each.pairs:,}",
            each.verdict,
        )
    return table


def _table(*headings: str) -> "Table":
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for number, heading in enumerate(headings):
        is_text = not number or not heading
        table.add_column(heading, justify="left" if is_text else "right", no_wrap=True)
    return table
