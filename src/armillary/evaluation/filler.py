"""Text that questions are hidden in."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from armillary.errors import UserError
from armillary.evaluation.vocabulary import TaskTokens

# Prose is taken or left out in pieces of this many tokens.
PIECE = 32


def filler(
    tokens: TaskTokens, length: int, without: Iterable[int], random: np.random.Generator
) -> NDArray[np.int64]:
    """Exactly `length` ids, among which none of `without` stands.

    Of prose: from a piece that is drawn onwards, over the end to the beginning, leaving out every
    piece in which such an id stands. Without prose: words, each drawn alone.
    Raises UserError when nothing is left to take.
    """
    forbidden = np.fromiter(without, np.int64)
    if not tokens.prose:
        words = np.setdiff1d(tokens.words, forbidden)
        if not words.size:
            raise UserError(f"all {len(tokens.words)} words are asked about; none is left to fill")
        return random.choice(words, length)
    pieces = np.asarray(tokens.prose, np.int64)[: len(tokens.prose) // PIECE * PIECE]
    pieces = pieces.reshape(-1, PIECE)
    pieces = pieces[~np.isin(pieces, forbidden).any(axis=1)]
    if not len(pieces):
        raise UserError(
            f"the prose of {len(tokens.prose)} tokens has no {PIECE} in a row that are free of the "
            "words asked about; give more text"
        )
    start = int(random.integers(len(pieces)))
    return np.resize(np.roll(pieces, -start, axis=0), length)
