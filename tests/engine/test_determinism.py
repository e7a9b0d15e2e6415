"""A token's logits are the same to the last bit whatever is computed with it, by how many threads.

Guesses that are checked together (generation/speculation.py) rely on it, and prompts that begin as
an earlier one did (engine/prompts.py).
"""

import numpy as np
import pytest

from armillary.config import DecoderConfig
from armillary.engine.cache_formats import CACHE_FORMATS
from support.engine import engine, in_chunks, text, with_attention

CONFIG = DecoderConfig.uniform(
    vocab_size=61,
    d_model=64,
    n_layers=2,
    n_heads=6,
    n_kv_heads=2,
    d_head=32,
    d_ff=96,
    max_positions=512,
)
EACH_CACHE = pytest.mark.parametrize("stored", CACHE_FORMATS)
LENGTH = 150  # past the first chunk of the cache, and two segments


@pytest.mark.parametrize(
    ("encoding", "cache"),
    [*((each, None) for each in ("F32", "BF16", "Q8_0", "Q4_0", "Q4_1")), ("Q8_0", "int8")],
)
def test_rows_together_are_rows_alone(encoding: str, cache: str | None) -> None:
    decoder = engine(CONFIG, encoding=encoding, cache=cache, threads=1)
    ids = text(LENGTH)
    alone = in_chunks(decoder, ids, [1] * LENGTH)
    for sizes in ([2] * 75, [3, 5] * 18 + [6], [8] * 18 + [6], [15] * 10):
        np.testing.assert_array_equal(in_chunks(decoder, ids, sizes), alone)


@EACH_CACHE
def test_texts_together_are_texts_alone(stored: str) -> None:
    decoder = engine(CONFIG, encoding="Q4_1", cache=stored, threads=1)
    texts = [text(length, seed=length) for length in (3, 90, 40, 41, 17)]
    caches = [decoder.new_cache() for _ in texts]
    for cache, ids in zip(caches, texts, strict=True):
        decoder.take([cache], [ids[:-1]])
    together = decoder.take(caches, [ids[-1:] for ids in texts])
    for ids, logits in zip(texts, together, strict=True):
        cache = decoder.new_cache()
        decoder.take([cache], [ids[:-1]])
        np.testing.assert_array_equal(decoder.take([cache], [ids[-1:]])[0], logits)


@EACH_CACHE
@pytest.mark.parametrize("threads", [2, 3])
def test_threads_change_nothing(threads: int, stored: str) -> None:
    ids = text(LENGTH)
    one, more = (
        engine(CONFIG, encoding="Q8_0", cache=stored, threads=count) for count in (1, threads)
    )
    sizes = [7] * 21 + [3]
    np.testing.assert_array_equal(in_chunks(one, ids, sizes), in_chunks(more, ids, sizes))


WINDOWED = with_attention(CONFIG, window=40)
CAPPED = with_attention(CONFIG, soft_cap=3.0)


@pytest.mark.parametrize("encoding", ["F32", "BF16", "Q8_0", "Q4_0", "Q4_1"])
@pytest.mark.parametrize("config", [CONFIG, WINDOWED, CAPPED], ids=["full", "windowed", "capped"])
def test_a_prompt_in_parts_is_the_prompt_as_a_whole(config: DecoderConfig, encoding: str) -> None:
    """Whatever the part that is computed last: more than a pass of many rows, or a single one."""
    one, more = (engine(config, encoding=encoding, threads=count) for count in (1, 3))
    ids = text(560)
    (whole,) = one.take([one.new_cache()], [ids])
    for sizes in ([559, 1], [20, 540], [64, 480, 16], [300, 7, 253]):
        for decoder in (one, more):
            cache, end = decoder.new_cache(), 0
            for size in sizes:
                (logits,) = decoder.take([cache], [ids[end : end + size]], prompts=True)
                end += size
            np.testing.assert_array_equal(logits, whole)


def test_the_last_token_of_a_prompt_alone_would_be_rounded_otherwise() -> None:
    """Otherwise the test above holds whether or not `prompts` does anything."""
    decoder = engine(CONFIG, encoding="Q4_0", threads=1)
    ids = text(100)
    caches = [decoder.new_cache() for _ in range(2)]
    for cache in caches:
        decoder.take([cache], [ids[:-1]])
    (alone,) = decoder.take(caches[:1], [ids[-1:]])
    (as_prompt,) = decoder.take(caches[1:], [ids[-1:]], prompts=True)
    assert not np.array_equal(alone, as_prompt)
    np.testing.assert_allclose(alone, as_prompt, atol=0.2)


def test_short_prompts_are_computed_as_they_are_without() -> None:
    decoder = engine(CONFIG, encoding="Q4_0", threads=1)
    caches = [decoder.new_cache() for _ in range(2)]
    (plain,) = decoder.take(caches[:1], [text(16)])
    (as_prompt,) = decoder.take(caches[1:], [text(16)], prompts=True)
    np.testing.assert_array_equal(plain, as_prompt)
