"""The key/value cache: what each layer keeps of a batch of texts, and what follows from it.

The cache owns the positions of what it holds and of what comes next, and the mask that follows
from them. It knows the attention settings that it was filled under and refuses others. It keeps
the tokens too, since under a rule whose frequencies vary with the length (dynamic, longrope) a
longer text changes what every layer holds: unless the length was fixed, the decoder then computes
the cached tokens anew. It records no gradients.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from pydantic import BaseModel
from torch import Tensor

from armillary.config import AttentionConfig, DecoderConfig
from armillary.parts.layer_store import CacheError, LayerStore
from armillary.parts.mask import Visibility, counted_positions, split_mask, tree
from armillary.parts.rotary import rotate, rotation
from armillary.parts.saved_cache import SavedCache, read_saved, write_saved


@dataclass(frozen=True)
class Step:
    """What the decoder computes to take new tokens into a cache.

    Shapes: tokens, positions (B, T'), where T' is the count of new tokens, or of all tokens when
    the cached ones are computed anew. `lengths` has an entry per row for rules that vary.
    """

    tokens: Tensor
    positions: Tensor
    visibility: Visibility
    lengths: list[int]


class KVCache:
    """Keys and values of a batch of texts, for one decoder configuration.

    `capacity` None grows as needed; a number is allocated once and never exceeded. With
    `windowed`, layers that have a window keep only what it reaches. `rotary_length`, one for all
    rows or one per row, fixes the length that varying rules see: every step then equals a whole
    pass computed with the same `rotary_length`. The number type and device are those of the first
    keys that come.
    Raises CacheError (a ValueError) for use that does not fit, and changes nothing then.
    """

    def __init__(
        self,
        config: DecoderConfig,
        batch: int = 1,
        capacity: int | None = None,
        *,
        windowed: bool = False,
        rotary_length: int | Sequence[int] | None = None,
    ) -> None:
        if batch < 1 or (capacity is not None and capacity < 1):
            raise CacheError(f"batch {batch} and capacity {capacity} must be at least 1")
        if isinstance(rotary_length, int):
            rotary_length = [rotary_length] * batch
        if rotary_length is not None and len(rotary_length) != batch:
            raise CacheError(f"{len(rotary_length)} rotary lengths for a batch of {batch}")
        self.config = config
        self.capacity = capacity
        self.windowed = windowed
        self.changes = 0
        """Counts what happened to it other than by `fill_slot`."""
        self._settings = _settings(config)
        self._fixed = None if rotary_length is None else list(rotary_length)
        self._batch = batch
        self.clear()

    def clear(self) -> None:
        """Forget everything, and free it."""
        self.changes += 1
        self.layers = self._empty_stores()
        self._tokens: Tensor | None = None
        self._readable: Tensor | None = None
        self._counts = [0] * self._batch
        self._filled_at = [0] * self._batch

    @property
    def batch(self) -> int:
        """B."""
        return self._batch

    @property
    def length(self) -> int:
        """Slots used in each row, padding included."""
        return 0 if self._tokens is None else self._tokens.shape[1]

    @property
    def counts(self) -> list[int]:
        """Real tokens in each row: the position that its next token gets."""
        return list(self._counts)

    @property
    def tokens(self) -> Tensor:
        """The tokens taken in so far, (B, length)."""
        if self._tokens is None:
            raise CacheError("the cache is empty")
        return self._tokens

    @property
    def readable(self) -> Tensor:
        """Which slots hold real tokens, (B, length)."""
        if self._readable is not None:
            return self._readable
        return torch.ones_like(self.tokens, dtype=torch.bool)

    @property
    def nbytes(self) -> int:
        """Bytes allocated for keys and values."""
        return sum(layer.nbytes for layer in self.layers)

    @contextlib.contextmanager
    def step(
        self, config: DecoderConfig, tokens: Tensor, mask: Tensor | None = None
    ) -> Iterator[Step]:
        """Take `tokens` in: the block in between appends to every layer's store.

        Shapes: tokens (B, T); mask (B, T), false for padding, or (B, T, S) over pairs, where S
        counts the cached tokens too. A block that ends early leaves the cache as it was.
        """
        self._check(config, tokens)
        count, before = tokens.shape[1], self.length
        new, allowed = split_mask(mask, self._batch, count, before + count)
        readable = self._joined(new, tokens)
        counts = [
            old + (count if new is None else int(new[row].sum()))
            for row, old in enumerate(self._counts)
        ]
        lengths = counts if self._fixed is None else self._fixed
        kept, marks = self.layers, [layer.mark() for layer in self.layers]
        if before and self._is_stale(lengths):
            if allowed is not None:
                raise CacheError(
                    "the frequencies change with this length, and a mask over pairs cannot be "
                    "applied to tokens that are computed anew; fix rotary_length"
                )
            self.layers, before = self._empty_stores(), 0
        all_tokens = tokens if self._tokens is None else torch.cat([self._tokens, tokens], dim=1)
        try:
            yield Step(
                tokens=all_tokens[:, before:],
                positions=_positions(readable, all_tokens)[:, before:],
                visibility=Visibility(
                    n_queries=all_tokens.shape[1] - before,
                    n_keys=all_tokens.shape[1],
                    readable=readable,
                    allowed=allowed,
                ),
                lengths=lengths,
            )
        except BaseException:
            self.layers = kept
            for layer, mark in zip(kept, marks, strict=True):
                layer.return_to(mark)
            raise
        self._tokens, self._readable = all_tokens, readable
        self._counts, self._filled_at = counts, list(lengths)
        self.changes += 1

    @property
    def next_lengths(self) -> list[int]:
        """The lengths that varying rules see when each row gets one more token."""
        return [old + 1 for old in self._counts] if self._fixed is None else self._fixed

    def make_slot(self, config: DecoderConfig, tokens: Tensor) -> bool:
        """Have memory for one more token of each row, (B, 1), if it can be taken in by itself.

        False where it takes a `step`: into an empty or windowed cache, beyond a table of positions,
        where frequencies change. Raises CacheError beyond the capacity.
        """
        self._check(config, tokens)
        if (
            self.length == 0
            or any(layer.is_windowed for layer in self.layers)
            or (config.position_table == "learned" and max(self._counts) >= config.max_positions)
            or self._is_stale(self.next_lengths)
        ):
            return False
        for layer in self.layers:
            layer.reserve(1)
        return True

    def fill_slot(self, tokens: Tensor) -> None:
        """Count in one more token of each row, (B, 1), whose keys and values were put in place."""
        for layer in self.layers:
            layer.fill(1)
        self._readable = self._joined(None, tokens)
        self._filled_at = list(self.next_lengths)
        self._tokens = torch.cat([self.tokens, tokens], dim=1)
        self._counts = [old + 1 for old in self._counts]

    @contextlib.contextmanager
    def branches(
        self, config: DecoderConfig, tokens: Tensor, parents: Sequence[int]
    ) -> Iterator[Step]:
        """Let `tokens` follow in several ways: after the block in between all is as it was.

        Shapes: tokens (B, T), parents (T,) as `tree` has them, −1 for what follows the cached text.
        Raises CacheError where a rule's frequencies vary with how long the ways are.
        """
        self._check(config, tokens)
        ways, depths = (part.to(tokens.device) for part in tree(parents))
        count, before = tokens.shape[1], self.length
        if len(parents) != count:
            raise CacheError(f"{len(parents)} parents for {count} tokens")
        longest = int(depths.max()) + 1
        lengths = self._fixed or [old + longest for old in self._counts]
        if self._fixed is None and self._is_stale(lengths):
            raise CacheError(
                "the frequencies change with the length of what follows; fix rotary_length"
            )
        marks = [layer.mark() for layer in self.layers]
        try:
            yield Step(
                tokens=tokens,
                positions=torch.tensor(self._counts, device=tokens.device).unsqueeze(-1) + depths,
                visibility=Visibility(
                    n_queries=count,
                    n_keys=before + count,
                    readable=self._joined(None, tokens),
                    allowed=torch.cat([ways.new_ones(count, before), ways], dim=1)[None, None],
                    places=torch.cat([torch.arange(before, device=tokens.device), before + depths]),
                ),
                lengths=lengths,
            )
        finally:
            for layer, mark in zip(self.layers, marks, strict=True):
                layer.return_to(mark)

    def trim(self, count: int) -> None:
        """Drop the last `count` slots of every row.

        Raises CacheError when a windowed layer has forgotten what it would then need: clear the
        cache and compute the kept tokens again.
        """
        if not 0 <= count <= self.length:
            raise CacheError(f"cannot trim {count} of {self.length} slots")
        if not all(layer.can_trim(count) for layer in self.layers):
            raise CacheError(
                f"cannot trim {count} slots: a windowed layer no longer holds what it would need; "
                "clear the cache and compute the kept tokens again"
            )
        if count == self.length:
            self.clear()
            return
        self.changes += 1
        for layer in self.layers:
            layer.trim(count)
        kept = self.length - count
        self._tokens = self.tokens[:, :kept]
        if self._readable is None:
            self._counts = [kept] * self._batch
        else:
            self._readable = self._readable[:, :kept]
            self._counts = self._readable.sum(-1).tolist()

    def copy(self) -> "KVCache":
        """An independent copy: what is added to one is not in the other."""
        other = KVCache(
            self.config,
            self._batch,
            self.capacity,
            windowed=self.windowed,
            rotary_length=self._fixed,
        )
        other.layers = [layer.clone() for layer in self.layers]
        other._tokens, other._readable = self._tokens, self._readable
        other._counts, other._filled_at = list(self._counts), list(self._filled_at)
        return other

    def reorder(self, rows: Sequence[int]) -> None:
        """Keep the given batch rows, in the given order; a row may be taken more than once."""
        if not rows or not all(0 <= row < self._batch for row in rows):
            raise CacheError(f"rows {list(rows)} are not all within a batch of {self._batch}")
        self.changes += 1
        if self._tokens is not None:
            index = torch.tensor(list(rows), device=self._tokens.device)
            self._tokens = self._tokens[index]
            self._readable = None if self._readable is None else self._readable[index]
            for layer in self.layers:
                layer.select(index)
        self._counts = [self._counts[row] for row in rows]
        self._filled_at = [self._filled_at[row] for row in rows]
        self._fixed = None if self._fixed is None else [self._fixed[row] for row in rows]
        self._batch = len(rows)

    def rerotate(self, config: DecoderConfig) -> None:
        """Turn the cached keys from the rotary settings they were filled under to `config`'s.

        A rotation can be undone and redone exactly, so the keys become those that the same
        projections would have given under the new settings. What the projections read, from the
        second layer on, was computed under the old ones: only for a single layer is this the
        same as computing the text again. Everything but the rotary settings and `max_positions`
        must agree, and each layer must go on to rotate or not to.
        """
        difference = _difference(_without_rotary(self.config), _without_rotary(config))
        if difference:
            raise CacheError(f"only rotary settings may differ: {difference}; clear the cache")
        settings = _settings(config)
        pairs = [
            (old.rotary, new.rotary) for old, new in zip(self._settings, settings, strict=True)
        ]
        if any((old is None) != (new is None) for old, new in pairs):
            raise CacheError("a layer cannot begin or cease to rotate; clear the cache")
        if self._tokens is not None:
            positions = _positions(self._readable, self._tokens)
            for layer, (old, new) in zip(self.layers, pairs, strict=True):
                if old is None or new is None or old == new:
                    continue
                held = positions[:, positions.shape[1] - layer.held :]
                # In the type that the angles had; it is cast when it is put in their place.
                wide = torch.promote_types(layer.k.dtype, torch.float32)
                turned = rotation(old, held, lengths=self._filled_at, dtype=wide)
                turn = rotation(new, held, lengths=self._filled_at, dtype=wide)
                layer.replace(rotate(rotate(layer.k, turned, inverse=True), turn))
        self.config, self._settings = config, settings
        self.changes += 1

    def save(self, path: str | Path) -> None:
        """Write everything that the cache holds as one safetensors file, atomically."""
        tensors = {"tokens": self.tokens.contiguous(), "readable": self.readable.contiguous()}
        for number, layer in enumerate(self.layers):
            tensors[f"layers.{number}.k"] = layer.k.contiguous()
            tensors[f"layers.{number}.v"] = layer.v.contiguous()
        about = SavedCache(
            config=self.config,
            capacity=self.capacity,
            windowed=self.windowed,
            rotary_length=self._fixed,
            filled_at=self._filled_at,
        )
        write_saved(Path(path), about, tensors)

    @classmethod
    def load(cls, path: str | Path, config: DecoderConfig, device: str = "cpu") -> Self:
        """Read what `save` wrote, for a decoder of the same configuration.

        Raises CheckpointError for a damaged file, CacheError for one of another configuration.
        """
        about, tensors = read_saved(Path(path), device)
        difference = _difference(about.config, config)
        if difference:
            raise CacheError(f"{path}: the cache was made for other settings: {difference}")
        tokens, readable = tensors["tokens"], tensors["readable"]
        cache = cls(
            config,
            tokens.shape[0],
            about.capacity,
            windowed=about.windowed,
            rotary_length=about.rotary_length,
        )
        for number, layer in enumerate(cache.layers):
            k, v = tensors[f"layers.{number}.k"], tensors[f"layers.{number}.v"]
            layer.restore(k, v, tokens.shape[1])
        cache._tokens = tokens
        cache._readable = None if bool(readable.all()) else readable
        cache._counts = readable.sum(-1).tolist()
        cache._filled_at = about.filled_at
        return cache

    def _empty_stores(self) -> list[LayerStore]:
        return [
            LayerStore(self.capacity, attention.window if self.windowed else None)
            for attention in self._settings
        ]

    def _check(self, config: DecoderConfig, tokens: Tensor) -> None:
        if tokens.shape[0] != self._batch:
            raise CacheError(f"{tokens.shape[0]} rows of tokens for a batch of {self._batch}")
        if config is not self.config:
            difference = _difference(self.config, config)
            if difference:
                raise CacheError(
                    f"the cache was made for other settings: {difference}; "
                    "make another, or rerotate this one when only rotary settings differ"
                )
            self.config = config
        needed = self.length + tokens.shape[1]
        if self.capacity is not None and needed > self.capacity:
            raise CacheError(
                f"{self.length} cached and {tokens.shape[1]} new tokens need {needed} slots, "
                f"but the capacity is {self.capacity}"
            )

    def _is_stale(self, lengths: list[int]) -> bool:
        """Whether a varying rule has other frequencies at `lengths` than when it was filled."""
        return any(
            rule.regime(before) != rule.regime(now)
            for rule in {
                attention.rotary.scaling for attention in self._settings if attention.rotary
            }
            for before, now in zip(self._filled_at, lengths, strict=True)
        )

    def _joined(self, new: Tensor | None, tokens: Tensor) -> Tensor | None:
        """Which of all slots are real, or None when all are."""
        if new is None and self._readable is None:
            return None
        if new is None:
            new = torch.ones_like(tokens, dtype=torch.bool)
        return new if self._tokens is None else torch.cat([self.readable, new], dim=1)


def _positions(readable: Tensor | None, tokens: Tensor) -> Tensor:
    """(1 or B, length) positions of all slots."""
    if readable is None:
        return torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0)
    return counted_positions(readable)


def _settings(config: DecoderConfig) -> list[AttentionConfig]:
    return [layer.attention for layer in config.layers]


def _without_rotary(config: DecoderConfig) -> DecoderConfig:
    """The settings that a rotation has nothing to do with."""
    layers = tuple(
        layer.model_copy(update={"attention": layer.attention.model_copy(update={"rotary": None})})
        for layer in config.layers
    )
    return config.model_copy(update={"layers": layers, "max_positions": 1})


def _difference(old: DecoderConfig, new: DecoderConfig) -> str | None:
    """The first setting that differs, in words; the layers' before the decoder's own."""
    if old.n_layers != new.n_layers:
        return f"it has {old.n_layers} layers, the decoder {new.n_layers}"
    for number, (before, now) in enumerate(zip(old.layers, new.layers, strict=True)):
        difference = _first_difference(before.attention, now.attention) or _first_difference(
            before, now
        )
        if difference:
            return f"in layer {number} {difference}"
    return _first_difference(old, new)


def _first_difference(old: BaseModel, new: BaseModel) -> str | None:
    for name in type(old).model_fields:
        before, now = getattr(old, name), getattr(new, name)
        if before != now:
            return f"{name} was {before!s}, the decoder's is {now!s}"
    return None
