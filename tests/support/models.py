"""Small decoders of unequal sizes, with every part switched once, for tests that compare."""

import json

import numpy as np
import torch

from armillary.config import (
    AttentionConfig,
    DecoderConfig,
    FeedForwardConfig,
    LatentConfig,
    LayerConfig,
    MixtureConfig,
    NormConfig,
    RotaryConfig,
)
from armillary.decoder import Decoder
from armillary.rope_scaling import (
    NTK,
    AnyRopeScaling,
    DynamicNTK,
    Llama3,
    LongRoPE,
    PositionInterpolation,
    Unscaled,
    YaRN,
)

VOCABULARY = 61
ORIGINAL_WINDOW = 8

SCALINGS: dict[str, AnyRopeScaling] = {
    "default": Unscaled(),
    "linear": PositionInterpolation(factor=4.0),
    "ntk": NTK(factor=4.0),
    "dynamic": DynamicNTK(factor=2.0, original_window=ORIGINAL_WINDOW),
    "yarn": YaRN(factor=4.0, original_window=64, beta_fast=8.0),
    "llama3": Llama3(factor=4.0, original_window=64),
    "longrope": LongRoPE(
        short_factor=(1.0, 1.1, 1.2, 1.3, 1.4),
        long_factor=(1.0, 1.5, 2.0, 3.0, 4.0),
        factor=4.0,
        original_window=ORIGINAL_WINDOW,
    ),
}


def layer(
    rotary: dict[str, object] | None = None,
    attention: dict[str, object] | None = None,
    feedforward: dict[str, object] | None = None,
    **entries: object,
) -> LayerConfig:
    """A layer with 6 query heads on 2 key/value heads of width 10, d_ff 24; entries replace."""
    turn = RotaryConfig(**({"d_rotary": 10, "base": 100.0} | (rotary or {})))  # type: ignore[arg-type]
    wide = {"d_ff": 24} | (feedforward or {})
    heads = {"n_heads": 6, "n_kv_heads": 2, "d_head": 10, "rotary": turn} | (attention or {})
    return LayerConfig(
        attention=AttentionConfig(**heads),  # type: ignore[arg-type]
        feedforward=(
            MixtureConfig.model_validate_json(json.dumps(feedforward))
            if wide.get("kind") == "moe"
            else FeedForwardConfig(**wide)  # type: ignore[arg-type]
        ),
        **entries,  # type: ignore[arg-type]
    )


def config(*layers: LayerConfig, **entries: object) -> DecoderConfig:
    """A decoder of width 40 with the given layers (one plain one twice when none is given)."""
    sizes = {"vocab_size": VOCABULARY, "d_model": 40, "max_positions": 64}
    return DecoderConfig(layers=layers or (layer(), layer()), **(sizes | entries))  # type: ignore[arg-type]


def _both(**entries: object) -> DecoderConfig:
    changed = layer(**entries)  # type: ignore[arg-type]
    return config(changed, changed)


def _variants() -> dict[str, DecoderConfig]:
    layer_norm = NormConfig(kind="layer", bias=True)
    variants = {
        "plain": config(),
        "interleaved": _both(rotary={"layout": "interleaved"}),
        "partial rotation": _both(rotary={"d_rotary": 4}),
        "partial interleaved": _both(rotary={"d_rotary": 6, "layout": "interleaved"}),
        "no position": _both(attention={"rotary": None}),
        "sinusoidal": config(*[layer(attention={"rotary": None})] * 2, position_table="sinusoidal"),
        "learned": config(*[layer(attention={"rotary": None})] * 2, position_table="learned"),
        "mixed layers": config(layer(attention={"window": 4}), layer(attention={"rotary": None})),
        "window": _both(attention={"window": 3}),
        "window of one": _both(attention={"window": 1}),
        "soft cap": _both(attention={"soft_cap": 2.0}),
        "soft cap and window": _both(attention={"soft_cap": 2.0, "window": 3}),
        "scale": _both(attention={"scale": 0.7}),
        "qkv bias": _both(attention={"qkv_bias": True}),
        "out bias": _both(attention={"out_bias": True}),
        "q/k norm": _both(attention={"qk_norm": NormConfig(eps=1e-3)}),
        "q/k layer norm": _both(attention={"qk_norm": layer_norm}),
        "q/k norm of all heads": _both(
            attention={"qk_norm": NormConfig(eps=1e-3), "qk_norm_over": "all_heads"}
        ),
        "q/k norm of each head": _both(
            attention={"qk_norm": NormConfig(offset=1.0), "qk_norm_over": "head_own_weights"}
        ),
        "q/k layer norm of each head": _both(
            attention={"qk_norm": layer_norm, "qk_norm_over": "head_own_weights"}
        ),
        "one kv head": _both(attention={"n_kv_heads": 1}),
        "all kv heads": _both(attention={"n_kv_heads": 6}),
        "layer norm": config(*[layer(norm=layer_norm)] * 2, final_norm=layer_norm),
        "norm offset": config(
            *[layer(norm=NormConfig(offset=1.0, cast_before_weight=False))] * 2,
            final_norm=NormConfig(offset=1.0, cast_before_weight=False),
        ),
        "no final norm": config(final_norm=None),
        "post norm": _both(norm_placement="post"),
        "sandwich norm": _both(norm_placement="sandwich"),
        "parallel": _both(residual="parallel"),
        "parallel sandwich": _both(residual="parallel", norm_placement="sandwich"),
        "parallel, shared norm": _both(residual="parallel_shared_norm"),
        "mlp relu": _both(feedforward={"kind": "mlp", "activation": "relu", "bias": True}),
        "mlp gelu": _both(feedforward={"kind": "mlp", "activation": "gelu"}),
        "residual scale": _both(residual_scale=0.3),
        "residual scale, sandwich": _both(residual_scale=0.3, norm_placement="sandwich"),
        "residual scale, parallel": _both(residual_scale=0.3, residual="parallel"),
        "tied head": config(tie_head=True),
        "head bias": config(head_bias=True),
        "tied head with bias": config(tie_head=True, head_bias=True),
        "embedding scale": config(embedding_scale=6.3),
        "logit scale": config(logit_scale=0.4),
        "logit scale and soft cap": config(logit_scale=0.4, final_soft_cap=1.5),
        "final soft cap": config(final_soft_cap=1.5),
    }
    for activation in ("gelu", "gelu_tanh", "relu", "sigmoid", "identity"):
        variants[f"glu {activation}"] = _both(feedforward={"activation": activation})
    variants["fused glu"] = _both(feedforward={"fused": True, "bias": True})
    for name, rule in SCALINGS.items():
        variants[f"rope {name}"] = _both(rotary={"scaling": rule})
    return variants


VARIANTS = _variants()


def mixture(**entries: object) -> dict[str, object]:
    """The entries of 6 experts of width 14, of which 2 are picked; `entries` replace."""
    return {"kind": "moe", "n_experts": 6, "top_k": 2, "expert": {"d_ff": 14}} | entries


def _mixtures() -> dict[str, DecoderConfig]:
    grouped = {"score": "sigmoid", "n_groups": 3, "top_groups": 2, "selection_bias": True}
    clipped = {"d_ff": 14, "activation": "quick_gelu", "limit": 1.5, "up_offset": 1.0, "bias": True}
    mixtures = {
        "experts": mixture(),
        "experts, scores as they are": mixture(router={"normalise": False}),
        "experts, sigmoid in groups": mixture(
            router=grouped | {"scale": 2.5}, shared={"d_ff": 18}, top_k=3
        ),
        "experts, shared one gated": mixture(shared={"d_ff": 18}, shared_gate=True),
        "experts, clipped, biases": mixture(
            n_experts=5, top_k=3, expert=clipped, router={"bias": True}
        ),
        "experts, fused": mixture(expert={"d_ff": 14, "fused": True, "bias": True}),
        "experts, mlp": mixture(expert={"kind": "mlp", "d_ff": 14, "activation": "relu"}),
    }
    variants = {name: _both(feedforward=entries) for name, entries in mixtures.items()}
    variants["experts in the second layer"] = config(layer(), layer(feedforward=mixture()))
    variants["sinks"] = _both(attention={"sinks": True})
    variants["sinks, soft cap and window"] = config(
        layer(attention={"sinks": True, "window": 3, "soft_cap": 2.0}),
        layer(attention={"sinks": True, "scale": 0.7}),
    )
    variants["clipped glu"] = _both(feedforward={"limit": 0.5, "up_offset": 1.0})
    variants["quick gelu"] = _both(feedforward={"activation": "quick_gelu"})
    return variants


def _latents() -> dict[str, DecoderConfig]:
    variants = {}
    latent = {"kv_rank": 12, "q_rank": 14, "d_rope": 4, "d_value": 8, "norm": NormConfig(eps=1e-3)}
    kept = {"n_kv_heads": 6, "latent": LatentConfig(**latent)}  # type: ignore[arg-type]
    turned = {"d_rotary": 4, "layout": "interleaved"}
    variants["latent"] = _both(attention=kept | {"scale": 0.4}, rotary=turned)
    direct = LatentConfig(**latent | {"q_rank": None, "d_value": 12})  # type: ignore[arg-type]
    variants["latent, queries direct"] = config(
        layer(
            attention=kept | {"latent": direct, "out_bias": True, "qkv_bias": True},
            rotary={"d_rotary": 4, "scaling": SCALINGS["yarn"]},
        ),
        layer(attention=kept | {"window": 3, "qkv_bias": True}, rotary={"d_rotary": 4}),
    )
    return variants


MIXTURES = _mixtures()
LATENTS = _latents()
EVERY_VARIANT = VARIANTS | MIXTURES | LATENTS


def build(
    config: DecoderConfig, *, dtype: torch.dtype = torch.float64, seed: int = 0, std: float = 0.3
) -> Decoder:
    """A decoder whose every parameter, biases and norms too, is random and large."""
    decoder = Decoder(config).to(dtype).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in decoder.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            # Norm weights start at 1 (or 0, with an offset): keep that and add to it.
            start = parameter.double() if parameter.dim() == 1 else 0.0
            parameter.copy_(start + std * noise)
    return decoder


def arrays(decoder: Decoder) -> dict[str, np.ndarray]:
    """The decoder's parameters as float64 NumPy, for the specification."""
    return {name: value.double().numpy() for name, value in decoder.state_dict().items()}


def tokens(batch: int, length: int, seed: int = 1) -> torch.Tensor:
    """Random token ids, (batch, length)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCABULARY, (batch, length), generator=generator)
