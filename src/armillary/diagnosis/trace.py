"""What a decoder gives at each step of each layer on one input, recorded by hooks.

A step is named as `armillary inspect` names it. Queries and keys are told half-split, whatever the
pairing of channels that the model rotates by, so that models of both can be compared.
"""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from armillary.config import AttentionConfig
from armillary.decoder import Decoder
from armillary.parts.rotary import Rotation, rotate
from armillary.rope_layout import half_split_from_interleaved

Place = tuple[int | None, str]
"""The layer, None before and after all of them, and the step."""

Trace = dict[Place, Tensor]

EMBEDDING, FINAL_NORM, LOGITS = (None, "embedding"), (None, "final norm"), (None, "logits")
LAYER_STEPS = (
    *("norm 1", "q", "k", "v", "q rotated", "k rotated", "heads", "attention", "residual"),
    *("norm 2", "gate", "up", "gated", "down", "output"),
)


def places(n_layers: int) -> list[Place]:
    """All places in the order of the computation."""
    inner: list[Place] = [(layer, step) for layer in range(n_layers) for step in LAYER_STEPS]
    return [EMBEDDING, *inner, FINAL_NORM, LOGITS]


class Recorder:
    """Notes tensors by their places, from hooks that end with the context."""

    def __init__(self) -> None:
        self.trace: Trace = {}
        self._hooks = ExitStack()

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, *_: object) -> None:
        self._hooks.close()

    def note(self, place: Place, value: Tensor) -> None:
        """Keep a tensor (1, T, …) as (T, …) in float64."""
        self.trace[place] = value.detach()[0].double().cpu()

    def of_output(self, module: nn.Module | None, place: Place) -> None:
        """Note what a module gives; a part that a model lacks gives nothing."""
        if module is not None:
            self.on(module, lambda _given, out: self.note(place, _first(out)))

    def of_input(self, module: nn.Module | None, place: Place) -> None:
        """Note the first thing that a module is given."""
        if module is not None:
            hook = module.register_forward_pre_hook(
                lambda _module, given, named: self.note(
                    place, given[0] if given else named["hidden_states"]
                ),
                with_kwargs=True,
            )
            self._hooks.callback(hook.remove)

    def on(self, module: nn.Module, take: Callable[[Any, Any], None]) -> None:
        """Call `take(given, given back)` after each use of a module."""
        hook = module.register_forward_hook(lambda _module, given, out: take(given, out))
        self._hooks.callback(hook.remove)


def _first(out: Any) -> Tensor:
    tensor: Tensor = out[0] if isinstance(out, tuple) else out
    return tensor


@torch.no_grad()
def trace_decoder(decoder: Decoder, tokens: Tensor) -> Trace:
    """Run tokens (1, T) and keep every step, (T, …) in float64."""
    with Recorder() as recorder:
        for number, layer in enumerate(decoder.layers):
            _watch_layer(recorder, number, layer)
        recorder.of_input(decoder.layers[0], EMBEDDING)
        recorder.of_output(decoder.final_norm, FINAL_NORM)
        recorder.note(LOGITS, decoder(tokens))
    return recorder.trace


def _watch_layer(recorder: Recorder, number: int, layer: Any) -> None:
    attention, feedforward, config = layer.attention, layer.feedforward, layer.attention.config
    recorder.of_output(layer.norm1, (number, "norm 1"))
    for part in ("q", "k"):
        named = getattr(attention, part)
        recorder.on(named, _channels(recorder, (number, part), config))
    recorder.of_output(attention.v, (number, "v"))
    recorder.on(attention, _rotated(recorder, number, attention))
    recorder.of_input(attention.out, (number, "heads"))
    recorder.of_output(attention, (number, "attention"))
    if layer.residual == "sequential" and not isinstance(layer.norm2, nn.Identity):
        recorder.of_input(layer.norm2, (number, "residual"))
    recorder.of_output(layer.norm2, (number, "norm 2"))
    recorder.of_output(getattr(feedforward, "gate", None), (number, "gate"))
    recorder.of_output(getattr(feedforward, "up", None), (number, "up"))
    down = getattr(feedforward, "down", None)
    recorder.of_input(down, (number, "gated"))
    recorder.of_output(feedforward, (number, "down"))
    recorder.of_output(layer, (number, "output"))


def _channels(
    recorder: Recorder, place: Place, config: AttentionConfig
) -> Callable[[Any, Any], None]:
    return lambda _given, out: recorder.note(place, _half_split(out, config))


def _half_split(x: Tensor, config: AttentionConfig) -> Tensor:
    """x (1, T, n·d_h) with the channels of each head in the order of halves."""
    rotary = config.rotary
    if rotary is None or rotary.layout == "half_split":
        return x
    order = half_split_from_interleaved(
        x.shape[-1] // config.d_head, config.d_head, rotary.d_rotary
    )
    return x[..., torch.from_numpy(order)]


def _rotated(recorder: Recorder, number: int, attention: Any) -> Callable[[Any, Any], None]:
    """Queries and keys once more, by the rotation that the layer was given."""
    config: AttentionConfig = attention.config

    def take(given: Any, _out: Any) -> None:
        x, turn = given[0], given[2] if len(given) > 2 else None
        for part in ("q", "k"):
            heads = getattr(attention, part)(x).unflatten(-1, (-1, config.d_head)).transpose(1, 2)
            norm = getattr(attention, f"{part}_norm")
            heads = heads if norm is None else norm(heads)
            if isinstance(turn, Rotation):
                heads = rotate(heads, turn)
            joined = heads.transpose(1, 2).flatten(2)
            recorder.note((number, f"{part} rotated"), _half_split(joined, config))

    return take
