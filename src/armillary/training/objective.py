"""A decoder and its loss as one module: what is compiled, sharded and trained.

One forward from tokens to a loss lets everything that hooks into modules (sharding, compilation)
see the whole computation; hidden states and logits never leave it.
"""

from contextlib import nullcontext
from dataclasses import replace
from typing import overload

import torch
from torch import Tensor, nn

from armillary.decoder import Decoder, SequencePart
from armillary.training.balance import Balance
from armillary.training.loss import (
    CHUNK,
    IGNORED,
    Kernel,
    LossSum,
    VocabularyShare,
    next_token_loss,
)


class Objective(nn.Module):
    """The summed next-token loss of a decoder on packed rows.

        loss = Objective(decoder)(tokens, labels, documents, positions)
        (loss.total / count_of_the_whole_step).backward()

    z_loss and chunk as in `chunked_cross_entropy`; `compile_objective` may set its `kernel`. The
    decoder's parameters keep their names under `decoder.`. With a `part` of the sequences, the loss
    is that of its places; a `share` says which part of the vocabulary the embedding and the head
    have the rows of. In training, `balance_loss` is the weight of the experts' balance loss (see
    `balance`) beside a token's cross-entropy.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        z_loss: float = 0.0,
        chunk: int = CHUNK,
        balance_loss: float = 0.0,
        balance_rate: float = 0.0,
    ) -> None:
        super().__init__()
        self.decoder = decoder
        self.z_loss = z_loss
        self.chunk = chunk
        self.part: SequencePart | None = None
        self.share: VocabularyShare | None = None
        self.kernel: Kernel | None = None
        self.balance_loss = balance_loss
        balance = Balance(decoder, balance_rate)
        self.balance = balance if balance.mixtures else None

    @overload
    def forward(
        self,
        tokens: Tensor,
        labels: Tensor,
        documents: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> LossSum: ...
    @overload
    def forward(self, tokens: Tensor) -> Tensor: ...

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        documents: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> LossSum | Tensor:
        """Each (B, T) int64, as `PackedBatches` gives them → sums over the labelled tokens.

        Without `documents` a row is one document, and without `positions` they are counted.
        Without labels, for a model that writes: the logits of each row's last token, (B, V); every
        process computes whole sequences then.
        """
        if labels is None:
            return self.decoder.project(self.decoder.hidden(tokens)[:, -1])
        balance = self.balance if self.training and torch.is_grad_enabled() else None
        with nullcontext() if balance is None else balance.watched():
            hidden = self.decoder.hidden(
                tokens, documents=documents, positions=positions, part=self.part
            )
        if self.part is not None:
            labels = self.part.take(labels)
        loss = next_token_loss(
            self.decoder,
            hidden,
            labels,
            z_loss=self.z_loss,
            chunk=self.chunk,
            share=self.share,
            kernel=self.kernel,
        )
        if balance is None:
            return loss
        even = loss.count * balance.loss(labels != IGNORED)
        total = loss.total + self.balance_loss * even if self.balance_loss else loss.total
        return replace(loss, total=total, balance=even.detach())
