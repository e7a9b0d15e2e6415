"""The loss on held-out rows, in nats and in bits per byte, and what compressors make of the text.

Bits per byte compare models of any vocabulary, and with gzip and xz: the loss in bits of the
predicted tokens, over the bytes of text that these stand for.
"""

import gzip
import lzma
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from armillary.data import IGNORED, Batch, PackedBatches, TokenDataset
from armillary.training.batches import arguments
from armillary.training.objective import Objective
from armillary.training.parallel.ranks import Ranks
from armillary.training.precision import Precision


@dataclass(frozen=True)
class HeldOutLoss:
    """A loss in nats over some predicted tokens, and the bytes of text that they stand for."""

    nats: float
    targets: int
    bytes: int

    @property
    def loss(self) -> float:
        """Nats per predicted token; NaN where there is none."""
        return self.nats / self.targets if self.targets else math.nan

    @property
    def bits_per_byte(self) -> float:
        """Bits per byte of the text; NaN where there is none."""
        return self.nats / math.log(2) / self.bytes if self.bytes else math.nan


def held_out_loss(
    objective: Objective,
    batches: PackedBatches,
    precision: Precision,
    ranks: Ranks,
    rows: int | None = None,
) -> HeldOutLoss:
    """The loss on some `rows` rows (all when None), the same ones on any number of ranks.

    The objective is left as it was, in training or not. Dropout is off.
    """
    training = objective.training
    objective.eval()
    sums = np.zeros(3)
    weights = batches.dataset.token_bytes
    try:
        with torch.no_grad(), precision.autocast():
            for batch in _some(batches, rows):
                loss = objective(*arguments(batch, ranks.device))
                (nats,) = ranks.sum_of_parts([float(loss.cross_entropy)])
                labels = batch.labels[batch.labels != IGNORED]
                targets, size = ranks.sum_of_rows([len(labels), int(weights[labels].sum())])
                sums += (nats, targets, size)
    finally:
        objective.train(training)
    return HeldOutLoss(float(sums[0]), int(sums[1]), int(sums[2]))


def _some(batches: PackedBatches, rows: int | None) -> Iterator[Batch]:
    """All rows, or the least whole batches that hold so many, drawn from all documents alike.

    Rows as they are planned go on in one document after another: the first would be of a few.
    """
    size = batches.batch_size
    count = batches.n_rows if rows is None else -(-rows // size)
    if count * size > batches.n_rows:
        return batches.once()
    return map(batches.batch, range(count))


def compressed_bits_per_byte(batches: PackedBatches, rows: int | None = None) -> dict[str, float]:
    """Bits per byte of gzip -9 and xz -9 on the text of the rows that `held_out_loss` measures.

    Each compresses all of it as one stream; the model is given the bytes of each row alone.
    """
    whole = PackedBatches(
        batches.dataset,
        length=batches.length,
        batch_size=batches.batch_size,
        seed=batches.seed,
        mode=batches.mode,
        shuffle=batches.shuffle,
    )
    text = b"".join(_text(batch, batches.dataset) for batch in _some(whole, rows))
    if not text:
        return {}
    sizes = {
        "gzip -9": len(gzip.compress(text, 9, mtime=0)),
        "xz -9": len(lzma.compress(text, preset=9)),
    }
    return {name: 8 * size / len(text) for name, size in sizes.items()}


def _text(batch: Batch, dataset: TokenDataset) -> bytes:
    tokens = batch.tokens[batch.documents >= 0]
    tokenizer = dataset.tokenizer
    return b"".join(
        b"" if tokenizer.is_special(token) else tokenizer.token_bytes(token)
        for token in tokens.tolist()
    )
