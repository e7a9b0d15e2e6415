"""Half-precision products over float32 weights.

Weights, gradients and the optimiser's state stay in float32; `autocast` runs the products in the
narrower type. float16 has so few small numbers that losses must be scaled up before the backward
pass and gradients down again before they are clipped: it always comes with its scaler here.
"""

from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from armillary.memory import give_back
from armillary.training.checks import check_choice
from armillary.training.optimizer import GradientNorm, clip_gradients

Compute = Literal["float32", "bfloat16", "float16"]


class Precision:
    """What products are computed in, and the three places where a loop must know of it.

        precision = Precision("bfloat16", device="cpu")
        with precision.autocast():
            loss = ...
        precision.backward(loss)
        norm = precision.step(optimizer, max_norm=1.0)

    Raises ConfigError for a type that is not known. Source: Micikevicius et al. 2018, §3.
    """

    def __init__(self, compute: Compute = "float32", device: torch.device | str = "cpu") -> None:
        check_choice("compute", compute, ("float32", "bfloat16", "float16"))
        self.device_type = torch.device(device).type
        self.dtype: torch.dtype = getattr(torch, compute)
        self.scaler = torch.amp.GradScaler(self.device_type, enabled=compute == "float16")

    def autocast(self) -> torch.autocast:
        """A context in which products are in the type; nothing changes for float32."""
        enabled = self.dtype != torch.float32
        # torch warns about float32 as a type to cast to, enabled or not.
        dtype = self.dtype if enabled else torch.bfloat16
        return torch.autocast(self.device_type, dtype=dtype, enabled=enabled)

    def backward(self, loss: Tensor) -> None:
        """Add the loss's gradients to the parameters', scaled when the type needs it."""
        scaled: Tensor = self.scaler.scale(loss)
        scaled.backward()  # type: ignore[no-untyped-call]

    def step(self, optimizer: Optimizer, max_norm: float | None = None) -> GradientNorm:
        """Unscale, clip, step, and clear the gradients; return their norm before clipping.

        With a gradient that is not finite, weights and state stay as they are, and the scaler
        comes down: look at `is_finite` of the result.
        """
        self.scaler.unscale_(optimizer)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        norm = clip_gradients(parameters, max_norm)
        if norm.is_finite:
            self.scaler.step(optimizer)
        self.scaler.update()
        optimizer.zero_grad(set_to_none=True)
        # Else the gradients' pieces would add up with the activations of the next step.
        give_back()
        return norm

    def state_dict(self) -> dict[str, Any]:
        """The scaler's state, empty but for float16."""
        return self.scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` gave."""
        self.scaler.load_state_dict(state)
