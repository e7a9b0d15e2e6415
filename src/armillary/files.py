"""Files: written whole or not at all, checked by size and sum, JSON read without surprises.

Knows nothing of models. A directory is built beside its target and renamed into place; its
manifest, written last, names every file with its size and SHA-256.
"""

import contextlib
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from armillary.errors import CheckpointError, TruncatedError, UserError

MANIFEST = "manifest.json"
PARTIAL = ".partial"  # what the name of a file that is being written ends with
_MANIFEST_FORMAT = "armillary-manifest"
_JSON_LIMIT = 64 << 20
_CHUNK = 1 << 20


@contextlib.contextmanager
def write_atomically(path: Path) -> Iterator[BinaryIO]:
    """Give a binary file that takes `path`'s place when the block ends, and only then.

    Whatever ends the block early leaves `path` as it was and nothing beside it.
    Raises UserError when the file cannot be written (no space, no permission).
    """
    partial = _beside(path)
    with as_user_error(path):
        try:
            with partial.open("xb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        sync(path.parent)


class Segments:
    """Takes the segments of a file in their order, each of a size that is known before.

    The first `done` bytes stand in the file already: segments that lie in them are passed over, and
    their chunks never asked for. `ended` is called with the bytes that stand there after each other
    segment.
    """

    def __init__(
        self, file: BinaryIO, done: int = 0, ended: Callable[[int], None] = lambda _: None
    ) -> None:
        self._file, self._done, self._ended = file, done, ended
        self.position = 0

    def put(self, what: str, size: int, chunks: Iterable[Any]) -> None:
        """Write a segment, chunk by chunk. Raises ValueError unless they have `size` bytes."""
        self.position += size
        if self.position <= self._done:
            return
        written = sum(self._file.write(memoryview(chunk).cast("B")) for chunk in chunks)
        if written != size:
            raise ValueError(f"{what}: {written} bytes were given, {size} needed")
        self._ended(self.position)


Opener = Callable[[Path], AbstractContextManager[Segments]]


@contextlib.contextmanager
def write_whole(path: Path) -> Iterator[Segments]:
    """Take the segments of a file that takes `path`'s place at the end, as `write_atomically`."""
    with write_atomically(path) as file:
        yield Segments(file)


@contextlib.contextmanager
def write_directory_atomically(
    path: Path, checksums: Mapping[str, str] | None = None
) -> Iterator[Path]:
    """Give an empty directory that takes `path`'s place when the block ends, manifest and all.

    An existing `path` is replaced only when it is empty or holds a manifest of ours, so that no
    other directory is ever lost to a slip of the name. It is set aside under `set_aside(path)`
    until the new one stands, then removed; a crash in between leaves it there, and the next
    write brings it back first. `checksums` as in `write_manifest`, read when the block ends.
    Raises UserError when `path` is in the way or cannot be written.
    """
    with as_user_error(path):
        old = set_aside(path)
        if old.exists() and not path.exists():
            old.rename(path)
        if path.exists():
            _check_replaceable(path)
        partial = _beside(path)
        partial.mkdir(parents=True)
        try:
            yield partial
            for file in sorted(partial.rglob("*")):
                sync(file)
            write_manifest(partial, checksums)
            sync(partial)
            _swap(partial, path, old)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise


@contextlib.contextmanager
def staged(path: Path) -> Iterator[Path]:
    """Give a path to write a file or a directory at, which takes `path`'s place at the end.

    For what is to be looked at, as a whole, before it stands. Whatever ends the block early leaves
    `path` as it was and nothing beside it; an existing `path` is replaced as `write_atomically` and
    `write_directory_atomically` do.
    Raises UserError when `path` is in the way, its folder is not there, or cannot be written to.
    """
    if path.is_dir():
        _check_replaceable(path)
    stage = _beside(path)
    with as_user_error(path):
        stage.mkdir()
    try:
        written = stage / path.name
        yield written
        with as_user_error(path):
            if written.is_dir():
                if path.exists():
                    _check_replaceable(path)
                _swap(written, path, set_aside(path))
            else:
                written.replace(path)
                sync(path.parent)
    finally:
        shutil.rmtree(stage, ignore_errors=True)


@dataclass(frozen=True)
class Writer:
    """One of `count` processes that write a directory together; number 0 writes what is one.

    `directory` is entered by all of them and gives all the same partial directory, which takes
    its place when the last is done, and only when none failed. `file` opens each file of weights.
    """

    number: int = 0
    count: int = 1
    directory: Callable[[Path], AbstractContextManager[Path]] = write_directory_atomically
    file: Opener = write_whole


ALONE = Writer()


def set_aside(path: Path) -> Path:
    """Where the previous directory waits while a new one takes its place."""
    return path.with_name(f".{path.name}.previous")


def _swap(partial: Path, path: Path, old: Path) -> None:
    if not path.exists():
        partial.rename(path)
    else:
        shutil.rmtree(old, ignore_errors=True)
        path.rename(old)
        try:
            partial.rename(path)
        except BaseException:
            old.rename(path)
            raise
        shutil.rmtree(old, ignore_errors=True)
    sync(path.parent)


def _check_replaceable(path: Path) -> None:
    if not _replaceable(path):
        raise UserError(f"{path}: exists and was not saved by armillary; choose another name")


def _replaceable(path: Path) -> bool:
    if not path.is_dir():
        return False
    if not any(path.iterdir()):
        return True
    try:
        return _manifest_entries(path) is not None
    except CheckpointError:
        return False


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}{PARTIAL}")


def sync(path: Path) -> None:
    """Make what a file or directory holds last, also through a loss of power."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def as_user_error(path: Path, remedy: str = "") -> Iterator[None]:
    """Turn what the system refuses while `path` is written into a UserError of one line."""
    try:
        yield
    except OSError as error:
        reason = f"cannot be written: {error.strerror or error}"
        raise UserError("; ".join(filter(None, (f"{path}: {reason}", remedy)))) from error


def sha256(path: Path, progress: Callable[[int], None] | None = None) -> str:
    """Hexadecimal SHA-256 of a file; `progress` is called with the bytes of each step."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            if progress is not None:
                progress(len(chunk))
    return digest.hexdigest()


def write_manifest(directory: Path, checksums: Mapping[str, str] | None = None) -> None:
    """Name every file of the directory with its size in bytes and its SHA-256.

    `checksums` are those that are known already, by a file's name; the rest are computed.
    """
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    names = {path.relative_to(directory).as_posix(): path for path in files}
    names.pop(MANIFEST, None)
    write_json(directory / MANIFEST, manifest_of(names, checksums))


def manifest_of(
    files: Mapping[str, Path], checksums: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """The entries of a manifest for files by their names; `checksums` as in `write_manifest`."""
    known = checksums or {}
    entries = {
        name: {"bytes": path.stat().st_size, "sha256": known.get(name) or sha256(path)}
        for name, path in files.items()
    }
    return {"format": _MANIFEST_FORMAT, "version": 1, "files": entries}


def verify_manifest(
    directory: Path, checksums: bool = False, share: tuple[int, int] = (0, 1)
) -> list[str]:
    """Hold the files against the manifest: there and of the right size, or also of the right sum.

    `share` (i, n) compares the sums of every n-th file only, from the i-th on: n processes may
    divide the work. Returns the names of all files.
    Raises CheckpointError naming the file that differs.
    """
    entries = _manifest_entries(directory)
    for number, (name, (size, checksum)) in enumerate(entries.items()):
        path = directory / name
        if not path.is_file():
            raise CheckpointError(f"{directory}: {name} is in the manifest but not there")
        found = path.stat().st_size
        if found != size:
            kind = TruncatedError if found < size else CheckpointError
            raise kind(f"{path}: has {found} bytes, the manifest says {size}")
        if checksums and number % share[1] == share[0] and sha256(path) != checksum:
            raise CheckpointError(f"{path}: its SHA-256 is not the manifest's; save it again")
    return list(entries)


def _manifest_entries(directory: Path) -> dict[str, tuple[int, str]]:
    path = directory / MANIFEST
    manifest = read_json(path)
    if manifest.get("format") != _MANIFEST_FORMAT or manifest.get("version") != 1:
        raise CheckpointError(f"{path}: is no manifest of armillary, version 1")
    entries = {}
    files = manifest.get("files")
    for name, entry in files.items() if isinstance(files, dict) else ():
        size = entry.get("bytes") if isinstance(entry, dict) else None
        checksum = entry.get("sha256") if isinstance(entry, dict) else None
        if type(size) is not int or not isinstance(checksum, str):
            raise CheckpointError(f"{path}: the entry of {name!r} lacks its bytes or its sha256")
        inside_directory(name, str(path))
        entries[name] = (size, checksum)
    if not entries:
        raise CheckpointError(f"{path}: names no files")
    return entries


def inside_directory(name: str, where: str) -> None:
    """Raise CheckpointError when a file's name, read from a file, leads out of its directory."""
    parts = name.split("/")
    if not name or "\\" in name or "\0" in name or any(part in {"", ".", ".."} for part in parts):
        raise CheckpointError(f"{where}: {name!r} does not name a file inside the directory")


def read_json(path: Path, limit: int = _JSON_LIMIT) -> dict[str, Any]:
    """Read a JSON object. Raises CheckpointError in one line with file and place.

    A duplicate key, NaN or Infinity, more than `limit` bytes, and anything but an object at the
    top are errors.
    """
    try:
        size = path.stat().st_size
        if size > limit:
            raise CheckpointError(f"{path}: has {size} bytes; at most {limit} are read as JSON")
        text = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    return parse_json(text, str(path))


def read_json_if_there(path: Path, limit: int = _JSON_LIMIT) -> dict[str, Any]:
    """Read a JSON object that may be absent, which is an empty one. Raises as `read_json`.

    A link into nowhere and a directory are not absent: something was meant to be there.
    """
    return read_json(path, limit) if os.path.lexists(path) else {}


def parse_json(text: bytes, where: str) -> dict[str, Any]:
    """Parse a JSON object, with the checks of `read_json`."""
    try:
        value = json.loads(
            text.decode("utf-8"),
            object_pairs_hook=without_duplicates,
            parse_constant=_refuse_constant,
        )
    except json.JSONDecodeError as error:
        place = f"line {error.lineno} column {error.colno}"
        raise CheckpointError(f"{where}: is not JSON: {place}: {error.msg}") from error
    except RecursionError as error:
        raise CheckpointError(f"{where}: is not JSON that can be read: nested too deep") from error
    except ValueError as error:
        raise CheckpointError(f"{where}: is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}: must hold a JSON object, not {type(value).__name__}")
    return value


def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The hook for JSON's objects that raises ValueError for a key given twice."""
    entries = dict(pairs)
    if len(entries) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"key {key!r} stands there twice")
            seen.add(key)
    return entries


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no number in JSON")


def write_json(path: Path, value: object) -> None:
    """Write a value as indented JSON, atomically."""
    with write_atomically(path) as file:
        text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
        file.write(text.encode("utf-8") + b"\n")


def map_file(path: Path) -> NDArray[np.uint8]:
    """Map a file into memory, read-only: flat bytes that cost no memory until they are read.

    Raises CheckpointError when the file cannot be read. An empty file gives an empty array.
    """
    try:
        if path.stat().st_size == 0:
            return np.empty(0, dtype=np.uint8)
        return np.memmap(path, dtype=np.uint8, mode="r")
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
