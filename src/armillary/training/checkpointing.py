"""Activation checkpointing: a layer keeps its input alone and is computed again for its gradients.

Memory of activations falls from some thirty tensors a layer to one, for a third more work.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from armillary.decoder import Decoder


def checkpoint_layers(decoder: Decoder, enabled: bool = True) -> None:
    """Compute each layer again in the backward pass instead of keeping its activations, or not.

    Results and gradients are the same bits, dropout included: the second time draws the same
    random numbers. Names of parameters and state do not change. Without gradients, as with a
    cache, nothing is computed twice.
    """
    for layer in decoder.layers:
        # An instance's own forward stands before its class's; hooks of the layer stay outside.
        layer.__dict__.pop("forward", None)
        if enabled:
            layer.__dict__["forward"] = Again(layer.forward)


class Again:
    """A layer's forward under torch's checkpoint; a class, so that copies of the layer copy it."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.forward = forward

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """As the layer's."""
        if not torch.is_grad_enabled():
            return self.forward(*arguments, **named)
        return checkpoint(self.forward, *arguments, use_reentrant=False, **named)
