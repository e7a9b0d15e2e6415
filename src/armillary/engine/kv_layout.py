"""How a layer's keys and values of one text lie in memory, for the kernels and the cache.

Both are in blocks of 16 tokens, one after another for each head. A block of keys is (d_h, 16), so
that one number of a query meets 16 keys at a time; one of values is as they come, (16, d_v), where
d_v is d_h rounded up to whole vectors. Formats in which numbers are used in twos have two that are
used one after the other side by side: (d_h / 2, 16, 2) and (8, d_v, 2). What else a format keeps of
each token is behind the numbers of its block (`engine/cache_formats`).
"""

from typing import Literal

Stored = Literal["F32", "BF16", "int8"]
"""What keys and values are kept as, by the names of `CACHE_FORMATS`."""

BLOCK = 16
CHUNK = 4 * BLOCK
"""Tokens that are scored together, and that the room for them is a multiple of."""

SEGMENTS = 16
"""Parts at most that the tokens which a query reads are cut into, to be shared between threads."""

SCRATCH = 4 * CHUNK * 4
"""Bytes that a thread needs for the scores of a chunk, of the 4 queries that are taken at once."""


def value_width(d_head: int) -> int:
    """d_v."""
    return -(-d_head // 16) * 16


def whole_chunks(tokens: int) -> int:
    """Tokens up to the end of the last one's chunk."""
    return -(-tokens // CHUNK) * CHUNK
