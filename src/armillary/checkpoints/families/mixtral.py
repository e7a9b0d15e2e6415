"""Mixtral: Mistral with 8 experts in the place of each feed-forward, of which 2 are picked.

The softmax of the two picked experts' logits weighs them. Source: transformers, `models/mixtral`.
"""

from armillary.checkpoints.families.common import EVERY_LAYER, huggingface_names, only, pre_norm
from armillary.checkpoints.families.experts import (
    TRAINING_ONLY,
    expert_keys,
    number,
    numbered_experts,
    with_experts,
)
from armillary.checkpoints.families.family import Family, HuggingFaceTable, Key, RotaryKeys

MIXTRAL = Family(
    name="mixtral",
    template=with_experts(pre_norm()),
    huggingface=HuggingFaceTable(
        architecture="MixtralForCausalLM",
        model_type="mixtral",
        keys=expert_keys(
            d_ff="intermediate_size",
            n_experts=number("num_local_experts"),
            without={"attention_bias"},
            more=(Key("sliding_window", int, default=None),),
            max_position_embeddings=131072,
            num_key_value_heads=8,
            rms_norm_eps=1e-5,
        ),
        layers=EVERY_LAYER,
        rotary=RotaryKeys(default_base=1e6),
        ignored=TRAINING_ONLY,
        tensors=only(huggingface_names(), ".bias", "feedforward.")
        | {
            "layers.{i}.feedforward.router.weight": "model.layers.{i}.block_sparse_moe.gate.weight",
        },
        layouts=numbered_experts("block_sparse_moe.experts", gate="w1", up="w3", down="w2"),
    ),
)
