"""Granite 3: Llama with multipliers of embeddings, scores, sub-layers' results and logits.

Source: transformers, `models/granite`; llama.cpp, `src/models/granite.cpp`.
"""

from armillary.checkpoints.families.common import (
    FREQUENCIES,
    GGUF_KEYS,
    GGUF_PRESENT,
    HEAD_WIDTH,
    HUGGINGFACE_KEYS,
    LONGROPE_FACTORS,
    changed,
    gguf_interleaved,
    huggingface_names,
    only,
    pre_norm,
)
from armillary.checkpoints.families.family import (
    RECIPROCAL,
    Family,
    GGUFTable,
    HuggingFaceTable,
    Key,
)

_SCALE, _RESIDUAL = ("layers.*.attention.scale",), ("layers.*.residual_scale",)

GRANITE = Family(
    name="granite",
    template=pre_norm(),
    huggingface=HuggingFaceTable(
        architecture="GraniteForCausalLM",
        model_type="granite",
        keys=changed(
            HUGGINGFACE_KEYS,
            without={"head_dim"},
            more=(
                Key("embedding_multiplier", float, ("embedding_scale",), default=1.0),
                Key("attention_multiplier", float, _SCALE, default=1.0),
                Key("residual_multiplier", float, _RESIDUAL, default=1.0),
                Key("logits_scaling", float, ("logit_scale",), default=1.0, form=RECIPROCAL),
            ),
        ),
        derived=(HEAD_WIDTH,),
        tensors=only(huggingface_names(), "norm1.bias", "norm2.bias", "final_norm.bias"),
    ),
    gguf=GGUFTable(
        architecture="granite",
        keys=(
            *GGUF_KEYS,
            Key("embedding_scale", float, ("embedding_scale",), default=1.0),
            Key("attention.scale", float, _SCALE, default=None),
            Key("residual_scale", float, _RESIDUAL, default=1.0),
            Key("logit_scale", float, ("logit_scale",), form=RECIPROCAL),
        ),
        present=GGUF_PRESENT,
        divisors=FREQUENCIES | LONGROPE_FACTORS,
        **gguf_interleaved(),
    ),
)
