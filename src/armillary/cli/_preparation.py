"""How far a preparation is, on standard error: a bar on a terminal, else a line now and then."""

from typing import TYPE_CHECKING

from armillary.cli._progress import BarOrLines
from armillary.wording import bytes_text, clock_text

if TYPE_CHECKING:
    from armillary.data.preparation import Progress


class PreparationProgress(BarOrLines):
    """A context in which `report` shows what `armillary.data.preparation` reports."""

    def __init__(self) -> None:
        super().__init__(patient=True)

    def report(self, progress: "Progress") -> None:
        """Show amounts, rate and time left."""
        self.show(line(progress), progress.bytes_read, progress.bytes_total or None)


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
