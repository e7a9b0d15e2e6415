"""How far something is, on standard error: a bar on a terminal, else a line now and then."""

import time
from types import TracebackType
from typing import TYPE_CHECKING, Self

from armillary.cli._options import Interrupted, progress_console
from armillary.wording import bytes_text

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

SECONDS_BETWEEN_LINES = 10.0


class NowAndThen:
    """Prints lines on standard error, but none within SECONDS_BETWEEN_LINES of the one before.

    `patient`: nor in the first of those seconds, for what is mostly done by then.
    """

    def __init__(self, *, patient: bool = False) -> None:
        self.console = progress_console()
        self._last = time.monotonic() if patient else None

    def say(self, line: str, *, at_once: bool = False) -> None:
        """Print a line if it is time for one, or `at_once`."""
        now = time.monotonic()
        if at_once or self._last is None or now - self._last >= SECONDS_BETWEEN_LINES:
            self._last = now
            self.console.print(line, markup=False, highlight=False, soft_wrap=True)


class BarOrLines:
    """A context in which `show` says in one line how far one thing is, beside a bar if it can."""

    def __init__(self, *, patient: bool = False) -> None:
        self._lines = NowAndThen(patient=patient)
        self._bars: Progress | None = None
        self._bar: TaskID | None = None

    def __enter__(self) -> Self:
        if self._lines.console.is_terminal:
            from rich.progress import BarColumn, Progress, TextColumn

            self._bars = Progress(
                BarColumn(),
                TextColumn("{task.description}", markup=False),
                console=self._lines.console,
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

    def show(self, line: str, done: float, total: float | None, *, at_once: bool = False) -> None:
        """Show the line and `done` of `total`; without a bar now and then, or `at_once`."""
        if self._bars is not None and self._bar is not None:
            self._bars.update(self._bar, completed=done, total=total, description=line)
        else:
            self._lines.say(line, at_once=at_once)


class TransferProgress:
    """A context in which `report(what, done, total)` shows bytes done of bytes in all.

    `total` is None while it is not known. It is what `locate` takes as its `progress`.
    Raises Interrupted when it is interrupted, since what has come is kept.
    """

    def __init__(self) -> None:
        self._console: Console | None = None  # made when there is something to show
        self._bars: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._last_line: dict[str, float] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bars is not None:
            self._bars.stop()
        if kind is KeyboardInterrupt and self._console is not None:
            raise Interrupted("what has come so far is kept; the same command goes on from it")

    def report(self, what: str, done: int, total: int | None) -> None:
        """Show that `done` bytes of `total` of `what` are here; with neither, just say `what`."""
        if self._console is None:
            self._console = progress_console()
            self._bars = self._started(self._console)
        if self._bars is None or (not done and total is None):
            self._print_now_and_then(self._console, what, done, total)
            return
        if what not in self._tasks:
            self._tasks[what] = self._bars.add_task(what, total=total)
        self._bars.update(self._tasks[what], completed=done, total=total)

    def _started(self, console: "Console") -> "Progress | None":
        if not console.is_terminal:
            return None
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        bars = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
        )
        bars.start()
        return bars

    def _print_now_and_then(
        self, console: "Console", what: str, done: int, total: int | None
    ) -> None:
        now = time.monotonic()
        last = self._last_line.get(what)
        if last is not None and now - last < SECONDS_BETWEEN_LINES and done != total:
            return
        self._last_line[what] = now
        amount = "" if total is None else f": {bytes_text(done)} of {bytes_text(total)}"
        console.print(f"{what}{amount}", markup=False, highlight=False, soft_wrap=True)
