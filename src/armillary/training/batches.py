"""Rows of NumPy → what an objective takes."""

import torch
from torch import Tensor

from armillary.data import Batch


def arguments(
    batch: Batch, device: torch.device
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """tokens, labels, documents and positions, each (B, T) int64 on the device.

    Where every row is one document, perhaps with padding behind it, causal order alone keeps
    them apart: then documents and positions are None, which is faster to compute.
    """
    tokens, labels = (
        torch.from_numpy(part).to(device, non_blocking=True)
        for part in (batch.tokens, batch.labels)
    )
    if batch.documents.max(initial=0) <= 0:
        return tokens, labels, None, None
    documents, positions = (
        torch.from_numpy(part).to(device, non_blocking=True)
        for part in (batch.documents, batch.positions)
    )
    return tokens, labels, documents, positions
