"""Latent attention: keys and values of all heads out of one small vector a token.

A cache keeps that vector and one rotated key for all heads. Whole texts expand it to keys and
values; few new tokens beside many cached ones bring their queries to it instead, which saves
expanding the cached ones, and gives the same.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from armillary.config import AttentionConfig
from armillary.parts.attention import KeyValueStore, attend
from armillary.parts.mask import Visibility
from armillary.parts.norm import build_norm
from armillary.parts.rotary import Rotation, rotate


class LatentAttention(nn.Module):
    """Attention whose keys and values are projections of a normalised vector (`LatentConfig`).

    Shapes: x (B, T, d) → (B, T, d). Parameters, r = kv_rank, d_n = d_head − d_rope: kv_down
    (r + d_rope, d), kv_norm (r,), kv_up (h·(d_n + d_value), r), each head's key before its value;
    q (h·d_head, d), or q_down (q_rank, d), q_norm (q_rank,) and q_up (h·d_head, q_rank); out
    (d, h·d_value). Source: DeepSeek-AI 2024 (V2), §2.1.
    """

    def __init__(self, d: int, config: AttentionConfig) -> None:
        super().__init__()
        latent = config.latent
        assert latent is not None
        self.config, self.latent = config, latent
        h, bias = config.n_heads, config.qkv_bias
        self.d_key = config.d_head - latent.d_rope
        if latent.q_rank is None:
            self.q = nn.Linear(d, h * config.d_head, bias=False)
        else:
            self.q_down = nn.Linear(d, latent.q_rank, bias=bias)
            self.q_norm = build_norm(latent.norm, latent.q_rank)
            self.q_up = nn.Linear(latent.q_rank, h * config.d_head, bias=False)
        self.kv_down = nn.Linear(d, latent.kv_rank + latent.d_rope, bias=bias)
        self.kv_norm = build_norm(latent.norm, latent.kv_rank)
        self.kv_up = nn.Linear(latent.kv_rank, h * (self.d_key + latent.d_value), bias=False)
        self.out = nn.Linear(h * latent.d_value, d, bias=config.out_bias)
        self.sinks = nn.Parameter(torch.zeros(h)) if config.sinks else None

    def forward(
        self,
        x: Tensor,
        visibility: Visibility,
        turn: Rotation | None = None,
        store: KeyValueStore | None = None,
    ) -> Tensor:
        """x (B, T, d) → (B, T, d); `store` holds the keys and vectors of earlier tokens."""
        assert turn is not None
        q = self.q(x) if self.latent.q_rank is None else self.q_up(self.q_norm(self.q_down(x)))
        q = q.view(*q.shape[:2], self.config.n_heads, -1).transpose(1, 2)
        q_key, q_rope = torch.split(q, [self.d_key, self.latent.d_rope], dim=-1)
        q_rope = rotate(q_rope, turn)
        down: Tensor = self.kv_down(x)
        c, k_rope = torch.split(down, [self.latent.kv_rank, self.latent.d_rope], dim=-1)
        # Both as of one head.
        c, k_rope = self.kv_norm(c).unsqueeze(1), rotate(k_rope.unsqueeze(1), turn)
        if store is not None:
            k_rope, c = store.append(k_rope, c)
        attended = self._in_latent if self._saves(x.shape[1], store) else self._expanded
        heads: Tensor = attended(q_key, q_rope, k_rope, c, visibility)
        joined: Tensor = self.out(heads.transpose(1, 2).flatten(2))
        return joined

    def _saves(self, count: int, store: KeyValueStore | None) -> bool:
        """Whether bringing so many queries to the vectors costs less than expanding these.

        An adapter beside `kv_up` is only in what it expands.
        """
        latent = self.latent
        wider = 2 * latent.kv_rank - self.d_key - latent.d_value
        expanding = latent.kv_rank * (self.d_key + latent.d_value)
        return store is not None and type(self.kv_up) is nn.Linear and count * wider < expanding

    def _expanded(
        self, q_key: Tensor, q_rope: Tensor, k_rope: Tensor, c: Tensor, visibility: Visibility
    ) -> Tensor:
        """Keys and values of every head → (B, h, T, d_value)."""
        h = self.config.n_heads
        both = self.kv_up(c.squeeze(1)).view(c.shape[0], c.shape[2], h, -1).transpose(1, 2)
        k, v = torch.split(both, [self.d_key, self.latent.d_value], dim=-1)
        k = torch.cat([k, k_rope.expand(-1, h, -1, -1)], dim=-1)
        return self._attend(torch.cat([q_key, q_rope], dim=-1), k, v, visibility)

    def _in_latent(
        self, q_key: Tensor, q_rope: Tensor, k_rope: Tensor, c: Tensor, visibility: Visibility
    ) -> Tensor:
        """q·(W_k c) = (W_kᵀ q)·c, and the sum of W_v c is W_v of the sum → (B, h, T, d_value)."""
        weight = self.kv_up.weight.view(self.config.n_heads, -1, self.latent.kv_rank)
        w_k, w_v = torch.split(weight, [self.d_key, self.latent.d_value], dim=1)
        q, k = torch.cat([q_key @ w_k, q_rope], dim=-1), torch.cat([c, k_rope], dim=-1)
        return self._attend(q, k, c, visibility) @ w_v.transpose(1, 2)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, visibility: Visibility) -> Tensor:
        config, d_value = self.config, v.shape[-1]
        # Of unequal widths kernels on the CPU would hold all scores; zeros change none of them.
        wide = max(q.shape[-1], d_value)
        q, k, v = (part if part.shape[-1] == wide else _padded(part, wide) for part in (q, k, v))
        heads = attend(
            q,
            k,
            v,
            visibility.within(config.window, k.shape[2]),
            scale=config.score_scale,
            soft_cap=config.soft_cap,
            dropout=config.dropout if self.training else 0.0,
            sinks=self.sinks,
        )
        return heads[..., :d_value]


def _padded(x: Tensor, width: int) -> Tensor:
    return F.pad(x, (0, width - x.shape[-1]))
