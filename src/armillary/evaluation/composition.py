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


def place(
    size: int, taken: Sequence[range], lengths: Sequence[int], random: np.random.Generator
) -> list[int]:
    """Where blocks of these lengths start, none over another or over what is taken.

    Raises UserError when there is no room.
    """
    free = np.ones(size, dtype=np.bool_)
    for part in taken:
        free[part.start : part.stop] = False
    starts = []
    for length in lengths:
        used = np.concatenate([[0], np.cumsum(~free)])
        fits = np.flatnonzero(used[length:] == used[:-length])
        if not fits.size:
            raise UserError(
                f"{size} tokens have no room for {len(lengths)} facts of up to {max(lengths)} "
                f"tokens beside {len(taken)} others; ask for a greater length or for fewer"
            )
        start = int(random.choice(fits))
        free[start : start + length] = False
        starts.append(start)
    return starts


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
