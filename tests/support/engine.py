"""Engine decoders made of arrays, and their logits as a batch of equal rows has them."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from armillary.checkpoints.tensors import StoredTensor
from armillary.config import DecoderConfig
from armillary.engine.decoder import EngineDecoder
from support.quantised import PLAIN, QUANTISED, stored
from support.random_weights import random_weights


def stored_tensors(
    arrays: Mapping[str, np.ndarray], encoding: str = "F32"
) -> dict[str, StoredTensor]:
    """Arrays as a file would have them, matrices in an encoding, all else in float32."""
    tensors = {}
    for name, array in arrays.items():
        numbers = np.asarray(array, np.float32)
        kind = encoding if numbers.ndim > 1 and name != "position_table.weight" else "F32"
        rows = stored(kind, numbers.reshape(-1, numbers.shape[-1]))
        tensors[name] = StoredTensor(name, numbers.shape, kind, rows.reshape(-1), "test")
    return tensors


def weights_of(config: DecoderConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """Random weights, rounded to float32, for our plain dict and for the specification."""
    drawn = random_weights(config.to_dict(), seed)
    return {name: array.astype(np.float32) for name, array in drawn.items()}


def engine(
    config: DecoderConfig,
    weights: Mapping[str, np.ndarray] | None = None,
    *,
    encoding: str = "F32",
    **options: Any,
) -> EngineDecoder:
    """An engine decoder of `weights_of` the configuration, or other weights."""
    arrays = weights_of(config) if weights is None else weights
    return EngineDecoder(config, stored_tensors(arrays, encoding), **options)


def in_chunks(
    decoder: EngineDecoder, ids: Sequence[int], sizes: Sequence[int], **options: Any
) -> np.ndarray:
    """All logits (T, V) of a text that is taken in so many tokens at a time."""
    cache, parts, end = decoder.new_cache(**options), [], 0
    for size in sizes:
        parts += decoder.take([cache], [ids[end : end + size]], every=True)
        end += size
    assert end == len(ids)
    return np.concatenate(parts)


def with_attention(config: DecoderConfig, **entries: Any) -> DecoderConfig:
    """A configuration with other entries in the attention of every layer."""
    layers = tuple(
        layer.model_copy(update={"attention": layer.attention.model_copy(update=entries)})
        for layer in config.layers
    )
    return config.model_copy(update={"layers": layers})


def text(length: int, seed: int = 1, vocabulary: int = 61) -> list[int]:
    """Random token ids."""
    return np.random.default_rng(seed).integers(0, vocabulary, length).tolist()


__all__ = [
    "PLAIN",
    "QUANTISED",
    "engine",
    "in_chunks",
    "stored_tensors",
    "text",
    "weights_of",
    "with_attention",
]
