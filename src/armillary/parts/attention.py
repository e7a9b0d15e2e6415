"""Causal attention with grouped queries.

`attend` is the arithmetic on heads that are already projected and rotated; `Attention` adds the
projections. Neither knows of layers, files or how keys are kept: a layer's cache is handed in.
"""

from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right
from torch.utils.checkpoint import checkpoint

from armillary.config import AttentionConfig
from armillary.parts.mask import Visibility
from armillary.parts.norm import build_norm
from armillary.parts.rotary import Rotation, rotate

# Queries that are scored at once when a mask must be written out: rows of a mask or of scores
# are held for this many, never for all.
QUERY_BLOCK = 512


class KeyValueStore(Protocol):
    """What attention asks of a cache."""

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Take (B, h_kv, T, d_h) new keys and values; give all that are to be read."""


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visibility: Visibility,
    *,
    scale: float,
    soft_cap: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """softmax(scale · q·kᵀ)·v over the keys that may be read.

    Shapes: q (B, h, T, d_h), k, v (B, h_kv, S, d_h) → (B, h, T, d_h). Query head i reads
    key/value head i // (h / h_kv). A query that may read nothing gets zeros and passes no
    gradient. No T × S matrix is held, except by torch where dropout is on.
    """
    if visibility.runs is not None:
        run_by_run = [
            attend(
                q[:, :, part],
                k[:, :, : rule.n_keys],
                v[:, :, : rule.n_keys],
                rule,
                scale=scale,
                soft_cap=soft_cap,
                dropout=dropout,
            )
            for part, rule in visibility.by_run()
        ]
        return torch.cat(run_by_run, dim=2)
    if soft_cap is None and visibility.is_plainly_causal and q.shape[2] > 1:
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scale, dropout_p=dropout, enable_gqa=True
        )
    if soft_cap is None and visibility.is_triangle and _flash_takes(q, k, v, dropout):
        # is_causal would align the triangle to the upper left; this one needs no mask in memory.
        corner = causal_lower_right(q.shape[2], k.shape[2])
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=corner, scale=scale, dropout_p=dropout, enable_gqa=True
        )
    starts = range(0, visibility.n_queries, QUERY_BLOCK)
    if len(starts) == 1:
        return _attend_block(q, k, v, visibility, 0, scale, soft_cap, dropout)
    run: Callable[..., Tensor] = _attend_block
    if torch.is_grad_enabled():
        # A block is computed again for its gradients: the scores or masks that all blocks would
        # keep until then are the T × S matrix.
        run = partial(checkpoint, run, use_reentrant=False, preserve_rng_state=dropout > 0)
    results = [run(q, k, v, visibility, start, scale, soft_cap, dropout) for start in starts]
    return torch.cat(results, dim=2)


def _flash_takes(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> bool:
    """Whether there is a kernel for a block of queries after others that holds no scores."""
    if not q.is_cuda or q.shape[2] == 1:
        return False
    return can_use_flash_attention(SDPAParams(q, k, v, None, dropout, True, True))


def _attend_block(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visibility: Visibility,
    start: int,
    scale: float,
    soft_cap: float | None,
    dropout: float,
) -> Tensor:
    block = visibility.block(start, min(start + QUERY_BLOCK, visibility.n_queries), q.device)
    batch, heads, _, width = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    q = q[:, :, block.start : block.stop]
    k, v = k[:, :, block.first : block.last], v[:, :, block.first : block.last]
    mask, reads = block.mask, None
    if mask is not None and visibility.may_be_empty:
        # A row with nothing to read attends to everything and is then set to zero: kernels
        # differ in what they make of an empty row, and NaN would spread through gradients.
        reads = mask.any(-1, keepdim=True)
        mask = mask | ~reads
    rows = block.stop - block.start
    # The queries of a group stand side by side as rows, so that no key is repeated for them.
    q = q.reshape(batch, kv_heads, group * rows, width)
    if mask is not None and group > 1 and rows > 1:
        mask = mask.repeat(1, 1, group, 1)
    if soft_cap is None:
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=scale, dropout_p=dropout
        )
    else:
        scores = soft_cap * torch.tanh(q @ k.transpose(-1, -2) * scale / soft_cap)
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        weights = scores.to(torch.promote_types(q.dtype, torch.float32)).softmax(-1)
        out = F.dropout(weights.to(q.dtype), dropout, training=dropout > 0) @ v
    out = out.reshape(batch, heads, rows, width)
    return out if reads is None else torch.where(reads, out, 0)


class Attention(nn.Module):
    """Project, normalise and rotate queries and keys, attend, join the heads, project back.

    Shapes: x (B, T, d) → (B, T, d). Parameters: q (h·d_h, d), k, v (h_kv·d_h, d),
    out (d, h·d_h), biases as configured, q_norm and k_norm (d_h,) when configured.
    Source: Vaswani et al. 2017, §3.2; grouped queries: Ainslie et al. 2023.
    """

    def __init__(self, d: int, config: AttentionConfig) -> None:
        super().__init__()
        self.config = config
        width, kv_width = config.n_heads * config.d_head, config.n_kv_heads * config.d_head
        self.q = nn.Linear(d, width, bias=config.qkv_bias)
        self.k = nn.Linear(d, kv_width, bias=config.qkv_bias)
        self.v = nn.Linear(d, kv_width, bias=config.qkv_bias)
        self.out = nn.Linear(width, d, bias=config.out_bias)
        norm = config.qk_norm
        self.q_norm = None if norm is None else build_norm(norm, config.d_head)
        self.k_norm = None if norm is None else build_norm(norm, config.d_head)

    def forward(
        self,
        x: Tensor,
        visibility: Visibility,
        turn: Rotation | None = None,
        store: KeyValueStore | None = None,
    ) -> Tensor:
        """x (B, T, d) → (B, T, d); `store` holds the keys and values of earlier tokens."""
        config = self.config
        q, k, v = self._heads(self.q(x)), self._heads(self.k(x)), self._heads(self.v(x))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if turn is not None:
            q, k = rotate(q, turn), rotate(k, turn)
        if store is not None:
            k, v = store.append(k, v)
        heads = attend(
            q,
            k,
            v,
            visibility.within(config.window, k.shape[2]),
            scale=config.score_scale,
            soft_cap=config.soft_cap,
            dropout=config.dropout if self.training else 0.0,
        )
        joined: Tensor = self.out(heads.transpose(1, 2).flatten(2))
        return joined

    def _heads(self, x: Tensor) -> Tensor:
        """(B, T, n·d_h) → (B, n, T, d_h), of all heads or of those that are computed here."""
        return x.view(*x.shape[:-1], -1, self.config.d_head).transpose(1, 2)
