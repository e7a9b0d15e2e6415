"""Engines for one torch decoder: torch itself, its texts each by itself, and compiled kernels."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from armillary.config import DecoderConfig
from armillary.decoder import Decoder
from armillary.generation.engine import Engine, TextDecoder, TextEngine, Texts
from armillary.generation.sampling import Logits
from armillary.parts.kv_cache import KVCache
from armillary.torch_engine import TorchEngine
from support.engine import engine
from support.models import arrays


class OneText:
    """A torch cache with the tokens that it holds, as a text's cache has them."""

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache
        self.tokens: list[int] = []

    def trim(self, count: int) -> None:
        del self.tokens[len(self.tokens) - count :]
        self.cache.trim(count)


class TextByText:
    """A torch decoder in the clothes of one that holds each text by itself; notes each call."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.taken: list[list[list[int]]] = []
        self.texts: list[OneText] = []

    @property
    def config(self) -> DecoderConfig:
        return self.decoder.config

    def new_cache(
        self, *, capacity: int | None = None, rotary_length: int | None = None
    ) -> OneText:
        cache = KVCache(self.config, capacity=capacity, rotary_length=rotary_length)
        self.texts.append(OneText(cache))
        return self.texts[-1]

    @torch.no_grad()
    def take(
        self,
        caches: Sequence[OneText],
        tokens: Sequence[Sequence[int]],
        *,
        every: bool = False,
        prompts: bool = False,
    ) -> list[np.ndarray]:
        del prompts
        self.taken.append([list(new) for new in tokens])
        logits = []
        for text, new in zip(caches, tokens, strict=True):
            wanted = "all" if every else "last"
            rows = self.decoder(torch.tensor([list(new)]), cache=text.cache, logits=wanted)
            text.tokens += new
            logits.append(rows[0].numpy())
        return logits


class Noting:
    """An engine that notes the tokens of each call, as rows of counts."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.config, self.new_cache = engine.config, engine.new_cache
        self.calls: list[list[int]] = []

    def texts(self, lengths: Sequence[int], cache: object = None) -> "NotingTexts":
        return NotingTexts(self._engine.texts(lengths, cache), self.calls)


class NotingTexts:
    """Texts that note the tokens of each call."""

    def __init__(self, texts: Texts, calls: list[list[int]]) -> None:
        self._texts, self._calls = texts, calls
        self.keep = texts.keep

    def begin(self, prompts: Sequence[Sequence[int]]) -> list[Logits]:
        self._calls.append([len(prompt) for prompt in prompts])
        return self._texts.begin(prompts)

    def step(self, tokens: Sequence[int]) -> list[Logits]:
        self._calls.append([1] * len(tokens))
        return self._texts.step(tokens)


@dataclass(frozen=True)
class Kind:
    """How an engine is made of a torch decoder, and how far its log-probabilities may be off."""

    make: Callable[[Decoder], Engine]
    atol: float


def compiled(decoder: Decoder) -> TextDecoder:
    """The numba engine's decoder with these weights, all in float32."""
    return engine(decoder.config, arrays(decoder), threads=1)


def in_slots(decoder: Decoder) -> Engine:
    """Torch with steps of fixed shapes; on a GPU, where they are recorded, if there is one."""
    if torch.cuda.is_available():
        decoder = copy.deepcopy(decoder).to("cuda")
    return TorchEngine(decoder, fixed_steps=True)


ENGINES = {
    "torch": Kind(TorchEngine, 1e-10),
    "torch, fixed steps": Kind(in_slots, 1e-10),
    "text by text": Kind(lambda decoder: TextEngine(TextByText(decoder)), 1e-10),
    "numba": Kind(lambda decoder: TextEngine(compiled(decoder)), 1e-4),
}
