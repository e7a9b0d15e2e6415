"""A tensor as it lies in a file, and the ways to float32 and back.

Knows the number encodings (GGML's names) and nothing of file formats or models. Nothing is
copied until it is asked for, and then by blocks of rows, so that reading costs the result and
little else.
"""

import functools
import math
import mmap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from armillary.checkpoints.k_types import K_TYPES, k_blocks
from armillary.errors import CheckpointError

# Elements handled at once: 1 MiB as float32, small beside any weight.
_BLOCK_ELEMENTS = 1 << 18

PLAIN: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
}
FP8, RAW = "F8_E4M3", "U8"
# The commonest blocks' elements and bytes: the gguf library, which has all, is imported for others.
BLOCKS = {"Q8_0": (32, 34), "Q4_0": (32, 18), "Q4_1": (32, 20)}
# Block encodings that weights can be brought to.
QUANTIZED = ("Q8_0", "Q5_0", "Q5_1", "Q4_0", "Q4_1", *K_TYPES)
# 32 numbers of FP4 (E2M1) with a scale, a power of two (E8M0): a byte of it, then 16 of them.
FP4, FP4_BLOCK = "MXFP4", 32
# Scales are half-precision numbers; a weight above the largest of them has none in any of these.
_LARGEST = 65504.0


@functools.cache
def block_size(encoding: str) -> tuple[int, int]:
    """Elements of a block and its bytes; (1, bytes of an element) for plain numbers.

    Raises CheckpointError for an encoding that cannot be brought to float32.
    Source: ggml, `ggml-common.h`, as tabled by the gguf library.
    """
    if encoding in PLAIN:
        return 1, PLAIN[encoding].itemsize
    if encoding in BLOCKS:
        return BLOCKS[encoding]
    if encoding in {FP8, RAW}:
        return 1, 1
    import gguf

    kind = gguf.GGMLQuantizationType.__members__.get(encoding)
    if kind is not None:
        elements, size = gguf.GGML_QUANT_SIZES[kind]
        try:
            gguf.quants.dequantize(np.zeros((1, size), dtype=np.uint8), kind)
        except NotImplementedError:
            pass
        else:
            return elements, size
    raise CheckpointError(
        f"encoding {encoding} cannot be read as weights; supported are F64, F32, F16, BF16, Q4_0, "
        "Q4_1, Q5_0, Q5_1, Q8_0, Q2_K to Q6_K and whatever else the gguf library dequantises"
    )


def encoded_bytes(shape: Sequence[int], encoding: str) -> int:
    """Bytes that a tensor takes. Raises CheckpointError when a row is no whole count of blocks."""
    elements, size = block_size(encoding)
    width = shape[-1] if shape else 1
    if width % elements:
        raise CheckpointError(
            f"a row of {width} is no multiple of the {elements} elements in a block of {encoding}"
        )
    return math.prod(shape) // elements * size


def plain_for(encoding: str) -> str:
    """The narrowest plain encoding that holds each number of another exactly, if float32 does.

    Numbers of MXFP4 are one or two bits times a power of two.
    """
    if encoding in PLAIN:
        return encoding
    return "BF16" if encoding == FP4 else "F32"


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """A named array in the encoding of its file.

    `shape` is row-major, as torch says it; `data` the flat bytes, usually memory-mapped; `where`
    the file, for messages. `row_order`, when there, says which stored row comes at each place:
    blocks run along a row, so rows can change places in any encoding, and `data` may hold more rows
    than these.
    """

    name: str
    shape: tuple[int, ...]
    encoding: str
    data: NDArray[np.uint8]
    where: str
    row_order: NDArray[np.intp] | None = None

    def __post_init__(self) -> None:
        if self.row_order is None and self.data.nbytes != self.nbytes:
            raise ValueError(f"{self.name}: {self.data.nbytes} bytes given, {self.nbytes} needed")

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return encoded_bytes(self.shape, self.encoding)

    @property
    def in_place(self) -> bool:
        """Whether `data` and `row_order` are the tensor: its rows lie whole in the file."""
        return True

    @property
    def n_rows(self) -> int:
        """Slices along the first dimension; 1 for a scalar and for a vector stored in blocks."""
        vector_of_blocks = len(self.shape) == 1 and block_size(self.encoding)[0] > 1
        return self.shape[0] if self.shape and not vector_of_blocks else 1

    def renamed(self, name: str) -> "StoredTensor":
        """Return the same tensor under another name."""
        return replace(self, name=name)

    def reordered(self, row_order: NDArray[np.intp]) -> "StoredTensor":
        """Return the tensor with row i taken from row `row_order[i]` of this one."""
        if len(row_order) != self.n_rows:
            raise CheckpointError(
                f"{self.where}: {self.name} has {self.n_rows} rows in {self.encoding}, "
                f"{len(row_order)} are to change places"
            )
        return self.taking_rows(row_order)

    def taking_rows(self, rows: NDArray[np.intp]) -> "StoredTensor":
        """Return the tensor of some rows of this one, in this order."""
        before = self.row_order
        order = rows if before is None else before[rows]
        return replace(self, shape=(len(rows), *self.shape[1:]), row_order=order)

    def row_range(self, start: int, stop: int) -> "StoredTensor":
        """Return the tensor of rows start ≤ i < stop of this one."""
        if self.row_order is not None or not self.in_place:
            return self.taking_rows(np.arange(start, stop))
        width = self.data.nbytes // max(1, self.n_rows)
        part = self.data[start * width : stop * width]
        return replace(self, shape=(stop - start, *self.shape[1:]), data=part)

    def stored_rows(self, start: int, stop: int) -> NDArray[np.uint8]:
        """Return rows start ≤ i < stop in their encoding, `row_order` applied: (rows, bytes)."""
        if not 0 <= start <= stop <= self.n_rows:
            raise ValueError(f"{self.name}: rows {start} to {stop} of {self.n_rows} asked for")
        if self.row_order is not None:
            return self._in_file(self.row_order[start:stop])
        return self._in_file(slice(start, stop))

    def _in_file(self, rows: slice | NDArray[np.intp]) -> NDArray[np.uint8]:
        """Return rows by their numbers in the file: (rows, bytes)."""
        width = self.nbytes // max(1, self.n_rows)
        return self.data.reshape(-1, width)[rows] if width else self.data.reshape(0, 0)

    def rows(self, start: int, stop: int) -> NDArray[np.float32]:
        """Return rows start ≤ i < stop along the first dimension as float32."""
        numbers = decode(self.stored_rows(start, stop), self.encoding)
        return numbers.reshape(self.shape if self.n_rows == 1 else (stop - start, *self.shape[1:]))

    def to_float32(self) -> NDArray[np.float32]:
        """Return the whole tensor as a new float32 array; the pages that were read are released."""
        result = np.empty(self.shape, dtype=np.float32)
        flat = result.reshape(max(self.n_rows, 1), -1) if result.size else result
        for start, stop in self.row_blocks():
            flat[start:stop] = self.rows(start, stop).reshape(stop - start, -1)
        self.release()
        return result

    def row_blocks(self) -> Iterator[tuple[int, int]]:
        """Ranges of rows, each of about a MiB as float32."""
        width = max(1, math.prod(self.shape) // max(1, self.n_rows))
        step = max(1, _BLOCK_ELEMENTS // width)
        for start in range(0, self.n_rows, step):
            yield start, min(start + step, self.n_rows)

    def encoded(self, encoding: str) -> Iterator[NDArray[np.uint8]]:
        """Yield the bytes of the tensor in an encoding, block of rows by block of rows.

        Raises CheckpointError for numbers that a block of `QUANTIZED` cannot hold.
        """
        for start, stop in self.row_blocks():
            if encoding == self.encoding:
                yield self.stored_rows(start, stop).reshape(-1)
                continue
            numbers = self.rows(start, stop)
            # Not the other way round: it is false for NaN too.
            if encoding in QUANTIZED and not np.abs(numbers).max(initial=0) <= _LARGEST:
                raise CheckpointError(
                    f"{self.where}: {self.name} holds a number beyond {_LARGEST:g}, or none at all "
                    f"(NaN), in rows {start} to {stop - 1}; it cannot be written as {encoding}"
                )
            yield encode(numbers, encoding)
        self.release()

    def release(self) -> None:
        """Give back the memory of the file's pages that were read; reading again brings them back.

        Otherwise a model that is read and kept in another type counts twice until memory runs
        short. Does nothing for tensors that are not memory-mapped.
        """
        mapping = getattr(self.data, "_mmap", None)
        if mapping is None or not hasattr(mmap, "MADV_DONTNEED"):
            return
        begin = self.data.ctypes.data - np.frombuffer(mapping, dtype=np.uint8).ctypes.data
        first = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
        last = (begin + self.data.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if first < last:
            mapping.madvise(mmap.MADV_DONTNEED, first, last - first)


class TensorToWrite(NamedTuple):
    """What a writer needs: `chunks` gives the bytes in order and is asked for once, when due."""

    name: str
    encoding: str
    shape: tuple[int, ...]
    chunks: Iterable[Any]


def to_write(tensor: StoredTensor, encoding: str) -> TensorToWrite:
    """Return what a writer needs to write a stored tensor in an encoding."""
    return TensorToWrite(tensor.name, encoding, tensor.shape, tensor.encoded(encoding))


def telling(tensor: TensorToWrite, progress: Callable[[int], None]) -> TensorToWrite:
    """Return the same to write; `progress` is called with the bytes of each chunk when taken."""

    def chunks() -> Iterator[Any]:
        for chunk in tensor.chunks:
            yield chunk
            progress(memoryview(chunk).nbytes)

    return tensor._replace(chunks=chunks())


def whole(tensor: TensorToWrite) -> NDArray[np.uint8]:
    """Return all bytes of a tensor at once."""
    result = np.empty(encoded_bytes(tensor.shape, tensor.encoding), dtype=np.uint8)
    start = 0
    for chunk in tensor.chunks:
        part = np.frombuffer(chunk, dtype=np.uint8)
        result[start : start + part.nbytes] = part
        start += part.nbytes
    return result


def mapped(
    tensor: TensorToWrite, change: Callable[[NDArray[np.float32]], NDArray[np.float32]]
) -> TensorToWrite:
    """Return a tensor with its numbers changed, all at once and in float32."""

    def chunks() -> Iterator[Any]:
        numbers = decode(whole(tensor).reshape(1, -1), tensor.encoding)
        yield encode(change(numbers), tensor.encoding)

    return tensor._replace(chunks=chunks())


def with_rows(tensor: TensorToWrite, order: NDArray[np.intp]) -> TensorToWrite:
    """Return a tensor with row i taken from row `order[i]`; all of it is held when it is due."""

    def chunks() -> Iterator[Any]:
        rows = whole(tensor).reshape(tensor.shape[0], -1)
        step = max(1, _BLOCK_ELEMENTS // max(1, rows.shape[1]))
        for start in range(0, len(order), step):
            yield rows[order[start : start + step]].reshape(-1)

    return tensor._replace(chunks=chunks())


def in_heads(tensor: TensorToWrite, heads: int, first: int) -> tuple[TensorToWrite, TensorToWrite]:
    """Return what `HeadsTensor` reads as this, which is held from the one to the other.

    Blocks cannot be turned, so the first is float32 where the matrix is in blocks.
    """
    rows, width = tensor.shape
    encoding = tensor.encoding if block_size(tensor.encoding)[0] == 1 else "F32"
    held: list[NDArray[np.uint8]] = []

    def stored() -> NDArray[np.uint8]:
        if not held:
            held.append(whole(tensor).reshape(heads, rows // heads, -1))
        return held[0]

    def turned() -> Iterator[Any]:
        for matrix in stored():
            numbers = decode(np.ascontiguousarray(matrix[:first]), tensor.encoding)
            yield encode(numbers.T, encoding)

    def plain() -> Iterator[Any]:
        for matrix in stored():
            yield np.ascontiguousarray(matrix[first:]).reshape(-1)
        held.clear()

    return (
        TensorToWrite(tensor.name, encoding, (heads, width, first), turned()),
        tensor._replace(shape=(heads, rows // heads - first, width), chunks=plain()),
    )


def turned_stacks(tensors: Sequence[TensorToWrite], shape: tuple[int, ...]) -> TensorToWrite:
    """Return what `TurnedStack` reads as these: their rows in turn as columns, expert by expert.

    All of them are held when it is due.
    """

    def chunks() -> Iterator[Any]:
        number = PLAIN[tensors[0].encoding]
        stacks = [whole(tensor).view(number).reshape(*tensor.shape[:2], -1) for tensor in tensors]
        for matrices in zip(*stacks, strict=True):
            yield np.ascontiguousarray(np.stack(matrices).transpose(2, 1, 0)).view(np.uint8)

    return tensors[0]._replace(shape=shape, chunks=chunks())


def transposed(tensor: TensorToWrite) -> TensorToWrite:
    """Return a matrix of plain numbers with columns for rows; all is held when it is due."""
    rows, columns = tensor.shape

    def chunks() -> Iterator[Any]:
        numbers = whole(tensor).view(PLAIN[tensor.encoding]).reshape(rows, columns)
        step = max(1, _BLOCK_ELEMENTS // max(1, rows))
        for start in range(0, columns, step):
            yield np.ascontiguousarray(numbers[:, start : start + step].T).view(np.uint8)

    return tensor._replace(shape=(columns, rows), chunks=chunks())


def decode(rows: NDArray[np.uint8], encoding: str) -> NDArray[np.float32]:
    """(rows, bytes) → (rows, elements) in float32, a new array."""
    if encoding == "BF16":
        # A bfloat16 is the upper half of the float32 of the same value.
        return (rows.view("<u2").astype(np.uint32) << 16).view(np.float32)
    if encoding in PLAIN:
        return np.asarray(rows.view(PLAIN[encoding]).astype(np.float32))
    if encoding == FP8:
        return _fp8_numbers()[rows]
    import gguf

    # The library cuts its input into many views, which a memory-map makes slow.
    numbers = gguf.quants.dequantize(rows.view(np.ndarray), gguf.GGMLQuantizationType[encoding])
    return np.asarray(numbers, dtype=np.float32)


@functools.cache
def _fp8_numbers() -> NDArray[np.float32]:
    """What each byte of F8_E4M3 stands for: no infinities, NaN where all bits but the sign are set.

    Source: Micikevicius et al. 2022, §3.
    """
    codes = np.arange(256)
    exponent, fraction = (codes >> 3) & 15, codes & 7
    normal = (1 + fraction / 8) * 2.0 ** (exponent - 7)
    size = np.where(exponent > 0, normal, fraction / 8 * 2.0**-6)
    size = np.where(codes & 127 == 127, np.nan, size)
    return np.where(codes < 128, size, -size).astype(np.float32)


def encode(numbers: NDArray[np.float32], encoding: str) -> NDArray[np.uint8]:
    """Return float32 numbers as the bytes of a plain encoding or of one of `QUANTIZED`.

    Plain numbers are rounded to nearest even; blocks, which run along the last dimension, are
    those of ggml's reference quantisers (of the K types our own). Raises ValueError for another
    encoding, and for rows that are no whole count of blocks.
    """
    numbers = np.ascontiguousarray(numbers, dtype=np.float32)
    if encoding == "BF16":
        bits = numbers.reshape(-1).view(np.uint32)
        rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
        # Adding to a NaN's bits may carry into its sign or make it infinite.
        halves = np.where(np.isnan(numbers.reshape(-1)), 0x7FC0, rounded)
        return halves.astype("<u2").view(np.uint8)
    if encoding in QUANTIZED:
        return _quantize(numbers, encoding)
    if encoding not in PLAIN:
        known = ", ".join((*PLAIN, *QUANTIZED))
        raise ValueError(f"numbers can be written as {known}, not {encoding}")
    return np.asarray(numbers.reshape(-1).astype(PLAIN[encoding]).view(np.uint8))


def _quantize(numbers: NDArray[np.float32], encoding: str) -> NDArray[np.uint8]:
    elements, _ = block_size(encoding)
    if not numbers.shape or numbers.shape[-1] % elements:
        raise ValueError(f"rows of {numbers.shape[-1:]} are no blocks of {elements} in {encoding}")
    if not numbers.size:
        return np.empty(0, dtype=np.uint8)
    if encoding in K_TYPES:
        return k_blocks(numbers.reshape(-1, elements), encoding).reshape(-1)
    import gguf

    # A block of subnormal numbers has a step of which there is no reciprocal, and scale 0.
    with np.errstate(over="ignore", invalid="ignore"):
        blocks = gguf.quants.quantize(numbers, gguf.GGMLQuantizationType[encoding])
    return np.asarray(blocks, dtype=np.uint8).reshape(-1)
