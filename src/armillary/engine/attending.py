"""The steps of attention: projections, rotation, the cache, and what queries find in it."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from armillary.config import AttentionConfig, LatentConfig, NormConfig
from armillary.engine.buffers import Buffer, Slots
from armillary.engine.kv_layout import SCRATCH, SEGMENTS, Kept, value_width
from armillary.engine.program import aligned
from armillary.engine.steps import Steps
from armillary.engine.weights import Stack


class AttentionSteps(Steps):
    """Adds them to a program."""

    def _prepare(self) -> None:
        """Make the memory that each thread needs for its queries."""
        self._scratch = aligned(SCRATCH * self._threads)

    def _attention(self, number: int, name: str, config: AttentionConfig, x: Buffer) -> Buffer:
        """Heads side by side, as the projection out reads them."""
        sinks = self._weights.optional(name + "sinks")
        if config.latent is not None:
            return self._latent(number, name, config, config.latent, x, sinks)
        wide, narrow = config.n_heads * config.d_head, config.n_kv_heads * config.d_head
        q, k, v = (
            self._shared(use, width) for use, width in (("q", wide), ("k", narrow), ("v", narrow))
        )
        self._products([(name + "q", q), (name + "k", k), (name + "v", v)], x, self.config.d_model)
        for part, which, heads in ((q, "q_norm", config.n_heads), (k, "k_norm", config.n_kv_heads)):
            if config.qk_norm is not None:
                self._norm_heads(name + which, config, config.qk_norm, part, heads)
            self._rotate(config, part, heads, config.d_head)
        out = self._shared("heads", wide)
        self._attend(number, config, (q, k, v), sinks, out)
        return out

    def _latent(
        self,
        number: int,
        name: str,
        config: AttentionConfig,
        latent: LatentConfig,
        x: Buffer,
        sinks: NDArray[np.float32] | None,
    ) -> Buffer:
        """Queries brought to the vectors that are kept: q·(W_k c) is (W_kᵀ q)·c.

        What they find, Σ p c, W_v makes the sum of values. Source: DeepSeek-AI 2024 (V2), §2.1.2.
        """
        h, rank = config.n_heads, latent.kv_rank
        d_key = config.d_head - latent.d_rope
        q = self._latent_queries(name, config, latent, x)
        kept = self._shared("kept", rank + latent.d_rope)
        self._products([(name + "kv_down", kept)], x, self.config.d_model)
        self._normalise(name + "kv_norm", latent.norm, kept, kept, 1, rank, None, wait=True)
        self._rotate(config, q, h, config.d_head, first=d_key)
        self._rotate(config, kept, 1, 0, first=rank)
        to_key, to_value = self._weights.of_heads(name + "kv_up.weight", h, d_key)
        wide = self._shared("queries", h * (rank + latent.d_rope))
        self._by_heads(to_key, q, 4 * config.d_head, d_key, rank, wide, own=q, tail=latent.d_rope)
        found = self._shared("found vectors", h * rank)
        self._attend(number, config, (wide, kept, kept), sinks, found)
        out = self._shared("heads", h * latent.d_value)
        self._by_heads(to_value, found, 4 * rank, rank, latent.d_value, out)
        return out

    def _latent_queries(
        self, name: str, config: AttentionConfig, latent: LatentConfig, x: Buffer
    ) -> Buffer:
        q = self._shared("q", config.n_heads * config.d_head)
        if latent.q_rank is None:
            self._products([(name + "q", q)], x, self.config.d_model)
            return q
        down = self._shared("q down", latent.q_rank)
        self._products([(name + "q_down", down)], x, self.config.d_model)
        self._normalise(name + "q_norm", latent.norm, down, down, 1, latent.q_rank, None, wait=True)
        self._products([(name + "q_up", q)], down, latent.q_rank)
        return q

    def _by_heads(
        self,
        weights: Stack,
        x: Buffer,
        apart: int,
        k: int,
        n: int,
        out: Buffer,
        *,
        own: Buffer | None = None,
        tail: int = 0,
    ) -> None:
        """The first k numbers of each head of x times its own weights, (n, k) → heads of `out`.

        Heads of x lie `apart` bytes apart. With `own`, the last `tail` of each of its heads follow.
        """
        heads, rows = len(weights.matrices), self.inputs.rows
        slots = self._slots.get((heads, heads)) or Slots.of(heads, heads, self.rows)
        self._slots[heads, heads] = slots
        taken, given = self._shared("of heads", k, slots), self._shared("by heads", n, slots)
        self.program.add(
            "by_head",
            wait=True,
            x=x.data,
            x_stride=x.stride,
            apart=apart,
            n=k,
            heads=heads,
            out=taken.data,
            out_stride=taken.stride,
            starts=slots.starts,
            rows=rows,
        )
        self._multiply([(weights, None, given)], taken, k, slots=slots)
        self.program.add(
            "by_row",
            wait=True,
            x=given.data,
            x_stride=given.stride,
            n=n,
            own=None if own is None else own.data[apart - 4 * tail :],
            own_stride=0 if own is None else own.stride,
            own_apart=apart,
            tail=tail,
            heads=heads,
            out=out.data,
            out_stride=out.stride,
            rows=rows,
        )

    def _rotate(
        self, config: AttentionConfig, x: Buffer, heads: int, d_head: int, *, first: int = 0
    ) -> None:
        """Turn channels of each head, from `first` on."""
        if config.rotary is None:
            return
        angles = self.rotaries.index(config.rotary)
        self.program.add(
            f"rotate_{config.rotary.layout}",
            wait=False,
            x=x.data[4 * first :],
            stride=x.stride,
            heads=heads,
            d_head=d_head,
            half=config.rotary.d_rotary // 2,
            cos=self.inputs.cos[angles],
            sin=self.inputs.sin[angles],
            rows=self.inputs.rows,
        )

    def _norm_heads(
        self, name: str, attention: AttentionConfig, norm: NormConfig, x: Buffer, heads: int
    ) -> None:
        d, over = attention.d_head, attention.qk_norm_over
        if over == "head":
            self._normalise(name, norm, x, x, heads, d, None, wait=True)
        elif over == "all_heads":
            self._normalise(name, norm, x, x, 1, heads * d, None, wait=True)
        else:
            for head in range(heads):
                part = slice(head * d, (head + 1) * d)
                self._normalise(name, norm, x, x, 1, d, None, wait=True, part=part)

    def _attend(
        self,
        number: int,
        config: AttentionConfig,
        projected: tuple[Buffer, Buffer, Buffer],
        sinks: NDArray[np.float32] | None,
        out: Buffer,
    ) -> None:
        """Put keys and values into the cache, and let the queries read it."""
        inputs, rows = self.inputs, self.inputs.rows
        q, k, v = projected
        kept = Kept.of(config)
        self.program.add(
            f"queries_{self.stored}",
            wait=False,
            x=q.data,
            stride=q.stride,
            heads=config.n_heads,
            d_head=kept.key,
            factor=config.score_scale,
            rows=rows,
        )
        self._append(number, kept, k, v)
        sizes = self._sizes(config)
        d_value = value_width(kept.value)
        found = self._shared("found", SEGMENTS * config.n_heads * (2 + d_value))
        self.program.add(
            f"attention_{self.stored}",
            wait=True,
            q=q.data,
            q_stride=q.stride,
            **sizes,
            **self._of_cache(number, config),
            found=found.data,
            scratch=self._scratch,
            rows=rows,
        )
        self.program.add(
            "combine",
            wait=True,
            found=found.data,
            **sizes,
            width=kept.value,
            window=config.window or 0,
            sinks=sinks,
            lengths=inputs.lengths,
            out=out.data,
            out_stride=out.stride,
            rows=rows,
        )

    def _append(self, number: int, kept: Kept, k: Buffer, v: Buffer) -> None:
        inputs = self.inputs
        self.program.add(
            f"append_{self.stored}",
            wait=True,
            k=k.data,
            v=v.data,
            stride=k.stride,
            kv_heads=kept.heads,
            d_head=kept.key,
            width=kept.value,
            d_value=value_width(kept.value),
            keys=inputs.keys[number],
            values=inputs.values[number],
            capacities=inputs.room,
            places=inputs.places,
            rows=inputs.rows,
        )

    def _of_cache(self, number: int, config: AttentionConfig) -> dict[str, Any]:
        """Where queries find a layer's keys and values, and which they read."""
        inputs = self.inputs
        return {
            "d_head": Kept.of(config).key,
            "window": config.window or 0,
            "cap": config.soft_cap or 0.0,
            "keys": inputs.keys[number],
            "values": inputs.values[number],
            "capacities": inputs.room,
            "lengths": inputs.lengths,
        }

    @staticmethod
    def _sizes(config: AttentionConfig) -> dict[str, Any]:
        kept = Kept.of(config)
        return {
            "kv_heads": kept.heads,
            "group": config.n_heads // kept.heads,
            "d_value": value_width(kept.value),
        }
