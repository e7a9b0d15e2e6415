"""OLMoE: 64 small experts, of which 8 are picked, and norms over all heads of queries and keys.

Experts count by their probabilities as they are. Source: transformers, `models/olmoe`.
"""

from armillary.checkpoints.families.common import (
    HEAD_WIDTH,
    huggingface_names,
    names,
    only,
    pre_norm,
)
from armillary.checkpoints.families.experts import (
    NORMALISE,
    TRAINING_ONLY,
    expert_keys,
    number,
    numbered_experts,
    with_experts,
)
from armillary.checkpoints.families.family import Family, HuggingFaceTable, Key

OLMOE = Family(
    name="olmoe",
    template=with_experts(
        pre_norm(attention={"qk_norm": {"kind": "rms"}, "qk_norm_over": "all_heads"})
    ),
    huggingface=HuggingFaceTable(
        architecture="OlmoeForCausalLM",
        model_type="olmoe",
        keys=expert_keys(
            d_ff="intermediate_size",
            n_experts=number("num_experts"),
            without={"head_dim"},
            more=(Key("norm_topk_prob", bool, (NORMALISE,), default=False),),
            max_position_embeddings=4096,
            rms_norm_eps=1e-5,
        ),
        derived=(HEAD_WIDTH,),
        ignored=TRAINING_ONLY,
        tensors=only(huggingface_names(), "norm1.bias", "norm2.bias", "norm.bias", "feedforward.")
        | {"layers.{i}.feedforward.router.weight": "model.layers.{i}.mlp.gate.weight"}
        | names(
            "layers.{i}.",
            "model.layers.{i}.self_attn.",
            {"attention.q_norm": "q_norm", "attention.k_norm": "k_norm"},
            ("weight",),
        ),
        layouts=numbered_experts("mlp.experts", gate="gate_proj", up="up_proj", down="down_proj"),
    ),
)
