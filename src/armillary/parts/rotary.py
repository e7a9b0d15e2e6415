"""Rotary position embedding: queries and keys turn by their position, values never.

A rotation is computed from the configuration each time it is needed, in float32 or, for float64
models, in float64; only cos and sin are cast to the model's type. There is no table to outgrow and
no buffer that a cast, a meta device or a checkpoint could change.

Source: Su et al. 2021, §3.2.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from armillary.config import RotaryConfig
from armillary.rope_layout import half_split_from_interleaved, interleaved_from_half_split
from armillary.rope_scaling import RopeScaling, trained_frequencies

Layout = Literal["half_split", "interleaved"]


@dataclass(frozen=True)
class Rotation:
    """cos and sin of the angles of some positions, times the rule's attention factor.

    Shapes: cos, sin (1 or B, T, d_rotary / 2).
    """

    cos: Tensor
    sin: Tensor
    layout: Layout


def varies_with_length(rule: RopeScaling) -> bool:
    """Whether the rule's frequencies depend on how long the text is."""
    return rule.regime(1) != rule.regime(1 << 62)


def rotation(
    config: RotaryConfig,
    positions: Tensor,
    *,
    lengths: int | Sequence[int] | None = None,
    dtype: torch.dtype = torch.float32,
) -> Rotation:
    """The rotation of each position.

    Shapes: positions (T,) or (B, T), any integers in any order. `lengths`, one for all or one
    per row, is the text's length in tokens: needed by rules whose frequencies vary with it.
    Raises ValueError for positions of another shape or kind, or when a length is needed and
    missing.
    """
    if positions.dim() not in (1, 2) or positions.is_floating_point():
        raise ValueError(
            f"positions must be integers of shape (T,) or (B, T), not {positions.dtype} of shape "
            f"{tuple(positions.shape)}"
        )
    positions = positions.view(1, -1) if positions.dim() == 1 else positions
    theta = frequencies(config, lengths, dtype=dtype)
    if theta.shape[0] not in (1, positions.shape[0]) and positions.shape[0] != 1:
        raise ValueError(f"{len(theta)} lengths for {positions.shape[0]} rows of positions")
    return rotation_under(config, theta.to(positions.device), positions, dtype=dtype)


def rotation_under(
    config: RotaryConfig, theta: Tensor, positions: Tensor, *, dtype: torch.dtype
) -> Rotation:
    """The rotation of each position under frequencies that are there already.

    Shapes: theta (1 or B, d_rotary / 2), positions (1 or B, T).
    """
    wide = torch.promote_types(dtype, torch.float32)
    # Elementwise, so that autocast leaves it alone: a matrix product would run in bfloat16.
    angles = positions.to(wide).unsqueeze(-1) * theta.unsqueeze(-2)
    factor = config.scaling.attention_factor()
    return Rotation(
        cos=(angles.cos() * factor).to(dtype),
        sin=(angles.sin() * factor).to(dtype),
        layout=config.layout,
    )


def frequencies(
    config: RotaryConfig,
    lengths: int | Sequence[int] | None = None,
    *,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """θ for texts of these lengths, (1 or B, d_rotary / 2), in float32 or wider.

    Exact in float64, as checkpoints know it in float32. Raises ValueError when a length is needed
    and missing.
    """
    wide = torch.promote_types(dtype, torch.float32)
    if not varies_with_length(config.scaling):
        lengths = 1
    if lengths is None:
        raise ValueError(
            f"the rule {config.scaling.kind!r} depends on the text's length; pass lengths"
        )
    rows = [lengths] if isinstance(lengths, int) else list(lengths)
    base, d, rule = config.base, config.d_rotary, config.scaling
    of = rule.frequencies if wide == torch.float64 else partial(trained_frequencies, rule)
    return torch.from_numpy(np.stack([of(base, d, length) for length in rows])).to(wide)


def rotate(
    x: Tensor, turn: Rotation, *, order: Literal["bhtd", "bthd"] = "bhtd", inverse: bool = False
) -> Tensor:
    """Turn each channel pair of x by its position's angle; channels beyond the pairs stay.

    Shapes: x (B, h, T, d_h), or (B, T, h, d_h) when `order` says so → the same.
    `inverse` turns back and divides by the attention factor: it undoes a rotation.
    Raises ValueError when x has not as many rows, positions or channels as the rotation needs.
    """
    _check(x, turn, order)
    cos, sin = (part.unsqueeze(1 if order == "bhtd" else 2) for part in (turn.cos, turn.sin))
    if inverse:
        norm = cos.square() + sin.square()
        cos, sin = cos / norm, -sin / norm
    half = turn.cos.shape[-1]
    rotary, rest = x[..., : 2 * half], x[..., 2 * half :]
    if turn.layout == "half_split":
        first, second = rotary[..., :half], rotary[..., half:]
        turned = torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)
    else:
        first, second = rotary[..., 0::2], rotary[..., 1::2]
        turned = torch.stack(
            [first * cos - second * sin, first * sin + second * cos], dim=-1
        ).flatten(-2)
    return torch.cat([turned, rest], dim=-1) if rest.shape[-1] else turned


def _check(x: Tensor, turn: Rotation, order: str) -> None:
    batch, length, half = turn.cos.shape
    t_dim = 2 if order == "bhtd" else 1
    if x.dim() != 4 or x.shape[t_dim] != length or batch not in (1, x.shape[0]):
        raise ValueError(
            f"x of shape {tuple(x.shape)}, ordered {order}, does not fit a rotation of "
            f"{batch} rows and {length} positions"
        )
    if x.shape[-1] < 2 * half:
        raise ValueError(f"x has {x.shape[-1]} channels, but {2 * half} are to be rotated")


def convert_layout(
    weight: Tensor, *, n_heads: int, d_head: int, d_rotary: int, to: Layout
) -> Tensor:
    """Rows of a query or key projection, its bias or a q/k-norm vector, for the other layout.

    Shapes: weight (n_heads · d_head, …) → the same; pass n_heads = 1 for a norm that every head
    shares. Exact: rows move, no value changes, and the two directions undo each other.
    Raises ValueError when the first dimension is not n_heads · d_head.
    """
    if weight.shape[0] != n_heads * d_head:
        raise ValueError(
            f"weight has {weight.shape[0]} rows, but {n_heads} heads of {d_head} channels have "
            f"{n_heads * d_head}"
        )
    order = half_split_from_interleaved if to == "half_split" else interleaved_from_half_split
    rows = torch.from_numpy(order(n_heads, d_head, d_rotary)).to(weight.device)
    return weight.index_select(0, rows)
