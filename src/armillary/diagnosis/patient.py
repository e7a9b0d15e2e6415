"""A decoder as plain data, and what a text costs it: what trials of other conventions run on.

A trial changes the configuration or a few tensors and computes the losses again. Tensors are
shared between trials, so one costs a pass over a short text and no memory to speak of.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from armillary.checkpoints.checkpoint import Checkpoint
from armillary.config import DecoderConfig
from armillary.decoder import Decoder
from armillary.weights import read

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Patient:
    """A configuration and the tensors under our parameter names.

    `source_config` is the one that the file states. A reader that brought rows to another order
    did so by its head counts, which a trial of other counts must undo.
    """

    config: DecoderConfig
    tensors: Tensors
    source_config: DecoderConfig
    relaid: bool = False
    """Whether the reader brought the rows of Q and K from interleaved to half-split."""

    def with_config(self, config: DecoderConfig) -> "Patient":
        """The same tensors under another configuration."""
        return replace(self, config=config)

    def with_tensors(self, changed: Tensors) -> "Patient":
        """The same with some tensors replaced."""
        return replace(self, tensors={**self.tensors, **changed})

    def decoder(self) -> Decoder:
        """A decoder on these tensors, none of them copied.

        Raises KeyError for a parameter without a tensor, ValueError for one of another shape.
        """
        with torch.device("meta"):
            decoder = Decoder(self.config)
        for name, parameter in list(decoder.named_parameters()):
            tensor = self.tensors[name]
            if tensor.shape != parameter.shape:
                raise ValueError(
                    f"{name}: shape {tuple(tensor.shape)}, {tuple(parameter.shape)} needed"
                )
            module, _, attribute = name.rpartition(".")
            filled = nn.Parameter(tensor, requires_grad=False)
            setattr(decoder.get_submodule(module), attribute, filled)
        return decoder.eval()


def read_patient(checkpoint: Checkpoint, dtype: torch.dtype = torch.float32) -> Patient:
    """The tensors of a checkpoint, all brought to one type."""
    tensors = {name: read(tensor, dtype) for name, tensor in checkpoint.tensors.items()}
    relaid = checkpoint.format == "gguf"
    return Patient(checkpoint.config, tensors, checkpoint.config, relaid)


@torch.no_grad()
def losses(decoder: Decoder, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
    """Nats for each next token: tokens (B, T) → (B, T − 1) in float32.

    `positions` (T,) or (B, T) stand for those counted from 0.
    """
    return _cross_entropy(decoder(tokens, positions=positions), tokens)


def losses_apart(patient: Patient, rows: Tensor, distance: int) -> Tensor:
    """Nats for the second half of each row (R, T), put `distance` positions further on."""
    length = rows.shape[1]
    places = torch.arange(length)
    places[length // 2 :] += distance
    return losses(patient.decoder(), rows, places)[:, length // 2 :]


def _cross_entropy(logits: Tensor, tokens: Tensor) -> Tensor:
    flat = logits[:, :-1].float().flatten(0, 1)
    each = F.cross_entropy(flat, tokens[:, 1:].flatten(), reduction="none")
    return each.view(tokens.shape[0], -1)


class Course:
    """What each layer of a decoder is given while it reads a text.

    A trial that changes one layer begins at that layer, with what the ones before it gave.
    """

    @torch.no_grad()
    def __init__(self, decoder: Decoder, tokens: Tensor) -> None:
        self.decoder, self.tokens = decoder, tokens
        self._given: list[tuple[Any, ...]] = []
        hooks = [
            layer.register_forward_pre_hook(lambda _, given: self._given.append(given))
            for layer in decoder.layers
        ]
        try:
            self.losses = losses(decoder, tokens)
        finally:
            for hook in hooks:
                hook.remove()

    @torch.no_grad()
    def losses_with(self, changed: Mapping[int, nn.Module | None]) -> Tensor:
        """The losses when some layers are other modules, or are passed over (None)."""
        first = min(changed)
        x = self._given[first][0]
        for number in range(first, len(self._given)):
            layer = changed.get(number, self.decoder.layers[number])
            if layer is not None:
                x = layer(x, *self._given[number][1:])
        logits = self.decoder.project(self.decoder.final_norm(x))
        return _cross_entropy(logits, self.tokens)


def layer_tensors(tensors: Tensors, number: int) -> Iterator[tuple[str, Tensor]]:
    """The tensors of one layer, by their names inside it."""
    prefix = f"layers.{number}."
    for name, tensor in tensors.items():
        if name.startswith(prefix):
            yield name.removeprefix(prefix), tensor
