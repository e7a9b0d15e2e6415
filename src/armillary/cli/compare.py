"""`armillary compare`: which differences between evaluated models are real."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from armillary.cli._options import Debug, Json


def compare(
    directories: Annotated[
        list[Path],
        typer.Argument(
            metavar="DIR",
            help="Directories that armillary evaluate wrote; the first is what the others are set "
            "against.",
            show_default=False,
        ),
    ],
    *,
    report: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Also write a page (.html) for others to read.",
            rich_help_panel="Output",
            show_default=False,
        ),
    ] = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Set evaluated models beside each other, paired on what both were asked.

    Examples:
      armillary compare results/base results/yarn
      armillary compare results/base results/linear results/yarn --report comparison.html
      armillary compare results/base results/yarn --json

    Differences come with intervals, and p is corrected for how many there are.
    """
    from armillary.cli._evaluation import say, show_comparison
    from armillary.evaluation import comparison
    from armillary.evaluation.results import cells_done, read_results
    from armillary.evaluation.summary import summarise

    results = [read_results(directory) for directory in directories]
    for directory, (run, _) in zip(directories, results, strict=True):
        wanted = sum(int(task.get("cells") or 0) for task in run.tasks.values())
        done = len(cells_done(directory))
        if done < wanted:
            say([f"{directory}: only {done:,} of {wanted:,} cells are done"])
    compared = comparison.compare(results)
    summaries = [summarise(run, rows) for run, rows in results]
    files = []
    if report is not None:
        from armillary.evaluation.provenance import frequencies_of
        from armillary.evaluation.report import write_report

        frequencies = [frequencies_of(run) for run, _ in results]
        commands = [f"armillary compare {shlex.join(map(str, directories))}"]
        write_report(report, summaries, compared, frequencies=frequencies, commands=commands)
        files.append(str(report))
    show_comparison(compared, summaries, files, json=json)
