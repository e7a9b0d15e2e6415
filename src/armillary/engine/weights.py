"""A checkpoint's tensors as the kernels read them: in place where a format has kernels."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from armillary.checkpoints.tensors import StoredTensor
from armillary.engine import repacking
from armillary.engine.formats import FORMATS, Format

Width = Literal["stored", "float32", "bfloat16"]
"""What matrices are held in: as the file has them, or brought to a type."""


@dataclass(frozen=True)
class Matrix:
    """(N, K) in a format; row i lies at row order[i] where there is an order."""

    format: Format
    data: NDArray[np.uint8]
    order: NDArray[np.int64] | None
    n: int
    k: int

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.format.row_bytes(self.k)

    def rows(self, first: int, last: int) -> "Matrix":
        """Some of its rows."""
        if self.order is not None:
            return Matrix(self.format, self.data, self.order[first:last], last - first, self.k)
        part = self.data[first * self.row_bytes : last * self.row_bytes]
        return Matrix(self.format, part, None, last - first, self.k)


class Weights:
    """Matrices and vectors by our parameter names."""

    def __init__(
        self,
        tensors: Mapping[str, StoredTensor],
        width: Width,
        notice: Callable[[str], None],
    ) -> None:
        self._tensors, self._width = tensors, width
        self._matrices: dict[str, Matrix] = {}
        matrices = {tensor.encoding for tensor in tensors.values() if len(tensor.shape) == 2}
        odd = sorted(name for name in matrices - FORMATS.keys() if repacking.target(name) is None)
        if odd and width == "stored":
            notice(f"no kernels for {', '.join(odd)}: these weights are held as float32")

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def tensor(self, name: str) -> StoredTensor:
        """A tensor as it is stored."""
        return self._tensors[name]

    def matrix(self, name: str) -> Matrix:
        """A matrix, brought to its width at most once."""
        if name not in self._matrices:
            self._matrices[name] = self._matrix(self._tensors[name])
        return self._matrices[name]

    def vector(self, name: str, add: float = 0.0) -> NDArray[np.float32]:
        """A vector as float32, plus a number."""
        numbers = self._tensors[name].to_float32()
        return numbers + np.float32(add) if add else numbers

    def optional(self, name: str) -> NDArray[np.float32] | None:
        """A vector that there may not be."""
        return self.vector(name) if name in self else None

    def _matrix(self, tensor: StoredTensor) -> Matrix:
        n, k = tensor.shape
        name = {"float32": "F32", "bfloat16": "BF16"}.get(self._width, tensor.encoding)
        form = FORMATS.get(name) or repacking.target(name) or FORMATS["F32"]
        if form.name == tensor.encoding and tensor.in_place:
            order = tensor.row_order
            kept = None if order is None else order.astype(np.int64)
            return Matrix(form, tensor.data, kept, n, k)
        data = np.empty(form.row_bytes(k) * n, dtype=np.uint8)
        is_plain = form.activations == "float32"
        start = 0
        for part in tensor.encoded(form.name) if is_plain else repacking.repacked(tensor):
            data[start : start + part.nbytes] = part
            start += part.nbytes
        tensor.release()
        return Matrix(form, data, None, n, k)
