"""Orders that are computed, not stored: each place of a permutation on its own.

Six rounds of a Feistel network over the smallest even number of bits that holds the range; what
falls outside the range goes through again (cycle walking; Black and Rogaway 2002, §3). Any place of
any epoch takes the same short time, so a step is recomputed without the steps before it.
"""

from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 6
Indices = NDArray[np.int64]


def permuted(places: Indices, count: int, *key: int | str) -> Indices:
    """Return what stands at `places` (N,) of the permutation of 0 … count − 1 that `key` names.

    Raises ValueError for a place outside the range.
    """
    if len(places) and not 0 <= int(places.min()) <= int(places.max()) < count:
        raise ValueError(f"places {places.min()} to {places.max()} of a permutation of {count}")
    half = max(1, ((count - 1).bit_length() + 1) // 2)
    keys = _round_keys(key)
    values = places.astype(np.uint64)
    outside = np.arange(len(values))
    while len(outside):
        values[outside] = _feistel(values[outside], half, keys)
        outside = outside[values[outside] >= count]
    return values.astype(np.int64)


def drawn(bound: int, *key: int | str) -> int:
    """Return one of 0 … bound − 1, each as likely, that `key` names."""
    digest = blake2b(repr(key).encode(), digest_size=16).digest()
    return int.from_bytes(digest, "little") * bound >> 128


def _round_keys(key: tuple[int | str, ...]) -> NDArray[np.uint64]:
    digest = blake2b(repr(key).encode(), digest_size=8 * _ROUNDS).digest()
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)


def _feistel(values: NDArray[np.uint64], half: int, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    bits, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = values >> bits, values & mask
    for key in keys:
        left, right = right, left ^ (_mixed(right ^ key) & mask)
    return (left << bits) | right


def _mixed(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Spread every bit over all 64 (the finalizer of SplitMix64; Steele et al. 2014, §5)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
