"""What is computed of a position without kernels: angles of rotations, rows of position tables."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from armillary.config import DecoderConfig, RotaryConfig
from armillary.engine.weights import Weights
from armillary.rope_scaling import trained_frequencies

_BLOCK = 256
_KEPT = 64
"""Blocks that are kept: a rule that varies with the length makes new ones at every step."""


class Angles:
    """cos and sin of positions under a rule, times its attention factor, made by blocks."""

    def __init__(self, rotary: RotaryConfig) -> None:
        self._rotary = rotary
        self._factor = rotary.scaling.attention_factor()
        self._blocks: dict[tuple[object, int], tuple[NDArray[np.float32], NDArray[np.float32]]] = {}

    def write(
        self, first: int, length: int, cos: NDArray[np.float32], sin: NDArray[np.float32]
    ) -> None:
        """Those of the positions from the first on in a text of a length, (R, d_rotary / 2)."""
        regime, done = self._rotary.scaling.regime(length), 0
        while done < len(cos):
            number, within = divmod(first + done, _BLOCK)
            if (regime, number) not in self._blocks:
                if len(self._blocks) == _KEPT:
                    del self._blocks[next(iter(self._blocks))]
                self._blocks[regime, number] = self._block(number, length)
            count = min(len(cos) - done, _BLOCK - within)
            for out, block in zip((cos, sin), self._blocks[regime, number], strict=True):
                out[done : done + count] = block[within : within + count]
            done += count

    def _block(self, number: int, length: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        rotary = self._rotary
        theta = trained_frequencies(rotary.scaling, rotary.base, rotary.d_rotary, length)
        positions = np.arange(number * _BLOCK, (number + 1) * _BLOCK, dtype=np.float32)
        angles = (positions[:, None] * theta.astype(np.float32)).astype(np.float64)
        return (
            (np.cos(angles).astype(np.float32) * np.float32(self._factor)),
            (np.sin(angles).astype(np.float32) * np.float32(self._factor)),
        )


def position_rows(
    config: DecoderConfig, weights: Weights
) -> Callable[[int], NDArray[np.float32]] | None:
    """The table that is added to the embeddings, if there is one: position → (d,)."""
    if config.position_table == "learned":
        return _learned(weights)
    if config.position_table == "sinusoidal":
        d = config.d_model
        theta = 10000.0 ** (-np.arange(0, d, 2) / d)

        def row(position: int) -> NDArray[np.float32]:
            angles = position * theta
            pairs = np.stack([np.sin(angles), np.cos(angles)], -1)
            return np.asarray(pairs.reshape(d), np.float32)

        return row
    return None


def _learned(weights: Weights) -> Callable[[int], NDArray[np.float32]]:
    table = weights.tensor("position_table.weight")

    def row(position: int) -> NDArray[np.float32]:
        return np.asarray(table.rows(position, position + 1)[0])

    return row
