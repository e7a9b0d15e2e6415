"""What families with experts share: the template, the keys and how directories hold the matrices."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from armillary.checkpoints.families.common import HUGGINGFACE_KEYS, changed
from armillary.checkpoints.families.family import Key
from armillary.checkpoints.layouts import Numbered

_MIXTURE = "layers.*.feedforward."
N_EXPERTS, TOP_K = f"{_MIXTURE}n_experts", f"{_MIXTURE}top_k"
NORMALISE = f"{_MIXTURE}router.normalise"

TRAINING_ONLY = frozenset({"output_router_logits", "router_aux_loss_coef", "router_jitter_noise"})
"""Keys without bearing on what is computed."""


def mixture(
    router: Mapping[str, Any] | None = None, expert: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The entries of a feed-forward with gated experts; others add."""
    return {
        "kind": "moe",
        "expert": {"kind": "glu", "activation": "silu", **(expert or {})},
        "router": dict(router or {}),
    }


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
