"""One layer's keys and values, as a cache keeps them: keys as rotated, values as projected.

Knows memory: how it is taken, grown, forgotten and brought back. What the entries mean (tokens,
positions, settings) is the affair of `KVCache`.
"""

import torch
from torch import Tensor

# Beyond its window, a windowed store keeps room for this many tokens, so that it moves its
# entries once in so many steps and can still be trimmed a little.
WINDOW_SLACK = 256
_GROWTH = 256


class CacheError(ValueError):
    """The cache cannot be used in this way; nothing in it was changed."""


def _rounded_up(count: int) -> int:
    return -(-count // _GROWTH) * _GROWTH


# Entries held, entries ever taken in, and the memory if a step may put other in its place.
Mark = tuple[int, int, tuple[Tensor | None, Tensor | None] | None]


class LayerStore:
    """The keys and values of one layer: (B, h_kv, held, d_h) each, oldest first.

    Three kinds: of fixed capacity, growing (`capacity` None), or windowed (`window` given), which
    forgets what the layer's window can no longer reach.
    """

    def __init__(self, capacity: int | None, window: int | None) -> None:
        self._capacity = capacity
        self._window = window
        self._k: Tensor | None = None
        self._v: Tensor | None = None
        self.total = 0
        self.held = 0

    @property
    def k(self) -> Tensor:
        """The keys held, rotated."""
        if self._k is None:
            raise CacheError("the cache is empty")
        return self._k[:, :, : self.held]

    @property
    def v(self) -> Tensor:
        """The values held."""
        if self._v is None:
            raise CacheError("the cache is empty")
        return self._v[:, :, : self.held]

    @property
    def memory(self) -> tuple[Tensor, Tensor]:
        """All slots, those that hold nothing yet included: (B, h_kv, room, d_h) keys and values."""
        if self._k is None or self._v is None:
            raise CacheError("the cache is empty")
        return self._k, self._v

    @property
    def is_windowed(self) -> bool:
        """Whether it forgets what its window can no longer reach."""
        return self._window is not None

    @property
    def nbytes(self) -> int:
        """Bytes allocated for keys and values."""
        return sum(part.nbytes for part in (self._k, self._v) if part is not None)

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Take (B, h_kv, T, d_h) new keys and values; give all that are to be read with them.

        Raises CacheError for more than the capacity, and for keys of another number type or
        device than those held.
        """
        count = k.shape[2]
        if self._capacity is not None and self.total + count > self._capacity:
            raise CacheError(
                f"{self.total} entries and {count} new ones are more than the capacity of "
                f"{self._capacity}"
            )
        if self._k is None or self._v is None:
            room = self._room(count)
            self._k = k.new_empty(*k.shape[:2], room, k.shape[3])
            self._v = v.new_empty(*v.shape[:2], room, v.shape[3])
        if k.dtype != self._k.dtype or k.device != self._k.device:
            raise CacheError(
                f"the cache holds {self._k.dtype} on {self._k.device}, the new keys are "
                f"{k.dtype} on {k.device}"
            )
        if self.held + count > self._k.shape[2]:
            if self._window is None:
                self._grow(self.held + count)
            else:
                self._keep_last(self.k, self.v, self._window - 1)
                if self.held + count > self._k.shape[2]:
                    return self._pass_through(k, v, self._window)
        end = self.held + count
        self._k[:, :, self.held : end] = k
        self._v[:, :, self.held : end] = v
        self.held = end
        self.total += count
        return self.k, self.v

    def reserve(self, count: int) -> None:
        """Have slots for `count` more entries, which a store that is not windowed can grow to."""
        if self._k is not None and self.held + count > self._k.shape[2]:
            self._grow(self.held + count)

    def fill(self, count: int) -> None:
        """Count in `count` entries that were put into the next slots."""
        self.held += count
        self.total += count

    def restore(self, k: Tensor, v: Tensor, total: int) -> None:
        """Hold what another store held after `total` tokens."""
        self.append(k, v)
        self.total = total

    def replace(self, k: Tensor) -> None:
        """Put other keys in the place of those held, in their number type."""
        self.k.copy_(k)

    def can_trim(self, count: int) -> bool:
        """Whether what a window still needs is held once the last `count` entries are gone."""
        if count > self.total:
            return False
        needed = self.total - count
        if self._window is not None:
            needed = min(needed, self._window - 1)
        return self.held - count >= needed

    def trim(self, count: int) -> None:
        """Drop the last `count` entries; ask `can_trim` first."""
        self.held -= count
        self.total -= count

    def mark(self) -> Mark:
        """What is held now, for `return_to`."""
        # Other memory is only added to, or has grown, and is as good.
        is_replaced = self._k is None or self._window is not None
        return self.held, self.total, (self._k, self._v) if is_replaced else None

    def return_to(self, mark: Mark) -> None:
        """Forget what was appended since the mark was made."""
        self.held, self.total, buffers = mark
        if buffers is not None:
            self._k, self._v = buffers

    def select(self, rows: Tensor) -> None:
        """Keep the given batch rows, in the given order."""
        if self._k is not None and self._v is not None:
            self._k, self._v = self._k[rows], self._v[rows]

    def clone(self) -> "LayerStore":
        """An independent copy."""
        other = LayerStore(self._capacity, self._window)
        other.total, other.held = self.total, self.held
        other._k = None if self._k is None else self._k.clone()
        other._v = None if self._v is None else self._v.clone()
        return other

    def _room(self, count: int) -> int:
        if self._window is None:
            return _rounded_up(count) if self._capacity is None else self._capacity
        room = self._window + WINDOW_SLACK
        return room if self._capacity is None else min(room, self._capacity)

    def _grow(self, needed: int) -> None:
        assert self._k is not None
        assert self._v is not None
        room = max(_rounded_up(needed), 2 * self._k.shape[2])
        self._k, self._v = (
            torch.cat([old, old.new_empty(*old.shape[:2], room - old.shape[2], old.shape[3])], 2)
            for old in (self._k, self._v)
        )

    def _keep_last(self, k: Tensor, v: Tensor, count: int) -> None:
        """Hold the last `count` of these entries, in new memory: `return_to` may need the old."""
        assert self._k is not None
        assert self._v is not None
        self._k, self._v = torch.empty_like(self._k), torch.empty_like(self._v)
        self.held = min(count, k.shape[2])
        self.k.copy_(k[:, :, k.shape[2] - self.held :])
        self.v.copy_(v[:, :, v.shape[2] - self.held :])

    def _pass_through(self, k: Tensor, v: Tensor, window: int) -> tuple[Tensor, Tensor]:
        """More new entries than there is room for: all are read once, the last ones kept."""
        all_k, all_v = torch.cat([self.k, k], 2), torch.cat([self.v, v], 2)
        self.total += k.shape[2]
        self._keep_last(all_k, all_v, window - 1)
        return all_k, all_v
