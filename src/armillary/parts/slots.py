"""A cache as a step of fixed shapes sees it: the next slot of each text, and all slots to read.

All that changes from step to step stands in tensors that stay where they are, and every slot is
read and masked, filled or not. So the step of one more token can be recorded once (as a CUDA graph)
or compiled once, and runs again without Python deciding anything.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from armillary.parts.kv_cache import KVCache
from armillary.parts.layer_store import CacheError
from armillary.parts.mask import Block, Visibility
from armillary.parts.rotary import frequencies


class SlotStore:
    """One layer's memory, (B, h_kv, S, d_h) keys and values, of which the next slot is filled."""

    def __init__(self, k: Tensor, v: Tensor, slot: Tensor) -> None:
        self._k, self._v, self._slot = k, v, slot

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Put (B, h_kv, 1, d_h) into the slot; give all slots."""
        self._k.index_copy_(2, self._slot, k)
        self._v.index_copy_(2, self._slot, v)
        return self._k, self._v


@dataclass(frozen=True)
class SlotVisibility(Visibility):
    """The rule by which one new token of each text reads the slots: by masks that are there.

    Shapes: masks (B, 1, 1, S), one for each window that a layer has.
    """

    masks: Mapping[int | None, Tensor] = field(default_factory=dict)

    @property
    def is_triangle(self) -> bool:
        """Never, since slots that are not filled stand among the keys."""
        return False

    @property
    def may_be_empty(self) -> bool:
        """Never: a token reads itself."""
        return False

    def within(self, window: int | None, n_keys: int) -> "SlotVisibility":
        """The same rule for a layer with a window."""
        del n_keys
        return replace(self, window=window)

    def block(self, start: int, stop: int, device: torch.device | None = None) -> Block:
        """All slots."""
        del device
        return Block(start, stop, 0, self.n_keys, self.masks[self.window])


class Slots:
    """The memory of a cache that has room for one more token of each text, and its next slot.

    `stores` has a store per layer, `frequencies` θ of each rotation (1 or B, d_rotary / 2).
    Raises CacheError for a cache whose layers forget what their window no longer reaches.
    """

    def __init__(self, cache: KVCache) -> None:
        if any(layer.is_windowed for layer in cache.layers):
            raise CacheError("a windowed cache moves its entries; make one without windowed")
        self._memory = [layer.memory for layer in cache.layers]
        k = self._memory[0][0]
        self._size = k.shape[2]
        self._windows = {layer.attention.window for layer in cache.config.layers}
        self._slot = torch.zeros(1, dtype=torch.long, device=k.device)
        self._padding = torch.zeros(cache.batch, 1, dtype=torch.long, device=k.device)
        self._readable = torch.ones(cache.batch, self._size, dtype=torch.bool, device=k.device)
        wide = torch.promote_types(k.dtype, torch.float32)
        self.frequencies = [
            torch.zeros(cache.batch, rotary.d_rotary // 2, dtype=wide, device=k.device)
            for rotary in cache.config.rotaries
        ]
        self.stores = [SlotStore(*memory, self._slot) for memory in self._memory]
        self._followed: int | None = None
        for memory in self._memory:
            for part in memory:
                # A value that is masked is still multiplied by zero, and NaN would stay NaN.
                part[:, :, cache.length :].zero_()

    def are_of(self, cache: KVCache) -> bool:
        """Whether the cache still keeps everything in this memory."""
        return len(self._memory) == len(cache.layers) and all(
            k is layer.memory[0] and v is layer.memory[1]
            for (k, v), layer in zip(self._memory, cache.layers, strict=True)
        )

    def follow(self, cache: KVCache) -> None:
        """Make ready for the token that comes after those that the cache holds now."""
        held = cache.length
        self._slot.fill_(held)
        if self._followed != cache.changes:
            # Since the last step more has happened than that its token was counted in.
            padding = [held - count for count in cache.counts]
            self._padding.copy_(torch.tensor(padding).unsqueeze(1))
            self._readable.fill_(True)
            self._readable[:, :held] = cache.readable
            for theta, rotary in zip(self.frequencies, cache.config.rotaries, strict=True):
                theta.copy_(frequencies(rotary, cache.next_lengths, dtype=theta.dtype))
            self._followed = cache.changes

    @property
    def positions(self) -> Tensor:
        """Of the new tokens, (B, 1): padding is not counted."""
        return self._slot - self._padding

    def visibility(self) -> SlotVisibility:
        """Which slots the new tokens may read, their own among them."""
        slots = torch.arange(self._size, device=self._slot.device)
        filled = (self._readable & (slots <= self._slot))[:, None, None]
        masks = {
            window: filled if window is None else filled & (slots > self._slot - window)
            for window in self._windows
        }
        return SlotVisibility(n_queries=1, n_keys=self._size, masks=masks)
