"""The checksum of a model's weights, remembered, since to read them all takes a while."""

import contextlib
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

from armillary.errors import CheckpointError, UserError
from armillary.files import read_json_if_there, sha256, write_json

_MUCH = 1 << 30


class Sums:
    """The SHA-256 of files, which a JSON file remembers by their paths, sizes, times and numbers.

    That file may be gone, hold nonsense or be no one's to write: then all is read again. `notice`
    is told before that takes a while.
    """

    def __init__(
        self, files: Sequence[Path], memory: Path, notice: Callable[[str], None] | None = None
    ) -> None:
        self._files, self._memory = [path.resolve() for path in files], memory
        self._notice = notice

    def known(self) -> str | None:
        """One for all files together, unless one of them is new or has changed."""
        remembered = self._remembered()
        try:
            sums = [_sum_of(remembered, path) for path in self._files]
        except OSError:
            return None
        return None if None in sums else _joined(sums)

    def computed(self) -> str:
        """The same, computed where it is not known. Raises OSError for a file that is gone."""
        remembered = self._remembered()
        new = [path for path in self._files if _sum_of(remembered, path) is None]
        if self._notice is not None and sum(path.stat().st_size for path in new) > _MUCH:
            self._notice("taking the checksum of the weights, once, to know their prompts again")
        for path in new:
            remembered[str(path)] = {"file": _file(path), "sha256": sha256(path)}
        if new:
            with contextlib.suppress(OSError, UserError):
                self._memory.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                there = {path: entry for path, entry in remembered.items() if Path(path).exists()}
                write_json(self._memory, there)
        return _joined([_sum_of(remembered, path) for path in self._files])

    def _remembered(self) -> dict[str, object]:
        try:
            return read_json_if_there(self._memory)
        except CheckpointError:
            return {}


def _sum_of(remembered: dict[str, object], path: Path) -> str | None:
    entry = remembered.get(str(path))
    if not isinstance(entry, dict) or entry.get("file") != _file(path):
        return None
    found = entry.get("sha256")
    return found if isinstance(found, str) else None


def _file(path: Path) -> list[int]:
    """What changes when a file is written anew: bytes, time and number."""
    about = path.stat()
    return [about.st_size, about.st_mtime_ns, about.st_ino]


def _joined(sums: Sequence[str | None]) -> str:
    return hashlib.sha256(repr(list(sums)).encode()).hexdigest()
