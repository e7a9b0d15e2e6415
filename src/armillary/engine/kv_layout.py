"""How a layer's keys and values of one text lie in memory, for the kernels and the cache.

Both are in blocks of 16 tokens, one after another for each head. A block of keys is (d_h, 16), so
that one number of a query meets 16 keys at a time; one of values is as they come, (16, d_v), where
d_v is their width rounded up to whole vectors. Formats in which numbers are used in twos have two
that are used one after the other side by side: (d_h / 2, 16, 2) and (8, d_v, 2). What else a format
keeps of each token is behind the numbers of its block (`engine/cache_formats`).
"""

from dataclasses import dataclass
from typing import Literal

from armillary.config import AttentionConfig

Stored = Literal["F32", "BF16", "int8"]
"""What keys and values are kept as, by the names of `CACHE_FORMATS`."""

BLOCK = 16
CHUNK = 4 * BLOCK
"""Tokens that are scored together, and that the room for them is a multiple of."""

SEGMENTS = 16
"""Parts at most that the tokens which a query reads are cut into, to be shared between threads."""

SCRATCH = 4 * CHUNK * 4
"""Bytes that a thread needs for the scores of a chunk, of the 4 queries that are taken at once."""


@dataclass(frozen=True)
class Kept:
    """What a layer keeps of a token: heads of keys and values, and the widths of both.

    Of latent attention one head: the vector and the rotated key are what all heads' queries meet,
    and the vector is the value. So it is kept twice, as keys are read and as values are.
    """

    heads: int
    key: int
    value: int

    @classmethod
    def of(cls, attention: AttentionConfig) -> "Kept":
        """That of a layer's attention."""
        latent = attention.latent
        if latent is None:
            return cls(attention.n_kv_heads, attention.d_head, attention.d_head)
        return cls(1, latent.kv_rank + latent.d_rope, latent.kv_rank)


def value_width(width: int) -> int:
    """d_v."""
    return -(-width // 16) * 16


def whole_chunks(tokens: int) -> int:
    """Tokens up to the end of the last one's chunk."""
    return -(-tokens // CHUNK) * CHUNK
