"""Llama 1 to 3 and what is built the same way: SmolLM, TinyLlama, Yi and many more.

Pre-norm with RMSNorm, grouped queries, RoPE over the whole head, SwiGLU. Sources: transformers,
`models/llama`; llama.cpp, `LLM_ARCH_LLAMA` and `convert_hf_to_gguf.py`.
"""

from typing import Any

from armillary.checkpoints.families.family import Facts, Family, GGUFTable, HuggingFaceTable


def _decoder(facts: Facts) -> dict[str, Any]:
    norm = {"kind": "rms", "eps": facts.eps}

    def layer(n_heads: int, n_kv_heads: int, d_ff: int) -> dict[str, Any]:
        return {
            "attention": {
                "n_heads": n_heads,
                "n_kv_heads": n_kv_heads,
                "d_head": facts.d_head,
                "rotary": facts.rotary,
                "qkv_bias": facts.qkv_bias,
                "out_bias": facts.out_bias,
                "dropout": facts.attention_dropout,
            },
            "feedforward": {
                "kind": "glu",
                "d_ff": d_ff,
                "activation": facts.activation,
                "bias": facts.mlp_bias,
            },
            "norm": norm,
        }

    return {
        "vocab_size": facts.vocab_size,
        "d_model": facts.d_model,
        "max_positions": facts.max_positions,
        "layers": [
            layer(*sizes) for sizes in zip(facts.n_heads, facts.n_kv_heads, facts.d_ff, strict=True)
        ],
        "final_norm": norm,
        "tie_head": facts.tie_head,
    }


_HUGGINGFACE_NAMES = {
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.out": "self_attn.o_proj",
    "feedforward.gate": "mlp.gate_proj",
    "feedforward.up": "mlp.up_proj",
    "feedforward.down": "mlp.down_proj",
}
_GGUF_NAMES = {
    "attention.q": "attn_q",
    "attention.k": "attn_k",
    "attention.v": "attn_v",
    "attention.out": "attn_output",
    "feedforward.gate": "ffn_gate",
    "feedforward.up": "ffn_up",
    "feedforward.down": "ffn_down",
}


def _with_biases(names: dict[str, str], ours: str, theirs: str) -> dict[str, str]:
    return {
        f"{ours}.{name}.{kind}": f"{theirs}.{their_name}.{kind}"
        for name, their_name in names.items()
        for kind in ("weight", "bias")
    }


LLAMA = Family(
    name="llama",
    decoder=_decoder,
    huggingface=HuggingFaceTable(
        architecture="LlamaForCausalLM",
        model_type="llama",
        keys={
            "vocab_size": "vocab_size",
            "d_model": "hidden_size",
            "max_positions": "max_position_embeddings",
            "n_layers": "num_hidden_layers",
            "n_heads": "num_attention_heads",
            "n_kv_heads": "num_key_value_heads",
            "d_head": "head_dim",
            "d_ff": "intermediate_size",
            "eps": "rms_norm_eps",
            "activation": "hidden_act",
            "tie_head": "tie_word_embeddings",
            "qkv_bias": "attention_bias",
            "out_bias": "attention_bias",
            "mlp_bias": "mlp_bias",
            "attention_dropout": "attention_dropout",
        },
        defaults={
            "max_positions": 2048,
            "eps": 1e-6,
            "rope_base": 10000.0,
            "activation": "silu",
            "tie_head": False,
            "qkv_bias": False,
            "out_bias": False,
            "mlp_bias": False,
            "attention_dropout": 0.0,
        },
        loud=frozenset({"max_positions", "eps"}),
        fixed={"pretraining_tp": 1, "rope_interleaved": False, "is_llama_config": True},
        ignored=frozenset(),
        tensors={
            "embedding.weight": "model.embed_tokens.weight",
            "layers.{i}.norm1.weight": "model.layers.{i}.input_layernorm.weight",
            "layers.{i}.norm2.weight": "model.layers.{i}.post_attention_layernorm.weight",
            "final_norm.weight": "model.norm.weight",
            "head.weight": "lm_head.weight",
            **_with_biases(_HUGGINGFACE_NAMES, "layers.{i}", "model.layers.{i}"),
        },
        redundant=("model.layers.{i}.self_attn.rotary_emb.inv_freq",),
    ),
    gguf=GGUFTable(
        architecture="llama",
        fixed={
            "attention.causal": True,
            "use_parallel_residual": False,
            "expert_count": 0,
            "expert_used_count": 0,
        },
        ignored=frozenset({"tensor_data_layout"}),
        tensors={
            "embedding.weight": "token_embd.weight",
            "layers.{i}.norm1.weight": "blk.{i}.attn_norm.weight",
            "layers.{i}.norm2.weight": "blk.{i}.ffn_norm.weight",
            "final_norm.weight": "output_norm.weight",
            "head.weight": "output.weight",
            **_with_biases(_GGUF_NAMES, "layers.{i}", "blk.{i}"),
        },
        interleaved=frozenset(
            f"layers.{{i}}.attention.{name}.{kind}" for name in "qk" for kind in ("weight", "bias")
        ),
    ),
)
