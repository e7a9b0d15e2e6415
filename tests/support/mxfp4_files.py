"""A tiny gpt-oss in MXFP4, as the released ones are published."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import safetensors.torch
import torch

from support.peer_families import build_peer, in_float64
from support.peer_llama import save_peer

HIDDEN, INNER = 96, 64
STACKS = ("gate_up_proj", "down_proj")
CONFIG = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": ["model.layers.*.self_attn", "model.embed_tokens", "lm_head"],
}
Tensors = dict[str, torch.Tensor]


def packed(shape: tuple[int, ...], seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks and scales for (E, rows, columns): every pair of numbers, exponents about 2^-3."""
    random = np.random.default_rng(seed)
    *rows, columns = shape
    blocks = random.integers(0, 256, (*rows, columns // 32, 16)).astype(np.uint8)
    scales = random.integers(122, 126, (*rows, columns // 32)).astype(np.uint8)
    return torch.from_numpy(blocks), torch.from_numpy(scales)


def transformers_numbers(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    return convert_moe_packed_tensors(blocks, scales)


def published(
    directory: Path,
    change: Callable[[Tensors], None] = lambda _: None,
    quantization: Mapping[str, Any] = MappingProxyType({}),
    **entries: Any,
) -> tuple[Path, Any]:
    """A directory, with its tensors changed, and transformers' model of the same numbers.

    `quantization` and `entries` add to the configuration.
    """
    with in_float64("gpt-oss"):
        peer = build_peer(
            "gpt-oss", "plain", hidden_size=HIDDEN, intermediate_size=INNER, **entries
        )
    save_peer(peer, directory)
    tensors = safetensors.torch.load_file(directory / "model.safetensors")
    kept = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    seed = 0
    for name in [name for name in kept if name.endswith(STACKS)]:
        stack, n_in, n_out = kept.pop(name).shape
        blocks, scales = packed((stack, n_out, n_in), seed := seed + 1)
        kept |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    numbers = {
        name: tensor.double() for name, tensor in kept.items() if tensor.dtype != torch.uint8
    }
    for name in [name for name in kept if name.endswith("_blocks")]:
        stem = name.removesuffix("_blocks")
        numbers[stem] = transformers_numbers(kept[name], kept[f"{stem}_scales"]).double()
    peer.load_state_dict(numbers)
    change(kept)
    safetensors.torch.save_file(kept, directory / "model.safetensors")
    path = directory / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"quantization_config": CONFIG | quantization}))
    return directory, peer
