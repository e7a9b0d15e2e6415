"""Files that a stopped run left, gone on from where each ends.

A workplace is a directory beside the target, of a name that the next run finds again. It carries a
key that says all that its files follow from: under another key it is emptied first. Knows nothing
of what the files hold.
"""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, Self

import filelock

from armillary.errors import UserError
from armillary.files import PARTIAL, Segments, as_user_error, sync, write_atomically

# Bytes after which what was written is made to last, and noted as done.
_BETWEEN_NOTES = 64 << 20
_KEY, _LOCK, _BEGUN, _DONE = "key", "lock", ".begun", ".done"


class Workplace:
    """Where a target is written before it stands, entered as a context.

    `written` is the path to write it at, a file or a directory. `passed_over` is called with the
    bytes of each file that an earlier run left. Whatever ends the block early leaves the files for
    the next run, unless `clear` was called; `finish` gives the target its place.
    Raises UserError when it cannot be written, or when another process is at work in it.
    """

    def __init__(
        self, target: Path, key: str, passed_over: Callable[[int], None] = lambda _: None
    ) -> None:
        self._target, self._key, self._passed_over = target, key, passed_over
        self._folder = workplace_of(target)
        self._lock = filelock.FileLock(self._folder / _LOCK, timeout=0)
        self.written = self._folder / target.name

    def __enter__(self) -> Self:
        with as_user_error(self._target):
            self._folder.mkdir(exist_ok=True)
            try:
                self._lock.acquire()
            except filelock.Timeout:
                raise UserError(
                    f"{self._target}: is being written by another process; wait for it, or name "
                    "another target"
                ) from None
            noted = self._folder / _KEY
            if not noted.is_file() or noted.read_bytes() != self._key.encode():
                self._empty()
                with write_atomically(noted) as file:
                    file.write(self._key.encode())
            for stray in self._folder.rglob(f"*{PARTIAL}"):
                stray.unlink()
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    @contextlib.contextmanager
    def open(self, path: Path) -> Iterator[Segments]:
        """Take the segments of a file in the workplace, after those that an earlier run left."""
        begun = path.with_name(f".{path.name}{_BEGUN}")
        note = path.with_name(f".{path.name}{_DONE}")
        with as_user_error(path):
            if path.exists():
                size = path.stat().st_size
                self._passed_over(size)
                with path.open("rb") as file:
                    yield Segments(file, size)
                return
            done = _noted(note, begun)
            self._passed_over(done)
            with begun.open("r+b" if done else "wb") as file:
                file.truncate(done)
                file.seek(done)
                yield Segments(file, done, _noting(file, note, done))
                file.flush()
                os.fsync(file.fileno())
            begun.replace(path)
            note.unlink(missing_ok=True)

    def finish(self) -> None:
        """Give the target its place. Raises UserError when something has come to be there."""
        with as_user_error(self._target):
            if os.path.lexists(self._target):
                raise UserError(f"{self._target}: has come to be meanwhile; name another target")
            sync(self.written)
            self.written.rename(self._target)
            sync(self._target.parent)
        self.clear()

    def clear(self) -> None:
        """Remove the workplace and all that is in it."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _empty(self) -> None:
        for entry in self._folder.iterdir():
            if entry.is_dir():
                shutil.rmtree(entry)
            elif entry.name != _LOCK:
                entry.unlink()


def workplace_of(target: Path) -> Path:
    """The directory in which a target is written before it stands."""
    return target.with_name(f".{target.name}.converting")


def _noting(file: BinaryIO, note: Path, done: int) -> Callable[[int], None]:
    """Make what was written last, and note how much it is, now and then."""
    last = done

    def ended(position: int) -> None:
        nonlocal last
        if position - last < _BETWEEN_NOTES:
            return
        file.flush()
        os.fsync(file.fileno())
        with write_atomically(note) as to:
            to.write(str(position).encode())
        last = position

    return ended


def _noted(note: Path, begun: Path) -> int:
    """The bytes of a file that are known to have been written."""
    try:
        done = int(note.read_bytes())
        return done if begun.stat().st_size >= done else 0
    except (OSError, ValueError):
        return 0
