"""A checkpoint's tensors as the kernels read them: in place where a format has kernels."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from armillary.checkpoints.tensors import PLAIN, StoredTensor, encode
from armillary.checkpoints.views import JoinedTensor
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

    def arguments(self) -> dict[str, Any]:
        """What a kernel is told of it."""
        return {
            "weights": self.data,
            "row_bytes": self.row_bytes,
            "order": self.order,
            "n": self.n,
        }

    def rows(self, first: int, last: int) -> "Matrix":
        """Some of its rows."""
        if self.order is not None:
            return Matrix(self.format, self.data, self.order[first:last], last - first, self.k)
        part = self.data[first * self.row_bytes : last * self.row_bytes]
        return Matrix(self.format, part, None, last - first, self.k)


@dataclass(frozen=True)
class Stack:
    """A matrix (N, K) for each of E experts, all in one format, wherever each lies."""

    matrices: tuple[Matrix, ...]

    @property
    def format(self) -> Format:
        """That of them all."""
        return self.matrices[0].format

    def arguments(self) -> dict[str, Any]:
        """What a kernel is told: where each lies, and where the order of its rows."""
        one = self.matrices[0]
        return {
            "weights": np.array([each.data.ctypes.data for each in self.matrices], np.int64),
            "row_bytes": one.row_bytes,
            "order": np.array(
                [0 if each.order is None else each.order.ctypes.data for each in self.matrices],
                np.int64,
            ),
            "n": one.n,
        }


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
        self._stacks: dict[str, Stack] = {}
        self._exact: dict[str, Matrix] = {}
        self._heads: dict[str, tuple[Stack, Stack]] = {}
        matrices = {tensor.encoding for tensor in tensors.values() if len(tensor.shape) > 1}
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

    def exact(self, name: str) -> Matrix:
        """A matrix in float32, whatever the others are brought to."""
        if name not in self._exact:
            self._exact[name] = _matrix(self._tensors[name], FORMATS["F32"])
        return self._exact[name]

    def stack(self, name: str) -> Stack:
        """The matrices of experts, (E, N, K), brought to their width at most once."""
        if name not in self._stacks:
            self._stacks[name] = Stack(tuple(self._of_experts(self._tensors[name])))
        return self._stacks[name]

    def of_heads(self, name: str, heads: int, d_key: int) -> tuple[Stack, Stack]:
        """Of (h·(d_key + d_value), r), each head's key before its value: W_kᵀ and W_v of each.

        W_v as it is stored; W_kᵀ (r, d_key) in plain numbers, since blocks run along the rows.
        """
        if name not in self._heads:
            whole, tensor = self.matrix(name), self._tensors[name]
            each = whole.n // heads
            values = tuple(whole.rows(e * each + d_key, (e + 1) * each) for e in range(heads))
            form = whole.format if whole.format.name in PLAIN else FORMATS["F32"]
            keys = []
            for start in range(0, whole.n, each):
                turned = encode(tensor.rows(start, start + d_key).T, form.name)
                keys.append(Matrix(form, turned, None, whole.k, d_key))
            tensor.release()
            self._heads[name] = Stack(tuple(keys)), Stack(values)
        return self._heads[name]

    def vector(self, name: str, add: float = 0.0) -> NDArray[np.float32]:
        """A vector as float32, plus a number; those of experts follow each other."""
        numbers = self._tensors[name].to_float32().reshape(-1)
        return numbers + np.float32(add) if add else numbers

    def optional(self, name: str) -> NDArray[np.float32] | None:
        """A vector that there may not be."""
        return self.vector(name) if name in self else None

    def _matrix(self, tensor: StoredTensor) -> Matrix:
        name = {"float32": "F32", "bfloat16": "BF16"}.get(self._width, tensor.encoding)
        return _matrix(tensor, FORMATS.get(name) or repacking.target(name) or FORMATS["F32"])

    def _of_experts(self, tensor: StoredTensor) -> list[Matrix]:
        count, n, _ = tensor.shape
        if isinstance(tensor, JoinedTensor) and tensor.is_stack:
            # One stored by itself may lie in place, which all together do not.
            return [self._matrix(part) for part in tensor.parts]
        whole = self._matrix(tensor)
        return [whole.rows(expert * n, (expert + 1) * n) for expert in range(count)]


def _matrix(tensor: StoredTensor, form: Format) -> Matrix:
    """A tensor in a format; its rows are those of its last dimension."""
    *outer, k = tensor.shape
    n = math.prod(outer)
    if form.name == tensor.encoding and tensor.in_place:
        return Matrix(form, tensor.data, _order(tensor, n), n, k)
    data = np.empty(form.row_bytes(k) * n, dtype=np.uint8)
    as_told = form.activations == "float32" or form.name == tensor.encoding
    start = 0
    for part in tensor.encoded(form.name) if as_told else repacking.repacked(tensor):
        data[start : start + part.nbytes] = part
        start += part.nbytes
    tensor.release()
    return Matrix(form, data, None, n, k)


def _order(tensor: StoredTensor, n: int) -> NDArray[np.int64] | None:
    """Where each of n rows lies; None where they follow each other."""
    if tensor.row_order is None:
        return None
    each = n // tensor.n_rows
    first = tensor.row_order.astype(np.int64)[:, None] * each
    return (first + np.arange(each)).reshape(-1)
