"""Keys and values of one text, as the kernels read them.

A batch is several of these, each of its own length, so nothing is ever padded. The tokens are kept
too: a rule whose frequencies vary with the length may need them computed anew.
"""

import copy
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from armillary.config import DecoderConfig
from armillary.engine.cache_formats import CACHE_FORMATS
from armillary.engine.kv_layout import BLOCK, CHUNK, Kept, Stored, value_width, whole_chunks


class CacheFullError(ValueError):
    """More tokens than the cache may hold; nothing in it was changed."""


class TextCache:
    """Room for the keys and values of a text, of every layer.

    `capacity` None grows as needed, from `room` on; a number is never exceeded. `rotary_length`
    fixes the length that rules see whose frequencies vary with it.
    """

    def __init__(
        self,
        config: DecoderConfig,
        stored: Stored = "BF16",
        *,
        capacity: int | None = None,
        rotary_length: int | None = None,
        room: int = CHUNK,
    ) -> None:
        if capacity is not None and capacity < 1:
            raise CacheFullError(f"capacity {capacity} must be at least 1")
        if rotary_length is not None and rotary_length < 1:
            raise ValueError(f"rotary_length {rotary_length} must be at least 1")
        self.config, self.stored = config, stored
        self.capacity, self.rotary_length = capacity, rotary_length
        self.tokens: list[int] = []
        self.filled_at = 0
        self.room = 0
        self.keys: list[NDArray[np.generic]] = []
        self.values: list[NDArray[np.generic]] = []
        self.addresses = np.zeros((2, config.n_layers), np.int64)
        self._take(room if capacity is None else capacity)

    @property
    def length(self) -> int:
        """Tokens held."""
        return len(self.tokens)

    @property
    def nbytes(self) -> int:
        """Bytes taken for keys and values."""
        return sum(part.nbytes for part in (*self.keys, *self.values))

    def reserve(self, count: int) -> None:
        """Make room for so many more tokens. Raises CacheFullError beyond the capacity."""
        needed = self.length + count
        if self.capacity is not None and needed > self.capacity:
            raise CacheFullError(
                f"{self.length} cached and {count} new tokens need {needed} places, but the "
                f"capacity is {self.capacity}"
            )
        if needed > self.room:
            self._take(max(needed, 2 * self.room))

    def trim(self, count: int) -> None:
        """Drop the last `count` tokens."""
        if not 0 <= count <= self.length:
            raise ValueError(f"cannot trim {count} of {self.length} tokens")
        del self.tokens[self.length - count :]

    def copy(self) -> "TextCache":
        """An independent copy."""
        other = TextCache(
            self.config, self.stored, capacity=self.capacity, rotary_length=self.rotary_length
        )
        other.tokens, other.filled_at, other.room = list(self.tokens), self.filled_at, self.room
        other.keys = [part.copy() for part in self.keys]
        other.values = [part.copy() for part in self.values]
        other._locate()
        return other

    def arrays(self) -> dict[str, NDArray[np.generic]]:
        """All that is kept of the tokens, by name, each (h_kv, chunks of room · their numbers)."""
        named = (("keys", self.keys), ("values", self.values))
        return {f"{name}.{n}": part for name, parts in named for n, part in enumerate(parts)}

    def seen(self) -> "TextCache":
        """What is held now, in the same memory: good for as long as the text only goes on."""
        other = copy.copy(self)
        other.tokens, other.addresses = list(self.tokens), self.addresses.copy()
        return other

    def beginning(self, count: int, *, room: int, rotary_length: int | None = None) -> "TextCache":
        """An independent copy of the first `count` tokens, with room for `room`."""
        other = TextCache(
            self.config, self.stored, rotary_length=rotary_length, room=max(count, room)
        )
        other.put(self.tokens[:count], self.arrays())
        other.filled_at = self.filled_at
        return other

    def put(self, tokens: list[int], arrays: Mapping[str, NDArray[np.generic]]) -> None:
        """Hold these tokens, which `arrays` like one's own hold, or begin with.

        Raises ValueError for arrays of another type.
        """
        for name, part in self.arrays().items():
            if arrays[name].dtype != part.dtype:
                raise ValueError(f"{name} is {arrays[name].dtype}, not {part.dtype}")
            count = self.span(part, len(tokens))
            part[:, :count] = arrays[name][:, :count]
        self.tokens = list(tokens)

    def span(self, part: NDArray[np.generic], tokens: int) -> int:
        """How many numbers of each head in one of the arrays the first tokens take."""
        of_a_chunk: int = part.shape[1] // (self.room // CHUNK)
        return of_a_chunk * (whole_chunks(tokens) // CHUNK)

    def _take(self, tokens: int) -> None:
        """Memory for so many tokens, with what is held copied to it."""
        room = whole_chunks(tokens)
        old = self.keys, self.values
        kept = [Kept.of(layer.attention) for layer in self.config.layers]
        self.keys = [self._zeros(each.heads, room, each.key) for each in kept]
        self.values = [self._zeros(each.heads, room, value_width(each.value)) for each in kept]
        for new, before in zip((self.keys, self.values), old, strict=True):
            for layer, held in zip(new, before, strict=False):
                layer[:, : held.shape[1]] = held
        self.room = room
        self._locate()

    def _zeros(self, heads: int, room: int, width: int) -> NDArray[np.generic]:
        """Blocks of `width` numbers a token, those of a head one after another."""
        form = CACHE_FORMATS[self.stored]
        item = np.dtype(form.item)
        return np.zeros((heads, room // BLOCK * form.block_bytes(width) // item.itemsize), item)

    def _locate(self) -> None:
        """Note where the keys and values of each layer lie."""
        self.addresses[:] = [
            [part.ctypes.data for part in parts] for parts in (self.keys, self.values)
        ]
