"""Llama 1 to 3 and what is built the same way: SmolLM, TinyLlama, Yi and many more.

Pre-norm with RMSNorm, grouped queries, RoPE over the whole head, SwiGLU. Sources: transformers,
`models/llama`; llama.cpp, `LLM_ARCH_LLAMA` and `convert_hf_to_gguf.py`.
"""

from armillary.checkpoints.families.common import (
    FREQUENCIES,
    GGUF_KEYS,
    GGUF_PRESENT,
    HUGGINGFACE_KEYS,
    LONGROPE_FACTORS,
    gguf_interleaved,
    huggingface_names,
    pre_norm,
)
from armillary.checkpoints.families.family import Family, GGUFTable, HuggingFaceTable

GGUF_LLAMA = GGUFTable(
    architecture="llama",
    keys=GGUF_KEYS,
    present=GGUF_PRESENT,
    fixed={
        "attention.causal": True,
        "use_parallel_residual": False,
        "expert_count": 0,
        "expert_used_count": 0,
    },
    ignored=frozenset({"tensor_data_layout"}),
    divisors=FREQUENCIES | LONGROPE_FACTORS,
    **gguf_interleaved(),
)

LLAMA = Family(
    name="llama",
    template=pre_norm(),
    huggingface=HuggingFaceTable(
        architecture="LlamaForCausalLM",
        model_type="llama",
        keys=HUGGINGFACE_KEYS,
        fixed={"pretraining_tp": 1, "rope_interleaved": False, "is_llama_config": True},
        tensors=huggingface_names(),
        redundant=("model.layers.{i}.self_attn.rotary_emb.inv_freq",),
    ),
    gguf=GGUF_LLAMA,
)
