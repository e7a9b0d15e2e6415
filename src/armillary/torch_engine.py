"""A torch decoder as generation's engine: the texts of a batch in one cache, padded on the left.

Padding is masked, so positions count real tokens and each text gets what it gets alone. Prompts
are computed in blocks, and so is every step on a CPU. On a GPU the step of one more token each has
fixed shapes, over all slots that the cache has memory for, and is recorded as a CUDA graph: anew
when the cache has grown to twice its size, or texts have left the batch.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from armillary.config import DecoderConfig, MixtureConfig
from armillary.cuda_graph import recorded
from armillary.decoder import Decoder
from armillary.parts.kv_cache import KVCache
from armillary.parts.layer_store import CacheError
from armillary.parts.slots import Slots

_PREFILL = {"cpu": 512, "cuda": 2048}
"""Tokens of each prompt that are computed at once: what bounds the memory of activations."""


class TorchEngine:
    """Computes with a decoder, in its own number type and on its own device.

    `fixed_steps`: whether the step of one more token each has fixed shapes, as a GPU needs it to be
    quick; on a CPU it would read slots that hold nothing. Left out, it is so on CUDA devices, but
    for decoders with experts: which of them multiply how much is known only when routing is done.
    The methods are those of `generation.engine.Engine`.
    """

    def __init__(self, decoder: Decoder, *, fixed_steps: bool | None = None) -> None:
        on_gpu = decoder.embedding.weight.device.type == "cuda"
        self._decoder = decoder
        layers = decoder.config.layers
        routes = any(isinstance(layer.feedforward, MixtureConfig) for layer in layers)
        self._fixed_steps = on_gpu and not routes if fixed_steps is None else fixed_steps

    @property
    def config(self) -> DecoderConfig:
        """The decoder's configuration."""
        return self._decoder.config

    def new_cache(
        self, *, capacity: int | None = None, rotary_length: int | None = None
    ) -> KVCache:
        """An empty cache for one text."""
        return KVCache(self.config, capacity=capacity, rotary_length=rotary_length)

    def texts(self, lengths: Sequence[int], cache: KVCache | None = None) -> "PaddedTexts":
        """Room for texts of these lengths, or for the single one that a cache is to go on from.

        Raises ValueError for a decoder in training mode and a cache of several rows, TypeError for
        a cache of another engine.
        """
        if self._decoder.training:
            raise ValueError(
                "the decoder is in training mode, with dropout; call decoder.eval() first"
            )
        if cache is None:
            cache = KVCache(
                self.config,
                len(lengths),
                windowed=not self._fixed_steps,
                rotary_length=lengths,
            )
        elif not isinstance(cache, KVCache):
            raise TypeError(
                f"a cache of type {type(cache).__name__} is not of this engine; it takes a KVCache"
            )
        elif cache.batch != 1:
            raise ValueError(f"a cache of {cache.batch} rows for one prompt; it must have one")
        return PaddedTexts(
            self._decoder, cache, FixedStep(self._decoder) if self._fixed_steps else None
        )


class PaddedTexts:
    """Texts in the rows of one cache.

    The methods are those of `generation.engine.Texts`; logits are float32, or float64 where the
    decoder computes in it.
    """

    def __init__(self, decoder: Decoder, cache: KVCache, fixed: "FixedStep | None") -> None:
        self._decoder, self._cache, self._fixed = decoder, cache, fixed
        self._device = decoder.embedding.weight.device

    def begin(self, prompts: Sequence[Sequence[int]]) -> list[NDArray[np.floating[Any]]]:
        """Take the prompts in → the logits after each, (V,)."""
        tokens, mask = left_padded(prompts)
        tokens = tokens[:, keep_common_prefix(self._cache, tokens) :]
        with torch.no_grad():
            logits = self._decoder.prefill(
                tokens.to(self._device),
                self._cache,
                mask=None if mask is None else mask.to(self._device),
                chunk=_PREFILL.get(self._device.type, 512),
            )
        return _rows(logits)

    def step(self, tokens: Sequence[int]) -> list[NDArray[np.floating[Any]]]:
        """Take one more token of each text in → the logits after each, (V,)."""
        last = torch.tensor(tokens, device=self._device).unsqueeze(1)
        with torch.no_grad():
            if self._fixed is not None and self._cache.make_slot(self._decoder.config, last):
                return _rows(self._fixed(last, self._cache))
            return _rows(self._decoder(last, cache=self._cache, logits="last"))

    def steps(self, tokens: Sequence[int]) -> list[NDArray[np.floating[Any]]]:
        """Take several tokens of a single text in → the logits after each, (V,)."""
        new = torch.tensor([list(tokens)], device=self._device)
        with torch.no_grad():
            logits = self._decoder(new, cache=self._cache)
        return _rows(logits.transpose(0, 1))

    def take_back(self, count: int) -> None:
        """Drop the last tokens of a single text."""
        self._cache.trim(count)

    def keep(self, rows: Sequence[int]) -> None:
        """Go on with these texts only, in this order."""
        self._cache.reorder(rows)


class FixedStep:
    """One more token of each text, in shapes and memory that stay as long as the cache's do."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._slots: Slots | None = None

    def __call__(self, tokens: Tensor, cache: KVCache) -> Tensor:
        """tokens (B, 1) → logits (B, 1, V), which hold until the next call.

        The cache has made a slot for them.
        """
        if self._slots is None or not self._slots.are_of(cache):
            self._slots = slots = Slots(cache)
            self._tokens = held = torch.empty_like(tokens)
            decoder = self._decoder
            self._step = recorded(lambda: decoder.next(held, slots), tokens.device)
        self._slots.follow(cache)
        self._tokens.copy_(tokens)
        logits = self._step()
        cache.fill_slot(tokens)
        return logits


def _rows(logits: Tensor) -> list[NDArray[np.floating[Any]]]:
    """(B, 1, V) → B rows (V,)."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return list(wide[:, -1].cpu().numpy())


def left_padded(prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor | None]:
    """Prompts as one matrix, (B, T), and the mask of what is no padding, (B, T), if there is any.

    A row is padded with its own first token: no id has to be set aside, and nothing that the
    row does not hold anyway (an unused, perhaps unfilled embedding) comes near the computation.
    """
    width = max(map(len, prompts))
    padding = [width - len(prompt) for prompt in prompts]
    rows = [[prompt[0]] * n + list(prompt) for n, prompt in zip(padding, prompts, strict=True)]
    tokens = torch.tensor(rows)
    if not any(padding):
        return tokens, None
    return tokens, torch.arange(width) >= torch.tensor(padding).unsqueeze(1)


def keep_common_prefix(cache: KVCache, tokens: Tensor) -> int:
    """Trim a cache to what it shares with the prompt, less one token, which must be computed.

    Shapes: tokens (1, T). Returns how many tokens stay; none when the cache cannot be trimmed, or
    holds padding, which is no part of a prompt.
    """
    if cache.length == 0:
        return 0
    if not bool(cache.readable.all()):
        cache.clear()
        return 0
    held = cache.tokens.to(tokens.device)
    width = min(cache.length, tokens.shape[1] - 1)
    differs = (held[0, :width] != tokens[0, :width]).nonzero()
    common = int(differs[0]) if len(differs) else width
    try:
        cache.trim(cache.length - common)
    except CacheError:
        cache.clear()
        return 0
    return common
