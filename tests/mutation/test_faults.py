"""Deliberate faults: for each, a comparison that holds the decoder must fail, and by far.

Each names the line that is made wrong and the comparison of tests/test_decoder.py that notices.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from armillary import rope_scaling
from armillary.config import AttentionConfig
from armillary.decoder import Decoder, DecoderLayer, Head
from armillary.parts import attention, feedforward, layer_store, mask, norm, rotary
from armillary.parts.attention import Attention
from armillary.parts.experts import MixtureOfExperts, Router
from armillary.parts.feedforward import GLU
from armillary.parts.kv_cache import KVCache
from armillary.parts.latent_attention import LatentAttention
from armillary.parts.layer_store import LayerStore
from armillary.parts.mask import Visibility
from armillary.parts.norm import LayerNorm, RMSNorm
from armillary.parts.slots import Slots, SlotStore
from support.checks import (
    CACHE,
    CHUNKINGS,
    LENGTH,
    SPECIFICATION,
    branch_gap,
    cache_gap,
    caches,
    layout_gap,
    padded,
    slot_gap,
    specification_gap,
)
from support.models import EVERY_VARIANT as VARIANTS
from support.models import ORIGINAL_WINDOW, build, config, layer, tokens
from support.mutate import mutate

MARGIN = 100


@dataclass(frozen=True)
class Check:
    """A comparison: what it measures, and what it lets pass."""

    measure: Callable[[], float]
    tolerance: float


def specification(name: str, **arguments: object) -> Check:
    """Logits of a variant against the specification."""
    return Check(
        lambda: specification_gap(build(VARIANTS[name]), tokens(3, LENGTH), **arguments),
        SPECIFICATION,
    )


def in_slots(name: str, padding: tuple[int, ...] = (), **options: Any) -> Check:
    """Steps of fixed shapes against whole passes."""

    def measure() -> float:
        of = VARIANTS[name]
        mask = padded(3, *padding) if padding else None
        cache = KVCache(of, 3, **options)
        return slot_gap(build(of), cache, tokens(3, LENGTH), mask)

    return Check(measure, CACHE)


def branched(name: str) -> Check:
    """Branches against whole passes."""

    def measure() -> float:
        decoder = build(VARIANTS[name])
        return branch_gap(decoder, KVCache(decoder.config, 2), tokens(2, LENGTH))

    return Check(measure, CACHE)


def cached(name: str, chunking: str = "3 + 1 + 4", kind: str = "growing") -> Check:
    """The cache against the whole pass, with a padded row."""

    def measure() -> float:
        cache = caches(VARIANTS[name], 2)[kind]
        ids, real = tokens(2, LENGTH), padded(2, 0, 2)
        return cache_gap(build(VARIANTS[name]), cache, ids, CHUNKINGS[chunking], real)

    return Check(measure, CACHE)


def layout() -> Check:
    """Weights converted to the other layout; 8 heads on 2, and 8 // 2 is not 2 (case 12)."""
    rows = layer(
        rotary={"layout": "interleaved", "d_rotary": 12},
        attention={"n_heads": 8, "n_kv_heads": 2, "d_head": 12},
    )
    return Check(lambda: layout_gap(build(config(rows)), tokens(2, LENGTH)), SPECIFICATION)


@dataclass(frozen=True)
class Fault:
    """In `function`, `old` reads `new`; then `check` must fail."""

    function: Callable[..., Any] | property
    old: str
    new: str
    check: Check


PADDING = padded(3, 4, -3)
DOCUMENTS = torch.tensor([[0] * 5 + [1] * 8, [4] * 2 + [9] * 7 + [2] * 4, [3] * LENGTH])
EMPTY_ROW = torch.ones(3, LENGTH, LENGTH, dtype=torch.bool)
EMPTY_ROW[1, 5] = False

FAULTS: dict[str, Fault] = {
    # Rotation
    "the layout is switched": Fault(
        rotary.rotate,
        'turn.layout == "half_split"',
        'turn.layout != "half_split"',
        specification("plain"),
    ),
    "the rotation is clockwise": Fault(
        rotary.rotation_under, "angles.sin()", "-angles.sin()", specification("partial interleaved")
    ),
    "queries are rotated by one position too many": Fault(
        Attention.forward,
        "q, k = rotate(q, turn), rotate(k, turn)",
        "q, k = rotate(rotate(q, Rotation(turn.cos[:, 1:2].expand_as(turn.cos), "
        "turn.sin[:, 1:2].expand_as(turn.sin), turn.layout)), turn), rotate(k, turn)",
        specification("plain"),
    ),
    "values are rotated": Fault(
        Attention.forward,
        "q, k = rotate(q, turn), rotate(k, turn)",
        "q, k, v = rotate(q, turn), rotate(k, turn), rotate(v, turn)",
        specification("plain"),
    ),
    "a partial rotation takes the head's width for its frequencies": Fault(
        rotary.frequencies,
        "of(base, d, length)",
        "of(base, 10, length)[: d // 2]",
        specification("partial rotation"),
    ),
    "keys are permuted with h / h_kv for h_kv": Fault(
        rotary.convert_layout,
        "order(n_heads, d_head, d_rotary)",
        "order(*((4, 6, 6) if n_heads == 2 else (n_heads, d_head, d_rotary)))",
        layout(),
    ),
    # Scales
    "results are added as they are": Fault(
        DecoderLayer._scaled,
        "result * self.residual_scale",
        "result",
        specification("residual scale"),
    ),
    "logits are divided by their scale": Fault(
        Head.forward, "logits * self.scale", "logits / self.scale", specification("logit scale")
    ),
    "logits are scaled after the cap": Fault(
        Head.forward,
        "self.soft_cap * torch.tanh(logits / self.soft_cap)",
        "self.scale * self.soft_cap * torch.tanh(logits / self.scale / self.soft_cap)",
        specification("logit scale and soft cap"),
    ),
    # Scaling rules
    "the attention factor is dropped": Fault(
        rotary.rotation_under,
        "config.scaling.attention_factor()",
        "1.0",
        specification("rope yarn"),
    ),
    "YaRN's ramp is flipped": Fault(
        rope_scaling.YaRN.frequencies,
        "ramp * theta / self.factor + (1 - ramp) * theta",
        "(1 - ramp) * theta / self.factor + ramp * theta",
        specification("rope yarn"),
    ),
    "YaRN's bounds stay fractional": Fault(
        rope_scaling.YaRN.ramp_bounds, "if self.truncate", "if False", specification("rope yarn")
    ),
    "llama3 multiplies": Fault(
        rope_scaling.Llama3.frequencies,
        "* theta / self.factor",
        "* theta * self.factor",
        specification("rope llama3"),
    ),
    "linear scaling is inverted": Fault(
        rope_scaling.PositionInterpolation.frequencies,
        "/ self.factor",
        "* self.factor",
        specification("rope linear"),
    ),
    "longrope's long list begins one token early": Fault(
        rope_scaling.LongRoPE.regime,
        "length > self.original_window",
        "length >= self.original_window",
        specification("rope longrope", rotary_length=ORIGINAL_WINDOW),
    ),
    "dynamic scaling shrinks short texts": Fault(
        rope_scaling.DynamicNTK.regime,
        "max(length, self.original_window)",
        "length",
        specification("rope dynamic", rotary_length=ORIGINAL_WINDOW - 2),
    ),
    # Attention
    "the q/k norm is dropped": Fault(
        Attention.forward,
        "self.q_norm is not None and self.k_norm is not None",
        "False",
        specification("q/k norm"),
    ),
    "heads are normed as one, channel by channel": Fault(
        attention._over_all_heads,
        "x.transpose(1, 2).flatten(2)",
        "x.permute(0, 2, 3, 1).flatten(2)",
        specification("q/k norm of all heads"),
    ),
    "a head is normed by another's weights": Fault(
        norm._of_heads,
        "weight.view(-1, 1, d)",
        "weight.view(-1, 1, d).flip(0)",
        specification("q/k norm of each head"),
    ),
    "a head's norm adds another's bias": Fault(
        LayerNorm.forward,
        "_of_heads(bias, self.d)",
        "_of_heads(bias, self.d).flip(0)",
        specification("q/k layer norm of each head"),
    ),
    "kv heads are tiled, not grouped": Fault(
        attention.attend,
        "    if by_torch and visibility.is_plainly_causal",
        "    k, v = (part.repeat(1, q.shape[1] // part.shape[1], 1, 1) for part in (k, v))\n"
        "    if by_torch and visibility.is_plainly_causal",
        specification("plain"),
    ),
    "scores are divided by d_head": Fault(
        AttentionConfig.score_scale, "self.d_head**-0.5", "self.d_head**-1", specification("plain")
    ),
    "the soft cap is dropped": Fault(
        attention._attend_block,
        "soft_cap * torch.tanh(scores / soft_cap)",
        "scores",
        specification("soft cap"),
    ),
    "the soft cap comes after the mask": Fault(
        attention._attend_block,
        'scores.masked_fill(~mask, float("-inf"))',
        'soft_cap * torch.tanh(scores.masked_fill(~mask, float("-inf")) / soft_cap)',
        specification("soft cap"),
    ),
    "a query reads one key ahead": Fault(
        Visibility.block, "key <= query", "key <= query + 1", specification("soft cap")
    ),
    "the triangle is aligned to the upper left": Fault(
        Visibility.block, "key <= query", "key <= query - shift", cached("plain")
    ),
    "the window is one too wide": Fault(
        Visibility.block,
        "key > query - self.window",
        "key >= query - self.window",
        specification("window"),
    ),
    "documents read each other": Fault(
        Visibility.block,
        "self.documents is not None",
        "False",
        specification("plain", documents=DOCUMENTS),
    ),
    "documents do not begin at 0": Fault(
        mask.counted_positions,
        "documents is None",
        "True",
        specification("learned", documents=DOCUMENTS),
    ),
    "padding is read": Fault(
        Visibility.block,
        "self.readable is not None",
        "False",
        specification("plain", mask=PADDING),
    ),
    "padding is counted": Fault(
        mask.counted_positions,
        "readable.cumsum(-1) - readable.long()",
        "torch.ones_like(readable, dtype=torch.long).cumsum(-1) - 1",
        specification("learned", mask=PADDING),
    ),
    "a query with nothing to read reads everything": Fault(
        attention._attend_block,
        "out if reads is None else torch.where(reads, out, 0)",
        "out",
        specification("plain", mask=EMPTY_ROW),
    ),
    # Norms and feed-forwards
    "eps is outside the root": Fault(
        RMSNorm.forward,
        "wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)",
        "wide / (wide.square().mean(-1, keepdim=True).sqrt() + self.eps)",
        specification("plain"),
    ),
    "the norm's offset is dropped": Fault(
        RMSNorm._scale, "+ self.offset", "", specification("norm offset")
    ),
    "gate and up are swapped": Fault(
        GLU.forward,
        "gated(gate, up, self.config)",
        "gated(up, gate, self.config)",
        specification("plain"),
    ),
    "the up half comes first": Fault(
        GLU.forward, ".chunk(2, dim=-1)", ".chunk(2, dim=-1)[::-1]", specification("fused glu")
    ),
    "silu is gelu": Fault(
        feedforward.gated,
        "ACTIVATIONS[config.activation]",
        'ACTIVATIONS["gelu"]',
        specification("plain"),
    ),
    "up is bounded from above alone": Fault(
        feedforward.gated,
        "up.clamp(-config.limit, config.limit)",
        "up.clamp(max=config.limit)",
        specification("experts, clipped, biases"),
    ),
    # Experts
    "experts' weights are no shares": Fault(
        Router.forward, "if config.normalise:", "if False:", specification("experts")
    ),
    "the routed scale is dropped": Fault(
        Router.forward,
        "weights * config.scale",
        "weights",
        specification("experts, sigmoid in groups"),
    ),
    "a selection bias counts": Fault(
        Router.forward,
        "weights = scores.gather(-1, chosen)",
        "weights = (scores + self.selection_bias).gather(-1, chosen)",
        specification("experts, sigmoid in groups"),
    ),
    "a selection bias does not choose": Fault(
        Router._choose,
        "self.selection_bias is not None",
        "False",
        specification("experts, sigmoid in groups"),
    ),
    "groups go by their best alone": Fault(
        Router._choose,
        ".topk(2, dim=-1)",
        ".topk(1, dim=-1)",
        specification("experts, sigmoid in groups"),
    ),
    "results stay sorted by expert": Fault(
        MixtureOfExperts._routed, "sorted_out[place]", "sorted_out[order]", specification("experts")
    ),
    "the shared expert's gate is left open": Fault(
        MixtureOfExperts.forward,
        "torch.sigmoid(self.shared_gate(rows)) * shared",
        "shared",
        specification("experts, shared one gated"),
    ),
    # Sinks and latent attention
    "sinks take no part of the softmax": Fault(
        attention._attend_block,
        "torch.cat([scores, nowhere], -1).softmax(-1)[..., :-1]",
        "scores.softmax(-1)",
        specification("sinks"),
    ),
    "the shared key is not rotated": Fault(
        LatentAttention.forward,
        "rotate(k_rope.unsqueeze(1), turn)",
        "k_rope.unsqueeze(1)",
        specification("latent"),
    ),
    "the latent vector is not normalised": Fault(
        LatentAttention.forward,
        "self.kv_norm(c).unsqueeze(1)",
        "c.unsqueeze(1)",
        specification("latent"),
    ),
    # The decoder
    "a post norm takes the residual path too": Fault(
        DecoderLayer.forward,
        "u + self._scaled(self.dropout(self.post_norm2(self.feedforward(read))))",
        "self.post_norm2(u + self._scaled(self.dropout(self.feedforward(read))))",
        specification("post norm"),
    ),
    "parallel sub-layers are in sequence": Fault(
        DecoderLayer.forward, "self.norm2(x)", "self.norm2(u)", specification("parallel")
    ),
    "a tied head is a matrix of its own": Fault(
        Head.forward,
        "embedding if self.weight is None",
        "embedding.flip(0) if self.weight is None",
        specification("tied head"),
    ),
    "the embedding's scale is dropped": Fault(
        Decoder._embedded,
        "x * self.config.embedding_scale",
        "x",
        specification("embedding scale"),
    ),
    "the final norm is dropped": Fault(
        Decoder._through, "self.final_norm(x)", "x", specification("plain")
    ),
    "the final soft cap is dropped": Fault(
        Head.forward, "self.soft_cap is None", "True", specification("final soft cap")
    ),
    # The cache
    "cached keys are not rotated": Fault(
        Attention.forward,
        "rotate(k, turn)",
        "k if store is not None else rotate(k, turn)",
        cached("plain"),
    ),
    "cached keys are rotated twice": Fault(
        Attention.forward,
        "store.append(k, v)",
        "store.append(rotate(k, turn), v)",
        cached("plain"),
    ),
    "branches read one another": Fault(
        mask.tree,
        "if parent >= 0:",
        "ways[child, :child] = True\n        if False:",
        branched("plain"),
    ),
    "branches stand one behind the other": Fault(
        KVCache.branches,
        ".unsqueeze(-1) + depths",
        ".unsqueeze(-1) + torch.arange(count)",
        branched("plain"),
    ),
    "windows count what stands in other branches": Fault(
        Visibility.block, "if self.places is None", "if True", branched("window")
    ),
    "positions begin anew with each chunk": Fault(
        KVCache.step,
        "_positions(readable, all_tokens)[:, before:]",
        "_positions(readable, all_tokens)[:, : all_tokens.shape[1] - before]",
        cached("plain"),
    ),
    "single steps count the padding": Fault(
        KVCache.step,
        "_positions(readable, all_tokens)[:, before:]",
        "_positions(readable if before == 0 else None, all_tokens)[:, before:]",
        cached("plain", "prompt, then steps"),
    ),
    "padding is forgotten once it is cached": Fault(
        KVCache._joined,
        "[self.readable, new]",
        "[torch.ones_like(self.readable), new]",
        cached("plain"),
    ),
    "dynamic frequencies change under cached keys": Fault(
        KVCache._is_stale, "return any(", "return False and any(", cached("rope dynamic")
    ),
    "longrope's lists change under cached keys": Fault(
        KVCache._is_stale, "return any(", "return False and any(", cached("rope longrope")
    ),
    "a full windowed layer forgets one key too many": Fault(
        LayerStore.append,
        "self._window - 1",
        "self._window - 2",
        cached("window", "one by one", "windowed"),
    ),
    "slots that are not filled are read": Fault(
        Slots.visibility, "(slots <= self._slot)", "(slots >= 0)", in_slots("plain")
    ),
    "a slot's window is one too wide": Fault(
        Slots.visibility, "slots > self._slot", "slots >= self._slot", in_slots("window")
    ),
    "a slot's window is dropped": Fault(
        Slots.visibility, "if window is None", "if True", in_slots("mixed layers")
    ),
    "padding in slots is counted": Fault(
        Slots.positions, "- self._padding", "+ 0 * self._padding", in_slots("learned", (4, 0, 2))
    ),
    "padding in slots is read": Fault(
        Slots.follow, "= cache.readable", "= True", in_slots("plain", (4, 0, 2))
    ),
    "slots see other frequencies than the cache": Fault(
        Slots.follow,
        "cache.next_lengths",
        "[1] * cache.batch",
        in_slots("rope longrope", rotary_length=30),
    ),
    "a slot's keys are not put in place": Fault(
        SlotStore.append, "self._k.index_copy_(2, self._slot, k)", "k", in_slots("plain")
    ),
    "a cache that grows loses its oldest entry": Fault(
        LayerStore._grow, "[old, ", "[old.roll(-1, 2), ", cached("plain")
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_the_comparison_fails_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sound code passes it, the faulty code computes something else altogether."""
    monkeypatch.setattr(layer_store, "WINDOW_SLACK", 2)
    monkeypatch.setattr(layer_store, "_GROWTH", 2)
    fault = FAULTS[name]
    assert fault.check.measure() <= fault.check.tolerance
    mutate(monkeypatch, fault.function, fault.old, fault.new)
    measured = fault.check.measure()
    assert np.isfinite(measured)
    assert measured > MARGIN * fault.check.tolerance
