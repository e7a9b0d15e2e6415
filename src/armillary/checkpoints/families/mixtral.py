"""Mixtral: Mistral with 8 experts in the place of each feed-forward, of which 2 are picked.

The softmax of the two picked experts' logits weighs them. In GGUF it is Llama's
architecture, told by a number of experts that is not 0. Sources: transformers, `models/mixtral`;
llama.cpp, `src/models/llama.cpp`.
"""

from armillary.checkpoints.families.common import (
    EVERY_LAYER,
    gguf_interleaved,
    huggingface_names,
    only,
    pre_norm,
)
from armillary.checkpoints.families.experts import (
    GGUF_EXPERTS,
    TRAINING_ONLY,
    expert_keys,
    gguf_expert_keys,
    number,
    numbered_experts,
    with_experts,
)
from armillary.checkpoints.families.family import (
    Family,
    GGUFTable,
    HuggingFaceTable,
    Key,
    RotaryKeys,
)
from armillary.checkpoints.families.llama import GGUF_LLAMA

_INTERLEAVED = gguf_interleaved("feedforward.", ".bias")

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
    gguf=GGUFTable(
        architecture=GGUF_LLAMA.architecture,
        told_by="expert_count",
        keys=gguf_expert_keys(d_ff="feed_forward_length"),
        fixed={"attention.causal": True, "use_parallel_residual": False},
        ignored=GGUF_LLAMA.ignored,
        divisors=GGUF_LLAMA.divisors,
        tensors=_INTERLEAVED["tensors"] | only(GGUF_EXPERTS, "shared", "bias"),
        layouts=_INTERLEAVED["layouts"],
    ),
)
