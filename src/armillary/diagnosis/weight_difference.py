"""Whether the weights of two files differ by more than the encodings of the files explain.

What an encoding does to numbers is measured, not assumed: each side is brought to the other's
encoding and back. A file made from the other then differs by exactly that.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from armillary.checkpoints.tensors import StoredTensor, block_size, decode, encode

_OTHER_WRITERS = 1.5
"""Writers choose the scales of blocks in different ways; none is so much worse than ours."""
_FLOAT32 = 1e-6


@dataclass(frozen=True)
class WeightDifference:
    """The row of a tensor that differs most, beside what the two encodings explain.

    Both are root mean squares over that of the row; `row` is 0 for a vector.
    """

    name: str
    row: int
    relative: float
    explained: float

    @property
    def parts(self) -> bool:
        """Whether it is more than the encodings explain."""
        return not self.relative <= self.explained

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


def weight_differences(
    one: Mapping[str, StoredTensor], other: Mapping[str, StoredTensor]
) -> list[WeightDifference]:
    """For each tensor that both have in one shape; none where an encoding is only read."""
    found = []
    for name, tensor in one.items():
        if name in other and other[name].shape == tensor.shape:
            # What an encoding does to numbers is known only where it can be written.
            with suppress(ValueError):
                found.append(_difference(name, tensor, other[name]))
    return found


def first_unexplained(found: list[WeightDifference]) -> WeightDifference | None:
    """The first tensor that differs by more than its encodings explain."""
    return next((difference for difference in found if difference.parts), None)


def _difference(name: str, one: StoredTensor, other: StoredTensor) -> WeightDifference:
    a, b = (np.atleast_2d(tensor.to_float32()) for tensor in (one, other))
    a, b = a.reshape(-1, a.shape[-1]), b.reshape(-1, b.shape[-1])
    size = _norms(a) + np.finfo(np.float32).tiny
    made = _norms(_brought_to(b, one.encoding) - b) + _norms(_brought_to(a, other.encoding) - a)
    explained = _OTHER_WRITERS * made / size + _FLOAT32
    relative = _norms(a - b) / size
    row = int(np.argmax(relative / explained))
    return WeightDifference(name, row, float(relative[row]), float(explained[row]))


def _norms(rows: NDArray[np.float32]) -> NDArray[np.float64]:
    return np.asarray(np.sqrt(np.einsum("ij,ij->i", rows, rows, dtype=np.float64)))


def _brought_to(rows: NDArray[np.float32], encoding: str) -> NDArray[np.float32]:
    """The numbers as an encoding keeps them."""
    if block_size(encoding)[0] == 1 and encoding in ("F32", "F64"):
        return rows
    return decode(encode(rows, encoding), encoding).reshape(rows.shape)
