"""The same steps of a causal model of transformers, where a user has it installed.

The library is asked for by name when a user wants it, and never imported otherwise. What a model of
it has no module for (rotated queries) is left out; rotated keys are those of its cache.
"""

from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from armillary.diagnosis.trace import EMBEDDING, FINAL_NORM, LOGITS, Recorder, Trace
from armillary.errors import UserError


def load_peer(path: Path, dtype: torch.dtype) -> Any:
    """A model of transformers in evaluation mode, from a directory or a GGUF file.

    Raises UserError where the library is not installed or refuses the model.
    """
    try:
        library: Any = import_module("transformers")
    except ImportError as error:
        raise UserError(
            "transformers is not installed; install it (pip install transformers), or leave "
            "--with out"
        ) from error
    where, options = path, {}
    if path.is_file():
        where, options = path.parent, {"gguf_file": path.name}
    try:
        model = library.AutoModelForCausalLM.from_pretrained(
            where, dtype=dtype, attn_implementation="eager", local_files_only=True, **options
        )
    except Exception as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{path}: transformers cannot read it: {reason:.300}") from error
    return model.eval()


@torch.no_grad()
def trace_peer(model: Any, tokens: Tensor) -> Trace:
    """Run tokens (1, T) and keep every step that has a module, (T, …) in float64."""
    body = model.get_decoder() if hasattr(model, "get_decoder") else model.model
    with Recorder() as recorder:
        for number, layer in enumerate(body.layers):
            _watch_layer(recorder, number, layer)
        recorder.of_input(body.layers[0], EMBEDDING)
        recorder.of_output(body.norm, FINAL_NORM)
        out = model(tokens, use_cache=True)
        recorder.note(LOGITS, out.logits)
        for number, keys in enumerate(_cached_keys(out.past_key_values)):
            joined = keys.transpose(1, 2).flatten(2)
            recorder.note((number, "k rotated"), joined)
    return recorder.trace


def _watch_layer(recorder: Recorder, number: int, layer: Any) -> None:
    attention, feedforward = layer.self_attn, layer.mlp
    recorder.of_output(getattr(layer, "input_layernorm", None), (number, "norm 1"))
    for part in ("q", "k", "v"):
        recorder.of_output(getattr(attention, f"{part}_proj", None), (number, part))
    out = getattr(attention, "o_proj", None)
    recorder.of_input(out, (number, "heads"))
    recorder.of_output(attention, (number, "attention"))
    norm2 = getattr(layer, "post_attention_layernorm", None)
    recorder.of_input(norm2, (number, "residual"))
    recorder.of_output(norm2, (number, "norm 2"))
    for part in ("gate", "up"):
        recorder.of_output(getattr(feedforward, f"{part}_proj", None), (number, part))
    recorder.of_input(getattr(feedforward, "down_proj", None), (number, "gated"))
    recorder.of_output(feedforward, (number, "down"))
    recorder.of_output(layer, (number, "output"))


def _cached_keys(cache: Any) -> list[Tensor]:
    """Each layer's keys, (1, h_kv, T, d_h); none where the cache is of another kind."""
    layers = getattr(cache, "layers", None)
    keys = [getattr(layer, "keys", None) for layer in layers or ()]
    return [each for each in keys if each is not None]
