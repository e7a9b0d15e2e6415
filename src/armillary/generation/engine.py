"""What generation asks of who computes, and how decoders that hold each text by itself give it.

Knows nothing of tokens' choice or texts' ends (decode.py), nor of how a decoder computes.
"""

from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from armillary.config import DecoderConfig
from armillary.generation.sampling import Logits


class Texts(Protocol):
    """The texts of a batch, as an engine holds them."""

    def begin(self, prompts: Sequence[Sequence[int]]) -> list[Logits]:
        """Take the prompts in → the logits after each, (V,)."""

    def step(self, tokens: Sequence[int]) -> list[Logits]:
        """Take one more token of each text in → the logits after each, (V,)."""

    def steps(self, tokens: Sequence[int]) -> list[Logits]:
        """Take several tokens of a single text in → the logits after each, (V,)."""

    def take_back(self, count: int) -> None:
        """Drop the last tokens of a single text, none of its prompt."""

    def keep(self, rows: Sequence[int]) -> None:
        """Go on with these texts only, in this order."""


class Engine(Protocol):
    """Computes one decoder for any number of texts."""

    @property
    def config(self) -> DecoderConfig:
        """The decoder's configuration."""

    def new_cache(self, *, capacity: int | None = None, rotary_length: int | None = None) -> Any:
        """An empty cache of the engine's own kind, for one text."""

    def texts(self, lengths: Sequence[int], cache: Any = None) -> Texts:
        """Room for texts that rules which vary with the length see at these lengths.

        `cache`, for a single text, is one to go on from: what it shares with the prompt is not
        computed again, and it sets the length itself. Raises TypeError for a cache of another
        kind, ValueError for one that does not fit.
        """


class TextCache(Protocol):
    """What was computed of one text."""

    tokens: list[int]

    def trim(self, count: int) -> None:
        """Drop the last `count` tokens."""


Cache = TypeVar("Cache", bound=TextCache)


@runtime_checkable
class TextDecoder(Protocol[Cache]):
    """A decoder that goes on with texts of any lengths, each in a cache of its own."""

    @property
    def config(self) -> DecoderConfig:
        """Its configuration."""

    def new_cache(self, *, capacity: int | None = None, rotary_length: int | None = None) -> Cache:
        """An empty cache."""

    def take(
        self,
        caches: Sequence[Cache],
        tokens: Sequence[Sequence[int]],
        *,
        every: bool = False,
        prompts: bool = False,
    ) -> Sequence[Any]:
        """Go on with each text → float32 logits after its last token, (1, V), or each one's.

        With `prompts` they come as if no part of the texts had been held.
        """


class KnownPrompts(Protocol[Cache]):
    """What was computed of earlier prompts."""

    def find(self, prompt: Sequence[int], empty: Cache) -> Cache:
        """A cache like the empty one that holds a beginning of the prompt, or the empty one."""

    def keep(self, cache: Cache) -> None:
        """A prompt's cache, which the text now goes on in."""


class TextEngine(Generic[Cache]):
    """The engine of a decoder without torch: nothing is padded, so no text touches another.

    `known` are earlier prompts, for texts that bring no cache of their own.
    """

    def __init__(
        self, decoder: TextDecoder[Cache], known: KnownPrompts[Cache] | None = None
    ) -> None:
        self._decoder, self._known = decoder, known

    @property
    def config(self) -> DecoderConfig:
        """The decoder's configuration."""
        return self._decoder.config

    def new_cache(self, *, capacity: int | None = None, rotary_length: int | None = None) -> Cache:
        """See `Engine`."""
        return self._decoder.new_cache(capacity=capacity, rotary_length=rotary_length)

    def texts(self, lengths: Sequence[int], cache: Cache | None = None) -> "SeparateTexts[Cache]":
        """See `Engine`."""
        if cache is None:
            caches = [self.new_cache(rotary_length=length) for length in lengths]
            return SeparateTexts(self._decoder, caches, self._known)
        if not hasattr(cache, "trim") or hasattr(cache, "batch"):
            raise TypeError(
                f"a cache of type {type(cache).__name__} is not of this engine; "
                "make one with new_cache"
            )
        return SeparateTexts(self._decoder, [cache])


class SeparateTexts(Generic[Cache]):
    """Texts in a cache each."""

    def __init__(
        self,
        decoder: TextDecoder[Cache],
        caches: list[Cache],
        known: KnownPrompts[Cache] | None = None,
    ) -> None:
        self._decoder, self._caches, self._known = decoder, caches, known

    def begin(self, prompts: Sequence[Sequence[int]]) -> list[Logits]:
        """See `Texts`. Prompts are computed one after the other, each as it is alone."""
        return [self._begin(text, prompt) for text, prompt in enumerate(prompts)]

    def _begin(self, text: int, prompt: Sequence[int]) -> Logits:
        if self._known is not None:
            self._caches[text] = self._known.find(prompt, self._caches[text])
        cache = self._caches[text]
        new = prompt[_keep_common_prefix(cache, prompt) :]
        (logits,) = self._decoder.take([cache], [new], prompts=True)[0]
        if self._known is not None:
            self._known.keep(cache)
        row: Logits = logits
        return row

    def step(self, tokens: Sequence[int]) -> list[Logits]:
        """See `Texts`."""
        return [row for (row,) in self._decoder.take(self._caches, [[t] for t in tokens])]

    def steps(self, tokens: Sequence[int]) -> list[Logits]:
        """See `Texts`."""
        (cache,) = self._caches
        return list(self._decoder.take([cache], [tokens], every=True)[0])

    def take_back(self, count: int) -> None:
        """See `Texts`."""
        (cache,) = self._caches
        cache.trim(count)

    def keep(self, rows: Sequence[int]) -> None:
        """See `Texts`."""
        self._caches = [self._caches[row] for row in rows]


def _keep_common_prefix(cache: TextCache, prompt: Sequence[int]) -> int:
    """Trim a cache to what it shares with a prompt, less one token, which must be computed."""
    held = cache.tokens
    width = min(len(held), len(prompt) - 1)
    common = next((n for n in range(width) if held[n] != prompt[n]), width)
    cache.trim(len(held) - common)
    return common
