"""The two ways in which rotary channels are paired, and the permutation between them.

Interleaved pairs channels (0, 1), (2, 3), …; half-split pairs (i, i + d_rotary/2). Weights stored
for one run in the other exactly when the rows of the query and key projections, their biases and
a per-channel q/k norm are taken in another order. These functions give that order; whoever holds
the rows (torch, NumPy, quantised blocks) indexes with it.
"""

import numpy as np
from numpy.typing import NDArray

RowOrder = NDArray[np.int64]


def half_split_from_interleaved(n_heads: int, d_head: int, d_rotary: int) -> RowOrder:
    """Rows to take, in order, from interleaved weights to make half-split ones.

    `n_heads` is the number of heads in the matrix at hand: h for queries, h_kv for keys, 1 for a
    norm that all heads share. Channels from `d_rotary` on stay where they are.
    Shape: (n_heads · d_head,). Raises ValueError for an odd or too large `d_rotary`.
    """
    if d_rotary % 2 or not 0 < d_rotary <= d_head:
        raise ValueError(f"d_rotary {d_rotary} must be even and at most d_head {d_head}")
    rotary = np.arange(d_rotary).reshape(-1, 2).T.reshape(-1)
    head = np.concatenate([rotary, np.arange(d_rotary, d_head)])
    return np.asarray((np.arange(n_heads)[:, None] * d_head + head).reshape(-1), dtype=np.int64)


def interleaved_from_half_split(n_heads: int, d_head: int, d_rotary: int) -> RowOrder:
    """The inverse order: rows to take from half-split weights to make interleaved ones."""
    return np.argsort(half_split_from_interleaved(n_heads, d_head, d_rotary))
