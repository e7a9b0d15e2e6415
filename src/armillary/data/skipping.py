"""Positions that skip: a short row in which the distances of a long window occur.

A piece of n tokens is cut into chunks, and each chunk is moved on by a bias of its own, so that
over many pieces every distance up to the target window comes up, at the price of n tokens (PoSE;
Zhu et al. 2023, §3.2). The tokens themselves go on without a gap: the paper's v_i = 0, which its
appendix A finds as good as the others.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from armillary.data.order import drawn, permuted


@dataclass(frozen=True)
class Skip:
    """How positions skip: over `to` positions, in `chunks` chunks.

    Raises ValueError for fewer than 2 chunks, which could not skip anything.
    """

    to: int
    chunks: int = 2

    def __post_init__(self) -> None:
        if self.chunks < 2 or self.to < 2:
            raise ValueError(f"{self.chunks} chunks over {self.to} positions: at least 2 of each")


def skipped_positions(size: int, skip: Skip, *key: int | str) -> NDArray[np.int64]:
    """Positions (size,), rising, within 0 … skip.to − 1; a function of the key.

    The first chunk stays (u_0 = 0); the others are moved by biases u_i drawn from
    {u_(i−1), …, to − size}, one after the other. Chunks begin at places drawn without repetition.
    A piece that is no shorter than the target keeps its positions.
    """
    positions = np.arange(size)
    room = skip.to - size
    if room <= 0 or size < 2:
        return positions
    chunks = min(skip.chunks, size)
    starts = np.sort(permuted(np.arange(chunks - 1), size - 1, "chunks", *key)) + 1
    bias = 0
    for number, start in enumerate(starts.tolist()):
        moved = drawn(room - bias + 1, "bias", number, *key)
        bias += moved
        positions[start:] += moved
    return positions
