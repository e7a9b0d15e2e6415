"""Contexts put together from ids: facts at their places in a text of exact length.

Facts lie over the text that fills the context, they do not push it aside: without one of them,
every other token stays where it was. That is the control.
"""

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from armillary.errors import UserError

Ids = tuple[int, ...]


def generator(*of: object) -> np.random.Generator:
    """Random numbers that depend on these values (their repr) and on nothing else."""
    digest = hashlib.sha256(repr(of).encode()).digest()
    return np.random.default_rng(np.frombuffer(digest, np.uint32))


def gaps(size: int, taken: Sequence[range]) -> list[range]:
    """What of a text is not taken, in order; no two that are taken may overlap."""
    ordered = sorted(taken, key=lambda part: part.start)
    starts = [0, *(part.stop for part in ordered)]
    stops = [*(part.start for part in ordered), size]
    return [range(start, stop) for start, stop in zip(starts, stops, strict=True)]


def place(free: Sequence[range], count: int, width: int, random: np.random.Generator) -> list[int]:
    """Where blocks of a width start, none over another, in any order, all within the gaps.

    Every gap that holds one may get one, and longer ones get more.
    Raises UserError when the gaps do not hold so many.
    """
    slots = [number for number, gap in enumerate(free) for _ in range(len(gap) // width)]
    if len(slots) < count:
        raise UserError(
            f"the gaps have room for {len(slots)} of {count} facts of {width} tokens; ask for a "
            "greater length or for fewer"
        )
    starts: list[int] = []
    chosen = [slots[index] for index in random.choice(len(slots), count, replace=False)]
    for number, gap in enumerate(free):
        blocks = chosen.count(number)
        spare = np.sort(random.integers(0, len(gap) - blocks * width + 1, blocks))
        starts += [gap.start + int(shift) + at * width for at, shift in enumerate(spare)]
    return [starts[index] for index in random.permutation(count)]


def overlay(text: NDArray[np.int64], facts: Sequence[tuple[int, Ids]]) -> Ids:
    """The text with facts, each a start and tokens, written over it."""
    written = text.copy()
    for start, fact in facts:
        written[start : start + len(fact)] = fact
    return tuple(written.tolist())


def draw(words: Sequence[int], count: int, random: np.random.Generator) -> Ids:
    """Different words, in any order; `check_words` beforehand."""
    return tuple(int(word) for word in random.choice(np.asarray(words), count, replace=False))


def check_words(task: str, words: Sequence[int], count: int) -> None:
    """Raise UserError unless there are so many words, and one more to fill the context with."""
    if count >= len(words):
        raise UserError(
            f"{task}: {count} different words are asked about and others fill the context, but the "
            f"vocabulary has {len(words)} in all; ask for less in one context"
        )
