"""DeepSeek-V3: latent attention, and after some dense layers experts chosen by sigmoids in groups.

Where YaRN states `mscale_all_dim`, scores are multiplied by the square of that factor. The layers
after the last, which predict more than one token ahead, are passed over. Source: transformers,
`models/deepseek_v3`; DeepSeek-AI 2024 (V3), §2.1.
"""

import math

from armillary.checkpoints.families.common import (
    D_HEAD,
    EPS,
    N_KV_HEADS,
    OUT_BIAS,
    QKV_BIAS,
    gguf_names,
    only,
    pre_norm,
)
from armillary.checkpoints.families.common import huggingface_names as llama_names
from armillary.checkpoints.families.experts import (
    GGUF_EXPERTS,
    NORMALISE,
    TRAINING_ONLY,
    expert_keys,
    gguf_expert_keys,
    number,
    numbered_experts,
    with_experts,
)
from armillary.checkpoints.families.family import (
    ACTIVATION,
    FULL,
    Derived,
    Entries,
    Family,
    Form,
    GGUFTable,
    HuggingFaceTable,
    Key,
    LayerTable,
    Patch,
    RotaryKeys,
    Values,
    choice,
)
from armillary.checkpoints.layouts import KeysAndValues
from armillary.config import AttentionConfig, DecoderConfig, FeedForwardConfig, MixtureConfig
from armillary.errors import ConfigError
from armillary.rope_scaling import YaRN
from armillary.strict_dict import StrictDict

_LATENT, _ROUTER = "layers.*.attention.latent.", "layers.*.feedforward.router."
_LAYER = "model.layers.{i}."


def _score_scale(entries: StrictDict, d_head: int) -> float | None:
    """d_head^(−1/2)·g², g = 0.1·mscale_all_dim·ln(factor) + 1, where the rule states it."""
    given = entries.take_optional("rope_parameters", dict)
    rule = given or entries.take_optional("rope_scaling", dict) or {}
    weight, factor = (_number(rule.get(key)) for key in ("mscale_all_dim", "factor"))
    if rule.get("rope_type", rule.get("type", "default")) == "default" or not weight:
        return None
    g = 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0
    return float(d_head**-0.5 * (g * g))


def _number(value: object) -> float:
    """A number, or 0 for what is none, which the rule's own reader refuses."""
    return float(value) if isinstance(value, int | float) else 0.0


def _read_layers(entries: StrictDict, values: Values, count: int) -> list[Patch]:
    first = entries.take("first_k_dense_replace", int, 3)
    interleaved = entries.take("rope_interleave", bool, True)
    dense = {
        "kind": "glu",
        "d_ff": values["intermediate_size"],
        "activation": ACTIVATION.read(values["hidden_act"]),
    }
    shared: Patch = {
        "attention.rotary": FULL,
        "attention.rotary.layout": "interleaved" if interleaved else "half_split",
        "attention.scale": _score_scale(
            entries, values["qk_nope_head_dim"] + values["qk_rope_head_dim"]
        ),
    }
    return [
        {**shared, **({"feedforward": dense} if layer < first else {})} for layer in range(count)
    ]


def _write_layers(config: DecoderConfig) -> Entries:
    wide = [layer.feedforward for layer in config.layers]
    dense = [w for w in wide if isinstance(w, FeedForwardConfig)]
    mixed = [w for w in wide if isinstance(w, MixtureConfig)]
    attention = config.layers[0].attention
    rotary, shared = attention.rotary, mixed[0].shared if mixed else None
    return {
        "first_k_dense_replace": len(dense),
        # Of no layer, where all have experts; readers want it all the same.
        "intermediate_size": dense[0].d_ff if dense else config.d_model,
        "n_shared_experts": shared.d_ff // mixed[0].expert.d_ff if shared else None,
        "qk_nope_head_dim": attention.d_head - attention.d_turning,
        "rope_interleave": rotary is not None and rotary.layout == "interleaved",
        "num_nextn_predict_layers": 0,
    }


def _read_gguf_layers(entries: StrictDict, values: Values, count: int) -> list[Patch]:
    if entries.take_optional("rope.scaling.type", str) == "linear":
        raise ConfigError(
            f"{entries.where}: rope.scaling.type is linear, under which llama.cpp scales scores of "
            "deepseek2 as for yarn; yarn is supported"
        )
    first = entries.take("leading_dense_block_count", int, 0)
    dense = {"kind": "glu", "d_ff": values["feed_forward_length"], "activation": "silu"}
    biased = any(name.endswith(".exp_probs_b.bias") for name in values.shapes)
    rotary = {"attention.rotary": FULL, "attention.rotary.layout": "interleaved"}
    mixed = {"feedforward.router.selection_bias": biased}
    return [
        {**rotary, **({"feedforward": dense} if layer < first else mixed)} for layer in range(count)
    ]


_OR_NONE = Form(read=lambda width: width or None)
# Counts of layers of which llama.cpp takes it that queries are made of no narrower vector.
_LITE = (26, 27)


def _write_gguf_layers(config: DecoderConfig) -> Entries:
    attention = config.layers[0].attention
    latent, rotary = attention.latent, attention.rotary
    if latent is None or rotary is None or rotary.layout != "interleaved":
        raise ConfigError(
            "GGUF's deepseek2 has latent attention with interleaved rotation and no other; write "
            "a directory"
        )
    written = _write_layers(config)
    mixtures = [w for w in (x.feedforward for x in config.layers) if isinstance(w, MixtureConfig)]
    if any(1 < each.router.n_groups == each.router.top_groups for each in mixtures):
        raise ConfigError(
            "llama.cpp reads no groups of experts that are all open (n_groups and top_groups "
            "equal); set both to 1, which is the same"
        )
    if config.n_layers in _LITE and latent.q_rank is not None:
        raise ConfigError(
            f"llama.cpp takes a deepseek2 of {config.n_layers} layers to have no q_rank, and here "
            f"it is {latent.q_rank}; write a directory"
        )
    return {
        # One head of keys and values, as wide as what is cached.
        "attention.head_count_kv": 1,
        "attention.key_length": latent.kv_rank + latent.d_rope,
        "attention.value_length": latent.kv_rank,
        # Its readers ask for the key, and take 0 for none.
        "attention.q_lora_rank": latent.q_rank or 0,
        "leading_dense_block_count": written["first_k_dense_replace"],
        "feed_forward_length": written["intermediate_size"],
        "expert_shared_count": written["n_shared_experts"] or 0,
        **_gguf_factors(attention),
    }


def _gguf_factors(attention: AttentionConfig) -> Entries:
    """The keys from which llama.cpp makes YaRN's factors of rotation and of scores.

    With m the log multiplier and a the factor: a, and a·(1 + m·ln s); but a·(1 + 0.1·ln s) for both
    where m is 0.
    """
    rule = None if attention.rotary is None else attention.rotary.scaling
    if not isinstance(rule, YaRN) or rule.factor <= 1.0:
        return {}
    rotation, log = rule.attention_factor(), math.log(rule.factor)
    scores = math.sqrt(attention.score_scale * math.sqrt(attention.d_head))
    if math.isclose(rotation, scores):
        return {"rope.scaling.attn_factor": rotation / (1 + 0.1 * log)}
    return {
        "rope.scaling.attn_factor": rotation,
        "rope.scaling.yarn_log_multiplier": (scores / rotation - 1) / log,
    }


DEEPSEEK_V3 = Family(
    name="deepseek-v3",
    template=with_experts(
        pre_norm(attention={"latent": {"norm": {"kind": "rms", "eps": 1e-6}}}),
        router={"score": "sigmoid", "selection_bias": True},
        shared={},
    ),
    huggingface=HuggingFaceTable(
        architecture="DeepseekV3ForCausalLM",
        model_type="deepseek_v3",
        keys=expert_keys(
            d_ff="moe_intermediate_size",
            n_experts=number("n_routed_experts"),
            without={"head_dim", "attention_bias"},
            more=(
                Key("attention_bias", bool, (QKV_BIAS, OUT_BIAS), default=False),
                Key("intermediate_size", int, default=18432),
                Key("n_shared_experts", int, default=1),
                Key("qk_nope_head_dim", int, default=128),
                Key("qk_rope_head_dim", int, (f"{_LATENT}d_rope",), default=64),
                Key("v_head_dim", int, (f"{_LATENT}d_value",), default=128),
                Key("kv_lora_rank", int, (f"{_LATENT}kv_rank",), default=512),
                Key("q_lora_rank", int, (f"{_LATENT}q_rank",), default=1536, nullable=True),
                Key("n_group", int, (f"{_ROUTER}n_groups",), default=8),
                Key("topk_group", int, (f"{_ROUTER}top_groups",), default=4),
                Key("routed_scaling_factor", float, (f"{_ROUTER}scale",), default=2.5),
                Key("norm_topk_prob", bool, (NORMALISE,), default=True),
            ),
            max_position_embeddings=4096,
        ),
        derived=(
            Derived((D_HEAD,), lambda v: v["qk_nope_head_dim"] + v["qk_rope_head_dim"]),
            Derived(
                ("layers.*.feedforward.shared.d_ff",),
                lambda v: v["moe_intermediate_size"] * v["n_shared_experts"],
            ),
        ),
        layers=LayerTable(_read_layers, _write_layers),
        rotary=RotaryKeys(default_base=10000.0),
        fixed={
            "pretraining_tp": 1,
            "moe_layer_freq": 1,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
        },
        # Widths that others say, and what is of training or of the layers that are passed over.
        ignored=TRAINING_ONLY
        | {"head_dim", "qk_head_dim", "num_nextn_predict_layers", "ep_size", "seq_aux"}
        | {"aux_loss_alpha", "auto_map"},
        tensors=only(
            llama_names(),
            "norm1.bias",
            "norm2.bias",
            "norm.bias",
            "gate.bias",
            "up.bias",
            "down.bias",
            "attention.k.",
            "attention.v.",
            "attention.q.bias",
        )
        | {
            "layers.{i}.attention.q_down.weight": f"{_LAYER}self_attn.q_a_proj.weight",
            "layers.{i}.attention.q_down.bias": f"{_LAYER}self_attn.q_a_proj.bias",
            "layers.{i}.attention.q_norm.weight": f"{_LAYER}self_attn.q_a_layernorm.weight",
            "layers.{i}.attention.q_up.weight": f"{_LAYER}self_attn.q_b_proj.weight",
            "layers.{i}.attention.kv_down.weight": f"{_LAYER}self_attn.kv_a_proj_with_mqa.weight",
            "layers.{i}.attention.kv_down.bias": f"{_LAYER}self_attn.kv_a_proj_with_mqa.bias",
            "layers.{i}.attention.kv_norm.weight": f"{_LAYER}self_attn.kv_a_layernorm.weight",
            "layers.{i}.attention.kv_up.weight": f"{_LAYER}self_attn.kv_b_proj.weight",
            "layers.{i}.feedforward.router.weight": f"{_LAYER}mlp.gate.weight",
            "layers.{i}.feedforward.router.selection_bias": (
                f"{_LAYER}mlp.gate.e_score_correction_bias"
            ),
            **{
                f"layers.{{i}}.feedforward.shared.{name}.weight": (
                    f"{_LAYER}mlp.shared_experts.{name}_proj.weight"
                )
                for name in ("gate", "up", "down")
            },
        },
        layouts=numbered_experts("mlp.experts", gate="gate_proj", up="up_proj", down="down_proj"),
        passes_over_later_layers=True,
    ),
    gguf=GGUFTable(
        architecture="deepseek2",
        keys=gguf_expert_keys(
            without={
                "attention.head_count_kv",
                "attention.key_length",
                "attention.value_length",
                "attention.layer_norm_rms_epsilon",
            },
            more=(
                # Of all norms, those of the latent vectors too.
                Key("attention.layer_norm_rms_epsilon", float, (*EPS, f"{_LATENT}norm.eps")),
                Key("attention.key_length_mla", int, (D_HEAD,)),
                Key("attention.value_length_mla", int, (f"{_LATENT}d_value",)),
                Key("attention.kv_lora_rank", int, (f"{_LATENT}kv_rank",)),
                Key("attention.q_lora_rank", int, (f"{_LATENT}q_rank",), default=0, form=_OR_NONE),
                Key("rope.dimension_count", int, (f"{_LATENT}d_rope",)),
                Key("feed_forward_length", int, default=None),
                Key("expert_shared_count", int),
                Key("expert_weights_scale", float, (f"{_ROUTER}scale",), default=1.0),
                Key("expert_weights_norm", bool, (NORMALISE,), default=False),
                Key(
                    "expert_gating_func",
                    int,
                    (f"{_ROUTER}score",),
                    default=1,
                    form=choice({1: "softmax", 2: "sigmoid"}),
                ),
                Key("expert_group_count", int, (f"{_ROUTER}n_groups",), default=1),
                Key("expert_group_used_count", int, (f"{_ROUTER}top_groups",), default=1),
            ),
        ),
        derived=(
            Derived((N_KV_HEADS,), lambda v: v["attention.head_count"]),
            Derived(
                ("layers.*.feedforward.shared.d_ff",),
                lambda v: v["expert_feed_forward_length"] * v["expert_shared_count"],
            ),
        ),
        layers=LayerTable(_read_gguf_layers, _write_gguf_layers),
        yarn_scales_scores=True,
        fixed={"nextn_predict_layers": 0},
        # What the cache holds, which other keys say.
        ignored=frozenset(
            {"attention.head_count_kv", "attention.key_length", "attention.value_length"}
        ),
        tensors=only(
            gguf_names() | dict(GGUF_EXPERTS),
            ".bias",
            "attention.k.",
            "attention.v.",
            ".shared_gate",
        )
        | {
            "layers.{i}.attention.q_down.weight": "blk.{i}.attn_q_a.weight",
            "layers.{i}.attention.q_norm.weight": "blk.{i}.attn_q_a_norm.weight",
            "layers.{i}.attention.q_up.weight": "blk.{i}.attn_q_b.weight",
            "layers.{i}.attention.kv_down.weight": "blk.{i}.attn_kv_a_mqa.weight",
            "layers.{i}.attention.kv_norm.weight": "blk.{i}.attn_kv_a_norm.weight",
        },
        layouts=(
            KeysAndValues(
                "blk.{i}.attn_k_b.weight",
                "blk.{i}.attn_v_b.weight",
                ("layers.{i}.attention.kv_up.weight",),
            ),
        ),
    ),
)
