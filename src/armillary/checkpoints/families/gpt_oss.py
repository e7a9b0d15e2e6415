"""gpt-oss: experts with biases and bounded gates, attention sinks, a window in every second layer.

YaRN's bounds are not rounded. The released weights are MXFP4 (checkpoints/mxfp4.py); the table is
that of their bfloat16 form. Source: transformers, `models/gpt_oss`; OpenAI 2025.
"""

from armillary.checkpoints.families.common import (
    OUT_BIAS,
    QKV_BIAS,
    alternating,
    gguf_alternating,
    gguf_names,
    huggingface_names,
    layer_types,
    only,
    pre_norm,
)
from armillary.checkpoints.families.experts import (
    GGUF_EXPERTS,
    TRAINING_ONLY,
    expert_keys,
    gguf_expert_keys,
    number,
    with_experts,
)
from armillary.checkpoints.families.family import (
    Derived,
    Family,
    GGUFTable,
    HuggingFaceTable,
    Key,
    RotaryKeys,
)
from armillary.checkpoints.layouts import Turned
from armillary.strict_dict import REQUIRED

_MLP = "model.layers.{i}.mlp."
_EXPERTS = "layers.{i}.feedforward.experts."
_LIMIT = "layers.*.feedforward.expert.limit"
_WITHOUT = ("norm1.bias", "norm2.bias", "norm.bias", "feedforward.")

GPT_OSS = Family(
    name="gpt-oss",
    template=with_experts(
        pre_norm(norm={"cast_before_weight": False}, attention={"sinks": True}),
        router={"bias": True},
        expert={"activation": "quick_gelu", "up_offset": 1.0, "bias": True},
    ),
    huggingface=HuggingFaceTable(
        architecture="GptOssForCausalLM",
        model_type="gpt_oss",
        keys=expert_keys(
            d_ff="intermediate_size",
            n_experts=number("num_local_experts"),
            without={"hidden_act", "attention_bias"},
            more=(
                Key("attention_bias", bool, (QKV_BIAS, OUT_BIAS), default=True),
                Key("swiglu_limit", float, (_LIMIT,), default=7.0),
                Key("sliding_window", int, default=128, nullable=True),
            ),
            max_position_embeddings=131072,
            num_key_value_heads=8,
            head_dim=64,
            rms_norm_eps=1e-5,
        ),
        layers=layer_types(alternating(2)),
        rotary=RotaryKeys(default_base=150000.0),
        fixed={"hidden_act": "silu", "swiglu_alpha": 1.702},
        # The last two repeat others.
        ignored=TRAINING_ONLY | {"experts_per_token", "initial_context_length"},
        tensors=only(huggingface_names(), *_WITHOUT)
        | {
            "layers.{i}.attention.sinks": "model.layers.{i}.self_attn.sinks",
            "layers.{i}.feedforward.router.weight": f"{_MLP}router.weight",
            "layers.{i}.feedforward.router.bias": f"{_MLP}router.bias",
        },
        layouts=tuple(
            Turned(
                f"{_MLP}experts.{theirs}{suffix}",
                tuple(f"{_EXPERTS}{name}.{kind}" for name in ours),
            )
            for theirs, ours in {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}.items()
            for kind, suffix in {"weight": "", "bias": "_bias"}.items()
        ),
    ),
    gguf=GGUFTable(
        architecture="gpt-oss",
        keys=gguf_expert_keys(),
        derived=(
            Derived((QKV_BIAS, OUT_BIAS), lambda _: True),
            # A number in llama.cpp's source, as its 1.702 is.
            Derived((_LIMIT,), lambda _: 7.0),
        ),
        layers=gguf_alternating(2, REQUIRED),
        needs_head=True,
        rounds_yarn=False,
        # Of the experts too, by the key that is read.
        ignored=frozenset({"feed_forward_length"}),
        tensors=only(gguf_names({"norm1": "attn_norm", "norm2": "post_attention_norm"}), *_WITHOUT)
        | only(GGUF_EXPERTS, "shared", "selection_bias")
        | {"layers.{i}.attention.sinks": "blk.{i}.attn_sinks.weight"},
    ),
)
