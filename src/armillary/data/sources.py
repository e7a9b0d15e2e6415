"""Where text comes from: files and trees of them, records, the standard library, the Hub.

`find_sources` turns what a user wrote into a list of files; `read_source` streams one of them as
documents, and in their midst what had to be passed over, each with its reason. Memory is bounded
by the limit on documents, whatever the size of the input. Knows no tokens.
"""

import contextlib
import glob
import io
import os
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import BinaryIO, Literal

from armillary.data.chats import read_chat
from armillary.data.compressed import DAMAGE, open_decompressed
from armillary.data.documents import Document, Event, Skipped, cut, decoded, in_parts
from armillary.data.records import read_hub, read_json_lines, read_parquet
from armillary.errors import UserError

PYTHON_STDLIB = "python-stdlib"
HUB = "hub:"
CHAT = "chat"
PART_BYTES = 1 << 20
_COMPRESSED = {".gz": "gzip", ".zst": "zstd", ".zstd": "zstd"}
_FORMATS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
_STDLIB_LEFT_OUT = frozenset({"__pycache__", "site-packages", "dist-packages"})

Format = Literal["auto", "text", "jsonl", "parquet", "chat"]
Moved = Callable[[float], None]


@dataclass(frozen=True)
class Source:
    """One file of documents, or one Hub data set.

    name          what its documents' ids begin with: the path as it was given
    below         its name below what the argument named, which stays when the whole is moved
    path          where it lies; None on the Hub
    kind          "text" (one document), "jsonl", "parquet" or "hub"
    compression   "", "gzip" or "zstd"
    size          bytes as they lie there; 0 where that is not known
    argument      which of the arguments, counted from 0, meant it first
    """

    name: str
    below: str
    path: Path | None
    kind: str
    compression: str = ""
    size: int = 0
    argument: int = 0

    def fingerprint(self) -> str:
        """Return what changes when the file does: its name, size and time of change."""
        changed = self.path.stat().st_mtime_ns if self.path is not None else 0
        return f"{self.name} {self.size} {changed}"


def find_sources(arguments: Sequence[str], format: Format = "auto") -> list[Source]:
    """Return the files that the arguments mean, in their order, and sorted within each.

    An argument is a file, a directory (every file in it and below, hidden ones left out), a pattern
    (`**` goes into directories), `python-stdlib` or `hub:owner/name[/configuration][@revision]`.
    A file that is meant twice is read once. The format is told by the name's ending unless it is
    given: .jsonl and .ndjson, .parquet, anything else is text; each may end in .gz or .zst. With
    the format "chat" the records of .parquet and of the Hub are chats, and so are the lines of any
    other file.
    Raises UserError for an argument that means nothing.
    """
    found: dict[str, Source] = {}
    for number, argument in enumerate(arguments):
        sources = list(_meant_by(argument, format))
        if not sources:
            raise UserError(f"{argument}: holds no files to read")
        for source in sources:
            key = source.name if source.path is None else os.path.realpath(source.path)
            found.setdefault(key, replace(source, argument=number))
    if not found:
        raise UserError("no source is given; name files, directories, patterns or python-stdlib")
    return list(found.values())


def read_source(
    source: Source,
    *,
    field: str = "text",
    chats: bool = False,
    limit: int = PART_BYTES,
    moved: Moved = lambda _: None,
) -> Iterator[Event]:
    """Yield the documents of a source, and a `Skipped` for each thing that is none.

    field   the key of JSON lines, or the column of a table, that holds the text
    chats   whether it holds a list of messages instead
    limit   bytes of UTF-8 text in one part of a longer document; it is cut at a line end where
            there is one
    moved   called now and then with the share of the source that is read, 0 to 1
    The same source gives the same events. Raises UserError where a library is missing.
    """
    read = read_chat if chats else partial(in_parts, limit=limit)
    if source.path is None:
        yield from read_hub(source.name, field, read)
        return
    if source.kind == "parquet":
        yield from read_parquet(source.path, source.name, field, read, moved)
        return
    try:
        with contextlib.closing(_Counted(source.path, source.size, moved)) as raw:
            stream = open_decompressed(io.BufferedReader(raw, 1 << 20), source.compression)
            if source.kind == "jsonl":
                yield from read_json_lines(stream, source.name, field, read)
            else:
                yield from _read_text(stream, source.name, limit)
    except OSError as error:
        yield Skipped(source.name, "cannot be read", error.strerror or str(error))


def _meant_by(argument: str, format: Format) -> Iterator[Source]:
    if argument == PYTHON_STDLIB:
        if format == CHAT:
            raise UserError(f"{argument}: holds no chats; leave out --format chat")
        yield from _standard_library()
    elif argument.startswith(HUB):
        yield Source(argument, argument, None, "hub")
    elif os.path.isdir(argument):
        yield from (_file(path, Path(argument), format) for path in _tree(Path(argument)))
    elif os.path.isfile(argument):
        yield _file(Path(argument), Path(argument).parent, format)
    elif glob.has_magic(argument):
        root = Path(*takewhile(lambda part: not glob.has_magic(part), Path(argument).parts))
        matches = map(Path, sorted(glob.glob(argument, recursive=True)))
        yield from (_file(match, root, format) for match in matches if match.is_file())
    else:
        hint = f"; the aliases are: {PYTHON_STDLIB}, {HUB}owner/name" if "/" not in argument else ""
        raise UserError(f"{argument}: no such file or directory{hint}")


def _tree(directory: Path) -> Iterator[Path]:
    """Every file in and below a directory, in the order of their names; links are not entered."""

    def refuse(error: OSError) -> None:
        raise UserError(f"{error.filename}: cannot be listed: {error.strerror}") from error

    for folder, folders, files in os.walk(directory, onerror=refuse):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(files):
            path = Path(folder, name)
            if not name.startswith(".") and path.is_file():
                yield path


def _file(path: Path, root: Path, format: Format) -> Source:
    compression = _COMPRESSED.get(path.suffix.lower(), "")
    inner = path.with_suffix("") if compression else path
    kind = _kind(inner.suffix.lower(), format)
    if kind == "parquet" and compression:
        raise UserError(f"{path}: Parquet inside {compression} cannot be read in parts; unpack it")
    name, below = (printable(each.as_posix()) for each in (path, path.relative_to(root)))
    return Source(name, below, path, kind, compression, path.stat().st_size)


def printable(name: str) -> str:
    """Return a name that is no UTF-8 with escapes, since ids go into JSON files."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def _kind(ending: str, format: Format) -> str:
    if format == CHAT:
        return "parquet" if ending == ".parquet" else "jsonl"
    return _FORMATS.get(ending, "text") if format == "auto" else format


def _standard_library() -> Iterator[Source]:
    """Source files of the running interpreter's library, without tests and what installs added."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in _tree(root):
        parts = path.relative_to(root).parts
        inside = _STDLIB_LEFT_OUT.isdisjoint(parts[:-1]) and not any(map(_is_test, parts))
        # _sysconfigdata… holds the flags that this one interpreter was built with.
        if path.suffix == ".py" and inside and not path.name.startswith("_sysconfigdata"):
            name = "/".join((PYTHON_STDLIB, *parts))
            yield Source(name, name, path, "text", size=path.stat().st_size)


def _is_test(part: str) -> bool:
    return part in {"test", "tests", "idle_test"} or part.startswith("test_")


class _Counted(io.RawIOBase):
    """A file that says how far it is read."""

    def __init__(self, path: Path, size: int, moved: Moved) -> None:
        self._file: BinaryIO = path.open("rb", buffering=0)
        self._size, self._moved, self._done = size, moved, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        count = self._file.readinto(buffer)  # type: ignore[attr-defined]
        self._done += count or 0
        self._moved(min(1.0, self._done / self._size) if self._size else 1.0)
        return count or 0

    def close(self) -> None:
        self._file.close()
        super().close()


def _read_text(stream: BinaryIO, name: str, limit: int) -> Iterator[Event]:
    """One document, read and handed on in parts of at most `limit` bytes."""
    rest, part, start = b"", 0, 0
    while True:
        try:
            block = _read_fully(stream, limit + 1 - len(rest))
        except DAMAGE as error:
            yield Skipped(name, "damaged compression", f"after {start} bytes of text: {error}")
            return
        data = rest + block
        at_end = len(data) <= limit
        size = len(data) if at_end else cut(data, limit)
        text = decoded(data[:size], name, start, "utf-8-sig" if part == 0 else "utf-8")
        if isinstance(text, Skipped):
            yield text
            return
        if part == 0 and at_end and not text.strip():
            yield Skipped(name, "empty", "no text in it")
            return
        yield Document(name, text, part, last=at_end)
        if at_end:
            return
        rest, part, start = data[size:], part + 1, start + size


def _read_fully(stream: BinaryIO, count: int) -> bytes:
    blocks = []
    while count > 0 and (block := stream.read(min(count, 1 << 20))):
        blocks.append(block)
        count -= len(block)
    return b"".join(blocks)
