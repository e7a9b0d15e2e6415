"""Text → tokens → packed batches; the same every time, and to be gone on with after any end.

`prepare` makes a directory of token shards out of sources, `TokenDataset` opens one, and
`PackedBatches` puts its documents into batches of NumPy arrays. Nothing here imports torch.
"""

from armillary.data.dataset import TokenDataset
from armillary.data.packing import IGNORED, Batch, PackedBatches
from armillary.data.preparation import prepare

__all__ = ["IGNORED", "Batch", "PackedBatches", "TokenDataset", "prepare"]
