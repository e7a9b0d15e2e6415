"""Passes of many rows beside passes of few, which tests/engine/test_decoder.py holds to the
specification, and where one ends and the next begins."""

import numpy as np
import pytest

from armillary.config import DecoderConfig, LatentConfig, MixtureConfig
from armillary.engine import decoder as decoders
from armillary.engine.cache_formats import CACHE_FORMATS
from armillary.engine.decoder import EngineDecoder
from armillary.engine.prefill import MANY_ROWS
from support.engine import engine, in_chunks, text
from support.models import EVERY_VARIANT, config, layer, mixture

LONG = MANY_ROWS + 45
"""Past the first pass, and past what is projected to the vocabulary at once."""
WIDE = DecoderConfig.uniform(
    vocab_size=61,
    d_model=64,
    n_layers=2,
    n_heads=6,
    n_kv_heads=2,
    d_head=32,
    d_ff=96,
    max_positions=1024,
)
MIXTURE = mixture(expert={"d_ff": 32}, shared={"d_ff": 64}, shared_gate=True)
MIXED = WIDE.model_copy(
    update={
        "layers": tuple(
            each.model_copy(update={"feedforward": MixtureConfig.model_validate(MIXTURE)})
            for each in WIDE.layers
        )
    }
)
LATENT = WIDE.model_copy(
    update={
        "layers": tuple(
            layer(
                rotary={"d_rotary": 16},
                attention={
                    "n_kv_heads": 6,
                    "d_head": 48,
                    "latent": LatentConfig(kv_rank=64, d_rope=16, d_value=32),
                    "window": window,
                },
                feedforward={"d_ff": 96},
            )
            for window in (None, 90)
        )
    }
)
EACH_CACHE = pytest.mark.parametrize("stored", CACHE_FORMATS)
WINDOWS = config(layer(attention={"window": 20}), layer())


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Makes decoders that take every text in passes of few rows."""
    monkeypatch.setattr(decoders, "_FROM", 10**6)
    return monkeypatch


def by_few(few: pytest.MonkeyPatch, decoder: EngineDecoder, ids: list[int]) -> np.ndarray:
    """All logits, in passes of few rows."""
    logits = in_chunks(decoder, ids, [len(ids)])
    few.undo()
    return logits


@pytest.mark.parametrize(
    "of", [WIDE, WINDOWS, MIXED, LATENT], ids=["wide", "windows", "experts", "latent"]
)
def test_passes_follow_each_other(of: DecoderConfig, few: pytest.MonkeyPatch) -> None:
    decoder, ids = engine(of, width="float32", threads=2), text(LONG)
    wanted = by_few(few, decoder, ids)
    for sizes in ([LONG], [MANY_ROWS, 45], [100, LONG - 100], [10, 33, 1, LONG - 44]):
        np.testing.assert_allclose(in_chunks(decoder, ids, sizes), wanted, atol=2e-4)


@pytest.mark.parametrize("encoding", ["F32", "F16", "BF16"])
def test_weights_of_every_plain_format(encoding: str, few: pytest.MonkeyPatch) -> None:
    """Beside the same weights in float32: activations are rounded to bfloat16, or not at all."""
    ids = text(50)
    wanted = by_few(few, engine(WIDE, encoding=encoding, width="float32", threads=1), ids)
    gap = in_chunks(engine(WIDE, encoding=encoding, cache="F32", threads=1), ids, [50]) - wanted
    most = 1e-5 if encoding in {"F32", "F16"} else 0.04
    assert np.sqrt((gap**2).mean() / (wanted**2).mean()) < most


@pytest.mark.parametrize("encoding", ["Q8_0", "Q4_0", "Q4_1"])
def test_quantised_weights_meet_what_they_meet_in_few_rows(
    encoding: str, few: pytest.MonkeyPatch
) -> None:
    """Activations of int8. Attention adds up otherwise: now and then one is rounded elsewhere.

    From there on a text's logits differ by about a step, the others' by what float32 rounds.
    """
    decoder = engine(WIDE, encoding=encoding, cache="F32", threads=1)
    texts = [text(50, seed) for seed in range(7)]
    wanted = [in_chunks(decoder, ids, [50]) for ids in texts]
    few.undo()
    gaps = []
    for ids, by_few_rows in zip(texts, wanted, strict=True):
        gap = in_chunks(decoder, ids, [50]) - by_few_rows
        gaps.append(np.sqrt((gap**2).mean() / (by_few_rows**2).mean()))
    assert np.median(gaps) < 1e-6, gaps
    assert max(gaps) < 0.02, gaps


@pytest.mark.parametrize("name", EVERY_VARIANT)
def test_the_last_logits_alone_are_those_among_all(name: str) -> None:
    decoder, ids = engine(EVERY_VARIANT[name], width="float32", threads=1), text(40)
    last = decoder.take([decoder.new_cache()], [ids])[0]
    assert last.shape == (1, 61)
    np.testing.assert_allclose(last[0], in_chunks(decoder, ids, [40])[-1], atol=1e-4)


@EACH_CACHE
@pytest.mark.parametrize("of", [WIDE, MIXED, LATENT], ids=["dense", "experts", "latent"])
def test_texts_together_are_texts_alone_to_the_last_bit(of: DecoderConfig, stored: str) -> None:
    """Long and short ones, which meet in passes, and in the slots of experts."""
    decoder = engine(of, encoding="Q4_1", cache=stored, threads=2)
    texts = [text(length, seed=length) for length in (300, 3, 33, 250, 31, 90)]
    together = decoder.take([decoder.new_cache() for _ in texts], texts)
    for ids, logits in zip(texts, together, strict=True):
        np.testing.assert_array_equal(decoder.take([decoder.new_cache()], [ids])[0], logits)


@pytest.mark.parametrize(("stored", "most"), [("BF16", 0.02), ("int8", 0.05)])
def test_narrow_caches_lose_what_rounding_costs(
    stored: str, most: float, few: pytest.MonkeyPatch
) -> None:
    """Beside a cache in float32, from passes of few rows, of many, and step by step."""
    ids = text(100)
    wanted = by_few(few, engine(WIDE, width="float32", threads=1), ids)
    decoder = engine(WIDE, width="float32", cache=stored, threads=1)
    for sizes in ([100], [70, *[1] * 30], [16] * 6 + [4]):
        gap = in_chunks(decoder, ids, sizes) - wanted
        assert 1e-4 < np.sqrt((gap**2).mean() / (wanted**2).mean()) < most, sizes


def test_generation_goes_on_from_a_prompt(few: pytest.MonkeyPatch) -> None:
    decoder, ids = engine(WIDE, width="float32", threads=1), text(100)
    wanted = by_few(few, decoder, ids)
    got = in_chunks(decoder, ids, [70, *[1] * 30])
    np.testing.assert_allclose(got, wanted, atol=1e-4)


@EACH_CACHE
@pytest.mark.parametrize("threads", [2, 3])
def test_threads_change_nothing(threads: int, stored: str) -> None:
    one, more = (
        engine(WIDE, encoding="BF16", cache=stored, threads=number) for number in (1, threads)
    )
    ids = text(150)
    np.testing.assert_array_equal(in_chunks(one, ids, [150]), in_chunks(more, ids, [150]))


@EACH_CACHE
def test_a_trimmed_cache_shows_nothing_of_what_it_held(stored: str) -> None:
    """Case 58."""
    decoder = engine(WIDE, width="bfloat16", cache=stored, threads=1)
    first, other = text(120), text(80, seed=2)
    cache = decoder.new_cache()
    decoder.take([cache], [first])
    cache.trim(70)
    again = decoder.take([cache], [other], every=True)[0]
    fresh = decoder.new_cache()
    decoder.take([fresh], [first[:50]])
    np.testing.assert_array_equal(decoder.take([fresh], [other], every=True)[0], again)
