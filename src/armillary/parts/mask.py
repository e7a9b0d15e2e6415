"""Which keys each query may read: causal order, window, padding, documents and a caller's own.

`Visibility` describes the rule; rows of a boolean mask are made for one block of queries at a
time, so that no T × T matrix is ever held. Order is that of the sequence, not of the rotary
positions, and the last query stands beside the last key: with fewer queries than keys the
triangle is aligned to the lower right.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Block:
    """Queries start … stop − 1 and the keys first … last − 1 that they may read at all.

    `mask` (1 or B, 1, stop − start, last − first), true meaning "may be read"; None when all of
    these keys may be read by all of these queries.
    """

    start: int
    stop: int
    first: int
    last: int
    mask: Tensor | None


@dataclass(frozen=True)
class Visibility:
    """The rule by which T queries read S ≥ T keys, none later than their own.

    Shapes: readable (B, S), false for padding; documents (B, S), equal numbers belong together;
    allowed (1 or B, 1, T, S), the caller's own. All are combined with each other.
    `window` w lets a query read its own key and the w − 1 before it. `runs` are the places of the
    queries among the keys where they are not the last ones. `places` (S,) says where in its text
    each key stands, where several texts go on from the same one side by side; they go by `allowed`.
    """

    n_queries: int
    n_keys: int
    window: int | None = None
    readable: Tensor | None = None
    documents: Tensor | None = None
    allowed: Tensor | None = None
    runs: tuple[range, ...] | None = None
    places: Tensor | None = None

    def __post_init__(self) -> None:
        if self.n_queries > self.n_keys:
            raise ValueError(f"{self.n_queries} queries cannot stand beside {self.n_keys} keys")

    @property
    def is_triangle(self) -> bool:
        """Whether the causal triangle alone, aligned to the lower right, says it all."""
        no_window = self.window is None or self.window >= self.n_keys
        return no_window and self.runs is None and not self.may_be_empty

    @property
    def is_plainly_causal(self) -> bool:
        """Whether the causal triangle alone, on equal counts, says it all."""
        return self.is_triangle and self.n_queries == self.n_keys

    @property
    def may_be_empty(self) -> bool:
        """Whether a query might have nothing to read."""
        return self.readable is not None or self.documents is not None or self.allowed is not None

    def within(self, window: int | None, n_keys: int) -> "Visibility":
        """The same rule for a layer with a window, or one that kept only the last keys."""
        if window == self.window and n_keys == self.n_keys:
            return self
        gone = self.n_keys - n_keys
        return replace(
            self,
            n_keys=n_keys,
            window=window,
            readable=None if self.readable is None else self.readable[:, gone:],
            documents=None if self.documents is None else self.documents[:, gone:],
            allowed=None if self.allowed is None else self.allowed[..., gone:],
            places=None if self.places is None else self.places[gone:],
        )

    def at(self, runs: Sequence[range]) -> "Visibility":
        """The rule for some of the queries: those at these places among the keys, in their order.

        Raises ValueError when there are not as many queries as keys before.
        """
        if self.n_queries != self.n_keys:
            raise ValueError(f"{self.n_queries} queries do not stand at all of {self.n_keys} keys")
        allowed = self.allowed
        if allowed is not None:
            allowed = torch.cat([allowed[:, :, run.start : run.stop] for run in runs], dim=2)
        count = sum(len(run) for run in runs)
        return replace(self, n_queries=count, allowed=allowed, runs=tuple(runs))

    def by_run(self) -> Iterator[tuple[slice, "Visibility"]]:
        """For each of the `runs` its queries, and their rule over the keys up to the run's end."""
        stop = 0
        for run in self.runs or ():
            part = slice(stop, stop := stop + len(run))
            yield (
                part,
                replace(
                    self,
                    n_queries=len(run),
                    n_keys=run.stop,
                    readable=None if self.readable is None else self.readable[:, : run.stop],
                    documents=None if self.documents is None else self.documents[:, : run.stop],
                    allowed=None if self.allowed is None else self.allowed[:, :, part, : run.stop],
                    runs=None,
                ),
            )

    def block(self, start: int, stop: int, device: torch.device | None = None) -> Block:
        """The keys that queries start … stop − 1 may read, the last of all beside the last key."""
        if self.runs is not None:
            raise ValueError("the queries stand in runs; take the blocks of each (by_run)")
        shift = self.n_keys - self.n_queries
        last = shift + stop
        if self.places is None:
            first = 0 if self.window is None else max(0, shift + start - self.window + 1)
            query = torch.arange(start + shift, stop + shift, device=device).unsqueeze(-1)
            key = torch.arange(first, last, device=device)
        else:
            # No query stands before the end of the text that all go on from.
            first = 0 if self.window is None else max(0, shift - self.window + 1)
            query, key = self.places[shift + start : last].unsqueeze(-1), self.places[first:last]
        parts: list[Tensor] = []
        if last > shift + start + 1:
            parts.append(key <= query)
        if self.window is not None and first < shift + stop - self.window:
            parts.append(key > query - self.window)
        if self.documents is not None:
            own = self.documents[:, shift + start : shift + stop, None]
            parts.append((own == self.documents[:, None, first:last]).unsqueeze(1))
        if self.readable is not None:
            parts.append(self.readable[:, None, None, first:last])
        if self.allowed is not None:
            parts.append(self.allowed[:, :, start:stop, first:last])
        mask: Tensor | None = None
        for part in parts:
            mask = part if mask is None else mask & part
        if mask is not None:
            rows = mask.shape[0] if mask.dim() == 4 else 1
            mask = mask.expand(rows, 1, stop - start, last - first)
        return Block(start, stop, first, last, mask)


def as_bool(mask: Tensor, what: str = "mask") -> Tensor:
    """A boolean or 0/1 mask as booleans, true meaning "may be read".

    Raises ValueError for other values (an additive mask of 0 and −∞ among them).
    """
    if mask.dtype == torch.bool:
        return mask
    if not bool(((mask == 0) | (mask == 1)).all()):
        raise ValueError(f"{what} must be boolean or hold only 0 and 1, where 1 means may be read")
    return mask.bool()


def split_mask(
    mask: Tensor | None, batch: int, n_queries: int, n_keys: int
) -> tuple[Tensor | None, Tensor | None]:
    """A caller's mask as (readable new tokens, allowed pairs); one of them is None.

    Shapes: mask (B, T) over the new tokens, or (B, T, S) or (B, 1, T, S) over pairs, where
    S = n_keys counts cached keys too. → readable (B, T), allowed (B, 1, T, S).
    Raises ValueError for another shape.
    """
    if mask is None:
        return None, None
    mask = as_bool(mask)
    if tuple(mask.shape) == (batch, n_queries):
        return mask, None
    if mask.dim() == 3:
        mask = mask.unsqueeze(1)
    if tuple(mask.shape) != (batch, 1, n_queries, n_keys):
        raise ValueError(
            f"mask of shape {tuple(mask.shape)} fits neither (B, T) = ({batch}, {n_queries}) nor "
            f"(B, T, S) = ({batch}, {n_queries}, {n_keys})"
        )
    return None, mask


def tree(parents: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Which of T tokens that make a tree are on the way to which, (T, T), and how many, (T,).

    `parents` (T,) are the numbers of the tokens that each follows, −1 where a way begins. A token
    is on its own way, but not counted: the first of a way has 0 before it.
    Raises ValueError for a parent that does not stand before its child.
    """
    ways = torch.eye(len(parents), dtype=torch.bool, device="cpu")
    for child, parent in enumerate(parents):
        if not -1 <= parent < child:
            raise ValueError(
                f"token {child} cannot follow token {parent}; only one before it, or -1"
            )
        if parent >= 0:
            ways[child] |= ways[parent]
    return ways, ways.sum(-1) - 1


def counted_positions(readable: Tensor, documents: Tensor | None = None) -> Tensor:
    """Each token's position: the count of readable tokens before it, in its own document.

    Shapes: readable, documents (B, T) → (B, T) int64. Padding, wherever it stands, is not
    counted, and stands at 0 itself. Documents may be interleaved.
    """
    readable = readable.bool()
    if documents is None:
        before = readable.cumsum(-1) - readable.long()
    else:
        order = documents.argsort(dim=-1, stable=True)
        sorted_before = _counted_in_runs(readable.gather(-1, order), documents.gather(-1, order))
        before = torch.empty_like(sorted_before).scatter_(-1, order, sorted_before)
    return torch.where(readable, before, 0)


def _counted_in_runs(readable: Tensor, documents: Tensor) -> Tensor:
    """The count of readable tokens before each, begun anew where the document changes."""
    before = readable.cumsum(-1) - readable.long()
    begins = torch.ones_like(readable)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return before - torch.where(begins, before, 0).cummax(-1).values
