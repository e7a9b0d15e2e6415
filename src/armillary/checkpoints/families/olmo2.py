"""OLMo 2: norms of what the sub-layers give, not of what they read, and of all heads at once.

Source: transformers, `models/olmo2`; llama.cpp, `src/models/olmo2.cpp`.
"""

from armillary.checkpoints.families.common import (
    GGUF_KEYS,
    HEAD_WIDTH,
    HUGGINGFACE_KEYS,
    changed,
    gguf_names,
    huggingface_names,
    names,
    only,
    pre_norm,
)
from armillary.checkpoints.families.family import Family, GGUFTable, HuggingFaceTable

_NORM = {"cast_before_weight": False}
_NORMS = {"post_norm1": "post_attention_layernorm", "post_norm2": "post_feedforward_layernorm"}
_GGUF_NORMS = {
    "post_norm1": "post_attention_norm",
    "post_norm2": "post_ffw_norm",
    "attention.q_norm": "attn_q_norm",
    "attention.k_norm": "attn_k_norm",
}
_NO_BIASES = ("norm1.bias", "norm2.bias", "final_norm.bias", "gate.bias", "up.bias", "down.bias")

OLMO2 = Family(
    name="olmo2",
    template=pre_norm(
        norm=_NORM,
        attention={"qk_norm": {"kind": "rms", **_NORM}, "qk_norm_over": "all_heads"},
        layer={"norm_placement": "post"},
    ),
    huggingface=HuggingFaceTable(
        architecture="Olmo2ForCausalLM",
        model_type="olmo2",
        keys=changed(HUGGINGFACE_KEYS, without={"mlp_bias", "head_dim"}, rms_norm_eps=1e-5),
        derived=(HEAD_WIDTH,),
        tensors=only(huggingface_names(_NORMS), *_NO_BIASES)
        | names(
            "layers.{i}.",
            "model.layers.{i}.self_attn.",
            {"attention.q_norm": "q_norm", "attention.k_norm": "k_norm"},
            ("weight",),
        ),
    ),
    gguf=GGUFTable(
        architecture="olmo2",
        keys=GGUF_KEYS,
        needs_head=True,
        tensors=only(gguf_names(_GGUF_NORMS), ".bias"),
    ),
)
