"""A vocabulary that tensor peers share out: each has the rows of some ids, in embedding and head.

An embedding is found by the one that has it and summed to all; logits are never together, the loss
exchanges their maxima and sums (see `VocabularyShare`).

Source: Shoeybi et al. 2019, §3.
"""

from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn import functional as F

from armillary.decoder import Decoder


def spread(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """The same, which all processes of the group have; its gradient is the sum of theirs."""
    whole = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
    return whole.to_local(grad_placements=[Partial()])


def summed(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """The sum of every process's, for all of them; its gradient goes to each."""
    part = DTensor.from_local(x, mesh, [Partial()], run_check=False)
    return part.redistribute(placements=[Replicate()]).to_local()


class SharedVocabulary:
    """The ids start … start + rows − 1 of `size`, of which this process has the rows."""

    def __init__(self, mesh: DeviceMesh, size: int) -> None:
        self.mesh, self.size = mesh, size
        self.rows = size // mesh.size()
        self.start = self.rows * mesh.get_local_rank()

    def spread(self, hidden: Tensor) -> Tensor:
        """The same; its gradient is the sum of every process's."""
        return spread(hidden, self.mesh)

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum of every process's tensor, in its place."""
        distributed.all_reduce(tensor, distributed.ReduceOp.SUM, self.mesh.get_group())
        return tensor

    def maximum(self, tensor: Tensor) -> Tensor:
        """The elementwise maximum of every process's tensor, in its place."""
        distributed.all_reduce(tensor, distributed.ReduceOp.MAX, self.mesh.get_group())
        return tensor


def share_vocabulary(decoder: Decoder, mesh: DeviceMesh) -> SharedVocabulary:
    """Let embedding and head, whose weights are this process's rows, stand for the whole."""
    share = SharedVocabulary(mesh, decoder.config.vocab_size)
    # An instance's own forward stands before its class's.
    decoder.embedding.__dict__["forward"] = _Lookup(decoder.embedding, share)

    def before(_module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        return share.spread(arguments[0]), *arguments[1:]

    def after(_module: nn.Module, _arguments: Any, logits: Tensor) -> Tensor:
        part = DTensor.from_local(logits, mesh, [Shard(logits.dim() - 1)], run_check=False)
        return part.redistribute(placements=[Replicate()]).to_local()

    decoder.head.register_forward_pre_hook(before)
    decoder.head.register_forward_hook(after)
    return share


class _Lookup:
    """An embedding of which this process has some rows."""

    def __init__(self, embedding: nn.Embedding, share: SharedVocabulary) -> None:
        self.embedding, self.share = embedding, share

    def __call__(self, tokens: Tensor) -> Tensor:
        row = tokens - self.share.start
        here = (row >= 0) & (row < self.share.rows)
        found = F.embedding(row.where(here, 0), self.embedding.weight)
        return summed(torch.where(here.unsqueeze(-1), found, 0), self.share.mesh)
