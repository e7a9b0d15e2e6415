"""GGUF files, versions 2 and 3, little-endian: metadata, then tensors in GGML's encodings.

A reader of our own, since a header must not be trusted: every count and length is held against the
bytes that are left before anything is allocated. A writer of our own too, since the library's holds
whole tensors. Knows nothing of models. Source: ggml's `docs/gguf.md`; the block formats are the
gguf library's.
"""

import math
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from armillary.checkpoints.tensors import StoredTensor, TensorToWrite, encoded_bytes
from armillary.errors import CheckpointError, TruncatedError
from armillary.files import Opener, Segments, map_file, write_whole

MAGIC = b"GGUF"
_MAX_DIMENSIONS = 4
ENCODINGS = {0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 8: "Q8_0", 30: "BF16"}
"""The commonest types by their numbers."""
_STRING, _ARRAY, _BOOL = 8, 9, 7
_UINT64 = struct.Struct("<Q")
_NUMBERS: dict[int, np.dtype[Any]] = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    _BOOL: np.dtype("<u1"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
_UINT32, _INT32, _FLOAT32 = 4, 5, 6
_WRITTEN_VERSION = 3
_ALIGNMENT = 32  # what readers take when no file says otherwise


class Encoded(NamedTuple):
    """A metadata value as a file has it, type and all."""

    data: memoryview


Value = bool | int | float | str | Sequence[bool] | Sequence[int] | Sequence[float] | Sequence[str]


@dataclass(frozen=True)
class GGUFFile:
    """What one file holds. Metadata values are Python's own: int, float, bool, str and lists.

    `encoded` has each of them as it stands there, for who carries it over.
    """

    path: Path
    version: int
    metadata: dict[str, object]
    encoded: dict[str, Encoded]
    tensors: dict[str, StoredTensor]


def read_gguf_file(path: Path) -> GGUFFile:
    """Read the header and map the tensors.

    Raises CheckpointError for every way in which the header is wrong or the file too short for it.
    """
    data = map_file(path)
    cursor = _Cursor(data, path)
    version = _version(cursor)
    n_tensors, n_keys = cursor.uint64(), cursor.uint64()
    metadata: dict[str, object] = {}
    encoded: dict[str, Encoded] = {}
    for _ in range(n_keys):
        key = cursor.string("a key")
        if not key:
            raise cursor.fault("has a key without a name")
        if key in metadata:
            raise cursor.fault(f"key {key!r:.80} stands there twice")
        begin = cursor.position
        metadata[key] = cursor.value(key)
        encoded[key] = Encoded(data.data[begin : cursor.position])
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise cursor.fault(f"general.alignment is {alignment!r:.80}; it must be a power of two")
    entries = [_TensorEntry.read(cursor) for _ in range(n_tensors)]
    start = -(-cursor.position // alignment) * alignment
    tensors: dict[str, StoredTensor] = {}
    for entry in entries:
        if entry.name in tensors:
            raise cursor.fault(f"tensor {entry.name!r:.80} stands there twice")
        tensors[entry.name] = entry.mapped(data, start, alignment, path)
    _check_overlap(entries, tensors, path)
    return GGUFFile(path, version, metadata, encoded, tensors)


def _version(cursor: "_Cursor") -> int:
    magic = bytes(cursor.take(4))
    if magic != MAGIC:
        raise cursor.fault(
            f"is no GGUF file: it begins with {magic!r}; a model is a GGUF file or a directory"
        )
    version = cursor.uint32()
    if version in {2, 3}:
        return version
    if int.from_bytes(version.to_bytes(4, "little"), "big") in {1, 2, 3}:
        raise cursor.fault("is a big-endian GGUF file; only little-endian ones are read")
    raise cursor.fault(f"is of GGUF version {version}; versions 2 and 3 are read")


class _Cursor:
    """A place in the file; whoever reads on asks it, and it never goes past the end."""

    def __init__(self, data: NDArray[np.uint8], path: Path) -> None:
        self.position = 0
        # Slices of a memoryview are several times cheaper than NumPy's, and a vocabulary has many.
        self._data = data.data
        self._path = path

    def fault(self, message: str) -> CheckpointError:
        return CheckpointError(f"{self._path}: {message}")

    def take(self, size: int) -> memoryview:
        if size > len(self._data) - self.position:
            raise TruncatedError(
                f"{self._path}: is cut off: {size} bytes are due at byte {self.position}, "
                f"{len(self._data) - self.position} are left; "
                "fetch the file again"
            )
        self.position += size
        return self._data[self.position - size : self.position]

    def uint32(self) -> int:
        return int.from_bytes(self.take(4), "little")

    def uint64(self) -> int:
        return int.from_bytes(self.take(8), "little")

    def string(self, what: str) -> str:
        text = self.take(self.uint64())
        try:
            return str(text, "utf-8")
        except UnicodeDecodeError as error:
            raise self.fault(f"{what} is not UTF-8, before byte {self.position}") from error

    def value(self, key: str) -> object:
        kind = self.uint32()
        if kind == _STRING:
            return self.string(f"the value of {key!r:.80}")
        if kind == _ARRAY:
            return self._array(key)
        return self._numbers(key, kind, 1)[0]

    def _array(self, key: str) -> list[object]:
        kind, count = self.uint32(), self.uint64()
        if kind == _ARRAY:
            raise self.fault(f"{key!r:.80} is an array of arrays, which is not supported")
        if kind == _STRING:
            return list(self._strings(count, f"an item of {key!r:.80}"))
        return self._numbers(key, kind, count)

    def _strings(self, count: int, what: str) -> Iterator[str]:
        """Read many, without a call for each: a vocabulary has a hundred thousand."""
        data, end = self._data, len(self._data)
        for _ in range(count):
            begin = self.position + 8
            stop = begin + _UINT64.unpack_from(data, self.position)[0] if begin <= end else end + 1
            try:
                text = str(data[begin:stop], "utf-8") if stop <= end else None
            except UnicodeDecodeError:
                text = None
            if text is None:
                text = self.string(what)  # which says what is wrong
            self.position = stop
            yield text

    def _numbers(self, key: str, kind: int, count: int) -> list[object]:
        if kind not in _NUMBERS:
            raise self.fault(f"{key!r:.80} has the unknown value type {kind}")
        numbers = np.frombuffer(self.take(count * _NUMBERS[kind].itemsize), dtype=_NUMBERS[kind])
        values: list[object] = numbers.tolist()
        return [bool(value) for value in values] if kind == _BOOL else values


@dataclass(frozen=True)
class _TensorEntry:
    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int

    @classmethod
    def read(cls, cursor: _Cursor) -> "_TensorEntry":
        name = cursor.string("a tensor's name")
        n_dimensions = cursor.uint32()
        if n_dimensions > _MAX_DIMENSIONS:
            raise cursor.fault(
                f"tensor {name!r:.80} has {n_dimensions} dimensions; {_MAX_DIMENSIONS} are read"
            )
        # The file says the fastest dimension first, torch says it last.
        shape = tuple(cursor.uint64() for _ in range(n_dimensions))[::-1]
        return cls(name, shape, cursor.uint32(), cursor.uint64())

    def mapped(
        self, data: NDArray[np.uint8], start: int, alignment: int, path: Path
    ) -> StoredTensor:
        where = f"{path}: tensor {self.name!r:.80}"
        try:
            encoding = ENCODINGS.get(self.kind) or _encoding(self.kind)
        except ValueError as error:
            raise CheckpointError(f"{where} has the unknown type {self.kind}") from error
        try:
            size = encoded_bytes(self.shape, encoding)
        except CheckpointError as error:
            raise CheckpointError(f"{where}: {error}") from error
        if self.offset % alignment:
            raise CheckpointError(
                f"{where} begins at {self.offset}, no multiple of the alignment {alignment}"
            )
        begin = start + self.offset
        if begin + size > data.size:
            raise TruncatedError(
                f"{where}: is cut off: {math.prod(self.shape)} numbers in {encoding} at byte "
                f"{begin}, the file has {data.size} bytes; fetch it again"
            )
        return StoredTensor(self.name, self.shape, encoding, data[begin : begin + size], str(path))


def _encoding(kind: int) -> str:
    """The name of a type that is not among the commonest. Raises ValueError for none."""
    import gguf

    return str(gguf.GGMLQuantizationType(kind).name)


def _check_overlap(
    entries: list[_TensorEntry], tensors: dict[str, StoredTensor], path: Path
) -> None:
    reached = 0
    for entry in sorted(entries, key=lambda entry: entry.offset):
        size = tensors[entry.name].nbytes
        if size and entry.offset < reached:
            raise CheckpointError(f"{path}: tensor {entry.name!r:.80} overlaps the one before it")
        reached = max(reached, entry.offset + size)


def write_gguf_file(
    path: Path,
    metadata: Mapping[str, Value | Encoded],
    tensors: Sequence[TensorToWrite],
    *,
    file: Opener = write_whole,
) -> None:
    """Write a file, atomically and one chunk at a time; `file` opens it.

    Whole numbers are written as 32 bits (those of lists signed, as token types must be), others as
    float32. Raises ValueError for a value of another type or size, a name that comes twice, and
    chunks that do not add up to their tensor; UserError when the file cannot be written.
    """
    names = [tensor.name for tensor in tensors]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{path}: tensor {twice!r:.80} comes twice")
    header = [
        MAGIC,
        struct.pack("<IQQ", _WRITTEN_VERSION, len(tensors), len(metadata)),
        *(_text(key) + _encoded(key, value) for key, value in metadata.items()),
    ]
    offset = 0
    for tensor in tensors:
        header.append(_tensor_entry(tensor, offset))
        offset += _aligned(encoded_bytes(tensor.shape, tensor.encoding))
    with file(path) as segments:
        _put(segments, "the header", sum(map(len, header)), header)
        for name, encoding, shape, chunks in tensors:
            _put(segments, name, encoded_bytes(shape, encoding), chunks)


def _put(segments: Segments, what: str, size: int, chunks: Iterable[Any]) -> None:
    """A segment, and zeros up to where the next one may begin."""
    segments.put(what, size, chunks)
    padding = _aligned(size) - size
    segments.put("padding", padding, [b"\0" * padding])


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _tensor_entry(tensor: TensorToWrite, offset: int) -> bytes:
    import gguf

    sizes = tensor.shape[::-1]  # the fastest dimension first
    kind = gguf.GGMLQuantizationType[tensor.encoding].value
    return _text(tensor.name) + struct.pack(
        f"<I{len(sizes)}QIQ", len(sizes), *sizes, int(kind), offset
    )


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _encoded(key: str, value: Value | Encoded) -> bytes:
    """A value with its type before it."""
    if isinstance(value, Encoded):
        return bytes(value.data)
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _text(value)
    if isinstance(value, Sequence):
        kinds = {type(item) for item in value}
        if kinds <= {str}:
            texts = b"".join(_text(item) for item in value)  # type: ignore[arg-type]
            return struct.pack("<IIQ", _ARRAY, _STRING, len(value)) + texts
        known = {bool: _BOOL, int: _INT32, float: _FLOAT32}
        if len(kinds) > 1 or not kinds <= known.keys():
            raise ValueError(f"{key}: a list of {kinds} cannot be written")
        kind = known[kinds.pop()]
        return struct.pack("<IIQ", _ARRAY, kind, len(value)) + _packed(key, kind, value)
    scalar = _UINT32
    if isinstance(value, bool | float):
        scalar = _BOOL if isinstance(value, bool) else _FLOAT32
    return struct.pack("<I", scalar) + _packed(key, scalar, [value])


def _packed(key: str, kind: int, values: Sequence[Any]) -> bytes:
    try:
        return np.array(values, dtype=_NUMBERS[kind]).tobytes()
    except OverflowError as error:
        raise ValueError(f"{key}: {error}") from error
