"""Tiny Llama models as files, made by the formats' own libraries and not by ours.

Unequal sizes: 6 query heads on 2 key/value heads of width 10, d_model 40, d_ff 24, vocabulary 61.
"""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import safetensors.numpy

H, H_KV, D_HEAD, D_MODEL, D_FF, VOCABULARY, LAYERS = 6, 2, 10, 40, 24, 61, 2

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": D_MODEL,
    "intermediate_size": D_FF,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": H,
    "num_key_value_heads": H_KV,
    "head_dim": D_HEAD,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}


def huggingface_tensors(seed: int = 0, biases: bool = False) -> dict[str, np.ndarray]:
    """Random weights under the names of Hugging Face's Llama, half-split."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, D_MODEL)}
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        linear = {
            "self_attn.q_proj": (H * D_HEAD, D_MODEL),
            "self_attn.k_proj": (H_KV * D_HEAD, D_MODEL),
            "self_attn.v_proj": (H_KV * D_HEAD, D_MODEL),
            "self_attn.o_proj": (D_MODEL, H * D_HEAD),
            "mlp.gate_proj": (D_FF, D_MODEL),
            "mlp.up_proj": (D_FF, D_MODEL),
            "mlp.down_proj": (D_MODEL, D_FF),
        }
        shapes[f"{layer}.input_layernorm.weight"] = (D_MODEL,)
        shapes[f"{layer}.post_attention_layernorm.weight"] = (D_MODEL,)
        for name, shape in linear.items():
            shapes[f"{layer}.{name}.weight"] = shape
            if biases:
                shapes[f"{layer}.{name}.bias"] = shape[:1]
    shapes["model.norm.weight"] = (D_MODEL,)
    shapes["lm_head.weight"] = (VOCABULARY, D_MODEL)
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def write_huggingface_directory(
    directory: Path,
    tensors: dict[str, np.ndarray] | None = None,
    generation: dict[str, Any] | None = None,
    **entries: Any,
) -> Path:
    """A directory with a single safetensors file; an entry that is None is left out."""
    directory.mkdir(exist_ok=True)
    config = {key: value for key, value in (CONFIG | entries).items() if value is not None}
    (directory / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    tensors = huggingface_tensors() if tensors is None else tensors
    safetensors.numpy.save_file(tensors, directory / "model.safetensors")
    return directory


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
METADATA: dict[str, Any] = {
    "block_count": LAYERS,
    "context_length": 64,
    "embedding_length": D_MODEL,
    "feed_forward_length": D_FF,
    "attention.head_count": H,
    "attention.head_count_kv": H_KV,
    "attention.key_length": D_HEAD,
    "attention.value_length": D_HEAD,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 100.0,
    "rope.dimension_count": D_HEAD,
    "vocab_size": VOCABULARY,
}


def interleaved(rows: np.ndarray, n_heads: int) -> np.ndarray:
    """Rows of a query or key projection as a GGUF converter stores them."""
    halves = rows.reshape(n_heads, 2, -1, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)


def gguf_tensors(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same weights as a GGUF file has them."""
    result = {}
    for name, rows in tensors.items():
        array = rows
        stem, _, kind = name.rpartition(".")
        prefix = ""
        if stem.startswith("model.layers."):
            number, _, stem = stem.removeprefix("model.layers.").partition(".")
            prefix = f"blk.{number}."
        if stem in {"self_attn.q_proj", "self_attn.k_proj"}:
            array = interleaved(rows, H if "q_proj" in stem else H_KV)
        result[f"{prefix}{GGUF_NAMES[stem]}.{kind}"] = array
    return result


def write_gguf(
    path: Path,
    tensors: dict[str, np.ndarray] | None = None,
    architecture: str = "llama",
    encoding: str = "F32",
    general: dict[str, Any] | None = None,
    **entries: Any,
) -> Path:
    """A GGUF file; an entry whose value is None is left out, dots in its name are written `__`.

    Matrices are written in `encoding` where their rows are whole blocks, all else in F32.
    """
    writer = gguf.GGUFWriter(path, architecture)
    changes = {key.replace("__", "."): value for key, value in entries.items()}
    named = {f"{architecture}.{key}": value for key, value in (METADATA | changes).items()}
    for key, value in (named | (general or {})).items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif value is not None:
            writer.add_array(key, value)
    tensors = gguf_tensors(huggingface_tensors()) if tensors is None else tensors
    kind = gguf.GGMLQuantizationType[encoding]
    for name, array in tensors.items():
        if encoding != "F32" and array.ndim == 2 and not array.shape[1] % 32:
            writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
