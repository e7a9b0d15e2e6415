"""Keys and values of long prompts in files, for the processes that come after.

One safetensors file holds a prompt: its tokens, the arrays of its cache by their names, and in the
metadata the SHA-256 of them all. Its name tells what it can serve: what was computed (weights,
configuration, types, code, machine), the first tokens, and all of them. A file that is cut, changed
or something else is removed and never an error, and neither is a disk that takes nothing. Files
appear whole and are gone at once, so that processes need not know of each other.

Prompts are private: the directory is its owner's alone.
"""

import contextlib
import functools
import hashlib
import os
import stat
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llvmlite
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from armillary.checkpoints.sums import Sums
from armillary.config import DecoderConfig
from armillary.engine.cache import TextCache
from armillary.engine.kv_layout import Stored
from armillary.engine.machine import host
from armillary.errors import UserError
from armillary.files import PARTIAL, write_atomically

SHORTEST = 64
"""Tokens that are worth going on from."""

LONG = 256
"""Tokens of a prompt that is worth a file."""

LIMIT = 2 << 30
"""Bytes of all files together."""

_ABANDONED = 3600
"""Seconds after which a file that is being written is nobody's."""

_SUFFIX = ".safetensors"


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two texts begin with alike."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(one), len(other)))


class PromptFiles:
    """The prompts of one model in a directory.

    `sums` are those of the files with its weights, `width` what it holds them in and `stored` what
    keys and values are in. `limit`: bytes of all files, beyond which those that were of no use for
    longest go.
    """

    def __init__(
        self,
        folder: Path,
        sums: Sums,
        config: DecoderConfig,
        width: str,
        stored: Stored,
        limit: int = LIMIT,
    ) -> None:
        self._folder, self._sums, self._limit = folder, sums, limit
        self._config, self._width, self._stored = config, width, stored

    def read(
        self, prompt: Sequence[int], shortest: int, regimes: Sequence[int], room: int
    ) -> TextCache | None:
        """A cache of the longest beginning of a prompt that a file holds, if it is long enough.

        `regimes` are what the rules for frequencies that vary make of the text's length.
        """
        known = self._sums.known()  # where they are not, no file of this model was written
        if known is None:
            return None
        for count, path in self._alike(prompt, self._key(known, regimes)):
            if count >= shortest:
                cache = self._cache(path, count, room)
                if cache is not None:
                    with contextlib.suppress(OSError):
                        os.utime(path)
                    return cache
        return None

    def write(self, cache: TextCache, regimes: Sequence[int]) -> None:
        """Write a prompt's cache, where it is long and files hold too little of it.

        Those that hold a beginning of it and no more are then of no use.
        """
        tokens = cache.tokens
        if len(tokens) < LONG:
            return
        with contextlib.suppress(OSError, UserError):
            key = self._key(self._sums.computed(), regimes)
            alike = self._alike(tokens, key)
            held = alike[0][0] if alike else 0
            if len(tokens) - held < max(SHORTEST, len(tokens) // 8):
                return
            content = _content(cache)
            _make_private(self._folder)
            if self._make_room(len(content)):
                with write_atomically(self._folder / f"{key}-{_names(tokens)}{_SUFFIX}") as file:
                    file.write(content)
                for count, path in alike:
                    if count == len(_tokens(path)):
                        path.unlink(missing_ok=True)

    def _key(self, weights: str, regimes: Sequence[int]) -> str:
        """A name for all that keys and values depend on, beside the tokens."""
        about = (weights, self._config.model_dump_json(), self._width, self._stored, _code())
        return hashlib.sha256(repr((about, tuple(regimes))).encode()).hexdigest()[:32]

    def _alike(self, prompt: Sequence[int], key: str) -> list[tuple[int, Path]]:
        """Files that begin as a prompt does, each with how far, the furthest first."""
        begins = f"{key}-{_names(prompt).partition('-')[0]}-*{_SUFFIX}"
        found = [(common_prefix(_tokens(path), prompt), path) for path in self._folder.glob(begins)]
        return sorted(found, reverse=True)

    def _cache(self, path: Path, count: int, room: int) -> TextCache | None:
        """The first tokens of a file. One that is not as it was written is removed."""
        cache = TextCache(self._config, self._stored)
        try:
            with safe_open(path, framework="numpy") as file:
                _check_shapes(file, cache)
                arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                if (file.metadata() or {}).get("sha256") != _sum(arrays):
                    raise ValueError("changed")
            cache = TextCache(self._config, self._stored, room=max(room, count))
            cache.put(arrays.pop("tokens")[:count].tolist(), arrays)
        except (SafetensorError, ValueError):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            return None
        except OSError:
            return None
        return cache

    def _make_room(self, size: int) -> bool:
        """Remove what was of no use for longest, so that so many bytes may come; whether they may.

        What a process left that died while it wrote goes too.
        """
        for path in self._folder.glob(f".*{PARTIAL}"):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > _ABANDONED:
                    path.unlink()
        files = []
        for path in self._folder.glob(f"*{_SUFFIX}"):
            with contextlib.suppress(OSError):
                about = path.stat()
                files.append((about.st_mtime, about.st_size, path))
        total = sum(held for _, held, _ in files) + size
        for _, held, path in sorted(files):
            if size > self._limit or total <= self._limit:
                break
            path.unlink(missing_ok=True)
            total -= held
        return size <= self._limit


def _make_private(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if stat.S_IMODE(folder.stat().st_mode) & 0o077:
        folder.chmod(0o700)


def _names(tokens: Sequence[int]) -> str:
    """What a file's name tells of its tokens: the first ones, and all."""
    first, whole = (np.array(part, np.int32).tobytes() for part in (tokens[:SHORTEST], tokens))
    return "-".join(hashlib.sha256(part).hexdigest()[:16] for part in (first, whole))


def _tokens(path: Path) -> list[int]:
    """The tokens of a file; none of one that cannot be read."""
    try:
        with safe_open(path, framework="numpy") as file:
            tokens = file.get_tensor("tokens")
    except (OSError, SafetensorError):
        return []
    return tokens.tolist() if tokens.ndim == 1 and tokens.dtype == np.int32 else []


def _content(cache: TextCache) -> bytes:
    """What a prompt's file holds."""
    arrays: dict[str, NDArray[Any]] = {
        name: np.ascontiguousarray(part[:, : cache.span(part, cache.length)])
        for name, part in cache.arrays().items()
    }
    arrays["tokens"] = np.array(cache.tokens, np.int32)
    return save(arrays, {"sha256": _sum(arrays)})


def _check_shapes(file: Any, like: TextCache) -> None:
    """Raise ValueError unless a file has a cache's arrays, before memory is taken for them."""
    (length,) = file.get_slice("tokens").get_shape()
    expected = {name: [len(part), like.span(part, length)] for name, part in like.arrays().items()}
    found = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    if found != {"tokens": [length], **expected}:
        raise ValueError("of another shape")


def _sum(arrays: dict[str, NDArray[Any]]) -> str:
    digest = hashlib.sha256()
    for name in sorted(arrays):
        digest.update(f"{name} {arrays[name].dtype} {arrays[name].shape} ".encode())
        digest.update(arrays[name].data)
    return digest.hexdigest()


@functools.cache
def _code() -> str:
    """A name for the machine, and for the code that keys and values come from."""
    digest = hashlib.sha256(repr((host(), llvmlite.__version__)).encode())
    package = Path(__file__).parents[1]
    folders = [package.glob("engine/**/*.py"), package.glob("checkpoints/**/*.py")]
    alone = [package / "config.py", package / "rope_scaling.py", package / "rope_layout.py"]
    for file in sorted([*alone, *(file for folder in folders for file in folder)]):
        digest.update(file.read_bytes())
    return digest.hexdigest()
