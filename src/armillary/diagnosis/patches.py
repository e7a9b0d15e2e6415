"""A change of the configuration, in the keys of the file that the model is in.

A table a format; what a format has no key for is left out, and the remedy in words stands alone.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from armillary.checkpoints.gguf_file import read_gguf_file
from armillary.checkpoints.huggingface import family_for
from armillary.checkpoints.rotary_keys import write_gguf_rotary, write_huggingface_rotary
from armillary.config import DecoderConfig, LayerConfig
from armillary.diagnosis.conventions import every_layer, first_rotary
from armillary.errors import ConfigError

_HUGGINGFACE = {
    "rope_base": "rope_theta",
    "eps": "rms_norm_eps",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "d_head": "head_dim",
    "tie_head": "tie_word_embeddings",
    "activation": "hidden_act",
}
_GGUF = {
    "rope_base": "rope.freq_base",
    "eps": "attention.layer_norm_rms_epsilon",
    "n_heads": "attention.head_count",
    "n_kv_heads": "attention.head_count_kv",
    "d_head": "attention.key_length",
}
_OURS = {
    "rope_base": "layers[*].attention.rotary.base",
    "rotary.layout": "layers[*].attention.rotary.layout",
    "scaling": "layers[*].attention.rotary.scaling",
    "eps": "layers[*].norm.eps",
    "n_heads": "layers[*].attention.n_heads",
    "n_kv_heads": "layers[*].attention.n_kv_heads",
    "d_head": "layers[*].attention.d_head",
    "norm.offset": "layers[*].norm.offset",
    "norm.kind": "layers[*].norm.kind",
    "norm_placement": "layers[*].norm_placement",
    "residual": "layers[*].residual",
    "attention.scale": "layers[*].attention.scale",
    "activation": "layers[*].feedforward.activation",
    "embedding_scale": "embedding_scale",
    "final_soft_cap": "final_soft_cap",
    "tie_head": "tie_head",
}


def patch_for(
    format_name: str, source: Path, patch: Mapping[str, Any], config: DecoderConfig
) -> tuple[dict[str, Any], str]:
    """The keys and values of a change, and the file that they stand in.

    Empty where the format has no key for any of them.
    """
    if "add_bos_token" in patch:
        return _beginning(format_name, patch)
    if format_name == "huggingface":
        keys = {_HUGGINGFACE[key]: value for key, value in patch.items() if key in _HUGGINGFACE}
        return keys | _huggingface_scaling(patch, config), "config.json"
    if format_name == "gguf":
        prefix = read_gguf_file(source).metadata.get("general.architecture", "llama")
        keys = {_GGUF[key]: value for key, value in patch.items() if key in _GGUF}
        keys |= _gguf_scaling(patch, config)
        return {f"{prefix}.{key}": value for key, value in keys.items()}, source.name
    keys = {_OURS[key]: value for key, value in patch.items() if key in _OURS}
    if "scaling" in patch:
        keys[_OURS["scaling"]] = _plain(patch["scaling"])
    return keys, "config.json"


def _beginning(format_name: str, patch: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    if format_name == "gguf":
        return {"tokenizer.ggml.add_bos_token": patch["add_bos_token"]}, "the file's metadata"
    return dict(patch), "tokenizer_config.json"


def _huggingface_scaling(patch: Mapping[str, Any], config: DecoderConfig) -> dict[str, Any]:
    if "scaling" not in patch:
        return {}
    try:
        keys = family_for(config).huggingface.rotary
        if keys is None:
            return {}
        return write_huggingface_rotary(_scaled(config, patch["scaling"]), keys)
    except ConfigError:
        return {}


def _scaled(config: DecoderConfig, scaling: Any) -> DecoderConfig:
    """The configuration with another rule wherever it rotates."""

    def changed(layer: LayerConfig) -> LayerConfig:
        rotary = layer.attention.rotary
        if rotary is None:
            return layer
        scaled = {"rotary": rotary.model_copy(update={"scaling": scaling})}
        return layer.model_copy(update={"attention": layer.attention.model_copy(update=scaled)})

    return config.model_copy(update={"layers": every_layer(config, changed)})


def _gguf_scaling(patch: Mapping[str, Any], config: DecoderConfig) -> dict[str, Any]:
    rotary = first_rotary(config)
    if "scaling" not in patch or rotary is None:
        return {}
    changed = rotary.model_copy(update={"scaling": patch["scaling"]})
    try:
        keys, tensors = write_gguf_rotary(changed, config.max_positions)
    except ConfigError:
        return {}
    divisors = {name: [round(float(x), 6) for x in np.ravel(t)] for name, t in tensors.items()}
    return {**keys, **divisors}


def _plain(rule: Any) -> dict[str, Any]:
    return {"kind": rule.kind, **asdict(rule)}


def patch_text(patch: Mapping[str, Any]) -> str:
    """Keys and values as they are written."""
    return ", ".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in patch.items())
