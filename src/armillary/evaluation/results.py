"""results.jsonl: what was evaluated, then each cell's rows and a line that says it is done.

    {"kind": "run", "format": 1, "name": "smollm2-135m", …, "checksum": "…"}
    {"kind": "question", "cell": "retrieval/…", "task": "retrieval", …}
    {"kind": "done", "cell": "retrieval/…", "checksum": "…"}

A cell is appended in one piece and flushed to the disk, so a kill at any moment costs the cell
that was running. Each checksum covers all bytes of the file before its own line and the cell's name
(the header's covers the header), so a byte that changes is noticed. The same evaluation gives the
same bytes.
"""

import hashlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from types import TracebackType, UnionType
from typing import Any, BinaryIO, Self, TypeVar, get_args, get_origin

from armillary.errors import UserError
from armillary.evaluation.records import ChoiceRow, LossRow, QuestionRow, Row, Run
from armillary.files import as_user_error, parse_json, write_atomically

R = TypeVar("R", bound=Row | Run)

FILE = "results.jsonl"
_FORMAT = 1
_ROWS: dict[str, type[Row]] = {"loss": LossRow, "question": QuestionRow, "choice": ChoiceRow}
_KINDS = {row: kind for kind, row in _ROWS.items()}
_NOT_FINITE = {"nan", "inf", "-inf"}  # JSON has no numbers for these


def read_results(path: Path | str) -> tuple[Run, list[Row]]:
    """Return what was evaluated and the rows of all cells that are done, in order.

    `path` is the directory of an evaluation. What a kill left of a cell is left out.
    Raises UserError naming file and line for what is no such file, or has been changed.
    """
    found = _read(_file_in(Path(path)))
    return found.run, [row for rows in found.cells.values() for row in rows]


def cells_done(path: Path | str) -> tuple[str, ...]:
    """Return the keys of the cells that are done. Raises as `read_results`."""
    return tuple(_read(_file_in(Path(path))).cells)


def header_of(directory: Path) -> Run | None:
    """Return what an evaluation begun in a directory is; None where none was. Raises UserError."""
    path = directory / FILE
    return _read(path).run if path.exists() else None


class ResultsFile:
    """A context in which an evaluation's cells are appended to its file.

    Entering it begins the file, or goes on with the one that is there: what follows its last whole
    cell is cut off. Raises UserError for a file of another evaluation, naming what differs, for a
    damaged one, and for what cannot be written.
    """

    def __init__(self, directory: Path, run: Run, keys: Sequence[str]) -> None:
        self.path = directory / FILE
        self._run, self._keys = run, keys
        self._file: BinaryIO | None = None
        self._digest = hashlib.sha256()
        self.rows: dict[str, list[Row]] = {}

    def __enter__(self) -> Self:
        with as_user_error(self.path):
            if self.path.exists():
                self._go_on()
            else:
                header = _header(self._run)
                with write_atomically(self.path) as file:
                    file.write(header)
                self._digest.update(header)
            self._file = self.path.open("ab", buffering=0)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._file is not None:
            self._file.close()

    def append(self, key: str, rows: Sequence[Row]) -> None:
        """Write a cell's rows, done with them. Raises UserError when the disk takes no more."""
        assert self._file is not None
        data = b"".join(_line({"kind": _KINDS[type(row)], "cell": key}, row) for row in rows)
        self._digest.update(data)
        done = _json({"kind": "done", "cell": key, "checksum": _sum_at(self._digest, key)})
        self._digest.update(done)
        with as_user_error(self.path, "what is done is kept"):
            view = memoryview(data + done)
            while view:
                view = view[self._file.write(view) :]
            os.fsync(self._file.fileno())
        self.rows[key] = list(rows)

    def _go_on(self) -> None:
        found = _read(self.path)
        different = difference(found.run, self._run)
        if different is not None:
            raise UserError(
                f"{self.path}: is of another evaluation: {different}; choose another directory, "
                "or remove the file to begin anew"
            )
        expected = list(self._keys[: len(found.cells)])
        if list(found.cells) != expected:
            raise UserError(
                f"{self.path}: its cells are not those of this evaluation; choose another "
                "directory, or remove the file to begin anew"
            )
        os.truncate(self.path, found.size)
        self.rows, self._digest = found.cells, found.digest


def difference(there: Run, here: Run) -> str | None:
    """Say the first setting in which two evaluations differ; None where they are the same."""
    theirs, ours = _settings(there), _settings(here)
    for name in [*ours, *theirs]:
        if theirs.get(name, "left out") != ours.get(name, "left out"):
            return (
                f"{name} is {theirs.get(name, 'left out')} there, {ours.get(name, 'left out')} here"
            )
    return None


def _settings(run: Run) -> dict[str, str]:
    """Every setting of a run under its dotted name, as JSON writes it."""
    flat: dict[str, str] = {}

    def add(name: str, value: object) -> None:
        if isinstance(value, Mapping):
            for key, entry in value.items():
                add(f"{name}.{key}", entry)
        else:
            flat[name] = json.dumps(value)

    for field in fields(run):
        add(field.name, getattr(run, field.name))
    return flat


@dataclass
class _Found:
    """A file's content up to its last whole cell: `size` bytes, whose running sum is `digest`."""

    run: Run
    cells: dict[str, list[Row]]
    size: int
    digest: Any


def _file_in(directory: Path) -> Path:
    path = directory / FILE
    if not path.is_file():
        raise UserError(f"{directory}: holds no {FILE}; armillary evaluate writes it to its --out")
    return path


def _read(path: Path) -> _Found:
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from error
    *lines, _torn = raw.split(b"\n")
    if not lines:
        raise UserError(f"{path}: is not a file of results: it has no whole line")
    run = _run(lines[0], f"{path}: line 1")
    digest = hashlib.sha256(lines[0] + b"\n")
    found = _Found(run, {}, len(lines[0]) + 1, digest.copy())
    size, rows = found.size, []
    for number, line in enumerate(lines[1:], 2):
        where = f"{path}: line {number}"
        entries = parse_json(line, where)
        kind, cell = entries.pop("kind", None), entries.pop("cell", None)
        if kind in _ROWS and isinstance(cell, str):
            rows.append((cell, _decoded(_ROWS[kind], entries, where)))
        elif kind == "done" and isinstance(cell, str):
            if entries != {"checksum": _sum_at(digest, cell)} or any(of != cell for of, _ in rows):
                raise UserError(
                    f"{where}: the lines up to here are not those that were written (their "
                    "checksum differs); evaluate again in another directory"
                )
            if cell in found.cells:
                raise UserError(f"{where}: cell {cell!r} is done a second time")
            found.cells[cell], rows = [row for _, row in rows], []
        else:
            raise UserError(f"{where}: kind is {kind!r}, must be one of {', '.join(_ROWS)}, done")
        digest.update(line + b"\n")
        size += len(line) + 1
        if kind == "done":
            found.size, found.digest = size, digest.copy()
    return found


def _header(run: Run) -> bytes:
    entries = {"kind": "run", "format": _FORMAT, **_encoded(run)}
    return _json({**entries, "checksum": _short(hashlib.sha256(_json(entries)))})


def _run(line: bytes, where: str) -> Run:
    entries = parse_json(line, where)
    if entries.get("kind") != "run":
        raise UserError(f"{where}: is not the beginning of a file of results")
    if entries.get("format") != _FORMAT:
        raise UserError(f"{where}: is of format {entries.get('format')!r}; {_FORMAT} is read")
    checksum = entries.pop("checksum", None)
    if checksum != _short(hashlib.sha256(_json(entries))):
        raise UserError(
            f"{where}: is not as it was written (its checksum differs); evaluate again in another "
            "directory"
        )
    del entries["kind"], entries["format"]
    return _decoded(Run, entries, where)


def _sum_at(digest: Any, cell: str) -> str:
    """The checksum of all before a line that says that a cell is done, and of the cell's name."""
    there = digest.copy()
    there.update(cell.encode("utf-8", "surrogatepass"))
    return _short(there)


def _short(digest: Any) -> str:
    return str(digest.hexdigest()[:16])


def _json(entries: Mapping[str, object]) -> bytes:
    # ASCII, since a document's name need not be valid Unicode.
    return json.dumps(entries, allow_nan=False).encode("ascii") + b"\n"


def _line(first: Mapping[str, object], row: Row) -> bytes:
    return _json({**first, **_encoded(row)})


def _encoded(record: Row | Run) -> dict[str, Any]:
    return {field.name: _plain(getattr(record, field.name)) for field in fields(record)}


def _plain(value: Any) -> Any:
    """A value as JSON holds it; NumPy's scalars as Python's own."""
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    value = value.item() if hasattr(value, "item") else value
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _decoded(kind: type[R], entries: Mapping[str, Any], where: str) -> R:
    known = {field.name: field for field in fields(kind)}
    unknown = [key for key in entries if key not in known]
    if unknown:
        raise UserError(f"{where}: {unknown[0]!r} is no entry of a {kind.__name__}")
    values = {}
    for name, field in known.items():
        if name not in entries:
            if field.default is MISSING and field.default_factory is MISSING:
                raise UserError(f"{where}: {name!r} is missing")
            continue
        try:
            values[name] = _as(field.type, entries[name])
        except TypeError:
            wanted = field.type.__name__ if type(field.type) is type else field.type
            raise UserError(f"{where}: {name} must be {wanted}, found {entries[name]!r}") from None
    return kind(**values)


def _as(annotation: Any, value: Any) -> Any:
    """The value as the annotated type has it. Raises TypeError where it is none."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is UnionType:
        return _first(arguments, value)
    if origin is tuple:
        return tuple(_as(arguments[0], entry) for entry in _of(list, value))
    if origin is not None:  # a mapping
        return {key: _as(arguments[1], entry) for key, entry in _of(dict, value).items()}
    if annotation is float:
        if value in _NOT_FINITE and isinstance(value, str):
            return float(value)
        return float(_of((int, float), value))
    return _of(annotation, value)


def _first(kinds: Iterable[Any], value: Any) -> Any:
    exact: Iterator[Any] = (kind for kind in kinds if type(value) is kind)
    for kind in (*exact, *kinds):
        try:
            return _as(kind, value)
        except TypeError:
            continue
    raise TypeError


def _of(kind: Any, value: Any) -> Any:
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if type(value) not in kinds:
        raise TypeError
    return value
