"""A run from its settings to its end: `train` is what `armillary train` calls.

ended = train(RunConfig.load("run.yaml"), listeners=[print])
"""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import filelock

from armillary.errors import UserError
from armillary.files import write_atomically
from armillary.training.checkpoint_folder import CheckpointFolder
from armillary.training.events import Event, Listener, Notice, RunEnded
from armillary.training.log import JsonLog
from armillary.training.loop import CHECKPOINTS, Trainer
from armillary.training.parallel.ranks import Ranks, start_ranks, world_size
from armillary.training.precision import Precision
from armillary.training.run_config import RunConfig
from armillary.training.setup import (
    Progress,
    device_of,
    open_model,
    precision_of,
    prepare_run,
)
from armillary.training.summary import write_summary
from armillary.training.tensorboard import TensorBoardLog

CONFIG, LOG, SUMMARY = "run.yaml", "log.jsonl", "summary.html"
TENSORBOARD, _LOCK = "tensorboard", ".lock"


def train(
    config: RunConfig,
    *,
    resume: bool = False,
    allow: Sequence[str] = (),
    listeners: Sequence[Listener] = (),
    progress: Progress | None = None,
) -> RunEnded:
    """Make a run, alone or as one of torchrun's processes; return how it ended.

    resume     go on from the newest checkpoint in `config.out`; from the start where there is none
    allow      settings (or sections) that may differ from the checkpoint's
    listeners  hear of every event, on the main process
    progress   whom to tell how far the preparation of data is

    Raises UserError in one line for what a user can mend.
    """
    device = device_of(config)
    opened = open_model(config, progress)
    sizes = config.sizes(opened.decoder, world_size())
    with (
        start_ranks(sizes, device) as ranks,
        _alone(config, ranks),
        _logs(config, ranks) as logs,
    ):
        listeners = [*listeners, *logs]
        newest = _newest(config, resume, ranks, listeners)
        work = prepare_run(config, opened, ranks, progress)
        for notice in work.notices:
            _tell(listeners, ranks, Notice(0, notice))
        precision = Precision(precision_of(config, device), ranks.device)
        trainer = Trainer(config, work, ranks, precision, listeners)
        if newest is not None:
            trainer.resume(newest, allow)
        if ranks.is_main:
            with write_atomically(Path(config.out) / CONFIG) as file:
                file.write(config.to_yaml().encode())
        ended = trainer.run()
        if ranks.is_main:
            write_summary(Path(config.out) / LOG, Path(config.out) / SUMMARY)
        return ended


@contextlib.contextmanager
def _alone(config: RunConfig, ranks: Ranks) -> Iterator[None]:
    """Keep a second run out of the directory."""
    if not ranks.is_main:
        yield
        return
    out = Path(config.out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{out}: cannot be written: {error.strerror or error}") from error
    try:
        with filelock.FileLock(out / _LOCK, timeout=0):
            yield
    except filelock.Timeout as error:
        raise UserError(f"{out}: another process is training here; choose another out") from error


@contextlib.contextmanager
def _logs(config: RunConfig, ranks: Ranks) -> Iterator[list[Listener]]:
    """What is written of the run while it goes."""
    out = Path(config.out)
    logs: list[Listener] = []
    with contextlib.ExitStack() as stack:
        if ranks.is_main:
            logs.append(stack.enter_context(JsonLog(out / LOG)))
            if config.log.tensorboard:
                logs.append(stack.enter_context(TensorBoardLog(out / TENSORBOARD)))
        yield logs


def _newest(
    config: RunConfig, resume: bool, ranks: Ranks, listeners: Sequence[Listener]
) -> Path | None:
    """The checkpoint to go on from."""
    folder = CheckpointFolder(Path(config.out) / CHECKPOINTS)
    newest = folder.newest(lambda text: _tell(listeners, ranks, Notice(0, text)))
    if newest is not None and not resume:
        raise UserError(
            f"{config.out}: holds a run already, saved as {newest.name}; go on with --resume, or "
            "choose another out"
        )
    if newest is None and resume:
        _tell(listeners, ranks, Notice(0, "there is no checkpoint yet; the run begins"))
    return newest


def _tell(listeners: Sequence[Listener], ranks: Ranks, event: Event) -> None:
    if ranks.is_main:
        for listener in listeners:
            listener(event)
