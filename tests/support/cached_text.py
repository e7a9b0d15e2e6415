"""Keys and values of texts in memory as a cache has them, for tests of the kernels that read it."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from armillary.checkpoints.tensors import encode
from armillary.engine.cache import TextCache
from armillary.engine.cache_formats import CACHE_FORMATS
from armillary.engine.kv_layout import BLOCK, CHUNK, Stored, value_width
from support.kernels import drawn


def kept(numbers: np.ndarray, stored: Stored) -> np.ndarray:
    """What a cache makes of float32 numbers; those of the last axis are a token's."""
    if stored == "F32":
        return numbers
    if stored == "BF16":
        halves = encode(numbers, "BF16").view(np.uint16).astype(np.uint32)
        return (halves << 16).view(np.float32).reshape(numbers.shape)
    q, scales = whole(numbers)
    return q * scales


def whole(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Whole numbers to ±127, and the float32 (…, 1) that a token's are multiples of."""
    scales = np.abs(numbers).max(-1, keepdims=True) * np.float32(1 / 127)
    inverse = np.divide(1, scales, out=np.zeros_like(scales), where=scales > 0)
    return np.rint(numbers * inverse).astype(np.float32), scales


@dataclass
class Text:
    """Keys (h_kv, S, d_h) and values (h_kv, S, width) of a text, and the memory they are read from.

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
        width = self.values.shape[2]
        k = np.full((heads, self.room, d), self.unwritten, np.float32)
        v = np.full((heads, self.room, value_width(width)), self.unwritten, np.float32)
        k[:, :length] = self.keys
        v[:, :length, :width], v[:, :length, width:] = self.values, 0
        if length % 2:
            v[:, length] = self.beside
        if self.stored == "F32":
            self.key_memory = k.reshape(heads, -1, BLOCK, d).swapaxes(2, 3).copy()
            self.value_memory = v
            return
        if self.stored == "BF16":
            k, v = (encode(part, "BF16").view(np.uint16).reshape(part.shape) for part in (k, v))
        else:
            (k, k_scales), (v, v_scales) = (self._bytes(part) for part in (k, v))
        blocks_k = k.reshape(heads, -1, BLOCK, d // 2, 2).swapaxes(2, 3)
        blocks_v = v.reshape(heads, -1, BLOCK // 2, 2, v.shape[-1]).swapaxes(3, 4)
        if self.stored == "BF16":
            self.key_memory, self.value_memory = blocks_k.copy(), blocks_v.copy()
            return
        self.key_memory, self.value_memory = (
            np.concatenate([blocks.reshape(heads, self.room // BLOCK, -1), scales], -1)
            for blocks, scales in ((blocks_k, k_scales), (blocks_v, v_scales))
        )

    def _bytes(self, part: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(h_kv, S, d) as bytes, and the bytes of its scales by blocks."""
        length = self.keys.shape[1]
        numbers = np.full(part.shape, -1, np.int8)  # all bits set, as a NaN may have them
        scales = np.full((*part.shape[:2], 1), self.unwritten, np.float32)
        numbers[:, :length], scales[:, :length] = whole(part[:, :length])
        blocks = scales.reshape(len(part), -1, BLOCK)
        return numbers.view(np.uint8), blocks.view(np.uint8)


def text(
    heads: int,
    length: int,
    d: int,
    stored: Stored,
    seed: int = 0,
    room: int = 0,
    unwritten: float = np.nan,
    beside: float = np.nan,
    width: int | None = None,
) -> Text:
    """Random keys and values, the latter of another width than d where one is given."""
    keys, values = drawn(2, heads, length, max(d, width or d), seed=seed)
    keys, values = keys[..., :d], values[..., : width or d]
    return Text(
        kept(keys, stored),
        kept(values, stored),
        stored,
        room or -(-length // CHUNK) * CHUNK,
        unwritten,
        beside,
    )


def poison(cache: TextCache, first: int) -> None:
    """Set every bit of every place from a token on: NaN, as far as there are numbers for that."""
    parts = [*cache.keys, *cache.values]
    held = [part.copy() for part in parts]
    for part, before in zip(parts, held, strict=True):
        part.view(np.uint8)[:] = 0xFF
        by_key = any(part is each for each in cache.keys)
        for new, old in zip(
            *(_by_token(each, cache, by_key) for each in (part, before)), strict=True
        ):
            for token in range(first):
                place = np.unravel_index(token, (cache.room // BLOCK, *new.shape[1:3]))
                new[place] = old[place]


def _by_token(part: np.ndarray, cache: TextCache, by_key: bool) -> Iterator[np.ndarray]:
    """Views (S / 16, words of a block, of a word, …) of a layer's numbers and of their scales."""
    form = CACHE_FORMATS[cache.stored]
    blocks = part.reshape(len(part), cache.room // BLOCK, -1)
    behind = blocks.shape[-1] - BLOCK * form.scale_bytes // part.itemsize
    numbers, together = blocks[..., :behind], form.per_word
    if by_key:
        shape = (*numbers.shape[:2], -1, BLOCK, together)
        yield numbers.reshape(shape).transpose(1, 3, 0, 2, 4)[:, :, None]
    else:
        shape = (*numbers.shape[:2], BLOCK // together, -1, together)
        yield numbers.reshape(shape).transpose(1, 2, 4, 0, 3)
    if form.scale_bytes:
        scales = blocks[..., behind:].reshape(*numbers.shape[:2], BLOCK, -1)
        yield scales.transpose(1, 2, 0, 3)[:, :, None]
