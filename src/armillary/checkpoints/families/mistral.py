"""Mistral 7B and what is built on it: Llama with a window in every layer, or with none.

GGUF files of it are Llama's, and cannot say a window. Source: transformers, `models/mistral`.
"""

from armillary.checkpoints.families.common import (
    EVERY_LAYER,
    HUGGINGFACE_KEYS,
    changed,
    huggingface_names,
    only,
    pre_norm,
)
from armillary.checkpoints.families.family import Family, HuggingFaceTable, Key
from armillary.checkpoints.families.llama import GGUF_LLAMA

MISTRAL = Family(
    name="mistral",
    template=pre_norm(),
    huggingface=HuggingFaceTable(
        architecture="MistralForCausalLM",
        model_type="mistral",
        keys=changed(
            HUGGINGFACE_KEYS,
            without={"attention_bias", "mlp_bias"},
            more=(Key("sliding_window", int, default=4096, nullable=True),),
            max_position_embeddings=131072,
            num_key_value_heads=8,
        ),
        layers=EVERY_LAYER,
        fixed={"attention_bias": False},
        tensors=only(huggingface_names(), ".bias"),
        redundant=("model.layers.{i}.self_attn.rotary_emb.inv_freq",),
    ),
    gguf=GGUF_LLAMA,
)
