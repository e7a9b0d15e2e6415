"""Feed-forward networks: the two-matrix MLP and the gated family.

Each works on one feature vector at a time and knows nothing of positions.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from armillary.config import FeedForwardConfig


def _gelu_tanh(z: Tensor) -> Tensor:
    return F.gelu(z, approximate="tanh")


def _quick_gelu(z: Tensor) -> Tensor:
    return z * torch.sigmoid(1.702 * z)


def _identity(z: Tensor) -> Tensor:
    return z


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": _gelu_tanh,
    "quick_gelu": _quick_gelu,
    "relu": F.relu,
    "sigmoid": torch.sigmoid,
    "identity": _identity,
}


def gated(gate: Tensor, up: Tensor, config: FeedForwardConfig) -> Tensor:
    """What a gated unit's down projection reads: act(gate) ⊙ up, bounded where it is configured.

    Shapes: gate, up (..., f) → (..., f). Source: Shazeer 2020, §2; the bounds and the offset:
    OpenAI 2025 (gpt-oss), `torch/model.py`.
    """
    if config.limit is not None:
        gate, up = gate.clamp(max=config.limit), up.clamp(-config.limit, config.limit)
    if config.up_offset:
        up = up + config.up_offset
    return ACTIVATIONS[config.activation](gate) * up


class MLP(nn.Module):
    """act(x·W_up)·W_down.

    Shapes: x (..., d) → (..., d); W_up d × f, W_down f × d. Source: Vaswani et al. 2017, §3.3.
    """

    def __init__(self, d: int, config: FeedForwardConfig) -> None:
        super().__init__()
        self.up = nn.Linear(d, config.d_ff, bias=config.bias)
        self.down = nn.Linear(config.d_ff, d, bias=config.bias)
        self.activation = ACTIVATIONS[config.activation]
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., d) → (..., d)."""
        out: Tensor = self.down(self.dropout(self.activation(self.up(x))))
        return out


class GLU(nn.Module):
    """(act(x·W_g) ⊙ (x·W_u))·W_d; SwiGLU when the activation is silu.

    Shapes: x (..., d) → (..., d); W_g and W_u d × f, W_d f × d. When fused, one matrix of 2f
    outputs holds the gate half first. Source: Shazeer 2020, §2.
    """

    def __init__(self, d: int, config: FeedForwardConfig) -> None:
        super().__init__()
        if config.fused:
            self.gate_up = nn.Linear(d, 2 * config.d_ff, bias=config.bias)
        else:
            self.gate = nn.Linear(d, config.d_ff, bias=config.bias)
            self.up = nn.Linear(d, config.d_ff, bias=config.bias)
        self.down = nn.Linear(config.d_ff, d, bias=config.bias)
        self.config = config
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., d) → (..., d)."""
        fused = self.config.fused
        gate, up = self.gate_up(x).chunk(2, dim=-1) if fused else (self.gate(x), self.up(x))
        out: Tensor = self.down(self.dropout(gated(gate, up, self.config)))
        return out


def build_feedforward(d: int, config: FeedForwardConfig) -> MLP | GLU:
    """The feed-forward network that a configuration describes, for a model of width d."""
    return MLP(d, config) if config.kind == "mlp" else GLU(d, config)
