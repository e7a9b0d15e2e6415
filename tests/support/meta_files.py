"""Tiny models as Meta lays them out: params.json and files cut for several processes."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from armillary.config import DecoderConfig
from armillary.decoder import Decoder
from support.models import build

PARAMS: dict[str, Any] = {
    "dim": 40,
    "n_layers": 2,
    "n_heads": 6,
    "n_kv_heads": 2,
    "vocab_size": 62,
    "multiple_of": 8,
    "norm_eps": 1e-5,
    "rope_theta": 100.0,
    "max_seq_len": 64,
}
D_HEAD = 10  # which params.json does not say: dim must be n_heads · d_head
NAMES = {
    "embedding": "tok_embeddings",
    "final_norm": "norm",
    "head": "output",
    "norm1": "attention_norm",
    "norm2": "ffn_norm",
    "attention.q": "attention.wq",
    "attention.k": "attention.wk",
    "attention.v": "attention.wv",
    "attention.out": "attention.wo",
    "feedforward.gate": "feed_forward.w1",
    "feedforward.up": "feed_forward.w3",
    "feedforward.down": "feed_forward.w2",
}
COLUMNS = ("attention.wo.weight", "feed_forward.w2.weight")


def decoder(**entries: Any) -> Decoder:
    """A decoder in Meta's own layout, interleaved."""
    sizes: dict[str, Any] = {"d_model": 60, "n_heads": 6, "n_kv_heads": 2, "d_ff": 160}
    config = DecoderConfig.uniform(
        vocab_size=62,
        n_layers=2,
        max_positions=64,
        rope_base=100.0,
        rope_layout="interleaved",
        **(sizes | entries),
    )
    return build(config)


def state(of: Decoder) -> dict[str, Tensor]:
    """Its parameters by Meta's names."""
    found = {}
    for name, parameter in of.named_parameters():
        stem = name.removesuffix(".weight")
        prefix = ""
        if stem.startswith("layers."):
            _, number, stem = stem.split(".", 2)
            prefix = f"layers.{number}."
        found[f"{prefix}{NAMES[stem]}.weight"] = parameter.detach()
    return found


def write(
    directory: Path,
    tensors: dict[str, Tensor],
    *,
    files: int = 1,
    embedding_axis: int = 1,
    **params: Any,
) -> Path:
    """Write the tensors cut for so many processes."""
    directory.mkdir()
    entries = PARAMS | {"dim": 60} | params
    given = {key: value for key, value in entries.items() if value is not None}
    (directory / "params.json").write_text(json.dumps(given))
    for number in range(files):
        part = {
            name: _cut(name, tensor, number, files, embedding_axis)
            for name, tensor in tensors.items()
        }
        torch.save(part, directory / f"consolidated.{number:02}.pth")
    return directory


def _cut(name: str, tensor: Tensor, number: int, files: int, embedding_axis: int) -> Tensor:
    if tensor.dim() == 1:
        return tensor.clone()
    axis = 1 if name.endswith(COLUMNS) else 0
    if name == "tok_embeddings.weight":
        axis = embedding_axis
    return tensor.chunk(files, axis)[number].clone()
