"""How far a preparation is, on standard error: a bar on a terminal, else a line now and then."""

import time
from types import TracebackType
from typing import TYPE_CHECKING, Self

from armillary.cli._options import progress_console
from armillary.cli._progress import SECONDS_BETWEEN_LINES
from armillary.wording import bytes_text, clock_text

if TYPE_CHECKING:
    from rich.progress import Progress as Bars
    from rich.progress import TaskID

    from armillary.data.preparation import Progress


class PreparationProgress:
    """A context in which `report` shows what `armillary.data.preparation` reports."""

    def __init__(self) -> None:
        self._console = progress_console()
        self._bars: Bars | None = None
        self._task: TaskID | None = None
        self._last_line = time.monotonic()

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            from rich.progress import BarColumn, Progress, TextColumn

            self._bars = Progress(
                BarColumn(),
                TextColumn("{task.description}", markup=False),
                console=self._console,
                transient=True,
            )
            self._bars.start()
            self._task = self._bars.add_task("reading", total=None)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bars is not None:
            self._bars.stop()

    def report(self, progress: "Progress") -> None:
        """Show amounts, rate and time left."""
        if self._bars is not None and self._task is not None:
            self._bars.update(
                self._task,
                description=line(progress),
                completed=progress.bytes_read,
                total=progress.bytes_total or None,
            )
        elif time.monotonic() - self._last_line >= SECONDS_BETWEEN_LINES:
            self._last_line = time.monotonic()
            self._console.print(line(progress), markup=False, highlight=False, soft_wrap=True)


def line(progress: "Progress") -> str:
    """Return what a person wants to know of it, with the rate of this run and the time left."""
    seconds = max(progress.seconds, 1e-9)
    rate = (progress.bytes_read - progress.resumed_bytes) / seconds
    parts = [
        f"{bytes_text(progress.bytes_read)} of {bytes_text(progress.bytes_total)}"
        if progress.bytes_total
        else "reading",
        f"{progress.documents:,} documents",
        f"{progress.tokens:,} tokens",
    ]
    if progress.skipped:
        parts.append(f"{progress.skipped:,} skipped")
    if progress.bytes_total and rate > 0:
        parts.append(f"{bytes_text(int(rate))}/s")
        left = (progress.bytes_total - progress.bytes_read) / rate
        parts.append(f"{clock_text(left)} left")
    return ", ".join(parts)
