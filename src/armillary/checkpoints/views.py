"""Tensors that lie in a file otherwise than they are meant: turned, joined, split, scaled, packed.

Each is a `StoredTensor` whose rows are made when they are asked for.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from armillary.checkpoints.tensors import (
    FP4,
    FP4_BLOCK,
    FP8,
    PLAIN,
    RAW,
    StoredTensor,
    decode,
    encode,
)
from armillary.errors import CheckpointError


@dataclass(frozen=True, eq=False)
class TransposedTensor(StoredTensor):
    """A matrix of plain numbers whose rows are the columns of the stored one."""

    @classmethod
    def of(cls, stored: StoredTensor) -> "TransposedTensor":
        """Return a stored matrix, with rows for columns."""
        if stored.encoding not in PLAIN or stored.row_order is not None or not stored.in_place:
            raise CheckpointError(
                f"{stored.where}: {stored.name} is stored with rows for columns in "
                f"{stored.encoding}; only plain numbers can be turned"
            )
        rows, columns = stored.shape
        return cls(stored.name, (columns, rows), stored.encoding, stored.data, stored.where)

    @property
    def in_place(self) -> bool:
        """No: its rows are spread over the file."""
        return False

    def _in_file(self, rows: slice | NDArray[np.intp]) -> NDArray[np.uint8]:
        stored = self.data.view(PLAIN[self.encoding]).reshape(self.shape[1], -1)
        return np.ascontiguousarray(stored[:, rows].T).view(np.uint8)


@dataclass(frozen=True, eq=False)
class JoinedTensor(StoredTensor):
    """Tensors of one encoding that are parts of one, of as many rows each."""

    parts: tuple[StoredTensor, ...] = ()

    @classmethod
    def of(cls, parts: Sequence[StoredTensor], shape: tuple[int, ...]) -> "JoinedTensor":
        """Return parts as a tensor of a shape, one after the other along its first dimension.

        Raises CheckpointError for parts of several encodings.
        """
        head = parts[0]
        for part in parts:
            if part.encoding != head.encoding:
                raise CheckpointError(
                    f"{part.where}: {part.name} is {part.encoding} and {head.name} "
                    f"{head.encoding}; parts of one tensor must be stored alike"
                )
        nothing = np.empty(0, dtype=np.uint8)
        return cls(head.name, shape, head.encoding, nothing, head.where, None, tuple(parts))

    def __post_init__(self) -> None:
        if self.row_order is None and sum(part.nbytes for part in self.parts) != self.nbytes:
            raise ValueError(f"{self.name}: parts of another size than {self.shape}")

    @property
    def in_place(self) -> bool:
        """No: its parts lie apart in the file."""
        return False

    @property
    def is_stack(self) -> bool:
        """Whether each part is one slice along the first dimension, and all are there in order."""
        return self.row_order is None and len(self.parts) == self.shape[0]

    def _in_file(self, rows: slice | NDArray[np.intp]) -> NDArray[np.uint8]:
        width = self.nbytes // max(1, self.n_rows)
        each = sum(part.nbytes for part in self.parts) // max(1, width) // len(self.parts)
        numbers = np.arange(each * len(self.parts))[rows]
        result = np.empty((len(numbers), width), dtype=np.uint8)
        for number, part in enumerate(self.parts):
            mine = numbers // each == number
            if not mine.any():
                continue
            first, last = numbers[mine].min() % each, numbers[mine].max() % each
            # A row of the whole may be several of a part.
            per_row = part.n_rows // each
            stored = part.stored_rows(first * per_row, (last + 1) * per_row).reshape(-1, width)
            result[mine] = stored[numbers[mine] % each - first]
        return result

    def release(self) -> None:
        """Give back the memory of the parts' pages."""
        for part in self.parts:
            part.release()


@dataclass(frozen=True, eq=False)
class HeadsTensor(StoredTensor):
    """The rows of a matrix stored head by head in two stacks: first ones turned, then last ones.

    `turned` (H, in, first) and `plain` (H, last, in) for rows (H · (first + last), in).
    """

    turned: StoredTensor | None = None
    plain: StoredTensor | None = None

    @classmethod
    def of(cls, turned: StoredTensor, plain: StoredTensor) -> "HeadsTensor":
        """Return the matrix, in float32 where the two are not in one 16-bit encoding."""
        heads, width, first = turned.shape
        shape = (heads * (first + plain.shape[1]), width)
        nothing = np.empty(0, dtype=np.uint8)
        alike = turned.encoding == plain.encoding in {"F16", "BF16"}
        encoding = plain.encoding if alike else "F32"
        return cls(turned.name, shape, encoding, nothing, turned.where, None, turned, plain)

    def __post_init__(self) -> None:
        """Its bytes are in the two."""

    @property
    def in_place(self) -> bool:
        """No: a part of its rows are columns in the file."""
        return False

    def _in_file(self, rows: slice | NDArray[np.intp]) -> NDArray[np.uint8]:
        assert self.turned is not None
        assert self.plain is not None
        each = self.turned.shape[2] + self.plain.shape[1]
        numbers = np.arange(self.turned.shape[0] * each)[rows]
        result = np.empty((len(numbers), self.shape[1]), dtype=np.float32)
        for head in np.unique(numbers // each):
            first = self.turned.rows(head, head + 1)[0].T
            matrix = np.concatenate([first, self.plain.rows(head, head + 1)[0]])
            mine = numbers // each == head
            result[mine] = matrix[numbers[mine] % each]
        return encode(result, self.encoding).reshape(len(numbers), -1)

    def release(self) -> None:
        """Give back the memory of the pages of both."""
        for part in (self.turned, self.plain):
            if part is not None:
                part.release()


@dataclass(frozen=True, eq=False)
class ScaledTensor(StoredTensor):
    """A matrix of 8-bit numbers with scales, for others a matrix in float32.

    `scale` (rows / b0, columns / b1), rounded up, has a factor for each block of b0 × b1 numbers.
    """

    scale: NDArray[np.float32] = field(default_factory=lambda: np.ones((1, 1), np.float32))
    block: tuple[int, int] = (1, 1)

    @classmethod
    def of(
        cls, stored: StoredTensor, scale: NDArray[np.float32], block: tuple[int, int]
    ) -> "ScaledTensor":
        """Return a stored matrix of F8_E4M3 with its scales. Raises CheckpointError for others."""
        wanted = tuple(-(-size // by) for size, by in zip(stored.shape, block, strict=False))
        if stored.encoding != FP8 or len(stored.shape) != 2 or scale.shape != wanted:
            raise CheckpointError(
                f"{stored.where}: {stored.name} is {list(stored.shape)} in {stored.encoding} with "
                f"scales {list(scale.shape)} for blocks of {list(block)}"
            )
        where = stored.where
        return cls(stored.name, stored.shape, "F32", stored.data, where, None, scale, block)

    def __post_init__(self) -> None:
        """Its bytes are a quarter of what it is for others."""

    @property
    def in_place(self) -> bool:
        """No: the numbers are made when they are asked for."""
        return False

    def _in_file(self, rows: slice | NDArray[np.intp]) -> NDArray[np.uint8]:
        stored = self.data.reshape(-1, self.shape[1])
        numbers = np.arange(len(stored))[rows]
        by_row = self.scale[numbers // self.block[0]]
        scales = np.repeat(by_row, self.block[1], axis=1)[:, : self.shape[1]]
        scaled = decode(stored[rows], FP8) * scales
        return scaled.view(np.uint8)


@dataclass(frozen=True, eq=False)
class PackedStack(StoredTensor):
    """A stack of matrices (E, in, out) in bfloat16, which its file holds turned and in MXFP4.

    `data` is (E, out, in / 32, 16): byte j of a block has numbers 2j and 2j + 1, the first in the
    lower half. `scales` (E, out, in / 32) are exponents, of a power of two for each block.
    """

    scales: StoredTensor | None = None

    @classmethod
    def of(cls, blocks: StoredTensor, scales: StoredTensor) -> "PackedStack":
        """Return blocks with their scales. Raises CheckpointError for others than those."""
        fit = len(blocks.shape) == 4 and blocks.shape == (*scales.shape, FP4_BLOCK // 2)
        if not fit or {blocks.encoding, scales.encoding} != {RAW}:
            raise CheckpointError(
                f"{blocks.where}: {blocks.name} is {list(blocks.shape)} in {blocks.encoding} with "
                f"scales {list(scales.shape)} in {scales.encoding}; MXFP4 is (experts, rows, "
                f"blocks, 16) and (experts, rows, blocks) in {RAW}"
            )
        stack, n_out, n_blocks, _ = blocks.shape
        shape = (stack, n_blocks * FP4_BLOCK, n_out)
        return cls(blocks.name, shape, "BF16", blocks.data, blocks.where, None, scales)

    def __post_init__(self) -> None:
        """Its bytes are about a quarter of what it is for others."""

    @property
    def in_place(self) -> bool:
        """No: the numbers are made when they are asked for."""
        return False

    def columns(self, shape: tuple[int, ...], first: int, count: int) -> StoredTensor:
        """Return every `count`-th column as rows, which are rows of the file, in blocks."""
        return PackedRows(
            self.name, shape, FP4, self.data, self.where, None, self.scales, first, count
        )

    def _in_file(self, rows: slice | NDArray[np.intp]) -> NDArray[np.uint8]:
        assert self.scales is not None
        (stack, n_out, _), n_in = self.scales.shape, self.shape[1]
        packed = self.columns((stack, n_out, n_in), 0, 1).taking_rows(np.arange(stack)[rows])
        turned = packed.rows(0, packed.n_rows).swapaxes(1, 2)
        return encode(turned, "BF16").reshape(packed.n_rows, -1)

    def release(self) -> None:
        """Give back the memory of the pages of both."""
        super().release()
        if self.scales is not None:
            self.scales.release()


@dataclass(frozen=True, eq=False)
class PackedRows(PackedStack):
    """Of a `PackedStack` every `count`-th row of the file, (E, out / count, in) in GGML's MXFP4."""

    first: int = 0
    count: int = 1

    def _in_file(self, rows: slice | NDArray[np.intp]) -> NDArray[np.uint8]:
        assert self.scales is not None
        stored, mine = self.scales.shape, slice(self.first, None, self.count)
        packed = self.data.reshape(*stored, -1)[rows][:, mine]
        numbers = np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:3], -1)
        # In GGML's blocks number j lies beside number j + 16.
        low, high = np.split(numbers, 2, axis=-1)
        scales = self.scales.data.reshape(*stored, 1)[rows][:, mine]
        blocks = np.concatenate([scales, low | high << 4], axis=-1)
        return blocks.reshape(len(blocks), -1)


@dataclass(frozen=True, eq=False)
class TurnedStack(StoredTensor):
    """Of a stack of matrices (E, in, out) in plain numbers, every `count`-th column as a row.

    Column `first` is row 0. The stack of vectors (E, out) is one of matrices of one row.
    """

    first: int = 0
    count: int = 1

    @classmethod
    def of(
        cls, stored: StoredTensor, shape: tuple[int, ...], first: int, count: int
    ) -> "TurnedStack":
        """Return a stored stack as one of this shape, (E, out / count, in) or (E, out / count)."""
        if stored.encoding not in PLAIN or stored.row_order is not None or not stored.in_place:
            raise CheckpointError(
                f"{stored.where}: {stored.name} is stored with rows for columns in "
                f"{stored.encoding}; only plain numbers can be turned"
            )
        return cls(
            stored.name, shape, stored.encoding, stored.data, stored.where, None, first, count
        )

    def __post_init__(self) -> None:
        if self.row_order is None and self.data.nbytes != self.count * self.nbytes:
            raise ValueError(f"{self.name}: {self.data.nbytes} bytes for {self.count} {self.shape}")

    @property
    def in_place(self) -> bool:
        """No: its rows are spread over the file."""
        return False

    def _in_file(self, rows: slice | NDArray[np.intp]) -> NDArray[np.uint8]:
        _, n_out, *inner = self.shape
        numbers = self.data.view(PLAIN[self.encoding])
        stored = numbers.reshape(-1, inner[0] if inner else 1, n_out, self.count)
        turned = np.ascontiguousarray(stored[rows, :, :, self.first].swapaxes(1, 2))
        return turned.reshape(len(turned), -1).view(np.uint8)


def columns(tensor: StoredTensor, shape: tuple[int, ...], first: int, count: int) -> StoredTensor:
    """Return every `count`-th column of a stack of matrices as rows, column `first` the first.

    Of this shape: (E, in, out) → (E, out / count, in), or (E, out) → (E, out / count).
    """
    if isinstance(tensor, PackedStack):
        return tensor.columns(shape, first, count)
    return TurnedStack.of(tensor, shape, first, count)
