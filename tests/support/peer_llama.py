"""Tiny Llama models of transformers, in float64 throughout, and what a whole pass of them gives.

transformers computes rotary angles, norms and the softmax of its eager attention in float32
whatever the model's type, which would leave a comparison in float64 six digits. `in_float64` runs
the peer's own code with float32 read as float64; nothing of its mathematics is rewritten.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F

from armillary.data import IGNORED, Batch

WINDOW = 16
# d_model 48 with heads of 10: not 48 / 6. transformers refuses a width that 6 does not divide.
SIZES = {
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}
_SCALED = {"rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": WINDOW}
_YARN = _SCALED | {"rope_type": "yarn", "beta_fast": 2.0}
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 100.0},
    "linear": {"rope_type": "linear", "rope_theta": 100.0, "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 2.0},
    "yarn": _YARN,
    "yarn, bounds not rounded": _YARN | {"truncate": False},
    "yarn, attention factor": _YARN | {"attention_factor": 0.7},
    "yarn, two mscales": _YARN | {"mscale": 1.3, "mscale_all_dim": 0.8},
    "llama3": _SCALED | {"rope_type": "llama3", "low_freq_factor": 0.5, "high_freq_factor": 2.0},
    "longrope": _SCALED
    | {
        "rope_type": "longrope",
        "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4],
        "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0],
    },
}


def config_entries(rope: str, **entries: Any) -> dict[str, Any]:
    """The arguments of a LlamaConfig; a dynamic one states the original window as its own."""
    window = {"max_position_embeddings": WINDOW} if rope == "dynamic" else {}
    return SIZES | window | {"rope_parameters": dict(ROPES[rope])} | entries


def build_peer(entries: Mapping[str, Any], dtype: torch.dtype, seed: int = 0) -> Any:
    """A LlamaForCausalLM with every parameter random and large, norms around 1."""
    from transformers import LlamaConfig, LlamaForCausalLM

    peer = LlamaForCausalLM(LlamaConfig(**entries)).to(dtype).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in peer.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(0.3 * noise + ("norm" in name))
    return peer


def save_peer(peer: Any, directory: Path) -> Path:
    """What `save_pretrained` writes, quietly."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    peer.save_pretrained(directory)
    return directory


def load_peer(directory: Path, dtype: torch.dtype) -> Any:
    """What transformers makes of a directory, quietly."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()


@torch.no_grad()
def whole_pass(peer: Any, tokens: Tensor, **arguments: Any) -> Tensor:
    """tokens (B, T) → logits (B, T, V), without a cache."""
    logits: Tensor = peer(tokens, use_cache=False, **arguments).logits
    return logits


@torch.no_grad()
def held_out_loss_of(peer: Any, batches: Iterable[Batch]) -> float:
    """Nats per labelled token of packed rows, each piece of a document read by itself."""
    nats, targets = 0.0, 0
    for batch in batches:
        for tokens, labels, documents in zip(
            batch.tokens, batch.labels, batch.documents, strict=True
        ):
            for document in range(documents.max() + 1):
                own = documents == document
                ids, wanted = torch.from_numpy(tokens[own])[None], torch.from_numpy(labels[own])
                logits = whole_pass(peer, ids)[0].float()
                nats += float(F.cross_entropy(logits, wanted, reduction="sum"))
                targets += int((wanted != IGNORED).sum())
    return nats / targets


class _Float64Torch:
    """The module torch, except that float32 is float64."""

    def __getattr__(self, name: str) -> Any:
        return torch.float64 if name in {"float", "float32"} else getattr(torch, name)


@contextlib.contextmanager
def in_float64() -> Iterator[None]:
    """Let transformers' Llama compute everything in float64; build and run it inside."""
    from transformers import modeling_rope_utils
    from transformers.models.llama import modeling_llama

    before = torch.get_default_dtype()
    # The dynamic rule divides the length, an integer tensor: that is done in the default type.
    torch.set_default_dtype(torch.float64)
    try:
        with (
            mock.patch.object(modeling_llama, "torch", _Float64Torch()),
            mock.patch.object(modeling_rope_utils, "torch", _Float64Torch()),
            mock.patch.object(Tensor, "float", Tensor.double),
        ):
            yield
    finally:
        torch.set_default_dtype(before)
