"""Memory that a plan works in: rows of activations, and what a pass is told of each row."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from armillary.engine.program import aligned
from armillary.engine.tiling import WHOLE_ROWS

_LINE = 64


class Buffer:
    """Rows of activations, for all threads together or for each its own.

    A row is an odd count of cache lines, so that rows which are read side by side do not fall on
    the same places of the cache.
    """

    def __init__(self, row_bytes: int, rows: int, threads: int = 0) -> None:
        self.rows = rows
        self.stride = (-(-row_bytes // _LINE) | 1) * _LINE
        self.private = self.stride * rows if threads else 0
        self.data = aligned(self.stride * rows * max(1, threads))

    def floats(self, width: int) -> NDArray[np.float32]:
        """The rows as float32, (R, width)."""
        rows: NDArray[np.float32] = self.data.view(np.float32).reshape(self.rows, -1)[:, :width]
        return rows


@dataclass
class Inputs:
    """What a pass is told: counts, and for each row its token, text and place."""

    rows: NDArray[np.int64]
    outputs: NDArray[np.int64]
    tokens: NDArray[np.int64]
    chosen: NDArray[np.int64]
    places: NDArray[np.int64]
    lengths: NDArray[np.int64]
    room: NDArray[np.int64]
    keys: NDArray[np.int64]
    values: NDArray[np.int64]
    cos: list[NDArray[np.float32]] = field(default_factory=list)
    sin: list[NDArray[np.float32]] = field(default_factory=list)
    positions: NDArray[np.float32] | None = None

    @classmethod
    def of(cls, layers: int, count: int) -> "Inputs":
        """Zeros, for so many rows at most."""
        a, b = (np.zeros(1, np.int64) for _ in range(2))
        rows = [np.zeros(count, np.int64) for _ in range(5)]
        many = np.zeros((2, layers, count), np.int64)
        return cls(a, b, rows[0], rows[1], rows[2], rows[3], rows[4], many[0], many[1])


@dataclass(frozen=True)
class Slots:
    """Rows of activations sorted by the expert that takes them, as `kernels/experts.py` has them.

    Those of expert e lie from starts[e] to starts[e + 1]. most: how many there are at most.
    chosen, weights: the experts that each row chose, and what they count. row_of: the row that a
    slot comes from; slot_of: the slot of each choice.
    """

    experts: int
    top_k: int
    most: int
    starts: NDArray[np.int64]
    chosen: NDArray[np.int64]
    weights: NDArray[np.float32]
    row_of: NDArray[np.int64]
    slot_of: NDArray[np.int64]

    @classmethod
    def of(cls, experts: int, top_k: int, rows: int) -> "Slots":
        """For so many rows at most, and memory up to a whole tile behind the last."""
        most = rows * top_k + WHOLE_ROWS
        # What sorts them works behind the starts.
        starts, weights = np.zeros(2 * experts + 1, np.int64), np.zeros(most, np.float32)
        chosen, row_of, slot_of = (np.zeros(most, np.int64) for _ in range(3))
        return cls(experts, top_k, most, starts, chosen, weights, row_of, slot_of)

    @property
    def rows(self) -> NDArray[np.int64]:
        """How many there are, as kernels are told it."""
        return self.starts[self.experts : self.experts + 1]
