"""Context parallelism: each process computes a part of every sequence.

A part is two of 2c equal pieces, the r-th from the front and the r-th from the end: a query reads
what stands before it, so that early pieces are little work and late ones much. Keys and values of
all parts are gathered in every layer, and their gradients summed on the way back.

Source: Llama 3 (Grattafiori et al. 2024, §3.3.2).
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from armillary.parts.attention import KeyValueStore
from armillary.parts.mask import Visibility


class ContextPart:
    """The part of this process, of `size` that a group of processes computes.

    A `SequencePart` of the decoder. Raises ValueError for a length that is no multiple of
    2 · size.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.rank, self.size = mesh.get_local_rank(), mesh.size()
        self.store: KeyValueStore = GatheredKeys(mesh)

    def take(self, rows: Tensor) -> Tensor:
        """(..., T) → (..., T / size)."""
        runs = self._runs(rows.shape[-1])
        return torch.cat([rows[..., run.start : run.stop] for run in runs], dim=-1)

    def narrow(self, visibility: Visibility) -> Visibility:
        """The rule for this part's queries."""
        return visibility.at(self._runs(visibility.n_keys))

    def _runs(self, length: int) -> Sequence[range]:
        pieces = 2 * self.size
        if length % pieces:
            raise ValueError(f"{length} tokens do not divide into {pieces} pieces")
        piece = length // pieces
        return [
            range(number * piece, (number + 1) * piece)
            for number in (self.rank, pieces - 1 - self.rank)
        ]


class GatheredKeys:
    """The keys and values of all parts, in the order of the sequence; nothing is kept."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """(B, h_kv, T / size, d_h) of this part → (B, h_kv, T, d_h)."""
        here = DTensor.from_local(torch.stack([k, v]), self.mesh, [Shard(3)], run_check=False)
        gathered = here.redistribute(placements=[Replicate()])
        # Each process reads them by its own queries, so that gradients are sums over processes.
        pieces = gathered.to_local(grad_placements=[Partial()]).chunk(2 * self.mesh.size(), dim=3)
        # Part after part, each a piece from the front and one from the end.
        ordered = torch.cat([*pieces[0::2], *reversed(pieces[1::2])], dim=3)
        return ordered[0], ordered[1]
