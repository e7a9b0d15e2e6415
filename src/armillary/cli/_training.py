"""How far a training run is, on standard error; and what came of it, on standard output."""

import math
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from armillary.cli._options import one_line, print_json, progress_console
from armillary.cli._progress import SECONDS_BETWEEN_LINES
from armillary.wording import clock_text, count_text, escaped, loss_text

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.live import Live
    from rich.text import Text

    from armillary.training.events import (
        Event,
        RunStarted,
        Sampled,
        StepDone,
        Validated,
    )
    from armillary.training.history import History

STEPS_OF_HALF_WEIGHT = 30


class TrainingDisplay:
    """A context, and a listener in it, that shows a run as it goes.

    On a terminal two lines stay at the bottom (unless `live` is false, as when standard output
    goes there too), else a line comes now and then; validations, samples, checkpoints and notices
    are lines of their own.
    """

    def __init__(self, *, live: bool = True) -> None:
        self._console = progress_console()
        self._wants_live = live and self._console.is_terminal
        self._live: Live | None = None
        self._status = Status()
        self._last_line: float | None = None
        self._unsaid = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()
        elif self._unsaid:
            self._print_status()

    def __call__(self, event: "Event") -> None:
        """Show the event."""
        self._status.add(event, time.monotonic())
        if event.kind == "start" and self._wants_live and self._live is None:
            from rich.live import Live

            # Results go to standard output, past the two lines.
            self._live = Live(
                _TwoLines(self._status),
                console=self._console,
                transient=True,
                redirect_stdout=False,
            )
            self._live.start()
        if event.kind == "step":
            self._show_step()
        else:
            for line in _lines(event):
                self._print(event, line)

    def _show_step(self) -> None:
        if self._live is not None:
            return  # it draws itself anew
        self._unsaid = True
        now = time.monotonic()
        if self._last_line is None or now - self._last_line >= SECONDS_BETWEEN_LINES:
            self._last_line = now
            self._print_status()

    def _print_status(self) -> None:
        self._unsaid = False
        now = time.monotonic()
        self._print_line(", ".join([*self._status.position(now), *self._status.figures()]))

    def _print_line(self, line: str) -> None:
        from rich.text import Text

        self._console.print(Text(line), soft_wrap=True)

    def _print(self, event: "Event", line: "Text") -> None:
        """Print what belongs to a step; on a terminal it wraps beside the step, not below it."""
        from rich.table import Table
        from rich.text import Text

        label = f"step {event.step:,}" + (" wrote" if event.kind == "sample" else "")
        if self._console.is_terminal:
            table = Table.grid(padding=(0, 2))
            table.add_column(no_wrap=True)
            table.add_column(overflow="fold")
            table.add_row(Text(label, style="dim"), line)
            self._console.print(table)
        else:
            self._print_line(f"{label}: {line.plain}".replace("\n", "\\n"))


class Smoothed:
    """An average of which what lies STEPS_OF_HALF_WEIGHT steps back has half the weight."""

    def __init__(self) -> None:
        self._sum = self._weight = 0.0

    def add(self, value: float, steps: int) -> None:
        """Take a value that stands for as many steps; one that is no number is passed over."""
        if math.isfinite(value):
            kept = 0.5 ** (steps / STEPS_OF_HALF_WEIGHT)
            self._sum = self._sum * kept + value * (1 - kept)
            self._weight = self._weight * kept + (1 - kept)

    @property
    def value(self) -> float | None:
        """The average, if there is one."""
        return self._sum / self._weight if self._weight else None


class Status:
    """What there is to say at any moment of a run; `now` are seconds of one clock."""

    def __init__(self) -> None:
        self.start: RunStarted | None = None
        self.step: StepDone | None = None
        self.validation: Validated | None = None
        self.done = 0
        self._loss = Smoothed()
        self._seconds_per_step = Smoothed()
        self._paused = 0.0
        self._at = 0.0

    def add(self, event: "Event", now: float) -> None:
        """Take an event that came at `now`."""
        from armillary.training.events import CheckpointSaved, RunStarted, StepDone, Validated

        match event:
            case RunStarted():
                self.start, self.done, self._at = event, event.step, now
            case StepDone():
                self._add_step(event)
                self._at = now
            case Validated() | CheckpointSaved():
                if isinstance(event, Validated):
                    self.validation = event
                if self.start is not None and event.step > self.start.step:
                    self._paused += event.seconds
                    self._at += event.seconds

    def _add_step(self, step: "StepDone") -> None:
        steps = max(1, step.step - self.done)
        self.step, self.done = step, step.step
        if step.skipped is None:
            self._loss.add(step.loss, steps)
        if self.start is not None and step.tokens_per_second > 0:
            tokens = self.start.rows * self.start.length
            self._seconds_per_step.add(tokens / step.tokens_per_second, steps)

    def seconds_left(self, now: float) -> float | None:
        """Time to the end: that of the steps, and of pauses as many as there have been so far."""
        each = self._seconds_per_step.value
        if each is None or self.start is None:
            return None
        made = self.done - self.start.step
        pause = self._paused / made if made > 0 else 0.0
        left = (self.start.steps - self.done) * (each + pause)
        return max(0.0, left - max(0.0, now - self._at))

    def position(self, now: float) -> list[str]:
        """Return where the run is."""
        if self.start is None:
            return [f"step {self.done:,}"]
        parts = [
            f"step {self.done:,} of {self.start.steps:,}",
            f"{100 * self.done // self.start.steps} %",
        ]
        left = self.seconds_left(now)
        return parts if left is None else [*parts, f"{clock_text(left)} left"]

    def figures(self) -> list[str]:
        """Return how the run does, what matters most first."""
        parts = []
        if self._loss.value is not None:
            parts.append(f"loss {loss_text(self._loss.value)}")
        if self.validation is not None:
            parts.append(f"validation {loss_text(self.validation.loss)}")
        if self.step is None:
            return parts
        if self.step.balance is not None:
            parts.append(f"balance {self.step.balance:.2f}")
        if self.step.skipped_so_far:
            parts.append(f"{self.step.skipped_so_far:,} skipped")
        if self.step.tokens_per_second > 0:
            parts.append(f"{self.step.tokens_per_second:,.0f} tokens/s")
        parts.append(f"lr {self.step.learning_rate:.1e}")
        if self.step.utilisation > 0:
            parts.append(f"MFU {100 * self.step.utilisation:.0f} %")
        return parts


class _TwoLines:
    """The lines at the bottom of a terminal: a bar with the time left, and figures below it."""

    def __init__(self, status: Status) -> None:
        self._status = status

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "RenderResult":
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        status, width = self._status, options.max_width
        words = fitting(status.position(time.monotonic()), width)
        table = Table.grid(padding=(0, 2))
        if width - len(words) >= 12 and status.start is not None:
            bar = ProgressBar(
                total=status.start.steps, completed=status.done, width=width - len(words) - 2
            )
            table.add_row(bar, Text(words, no_wrap=True))
        else:
            table.add_row(Text(words, no_wrap=True, overflow="crop"))
        yield table
        yield Text(fitting(status.figures(), width), no_wrap=True, overflow="crop")


def fitting(parts: Sequence[str], width: int) -> str:
    """Join as many of the parts as fit a line, whole ones from the first on."""
    line = ""
    for part in parts:
        longer = f"{line}  {part}" if line else part
        if line and len(longer) > width:
            break
        line = longer
    return line


def _lines(event: "Event") -> "list[Text]":
    """Return what is printed of an event that is no step."""
    from rich.text import Text

    from armillary.training.events import CheckpointSaved, Notice, RunStarted, Sampled, Validated

    match event:
        case RunStarted():
            return [Text(line) for line in _of_start(event)]
        case Validated():
            best = ", the best so far" if event.best and event.step else ""
            return [
                Text(
                    f"validation {loss_text(event.loss)} nats per token, "
                    f"{loss_text(event.bits_per_byte)} bits per byte{best}"
                )
            ]
        case Sampled():
            return [_of_sample(event)]
        case CheckpointSaved():
            return [Text(f"saved {one_line(event.path)}")]
        case Notice():
            return [Text(one_line(event.text), style="yellow")]
    return []


def _of_start(start: "RunStarted") -> list[str]:
    trained = count_text(start.trained_parameters)
    if start.trained_parameters != start.parameters:
        trained += f" of {count_text(start.parameters)}"
    where = f"{start.precision} on {start.device}"
    processes = f", {start.processes} processes" if start.processes > 1 else ""
    steps = f"{start.steps:,} steps of {start.rows:,} × {start.length:,} tokens"
    epochs = f", {start.steps / start.epoch_steps:.2g} epochs" if start.epoch_steps > 0 else ""
    return [f"trains {trained} parameters, {where}{processes}", f"{steps}{epochs}"]


def _of_sample(sample: "Sampled") -> "Text":
    from rich.text import Text

    return Text.assemble((escaped(sample.prompt), "bold"), escaped(sample.text))


def print_event(event: "Event") -> None:
    """Print an event for programs, one object on a line: the listener of --json."""
    from armillary.training.log import to_strict_json

    print_json(to_strict_json(event))


def print_result(history: "History", summary: Path | None, *, json: bool = False) -> None:
    """Print what came of a run: the model, how good it is, where more of it stands."""
    if json:
        print_json(_facts(history, summary))
    else:
        print(*_result(history, summary), sep="\n")


def _facts(history: "History", summary: Path | None) -> dict[str, object]:
    from armillary.training.log import finite_or_none

    last, best, end = history.last_validation, history.best_validation, history.end
    return {
        "kind": "result",
        "step": history.step,
        "reason": end.reason if end else None,
        "model": end.model if end else None,
        "summary": str(summary) if summary else None,
        "validation_loss": finite_or_none(last.loss) if last else None,
        "bits_per_byte": finite_or_none(last.bits_per_byte) if last else None,
        "best_validation_loss": best.loss if best else None,
        "best_step": best.step if best else None,
        "compressors": end.compressors if end else {},
        "seconds": history.seconds,
        "tokens": history.tokens,
    }


def _result(history: "History", summary: Path | None) -> list[str]:
    start, last, end = history.start, history.last_validation, history.end
    lines = [end.model] if end is not None and end.model is not None else []
    rows: list[tuple[str, str]] = []
    planned = f" of {start.steps:,}" if start else ""
    how = f", {one_line(end.reason)}" if end else ""
    rows.append(("steps", f"{history.step:,}{planned}{how}, in {clock_text(history.seconds)}"))
    if last is not None:
        first = history.validations[0]
        known = {"before": first} if first.step == 0 < last.step else {}
        for name, event in (known | {"validation": last}).items():
            bits, nats = loss_text(event.bits_per_byte), loss_text(event.loss)
            rows.append((name, f"{bits} bits per byte, {nats} nats per token"))
    best = history.better_validation
    if best is not None:
        rows.append(("its best", f"{loss_text(best.loss)} nats per token, step {best.step:,}"))
    for name, bits_per_byte in (end.compressors if end else {}).items():
        rows.append((name, f"{loss_text(bits_per_byte)} bits per byte"))
    if summary is not None:
        rows.append(("summary", str(summary)))
    width = max(len(name) for name, _ in rows)
    return [*lines, *(f"  {name:<{width}}  {text}" for name, text in rows)]
