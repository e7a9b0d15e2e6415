"""Which tokens are learned, as the runs that they stand in: a chat has two numbers an answer.

Runs are stored flat, as where each starts and stops, in order: (2·r,) of int64. Stored so, the
learned tokens of any stretch are counted without looking at them.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int64]


def runs_of(mask: Sequence[bool]) -> Numbers:
    """Return the runs of what is true in a mask (n,)."""
    framed = np.concatenate([[0], np.asarray(mask, dtype=np.int8), [0]])
    return np.flatnonzero(np.diff(framed)).astype(np.int64)


class LearnedRuns:
    """The runs of one shard, `borders` (2·r,), mapped into memory or not.

    Raises ValueError where they are no runs within `tokens` tokens.
    """

    def __init__(self, borders: Numbers, tokens: int) -> None:
        ordered = len(borders) % 2 == 0 and bool((np.diff(borders) >= 0).all())
        if not ordered or (len(borders) and not 0 <= borders[0] <= borders[-1] <= tokens):
            raise ValueError(f"{len(borders)} borders are no runs of {tokens} tokens")
        self._borders = borders

    def within(self, start: int, stop: int) -> NDArray[np.bool_]:
        """Return which of the tokens start … stop − 1 are learned, (stop − start,)."""
        first = int(np.searchsorted(self._borders, start, side="right"))
        last = int(np.searchsorted(self._borders, stop, side="left"))
        turns = np.bincount(self._borders[first:last] - start, minlength=stop - start)
        learned: NDArray[np.bool_] = (first + np.cumsum(turns)) % 2 == 1
        return learned

    def count(self, starts: Numbers, stops: Numbers) -> Numbers:
        """Return how many tokens of each stretch starts[i] … stops[i] − 1 are learned, (n,)."""
        borders = np.asarray(self._borders)
        before = np.concatenate([[0], np.cumsum(borders[1::2] - borders[::2])])

        def up_to(places: Numbers) -> Numbers:
            passed = np.searchsorted(borders, places, side="right")
            inside = passed % 2 == 1
            counted: Numbers = before[passed // 2]
            counted[inside] += places[inside] - borders[passed[inside] - 1]
            return counted

        return up_to(stops) - up_to(starts)
