"""`armillary doctor`: why a checkpoint talks nonsense, and what would mend it."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from armillary.cli._options import (
    Debug,
    IgnoreKey,
    Json,
    Model,
    one_line,
    output_console,
    print_json,
)

if TYPE_CHECKING:
    from rich.console import Console

    from armillary.diagnosis.findings import Finding, Report


def doctor(
    model: Model,
    *,
    text: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A text in a language that the model knows; English prose and Python code when "
            "left out.",
            rich_help_panel="Trials",
            show_default=False,
        ),
    ] = None,
    json: Json = False,
    ignore_key: IgnoreKey = None,
    debug: Debug = False,
) -> None:
    """Find out why a checkpoint talks nonsense: the first line is the diagnosis, or "healthy".

    Examples:
      armillary doctor my-model
      armillary doctor my-model.gguf --text a-text-it-knows.txt
      armillary doctor smollm2-135m --json

    Exit code 0 when healthy, 1 when something was found (a file that is cut off, too), 2 when there
    is nothing that could be examined.
    """
    from armillary.checkpoints.locate import locate
    from armillary.cli._progress import BarOrLines, TransferProgress
    from armillary.diagnosis.doctor import examine
    from armillary.diagnosis.probe_text import read_texts

    texts = read_texts(text)
    with TransferProgress() as progress:
        path = locate(model, progress=progress.report)
    with BarOrLines() as bar:

        def tell(what: str, done: int, of: int) -> None:
            bar.show(f"{what}, {done} of {of}" if of > 1 else what, done, of)

        report = examine(path, texts, tell, model=model, ignore_keys=tuple(ignore_key or ()))
    if json:
        print_json(report.to_dict())
    else:
        _print(report)
    if report.findings:
        raise typer.Exit(1)


_RESULTS = {True: "yes", False: "no", None: "–"}


def _print(report: "Report") -> None:
    console = output_console()
    console.print(one_line(report.diagnosis), style="bold", soft_wrap=True)
    console.print(f"{report.model}" + (f" ({report.format})" if report.format else ""))
    for note in report.notes:
        console.print(f"note: {one_line(note)}", soft_wrap=True)
    _print_checks(report, console)
    for number, finding in enumerate(report.findings, start=1):
        _print_finding(number, finding, console)


def _print_checks(report: "Report", console: "Console") -> None:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("looked at", no_wrap=True)
    table.add_column("sound")
    table.add_column("seen")
    for check in report.checks:
        table.add_row(check.name, _RESULTS[check.holds], one_line(check.seen))
    console.print(table)


def _print_finding(number: int, finding: "Finding", console: "Console") -> None:
    from armillary.diagnosis.patches import patch_text

    console.print(f"{number}. {one_line(finding.fault)}", style="bold", soft_wrap=True)
    for name, said in (("measured", finding.evidence), ("remedy", finding.remedy)):
        if said:
            console.print(f"   {name}: {one_line(said)}", soft_wrap=True)
    if finding.patch:
        said = f"{finding.patch_file}: {patch_text(finding.patch)}"
        console.print(f"   patch: {one_line(said)}", soft_wrap=True)
