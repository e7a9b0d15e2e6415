"""Normalisation over the last dimension.

Knows nothing of where in a layer it is used.
"""

import torch
from torch import Tensor, nn

from armillary.config import NormConfig


class RMSNorm(nn.Module):
    """Scale each feature vector to unit root mean square, then by a learned weight.

    Shapes: x (..., d) → (..., d), in x's type. The statistic is taken in float32 at least.
    `offset` is added to the weight before use (1.0 in Gemma, whose files store weight − 1).
    `cast_before_weight` says whether the normalised vector goes back to x's type before the
    weight is applied (Llama) or after (Gemma).
    Raises ValueError when x's last dimension is not d.
    Source: Zhang and Sennrich 2019, §4.
    """

    def __init__(
        self, d: int, eps: float = 1e-5, offset: float = 0.0, cast_before_weight: bool = True
    ) -> None:
        super().__init__()
        self.eps = eps
        self.offset = offset
        self.cast_before_weight = cast_before_weight
        self.weight = nn.Parameter(torch.full((d,), 1.0 - offset))

    def forward(self, x: Tensor) -> Tensor:
        """x (..., d) → (..., d)."""
        _check_width(x, self.weight)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        normal = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        if self.cast_before_weight:
            normal = normal.to(x.dtype)
        return (normal * self._scale(wide.dtype)).to(x.dtype)

    def _scale(self, wide: torch.dtype) -> Tensor:
        """The weight as multiplied by; in a narrow type, 1 + 15.8125 would be 16.75."""
        return self.weight.to(wide) + self.offset if self.offset else self.weight

    def extra_repr(self) -> str:
        """Sizes and options, for printing."""
        return f"{self.weight.numel()}, eps={self.eps}, offset={self.offset}"


class LayerNorm(nn.Module):
    """Subtract the mean, scale to unit variance, then a learned weight and perhaps a bias.

    Shapes: x (..., d) → (..., d), in x's type. Statistics in float32 at least.
    Raises ValueError when x's last dimension is not d.
    Source: Ba et al. 2016, §3.
    """

    def __init__(self, d: int, eps: float = 1e-5, bias: bool = True) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(d))
        self.bias = nn.Parameter(torch.zeros(d)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """x (..., d) → (..., d)."""
        _check_width(x, self.weight)
        wide = torch.promote_types(x.dtype, torch.float32)
        bias = None if self.bias is None else self.bias.to(wide)
        return nn.functional.layer_norm(
            x.to(wide), self.weight.shape, self.weight.to(wide), bias, self.eps
        ).to(x.dtype)

    def extra_repr(self) -> str:
        """Sizes and options, for printing."""
        return f"{self.weight.numel()}, eps={self.eps}, bias={self.bias is not None}"


def build_norm(config: NormConfig, d: int) -> RMSNorm | LayerNorm:
    """The norm that a configuration describes, for vectors of width d."""
    if config.kind == "layer":
        return LayerNorm(d, eps=config.eps, bias=config.bias)
    return RMSNorm(
        d, eps=config.eps, offset=config.offset, cast_before_weight=config.cast_before_weight
    )


def _check_width(x: Tensor, weight: Tensor) -> None:
    if x.shape[-1] != weight.shape[0]:
        raise ValueError(
            f"input has width {x.shape[-1]}, but the norm was made for {weight.shape[0]}"
        )
