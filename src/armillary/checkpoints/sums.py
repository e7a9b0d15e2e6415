"""The checksum of a model's weights, remembered, since to read them all takes a while."""

import contextlib
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from armillary.errors import CheckpointError, UserError
from armillary.files import read_json_if_there, sha256, write_json

_MOST = 1000


class Sums:
    """The SHA-256 of files, which a JSON file remembers by their paths, sizes and times.

    It may be gone, hold nonsense or be no one's to write: then the files are read again.
    """

    def __init__(self, files: Sequence[Path], memory: Path) -> None:
        self._files, self._memory = [path.resolve() for path in files], memory

    def known(self) -> str | None:
        """One for all files together, unless one of them is new or has changed."""
        remembered = self._remembered()
        try:
            sums = [remembered.get(_state(path)) for path in self._files]
        except OSError:
            return None
        return _joined(sums) if sums and all(isinstance(one, str) for one in sums) else None

    def computed(self) -> str:
        """The same, computed where it is not known. Raises OSError for a file that is gone."""
        remembered = self._remembered()
        sums = {}
        for path in self._files:
            state = _state(path)
            one = remembered.get(state)
            sums[state] = one if isinstance(one, str) else sha256(path)
        if any(remembered.get(state) != one for state, one in sums.items()):
            others = [(state, one) for state, one in remembered.items() if state not in sums]
            with contextlib.suppress(OSError, UserError):
                self._memory.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                write_json(self._memory, dict(others[-_MOST:]) | sums)
        return _joined(list(sums.values()))

    def _remembered(self) -> dict[str, object]:
        try:
            return read_json_if_there(self._memory)
        except CheckpointError:
            return {}


def _state(path: Path) -> str:
    """What changes when a file is written anew."""
    about = path.stat()
    return json.dumps([str(path), about.st_size, about.st_mtime_ns, about.st_ino])


def _joined(sums: Sequence[object]) -> str:
    return hashlib.sha256(repr(sums).encode()).hexdigest()
