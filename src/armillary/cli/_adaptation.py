"""What `armillary extend apply --adapt` runs and prints: stages, their gates, the model."""

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from armillary.cli import _extension
from armillary.cli._options import Interrupted, NotReached, print_json, print_keys
from armillary.cli._progress import NowAndThen
from armillary.wording import clock_text, loss_text

if TYPE_CHECKING:
    from armillary.checkpoints.checkpoint import Checkpoint
    from armillary.evaluation.run import Progress as Measured
    from armillary.extension.adapt import Adapted, Stage
    from armillary.training.events import Listener

_GO_ON = "what is done is kept, and the same command goes on from it"


def show_keys(json: bool) -> None:
    """Print every key of an adaptation's file."""
    from armillary.extension.adapt_config import AdaptConfig
    from armillary.training.run_config import explain

    print_keys(explain(AdaptConfig), json)


def run(
    checkpoint: "Checkpoint",
    out: Path,
    file: Path,
    settings: Sequence[str],
    json: bool,
    **arguments: Any,
) -> None:
    """Adapt, and print what came of it. `arguments` are the rest of `adapt`'s.

    Raises Interrupted when a signal ends it before the model is written, NotReached when a gate
    does, UserError as `adapt` does.
    """
    from armillary.cli._preparation import PreparationProgress
    from armillary.cli._progress import TransferProgress
    from armillary.extension.adapt import Watch, adapt
    from armillary.extension.adapt_config import AdaptConfig
    from armillary.training.setup import Progress

    config = AdaptConfig.load(file, settings)
    shows = os.environ.get("RANK", "0") == "0"
    told = _Told(json)
    try:
        with TransferProgress() as transfer, PreparationProgress() as preparation:
            watch = Watch(
                told.say,
                told.listeners,
                told.measured,
                Progress(transfer.report, preparation.report),
            )
            adapted = adapt(checkpoint, out, config, watch=watch if shows else None, **arguments)
    except KeyboardInterrupt:
        raise Interrupted(_GO_ON) from None
    if adapted.reason not in {"finished", "gates"}:
        raise Interrupted(_GO_ON, code=128 + signal.Signals[adapted.reason])
    if shows:
        _show(adapted, json)
    if adapted.reason == "gates":
        raise NotReached(_advice(adapted))


class _Told:
    """Tells on standard error how an adaptation goes; of --json, events go to standard output."""

    def __init__(self, json: bool) -> None:
        self._lines = NowAndThen()
        self._json = json

    def say(self, line: str) -> None:
        self._lines.say(line, at_once=True)

    @contextmanager
    def listeners(self) -> "Iterator[Sequence[Listener]]":
        from armillary.cli._training import TrainingDisplay, print_event

        with TrainingDisplay(live=not self._json) as display:
            yield [display, *([print_event] if self._json else [])]

    def measured(self, model: str, progress: "Measured") -> None:
        left = progress.seconds_left
        more = "" if left is None else f", {clock_text(left)} left"
        self._lines.say(f"measuring {model}: {progress.done:,} of {progress.cells:,}{more}")


def _show(adapted: "Adapted", json: bool) -> None:
    if adapted.applied is not None:
        _extension.show_applied(adapted.applied, json)
    for stage in adapted.stages:
        if json:
            print_json(_facts(stage))
        else:
            print(*_lines(stage), sep="\n")
    if not json:
        print(f"  in between  {adapted.work}")


def _facts(stage: "Stage") -> dict[str, object]:
    return {
        "kind": "stage",
        "stage": stage.number + 1,
        "length": stage.length,
        "steps": stage.steps,
        "passed": stage.passed,
        "gates": [vars(gate) for gate in stage.gates],
        "losses": [vars(each) for each in stage.losses],
    }


def _lines(stage: "Stage") -> Iterator[str]:
    verdict = "passed" if stage.passed else "not passed"
    if not stage.gates:
        verdict = "nothing measured"
    yield f"  stage {stage.number + 1}     {stage.length:,} after {stage.steps:,} steps: {verdict}"
    for gate in stage.gates:
        mark = {True: "holds", False: "does not hold", None: "left out"}[gate.passed]
        yield f"    {gate.name}, {mark}: {gate.said}"
    for each in stage.losses:
        yield (
            f"    {each.what}: {loss_text(each.unextended)} unextended, "
            f"{loss_text(each.rule_alone)} under the rule alone, {loss_text(each.adapted)} adapted"
        )


def _advice(adapted: "Adapted") -> str:
    stage = adapted.stages[-1]
    failed = " and ".join(gate.name for gate in stage.gates if gate.passed is False)
    return (
        f"stage {stage.number + 1} does not hold to {failed}; nothing is lost: raise its steps "
        f"(now {stage.steps:,}) and run the same command, which goes on from there, or take "
        "another rule and another --out"
    )
