"""How often rows are drawn: long documents more often, and short sequences in every step.

Long documents are drawn more often within their own source, and the others of that source less
often, so that each source keeps its share of the tokens: what the text is about stays as it was,
and only its lengths change (Fu et al. 2024, §3, per-source length up-sampling).

What stands at a place of the order is computed from the place alone, as in `order`.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from armillary.data.order import permuted

Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class Mixture:
    """What shares of the tokens are to be of long documents and of short sequences.

    long          tokens from which a document is long; None leaves lengths as they are
    long_share    least share of a source's tokens that is of long documents, where it has some
    long_repeat   at most so many times as often as they would come a source's long documents come
    short         most tokens of a short sequence; None for no such rows
    short_share   share of a step's rows that hold short sequences only, rounded to whole rows, one
                  at least

    Raises ValueError for shares outside 0 … 1 and sizes that are not positive.
    """

    long: int | None = None
    long_share: float = 0.0
    long_repeat: float = 5.0
    short: int | None = None
    short_share: float = 0.0

    def __post_init__(self) -> None:
        for name in ("long_share", "short_share"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)} must be at least 0 and below 1")
        for name in ("long", "short"):
            size = getattr(self, name)
            if size is not None and size < 2:
                raise ValueError(f"{name} {size} must be at least 2")
        if self.long_repeat < 1:
            raise ValueError(f"long_repeat {self.long_repeat} must be at least 1")

    def short_rows(self, batch_size: int) -> int:
        """How many of a step's rows hold short sequences. Raises ValueError where none is left."""
        if self.short is None or not self.short_share:
            return 0
        rows = max(1, round(self.short_share * batch_size))
        if rows >= batch_size:
            raise ValueError(
                f"of {batch_size} rows a step, {rows} short ones leave none for the others; take "
                "more rows, or a short_share of 0"
            )
        return rows


@dataclass(frozen=True)
class Group:
    """Documents of one source that are drawn alike: its long ones, or the others."""

    source: int
    is_long: bool
    documents: Numbers


def groups(lengths: Numbers, sources: Numbers, order: Numbers, long: int) -> list[Group]:
    """Divide the documents by source and by whether they are long, each in the given order.

    Shapes: lengths, sources, order (N,). Groups without documents are left out.
    """
    found = []
    for source in np.unique(sources).tolist():
        of_source = order[sources[order] == source]
        long_ones = lengths[of_source] >= long
        for is_long in (True, False):
            documents = of_source[long_ones == is_long]
            if len(documents):
                found.append(Group(source, is_long, documents))
    return found


def shares(tokens: Numbers, divided: list[Group], mixture: Mixture) -> NDArray[np.float64]:
    """What share of all tokens each group is to have, (K,), summing to 1.

    `tokens` (K,) are those that it has. A source's share is what it was; within it, long documents
    have `long_share` at least, but no more than `long_repeat` times their own.
    """
    natural = tokens / tokens.sum()
    wanted: NDArray[np.float64] = natural.copy()
    for source in {group.source for group in divided}:
        at = {group.is_long: k for k, group in enumerate(divided) if group.source == source}
        if len(at) < 2:
            continue  # all of them are long, or none is
        whole = natural[at[True]] + natural[at[False]]
        had = natural[at[True]] / whole
        share = max(had, min(mixture.long_share, mixture.long_repeat * had))
        wanted[at[True]], wanted[at[False]] = share * whole, (1 - share) * whole
    return wanted


@dataclass(frozen=True)
class Draws:
    """An order of rows without end, in epochs that have so many rows of each pool.

    first, rows   (K,) which rows a pool has: first … first + rows − 1
    quotas        (K,) how many of them an epoch has; a pool that has given all its rows begins
                  again, in another order
    name          tells this order from others of the same seed

    Without `shuffle`, which wants quotas that are all rows, rows come in their own order.
    """

    first: Numbers
    rows: Numbers
    quotas: Numbers
    name: str
    seed: int
    shuffle: bool = True

    @property
    def epoch(self) -> int:
        """Rows of an epoch."""
        return int(self.quotas.sum())

    def row(self, place: int) -> int:
        """The row at a place, counted from 0 and on through the epochs."""
        epoch, within = divmod(place, self.epoch)
        if self.shuffle:
            within = _permuted(within, self.epoch, self.name, self.seed, epoch)
        ends = np.cumsum(self.quotas)
        pool = int(np.searchsorted(ends, within, side="right"))
        quota, rows = int(self.quotas[pool]), int(self.rows[pool])
        drawn = epoch * quota + within - (int(ends[pool]) - quota)
        cycle, number = divmod(drawn, rows)
        if quota != rows:  # else an epoch has each once, and they are permuted already
            number = _permuted(number, rows, self.name, self.seed, "pool", pool, cycle)
        return int(self.first[pool]) + number


def quotas(wanted: NDArray[np.float64], tokens: Numbers, rows: Numbers) -> Numbers:
    """How many rows of each pool an epoch has, (K,), one at least.

    So many that pools have the `wanted` shares of the tokens, and an epoch about as many tokens as
    there are. Shapes: wanted, tokens (of all its rows), rows (K,).
    """
    drawn: Numbers = np.rint(wanted * tokens.sum() * rows / tokens).astype(np.int64)
    return np.maximum(1, drawn)


def _permuted(place: int, count: int, *key: int | str) -> int:
    return int(permuted(np.array([place]), count, *key)[0])
