"""Keys and values of texts in memory as a cache has them, for tests of the kernels that read it."""

from dataclasses import dataclass

import numpy as np

from armillary.checkpoints.tensors import encode
from armillary.engine.kv_layout import BLOCK, CHUNK, Stored, value_width
from support.kernels import drawn


def kept(numbers: np.ndarray, stored: Stored) -> np.ndarray:
    """What a cache makes of float32 numbers."""
    if stored == "F32":
        return numbers
    halves = encode(numbers, "BF16").view(np.uint16).astype(np.uint32)
    return (halves << 16).view(np.float32).reshape(numbers.shape)


@dataclass
class Text:
    """Keys and values (h_kv, S, d_h) of a text, and the memory that they are read from.

    `room` is a multiple of 64; what no token has written is `unwritten`, values that share
    words with an odd last token's are `beside`.
    """

    keys: np.ndarray
    values: np.ndarray
    stored: Stored
    room: int
    unwritten: float = np.nan
    beside: float = np.nan

    def __post_init__(self) -> None:
        heads, length, d = self.keys.shape
        k = np.full((heads, self.room, d), self.unwritten, np.float32)
        v = np.full((heads, self.room, value_width(d)), self.unwritten, np.float32)
        k[:, :length] = self.keys
        v[:, :length, :d], v[:, :length, d:] = self.values, 0
        if length % 2:
            v[:, length] = self.beside
        if self.stored == "F32":
            self.key_memory = k.reshape(heads, -1, BLOCK, d).swapaxes(2, 3).copy()
            self.value_memory = v
        else:
            k, v = (encode(part, "BF16").view(np.uint16).reshape(part.shape) for part in (k, v))
            pairs = k.reshape(heads, -1, BLOCK, d // 2, 2).swapaxes(2, 3)
            self.key_memory = pairs.copy()
            self.value_memory = v.reshape(heads, self.room // 2, 2, -1).swapaxes(2, 3).copy()


def text(
    heads: int,
    length: int,
    d: int,
    stored: Stored,
    seed: int = 0,
    room: int = 0,
    unwritten: float = np.nan,
    beside: float = np.nan,
) -> Text:
    """Random keys and values."""
    keys, values = drawn(2, heads, length, d, seed=seed)
    return Text(
        kept(keys, stored),
        kept(values, stored),
        stored,
        room or -(-length // CHUNK) * CHUNK,
        unwritten,
        beside,
    )
