"""Shards: tokens in one .npy file, the borders of their documents in another beside it.

Where documents are chats, the runs of tokens that are learned are in a third (`learned`). Tokens
are written as they come, so that memory does not grow with the shard; the header, which has room
for any count, is written once more at the end.
"""

import os
from array import array
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from armillary.errors import UserError
from armillary.files import PARTIAL

Tokens = NDArray[np.unsignedinteger]


class _HeaderWriter(Protocol):
    def __call__(self, file: BinaryIO, facts: dict[str, object]) -> None: ...


def narrowest(vocab_size: int) -> np.dtype[np.unsignedinteger]:
    """Return the narrowest unsigned integer type that holds every id below `vocab_size`."""
    return cast("np.dtype[np.unsignedinteger]", np.min_scalar_type(max(0, vocab_size - 1)))


def tokens_name(index: int) -> str:
    """Return the name of a shard's tokens."""
    return f"{index:05d}.tokens.npy"


def offsets_name(index: int) -> str:
    """Return the name of a shard's document borders."""
    return f"{index:05d}.offsets.npy"


def learned_name(index: int) -> str:
    """Return the name of a shard's runs of learned tokens."""
    return f"{index:05d}.learned.npy"


class ShardWriter:
    """Writes one shard, document by document; it is there when `close` has ended, and not before.

    A document is appended in one piece or several and ended by `end_document`; `drop_document`
    takes back what was appended since. With `masked` it says which tokens are learned.
    """

    def __init__(
        self,
        directory: Path,
        index: int,
        dtype: np.dtype[np.unsignedinteger],
        *,
        masked: bool = False,
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._tokens_path = directory / tokens_name(index)
        self._offsets_path = directory / offsets_name(index)
        self._dtype = dtype
        self._file = self._tokens_path.with_suffix(PARTIAL).open("wb")
        self._start = _write_header(self._file, dtype, 0)
        self._learned_path = directory / learned_name(index) if masked else None
        self._offsets = array("q", [0])
        self._runs = array("q")
        self.tokens = 0

    @property
    def documents(self) -> int:
        """Documents that have ended."""
        return len(self._offsets) - 1

    def append(self, ids: Tokens, runs: NDArray[np.int64] | None = None) -> None:
        """Add tokens to the document that is being written, and the runs (2·r,) learned of them."""
        if runs is not None:
            self._runs.extend((runs + self.tokens).tolist())
        self._file.write(ids.astype(self._dtype, copy=False).tobytes())
        self.tokens += len(ids)

    def end_document(self) -> int:
        """End the document and return its number of tokens."""
        length = self.tokens - self._offsets[-1]
        self._offsets.append(self.tokens)
        return length

    def drop_document(self) -> None:
        """Take back what was appended since the last document ended."""
        self.tokens = self._offsets[-1]
        while self._runs and self._runs[-1] > self.tokens:
            del self._runs[-2:]
        self._file.seek(self._start + self.tokens * self._dtype.itemsize)
        self._file.truncate()

    def discard(self) -> None:
        """Leave nothing behind."""
        self._file.close()
        self._tokens_path.with_suffix(PARTIAL).unlink()

    def close(self) -> list[Path]:
        """Put the files in their places and return them."""
        self._file.seek(0)
        if _write_header(self._file, self._dtype, self.tokens) != self._start:
            raise RuntimeError("the .npy header did not keep its length")
        _finish(self._file, self._tokens_path)
        _write_numbers(self._offsets_path, self._offsets)
        if self._learned_path is None:
            return [self._tokens_path, self._offsets_path]
        _write_numbers(self._learned_path, self._runs)
        return [self._tokens_path, self._offsets_path, self._learned_path]


def _write_header(file: BinaryIO, dtype: np.dtype[np.generic], count: int) -> int:
    write = cast(_HeaderWriter, np.lib.format.write_array_header_1_0)
    little = dtype.newbyteorder("<")
    write(file, {"descr": little.str, "fortran_order": False, "shape": (count,)})
    return file.tell()


def _write_numbers(path: Path, numbers: "array[int]") -> None:
    file = path.with_suffix(PARTIAL).open("wb")
    _write_header(file, np.dtype(np.int64), len(numbers))
    file.write(np.asarray(numbers).astype("<i8", copy=False).tobytes())
    _finish(file, path)


def _finish(file: BinaryIO, path: Path) -> None:
    with file:
        file.flush()
        os.fsync(file.fileno())
    path.with_suffix(PARTIAL).replace(path)


def map_array(path: Path, dtype: str) -> NDArray[Any]:
    """Map a one-dimensional .npy array of that type into memory, read-only.

    Raises UserError when the file holds anything else.
    """
    try:
        array: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise UserError(f"{path}: cannot be read as .npy: {error}") from error
    if array.ndim != 1 or array.dtype != np.dtype(dtype):
        raise UserError(f"{path}: holds {array.dtype} {array.shape}, not {dtype} in one dimension")
    return array
