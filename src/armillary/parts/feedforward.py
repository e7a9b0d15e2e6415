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


def _identity(z: Tensor) -> Tensor:
    return z


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": F.relu,
    "sigmoid": torch.sigmoid,
    "identity": _identity,
}


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
        self.fused = config.fused
        self.activation = ACTIVATIONS[config.activation]
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., d) → (..., d)."""
        gate, up = self.gate_up(x).chunk(2, dim=-1) if self.fused else (self.gate(x), self.up(x))
        out: Tensor = self.down(self.dropout(self.activation(gate) * up))
        return out


def build_feedforward(d: int, config: FeedForwardConfig) -> MLP | GLU:
    """The feed-forward network that a configuration describes, for a model of width d."""
    return MLP(d, config) if config.kind == "mlp" else GLU(d, config)
