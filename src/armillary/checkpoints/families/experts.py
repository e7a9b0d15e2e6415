"""What families with experts share: template, keys, and how files hold the matrices."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from armillary.checkpoints.families.common import GGUF_KEYS, HUGGINGFACE_KEYS, changed, names
from armillary.checkpoints.families.family import Entries, Key
from armillary.checkpoints.layouts import Numbered

_MIXTURE = "layers.*.feedforward."
N_EXPERTS, TOP_K = f"{_MIXTURE}n_experts", f"{_MIXTURE}top_k"
NORMALISE = f"{_MIXTURE}router.normalise"

TRAINING_ONLY = frozenset({"output_router_logits", "router_aux_loss_coef", "router_jitter_noise"})
"""Keys without bearing on what is computed."""


def with_experts(
    template: Entries,
    *,
    router: Mapping[str, Any] | None = None,
    expert: Mapping[str, Any] | None = None,
    shared: Mapping[str, Any] | None = None,
) -> Entries:
    """A template with gated experts for its feed-forward; entries add."""
    gated = {"kind": "glu", "activation": "silu"}
    template["layers"]["feedforward"] = {
        "kind": "moe",
        "expert": {**gated, **(expert or {})},
        "router": dict(router or {}),
        "shared": None if shared is None else {**gated, **shared},
    }
    return template


def number(key: str, **options: Any) -> Key:
    """The key of the number of experts."""
    return Key(key, int, (N_EXPERTS,), **options)


def expert_keys(
    *,
    d_ff: str,
    n_experts: Key,
    without: frozenset[str] | set[str] = frozenset(),
    more: tuple[Key, ...] = (),
    **defaults: Any,
) -> tuple[Key, ...]:
    """Llama's keys with a feed-forward of experts in the place of its own; others as `changed`.

    `d_ff` and `n_experts` are the keys of an expert's width and of their number (`number`).
    """
    kept = changed(
        HUGGINGFACE_KEYS,
        without={"intermediate_size", "mlp_bias", *without},
        more=(
            Key(d_ff, int, (f"{_MIXTURE}expert.d_ff",)),
            n_experts,
            Key("num_experts_per_tok", int, (TOP_K,)),
            *more,
        ),
        **defaults,
    )
    activation = (f"{_MIXTURE}expert.activation",)
    return tuple(replace(key, to=activation) if key.name == "hidden_act" else key for key in kept)


def numbered_experts(module: str, gate: str, up: str, down: str) -> tuple[Numbered, ...]:
    """A tensor for each expert and projection: `module`.EXPERT.NAME.weight."""
    return tuple(
        Numbered(
            f"model.layers.{{i}}.{module}.{{n}}.{theirs}.weight",
            (f"layers.{{i}}.feedforward.experts.{ours}.weight",),
            count="feedforward.n_experts",
        )
        for ours, theirs in {"gate": gate, "up": up, "down": down}.items()
    )


def gguf_expert_keys(
    *,
    d_ff: str = "expert_feed_forward_length",
    without: frozenset[str] | set[str] = frozenset(),
    more: tuple[Key, ...] = (),
) -> tuple[Key, ...]:
    """llama.cpp's keys with a feed-forward of experts in the place of Llama's; others as `changed`.

    `d_ff` is the key of an expert's width; older architectures use `feed_forward_length`.
    """
    return changed(
        GGUF_KEYS,
        without={"feed_forward_length", *without},
        more=(
            Key("expert_count", int, (N_EXPERTS,)),
            Key("expert_used_count", int, (TOP_K,)),
            Key(d_ff, int, (f"{_MIXTURE}expert.d_ff",)),
            *more,
        ),
    )


_PROJECTIONS = ("gate", "up", "down")
GGUF_EXPERTS: Mapping[str, str] = {
    **names(
        "layers.{i}.feedforward.experts.",
        "blk.{i}.",
        {name: f"ffn_{name}_exps" for name in _PROJECTIONS},
    ),
    **names(
        "layers.{i}.feedforward.shared.",
        "blk.{i}.",
        {name: f"ffn_{name}_shexp" for name in _PROJECTIONS},
    ),
    **names("layers.{i}.feedforward.", "blk.{i}.", {"router": "ffn_gate_inp"}),
    "layers.{i}.feedforward.router.selection_bias": "blk.{i}.exp_probs_b.bias",
}
"""Our parameters of mixtures → llama.cpp's tensors, which hold the experts of a layer as we do."""
