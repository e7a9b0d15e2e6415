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
    weight is applied (Llama) or after (Gemma). With several `heads`, x (..., heads, T, d) has
    weights of its own for each: (heads·d,).
    Raises ValueError when x's last dimension is not d.
    Source: Zhang and Sennrich 2019, §4.
    """

    def __init__(
        self,
        d: int,
        eps: float = 1e-5,
        offset: float = 0.0,
        cast_before_weight: bool = True,
        heads: int = 1,
    ) -> None:
        super().__init__()
        self.d = d
        self.eps = eps
        self.offset = offset
        self.cast_before_weight = cast_before_weight
        self.weight = nn.Parameter(torch.full((heads * d,), 1.0 - offset))

    def forward(self, x: Tensor) -> Tensor:
        """x (..., d) → (..., d)."""
        _check_width(x, self.d)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        normal = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        if self.cast_before_weight:
            normal = normal.to(x.dtype)
        return (normal * self._scale(wide.dtype)).to(x.dtype)

    def _scale(self, wide: torch.dtype) -> Tensor:
        """The weight as multiplied by; in a narrow type, 1 + 15.8125 would be 16.75."""
        weight = _of_heads(self.weight, self.d)
        return weight.to(wide) + self.offset if self.offset else weight

    def extra_repr(self) -> str:
        """Sizes and options, for printing."""
        return f"{self.weight.numel()}, eps={self.eps}, offset={self.offset}"


class LayerNorm(nn.Module):
    """Subtract the mean, scale to unit variance, then a learned weight and perhaps a bias.

    Shapes: x (..., d) → (..., d), in x's type. Statistics in float32 at least. `heads` as in
    `RMSNorm`.
    Raises ValueError when x's last dimension is not d.
    Source: Ba et al. 2016, §3.
    """

    def __init__(self, d: int, eps: float = 1e-5, bias: bool = True, heads: int = 1) -> None:
        super().__init__()
        self.d = d
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(heads * d))
        self.bias = nn.Parameter(torch.zeros(heads * d)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """x (..., d) → (..., d)."""
        _check_width(x, self.d)
        wide = torch.promote_types(x.dtype, torch.float32)
        weight, bias = self.weight.to(wide), None if self.bias is None else self.bias.to(wide)
        normalise = nn.functional.layer_norm
        if weight.shape[0] == self.d:
            return normalise(x.to(wide), (self.d,), weight, bias, self.eps).to(x.dtype)
        normal = normalise(x.to(wide), (self.d,), eps=self.eps) * _of_heads(weight, self.d)
        return (normal if bias is None else normal + _of_heads(bias, self.d)).to(x.dtype)

    def extra_repr(self) -> str:
        """Sizes and options, for printing."""
        return f"{self.weight.numel()}, eps={self.eps}, bias={self.bias is not None}"


def build_norm(config: NormConfig, d: int, heads: int = 1) -> RMSNorm | LayerNorm:
    """The norm that a configuration describes, for vectors of width d, or for such heads."""
    if config.kind == "layer":
        return LayerNorm(d, eps=config.eps, bias=config.bias, heads=heads)
    return RMSNorm(
        d,
        eps=config.eps,
        offset=config.offset,
        cast_before_weight=config.cast_before_weight,
        heads=heads,
    )


def _of_heads(weight: Tensor, d: int) -> Tensor:
    """(d,) as it is; (heads·d,) → (heads, 1, d)."""
    return weight if weight.shape[0] == d else weight.view(-1, 1, d)


def _check_width(x: Tensor, d: int) -> None:
    if x.shape[-1] != d:
        raise ValueError(f"input has width {x.shape[-1]}, but the norm was made for {d}")
