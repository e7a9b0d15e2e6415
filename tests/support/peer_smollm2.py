"""SmolLM2 in transformers, its weights read from the GGUF file without any code of ours."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def peer_from_gguf(path: Path) -> Any:
    """A LlamaForCausalLM in float32 with the file's dequantised weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    reader = gguf.GGUFReader(path)

    def entry(key: str) -> Any:
        return reader.fields[f"llama.{key}"].contents()

    heads, kv_heads = entry("attention.head_count"), entry("attention.head_count_kv")
    config = LlamaConfig(
        vocab_size=entry("vocab_size"),
        hidden_size=entry("embedding_length"),
        intermediate_size=entry("feed_forward_length"),
        num_hidden_layers=entry("block_count"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=entry("context_length"),
        rms_norm_eps=entry("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": entry("rope.freq_base")},
        tie_word_embeddings=True,
    )
    weights = {}
    for tensor in reader.tensors:
        numbers = gguf.dequantize(tensor.data, tensor.tensor_type)
        block, _, name = tensor.name.removeprefix("blk.").partition(".")
        kind = name.removesuffix(".weight")
        if kind in {"attn_q", "attn_k"}:
            numbers = _half_split(numbers, heads if kind == "attn_q" else kv_heads)
        theirs = {
            "token_embd.weight": "model.embed_tokens.weight",
            "output_norm.weight": "model.norm.weight",
        }.get(tensor.name) or f"model.layers.{block}.{_NAMES[kind]}.weight"
        weights[theirs] = torch.from_numpy(np.array(numbers, dtype=np.float32))
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    with torch.device("meta"):
        peer = LlamaForCausalLM(config)
    peer.load_state_dict(weights, assign=True)
    peer.tie_weights()
    # What is computed, not loaded, must not stay on the meta device.
    peer.model.rotary_emb = type(peer.model.rotary_emb)(config)
    return peer.eval()


def _half_split(rows: np.ndarray, n_heads: int) -> np.ndarray:
    """Rows that llama.cpp's converter has interleaved, put back."""
    return (
        rows.reshape(n_heads, rows.shape[0] // n_heads // 2, 2, *rows.shape[1:])
        .swapaxes(1, 2)
        .reshape(rows.shape)
    )
