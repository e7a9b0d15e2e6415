"""Room for keys and values: how much, how it grows, and what a text may do with it."""

import numpy as np
import pytest

from armillary.engine.cache import CacheFullError, TextCache
from armillary.engine.cache_formats import CACHE_FORMATS
from armillary.engine.kv_layout import CHUNK
from support.models import VARIANTS, config, layer

PLAIN = VARIANTS["plain"]


EACH = pytest.mark.parametrize("stored", CACHE_FORMATS)


@pytest.mark.parametrize(
    ("stored", "size", "scale"), [("F32", 4, 0), ("BF16", 2, 0), ("int8", 1, 4)]
)
def test_its_size_is_that_of_the_key_value_heads(stored: str, size: int, scale: int) -> None:
    """Case 63: 2 · layers · kv heads · d_head · places · bytes of a number; never h for h_kv.

    In int8, each head of a token has a scale besides.
    """
    heads = {"n_kv_heads": 2, "d_head": 16}
    of = config(*[layer(attention=heads, rotary={"d_rotary": 16})] * 3)
    for capacity in (CHUNK, 5 * CHUNK):
        cache = TextCache(of, stored, capacity=capacity)  # type: ignore[arg-type]
        assert cache.nbytes == 2 * 3 * 2 * (16 * size + scale) * capacity


def test_a_fixed_cache_is_allocated_once() -> None:
    cache = TextCache(PLAIN, capacity=200)
    before = cache.addresses.copy()
    for _ in range(200):
        cache.reserve(1)
        cache.tokens.append(1)
    np.testing.assert_array_equal(cache.addresses, before)
    with pytest.raises(CacheFullError, match="200 cached and 1 new tokens need 201 places"):
        cache.reserve(1)


@EACH
def test_a_growing_cache_at_most_doubles_and_keeps_what_it_has(stored: str) -> None:
    cache = TextCache(PLAIN, stored)  # type: ignore[arg-type]
    for part in (*cache.keys, *cache.values):
        part[:] = np.arange(part.size).reshape(part.shape) % 251
    before = [part.copy() for part in (*cache.keys, *cache.values)]
    length = 0
    while length < 1000:
        cache.reserve(1)
        cache.tokens.append(1)
        length += 1
        assert length <= cache.room <= max(CHUNK, 2 * length)
        assert cache.room % CHUNK == 0
    for old, new in zip(before, (*cache.keys, *cache.values), strict=True):
        np.testing.assert_array_equal(new[:, : old.shape[1]], old)
    places = [[part.ctypes.data for part in parts] for parts in (cache.keys, cache.values)]
    np.testing.assert_array_equal(cache.addresses, places)


def test_a_copy_has_the_same_options_and_memory_of_its_own() -> None:
    cache = TextCache(PLAIN, "F32", capacity=70, rotary_length=12)
    cache.tokens += [1, 2, 3]
    cache.filled_at = 12
    other = cache.copy()
    for name in ("config", "stored", "capacity", "rotary_length", "tokens", "filled_at", "room"):
        assert getattr(other, name) == getattr(cache, name), name
    assert other.tokens is not cache.tokens
    mine, theirs = ({int(a) for a in each.addresses.flat} for each in (cache, other))
    assert not mine & theirs
    assert theirs == {part.ctypes.data for part in (*other.keys, *other.values)}


def test_only_held_tokens_are_trimmed() -> None:
    cache = TextCache(PLAIN)
    cache.tokens += [1, 2, 3]
    for count in (4, -1):
        with pytest.raises(ValueError, match=f"cannot trim {count} of 3 tokens"):
            cache.trim(count)
    cache.trim(0)
    assert cache.tokens == [1, 2, 3]
    cache.trim(2)
    assert cache.tokens == [1]
    assert cache.length == 1


@pytest.mark.parametrize("capacity", [0, -5])
def test_a_capacity_is_at_least_one(capacity: int) -> None:
    with pytest.raises(ValueError, match=f"capacity {capacity} must be at least 1"):
        TextCache(PLAIN, capacity=capacity)


def test_a_rotary_length_is_at_least_one() -> None:
    with pytest.raises(ValueError, match="rotary_length 0 must be at least 1"):
        TextCache(PLAIN, rotary_length=0)


def filled(stored: str, count: int) -> TextCache:
    """A cache with numbers in it that tell their places."""
    cache = TextCache(PLAIN, stored)  # type: ignore[arg-type]
    cache.reserve(count)
    for part in cache.arrays().values():
        part[:] = np.arange(part.size).reshape(part.shape) % 251
    cache.tokens += range(count)
    return cache


@EACH
@pytest.mark.parametrize("count", [1, CHUNK, CHUNK + 1, 150])
def test_a_beginning_holds_whole_chunks_in_memory_of_its_own(stored: str, count: int) -> None:
    cache = filled(stored, 150)
    other = cache.beginning(count, room=200, rotary_length=9)
    assert (other.tokens, other.room, other.rotary_length) == (list(range(count)), 256, 9)
    whole = -(-count // CHUNK) * CHUNK
    for name, part in other.arrays().items():
        held = cache.arrays()[name]
        width = held.shape[1] // cache.room
        assert part.shape == (len(held), other.room * width)
        np.testing.assert_array_equal(part[:, : whole * width], held[:, : whole * width])
        assert not part[:, whole * width :].any()
        assert not np.shares_memory(part, held)


def test_what_is_seen_stays_when_the_text_goes_on() -> None:
    cache = filled("BF16", 150)
    seen = cache.seen()
    before = {name: part.copy() for name, part in cache.arrays().items()}
    assert all(np.shares_memory(a, b) for a, b in zip(cache.keys, seen.keys, strict=True))
    cache.tokens += [7] * 300
    cache.reserve(1)
    assert len(seen.tokens) == 150
    for name, part in seen.arrays().items():
        np.testing.assert_array_equal(part, before[name])


def test_arrays_of_another_type_are_not_taken_in() -> None:
    with pytest.raises(ValueError, match=r"keys\.0 is float32, not uint16"):
        TextCache(PLAIN, "BF16").put([1], filled("F32", 1).arrays())
