"""The log of a run: a file of JSON lines, one event each, that outlives kills and resumes.

    {"kind": "step", "step": 20, "loss": 5.31, "learning_rate": 0.0003, …}

The fields are those of `armillary.training.events`. JSON has no name for what is no number, so such
a loss is null in the file and NaN when it is read.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields
from pathlib import Path
from types import TracebackType, UnionType
from typing import Any, BinaryIO, Self, get_args, get_origin

from armillary.errors import UserError
from armillary.files import parse_json, write_atomically
from armillary.strict_dict import nearest
from armillary.training.events import (
    CheckpointSaved,
    Event,
    Notice,
    RunEnded,
    RunStarted,
    Sampled,
    StepDone,
    Validated,
)

EVENTS: dict[str, type[Event]] = {
    event.kind: event
    for event in (RunStarted, StepDone, Validated, Sampled, CheckpointSaved, Notice, RunEnded)
}


class JsonLog:
    """A listener that writes each event as a line, and passes it on to the system at once.

    The file is opened when the run starts. One that goes on after n steps keeps the lines up to
    there and loses what came later and will come again, and the end that was none: the log reads
    as one run. One that begins begins a new log. Raises UserError for a file that cannot be
    written, or that should be gone on with and holds something else than such lines.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: BinaryIO | None = None
        self._before_start: list[Event] = []

    def __call__(self, event: Event) -> None:
        """Write the event."""
        try:
            if self._file is None and isinstance(event, RunStarted):
                self._open(resumed_at=event.step)
            if self._file is None:
                self._before_start.append(event)
            else:
                self._file.write(_line(event))
                self._file.flush()
        except OSError as error:
            raise UserError(f"{self.path}: cannot be written: {error.strerror or error}") from error

    def _open(self, resumed_at: int) -> None:
        kept = _kept(self.path, resumed_at) if resumed_at else []
        with write_atomically(self.path) as file:
            file.writelines([*kept, *map(_line, self._before_start)])
        self._file = self.path.open("ab")

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def read_log(path: Path) -> list[Event]:
    """Return the events of a log, in order.

    A last line that a kill cut short is left out, and a notice in its place says so.
    Raises UserError naming the line that is no event, the key that is missing, unknown or wrong.
    """
    if not path.is_file():
        raise UserError(f"{path}: is not there; a run writes it where its `out` says")
    return [event for event, _ in _read(path)]


def to_strict_json(event: Event) -> dict[str, Any]:
    """Return an event as plain values that JSON can hold: what is no number is None."""
    return {key: finite_or_none(value) for key, value in event.to_json().items()}


def _kept(path: Path, step: int) -> list[bytes]:
    """Return the lines of a log that still hold when its run goes on after `step`."""
    try:
        return [
            line
            for event, line in _read(path)
            if event.step <= step and not isinstance(event, RunEnded)
        ]
    except UserError as error:
        raise UserError(f"{error}; move the file away to go on with a new log") from error


def finite_or_none(value: Any) -> Any:
    """Return plain values with None for each number that JSON cannot hold."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite_or_none(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [finite_or_none(entry) for entry in value]
    return value


def _line(event: Event) -> bytes:
    # ASCII, since a text that a model writes need not be valid Unicode.
    return json.dumps(to_strict_json(event), allow_nan=False).encode("ascii") + b"\n"


def _read(path: Path) -> Iterator[tuple[Event, bytes]]:
    """Yield each event with its line."""
    try:
        raw = path.read_bytes() if path.exists() else b""
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from error
    *lines, rest = raw.split(b"\n")
    step = 0
    for number, line in enumerate(lines, 1):
        event = _event(line, f"{path}: line {number}")
        step = event.step
        yield event, line + b"\n"
    if rest:
        notice = Notice(step, f"{path.name}: the last line was cut short and is left out")
        yield notice, _line(notice)


def _event(line: bytes, where: str) -> Event:
    entries = parse_json(line, where)
    kind = entries.pop("kind", None)
    event = EVENTS.get(kind) if isinstance(kind, str) else None
    if event is None:
        raise UserError(f"{where}: kind is {kind!r}, must be one of {', '.join(EVENTS)}")
    known = {field.name: field for field in fields(event)}
    for key in entries:
        if key not in known:
            raise UserError(f"{where}: a {kind} has no {key!r}{nearest(key, known)}")
    return event(**_checked(entries, known, where))


def _checked(entries: dict[str, Any], known: dict[str, Field[Any]], where: str) -> dict[str, Any]:
    checked = {}
    for name, field in known.items():
        if name not in entries:
            if field.default is MISSING and field.default_factory is MISSING:
                raise UserError(f"{where}: {name!r} is missing")
            continue
        value = entries[name]
        if field.type is float and value is None:
            value = math.nan
        if not _fits(value, field.type):
            wanted = field.type.__name__ if type(field.type) is type else field.type
            raise UserError(f"{where}: {name} must be {wanted}, found {value!r}")
        checked[name] = float(value) if field.type is float else value
    return checked


def _fits(value: object, annotation: Any) -> bool:
    """Whether a value is of an annotated type; an int passes for a float, a bool for neither."""
    if annotation is Any:
        return True
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is UnionType:
        return any(_fits(value, part) for part in arguments)
    if origin is dict:
        return isinstance(value, dict) and all(_fits(v, arguments[1]) for v in value.values())
    return type(value) in ({int, float} if annotation is float else {annotation})
