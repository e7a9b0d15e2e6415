"""Rows of NumPy → what an objective takes."""

import numpy as np
import torch
from torch import Tensor

from armillary.data import Batch


def arguments(
    batch: Batch, device: torch.device
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """tokens, labels, documents and positions, each (B, T) int64 on the device.

    Where every row is one document, perhaps with padding behind it, causal order alone keeps
    them apart: then documents are None, which is faster to compute, and so are positions, unless
    some of them are skipped.
    """
    tokens, labels = (
        torch.from_numpy(part).to(device, non_blocking=True)
        for part in (batch.tokens, batch.labels)
    )
    several = batch.documents.max(initial=0) > 0
    if not several and _are_counted(batch):
        return tokens, labels, None, None
    positions = torch.from_numpy(batch.positions).to(device, non_blocking=True)
    if not several:
        return tokens, labels, None, positions
    documents = torch.from_numpy(batch.documents).to(device, non_blocking=True)
    return tokens, labels, documents, positions


def _are_counted(batch: Batch) -> bool:
    """Whether the tokens of rows that are one document each stand at 0, 1, 2 and so on."""
    counted = np.arange(batch.positions.shape[1])
    return bool(((batch.positions == counted) | (batch.documents < 0)).all())
