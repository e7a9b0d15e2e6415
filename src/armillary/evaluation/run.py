"""An evaluation, cell by cell, to be gone on with after any end.

run, rows = evaluate(DecoderScorer(lm.decoder), run_of(…), [Perplexity(…)], Path("results"))
"""

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

import filelock

from armillary.errors import UserError
from armillary.evaluation.budget import RELATIVE, Speed
from armillary.evaluation.provenance import task_settings
from armillary.evaluation.records import Cell, Row, Run, Task
from armillary.evaluation.results import ResultsFile, cells_done
from armillary.evaluation.scoring import Scorer
from armillary.files import as_user_error

_LOCK = ".lock"


@dataclass(frozen=True)
class Progress:
    """How far an evaluation is.

    cell          the key of what is measured next; None when all is done
    seconds_left  None while nothing is known of the speed
    """

    done: int
    cells: int
    cell: str | None
    seconds_left: float | None


Listener = Callable[[Progress], None]


class Stopped(Exception):  # noqa: N818  # like KeyboardInterrupt, it is no error
    """A signal has stopped an evaluation; `done` of its `cells` are kept."""

    def __init__(self, number: int, done: int, cells: int) -> None:
        super().__init__(f"{done} of {cells} cells are done and kept")
        self.number = number


def evaluate(
    scorer: Scorer,
    run: Run,
    tasks: Sequence[Task],
    out: Path,
    *,
    listeners: Sequence[Listener] = (),
    speed: Speed | None = None,
) -> tuple[Run, list[Row]]:
    """Measure all cells of the tasks, writing each to `out` when it is done.

    Returns what `results.read_results` reads there.

    run        what the model is (`provenance.run_of`); what the tasks are is filled in here
    out        a directory; where it holds this same evaluation, unfinished, that is gone on with,
               and the finished file has the bytes of one that was never stopped
    listeners  hear how far it is, before each cell and at the end
    speed      of the scorer, where it is known: then time left is known from the beginning

    Raises UserError for a directory that holds another evaluation, or in which another process is
    at work, and for what cannot be written; Stopped at SIGINT and SIGTERM, at once: the cell that
    was running is lost.
    """
    run = replace(run, tasks={task.name: task_settings(task) for task in tasks})
    if len(run.tasks) < len(tasks):
        raise ValueError(f"two of the tasks have one name: {[task.name for task in tasks]}")
    work = [(task, cell) for task in tasks for cell in task.cells()]
    keys = [cell.key for _, cell in work]
    if len(set(keys)) < len(keys):
        raise ValueError("two cells have one key")
    with _alone(out), ResultsFile(out, run, keys) as results:
        clock = _Clock([cell for _, cell in work], len(results.rows), speed)
        with _stops_at_once(results, len(work)):
            for task, cell in work[len(results.rows) :]:
                _tell(listeners, clock.now(cell.key))
                scorer.begin()
                results.append(cell.key, task.run(cell, scorer))
                clock.count()
        _tell(listeners, clock.now(None))
        return run, [row for rows in results.rows.values() for row in rows]


class _Clock:
    """Tells how far the work is, and from the cells done here what time the others will take."""

    def __init__(self, cells: Sequence[Cell], done: int, speed: Speed | None) -> None:
        self._costs = [(speed or RELATIVE).seconds(cell.work) for cell in cells]
        self._known = speed is not None
        self._first = self._done = done
        self._start = time.monotonic()

    def count(self) -> None:
        self._done += 1

    def now(self, cell: str | None) -> Progress:
        here, left = sum(self._costs[self._first : self._done]), sum(self._costs[self._done :])
        seconds = left if self._known else None
        if here:
            seconds = (time.monotonic() - self._start) / here * left
        return Progress(self._done, len(self._costs), cell, seconds)


def _tell(listeners: Sequence[Listener], progress: Progress) -> None:
    for listener in listeners:
        listener(progress)


@contextlib.contextmanager
def _alone(out: Path) -> Iterator[None]:
    """Keep a second evaluation out of the directory."""
    with as_user_error(out):
        out.mkdir(parents=True, exist_ok=True)
    try:
        with filelock.FileLock(out / _LOCK, timeout=0):
            yield
    except filelock.Timeout as error:
        raise UserError(
            f"{out}: another process is evaluating here; choose another directory"
        ) from error


@contextlib.contextmanager
def _stops_at_once(results: ResultsFile, cells: int) -> Iterator[None]:
    """Turn SIGINT and SIGTERM into Stopped; outside the main thread Python has no handlers."""
    received: list[int] = []

    def stop(number: int, _: FrameType | None) -> None:
        received.append(number)
        raise KeyboardInterrupt

    here = threading.current_thread() is threading.main_thread()
    before = {n: signal.signal(n, stop) for n in (signal.SIGINT, signal.SIGTERM) if here}
    try:
        yield
    except KeyboardInterrupt as interrupt:
        number = received[0] if received else signal.SIGINT
        # Counted in the file: the signal may have come when a cell was there and not yet noted.
        raise Stopped(number, len(cells_done(results.path.parent)), cells) from interrupt
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
