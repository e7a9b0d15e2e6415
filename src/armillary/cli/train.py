"""`armillary train`: a run from its settings to a model, or a part of it."""

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from armillary.cli._options import Debug, Interrupted, Json, print_keys
from armillary.errors import UserError

if TYPE_CHECKING:
    from armillary.training.run_config import RunConfig


def train(
    run: Annotated[
        Path | None,
        typer.Argument(
            metavar="RUN.yaml",
            help="The run's settings; --explain tells every key.",
            show_default=False,
        ),
    ] = None,
    *,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Replace a setting, such as train.lr=3e-4 (may be repeated).",
            rich_help_panel="Settings",
            show_default=False,
        ),
    ] = None,
    explain: Annotated[
        bool,
        typer.Option(
            "--explain",
            help="Print every key with its type, default and meaning, and stop.",
            rich_help_panel="Settings",
        ),
    ] = False,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Go on from the newest whole checkpoint, bit for bit.",
            rich_help_panel="Going on",
        ),
    ] = False,
    allow: Annotated[
        list[str] | None,
        typer.Option(
            "--allow",
            metavar="KEY",
            help="With --resume: this setting may differ from the checkpoint's (may be repeated).",
            rich_help_panel="Going on",
            show_default=False,
        ),
    ] = None,
    plan: Annotated[
        bool,
        typer.Option(
            "--plan",
            help="Print the memory that each process would need, and stop.",
            rich_help_panel="Planning",
        ),
    ] = False,
    ranks: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            max=1 << 20,
            help="With --plan: so many processes (default: as many as parallel names).",
            rich_help_panel="Planning",
            show_default=False,
        ),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="With --plan: what each process has, such as 80GB (default: that of the GPU "
            "here, or the machine's).",
            rich_help_panel="Planning",
            show_default=False,
        ),
    ] = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Train a decoder: from scratch, from a checkpoint, or on chats.

    Examples:
      armillary train examples/stdlib-small.yaml
      armillary train run.yaml --set train.lr=3e-4 --set out=runs/second
      armillary train run.yaml --resume
      torchrun --nproc-per-node 8 -m armillary train run.yaml --set parallel.tensor=2
      armillary train run.yaml --plan --ranks 64 --memory 80GB

    SIGINT (^C) and SIGTERM save first; --resume goes on from there.
    """
    if explain:
        from armillary.training.run_config import RunConfig
        from armillary.training.run_config import explain as keys

        print_keys(keys(RunConfig), json)
        return
    if run is None:
        raise UserError("no run is named; give a RUN.yaml, such as examples/stdlib-small.yaml")
    from armillary.training.run_config import RunConfig

    config = RunConfig.load(run, settings or [])
    if plan:
        from armillary.cli._plan import show_plan

        show_plan(str(run), config, ranks, memory, json)
    elif ranks is not None or memory is not None:
        raise UserError("--ranks and --memory are of a plan; add --plan, or start with torchrun")
    else:
        _train(run, config, resume, allow or [], json)


def _train(run: Path, config: "RunConfig", resume: bool, allow: list[str], json: bool) -> None:
    from armillary.cli._preparation import PreparationProgress
    from armillary.cli._progress import TransferProgress
    from armillary.cli._training import TrainingDisplay, print_event, print_result
    from armillary.training.history import History
    from armillary.training.log import read_log
    from armillary.training.run import LOG, SUMMARY, train
    from armillary.training.setup import Progress

    # Of torchrun's processes one shows how it goes.
    shows = os.environ.get("RANK", "0") == "0"
    with (
        TransferProgress() as transfer,
        PreparationProgress() as preparation,
        TrainingDisplay(live=not json) as display,
    ):
        ended = train(
            config,
            resume=resume,
            allow=allow,
            listeners=[display, *([print_event] if json else [])],
            progress=Progress(transfer.report, preparation.report) if shows else None,
        )
    if ended.reason != "finished":
        raise Interrupted(
            f"saved after step {ended.step}; go on with: armillary train {run} --resume",
            code=128 + signal.Signals[ended.reason],
        )
    if shows:
        out = Path(config.out)
        print_result(History.of(read_log(out / LOG)), out / SUMMARY, json=json)
