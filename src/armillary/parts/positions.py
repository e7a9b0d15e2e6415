"""Position tables added to the embeddings: the baselines of 2017.

With rotary positions no table is added.
"""

import torch
from torch import Tensor, nn


class SinusoidalPositions(nn.Module):
    """PE(pos, 2i) = sin(pos / 10000^(2i/d)), PE(pos, 2i + 1) = cos of the same angle.

    Shapes: positions (T,) or (B, T) → (T, d) or (B, T, d), in `dtype`. Any position can be
    computed; angles are float32 at least. Source: Vaswani et al. 2017, §3.5.
    """

    def __init__(self, d: int) -> None:
        super().__init__()
        if d % 2:
            raise ValueError(f"d is {d}; sine and cosine come in pairs, so make it even")
        self.d = d

    def forward(self, positions: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """positions (..., T) → (..., T, d)."""
        return self.rows(positions, dtype)

    def rows(self, positions: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """The same: any position is in this table."""
        wide = torch.promote_types(dtype, torch.float32)
        pair = torch.arange(0, self.d, 2, dtype=wide, device=positions.device)
        angles = positions.to(wide).unsqueeze(-1) * 10000.0 ** (-pair / self.d)
        return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-2).to(dtype)


class LearnedPositions(nn.Module):
    """A trained vector for each position; there is none beyond the table's size.

    Shapes: positions (T,) or (B, T) → (T, d) or (B, T, d).
    Raises ValueError for a position outside the table.
    """

    def __init__(self, size: int, d: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size, d))

    def forward(self, positions: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """positions (..., T) → (..., T, d)."""
        self._check(positions)
        return self.rows(positions, dtype)

    def rows(self, positions: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """The same for positions that are known to be in the table: none is looked at."""
        rows = nn.functional.embedding(positions, self.weight)
        return rows if dtype is None else rows.to(dtype)

    def _check(self, positions: Tensor) -> None:
        size = self.weight.shape[0]
        if positions.numel():
            low, high = (int(value) for value in positions.aminmax())
            if low < 0 or high >= size:
                outside = low if low < 0 else high
                raise ValueError(
                    f"position {outside} is outside the learned table, which holds 0 to {size - 1}"
                )
