"""Where this process stands among the others, and the few sums that a training loop needs.

A process group is there between the beginning and the end of `start_ranks`; one process has none.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from armillary.errors import UserError
from armillary.training.parallel.config import Sizes


def world_size() -> int:
    """How many processes torchrun started; 1 without it. Raises UserError for a broken setting."""
    if distributed.is_initialized():
        return distributed.get_world_size()
    return _from_environment("WORLD_SIZE", 1)


def _from_environment(name: str, default: int | None = None) -> int:
    text = os.environ.get(name, None if default is None else str(default))
    if text is None or not text.isdecimal():
        raise UserError(
            f"the environment's {name} is {text!r}, not a number; start with torchrun, which sets "
            "RANK, LOCAL_RANK and WORLD_SIZE"
        )
    return int(text)


@dataclass(frozen=True)
class Ranks:
    """One process among `sizes.world`.

    rank     0 … world − 1; ((replicate · shard + …) · context + …) · tensor + …
    device   what this process computes on
    mesh     processes by (replicate, shard × context, tensor), None for one process: weights are
             sharded over the middle dimension, where peers in a context hold parts of the rows
    context  the mesh of the processes that share this one's rows, None when rows are whole
    """

    sizes: Sizes
    rank: int
    device: torch.device
    mesh: DeviceMesh | None = None
    context: DeviceMesh | None = None

    @classmethod
    def single(cls, device: torch.device | str = "cpu") -> "Ranks":
        """The only process."""
        return cls(Sizes(), 0, torch.device(device))

    @property
    def world(self) -> int:
        """All processes."""
        return self.sizes.world

    @property
    def is_main(self) -> bool:
        """Whether this process writes what is written once."""
        return self.rank == 0

    @property
    def data_rank(self) -> int:
        """Which of `data_ranks` parts of the rows this process takes; its peers take the same."""
        return self.rank // (self.sizes.context * self.sizes.tensor)

    @property
    def data_ranks(self) -> int:
        """Parts that the rows of a step are dealt into."""
        return self.sizes.data

    @property
    def context_rank(self) -> int:
        """Which part of each sequence this process takes."""
        return self.rank // self.sizes.tensor % self.sizes.context

    @property
    def tensor_rank(self) -> int:
        """Which part of each matrix this process holds."""
        return self.rank % self.sizes.tensor

    def seed(self, seed: int) -> int:
        """The seed of this process's dropout: its own, but that of its tensor peers.

        They hold the same activations, and must drop the same of them.
        """
        return seed * self.world + self.random_stream

    @property
    def random_stream(self) -> int:
        """Which of the streams of random numbers is this process's; tensor peers share one."""
        return self.rank // self.sizes.tensor

    def sum_of_rows(self, numbers: Sequence[float]) -> list[float]:
        """Each number summed over the data ranks; peers that hold the same rows count once.

        For what is counted on a batch, such as its labels. Exact up to 2⁵³.
        """
        counts = self.context_rank == 0 and self.tensor_rank == 0
        return self._reduce(numbers if counts else [0.0] * len(numbers), "sum")

    def sum_of_parts(self, numbers: Sequence[float]) -> list[float]:
        """Each number summed over data and context ranks; tensor peers count once.

        For what an objective returned, which is the loss of this process's part of the sequences.
        """
        return self._reduce(numbers if self.tensor_rank == 0 else [0.0] * len(numbers), "sum")

    def maximum(self, numbers: Sequence[float]) -> list[float]:
        """Each number's greatest over all processes."""
        return self._reduce(numbers, "max")

    def any_rank(self, flag: bool) -> bool:
        """Whether the flag is set in any process: all hear of a signal that one received."""
        return self.maximum([float(flag)])[0] > 0

    def barrier(self) -> None:
        """Wait until every process is here."""
        self.maximum([0.0])

    def _reduce(self, numbers: Sequence[float], how: str) -> list[float]:
        values = [float(number) for number in numbers]
        if self.world == 1:
            return values
        together = torch.tensor(values, dtype=torch.float64, device=self.device)
        op = distributed.ReduceOp.SUM if how == "sum" else distributed.ReduceOp.MAX
        distributed.all_reduce(together, op)
        return [float(value) for value in together.tolist()]


@contextmanager
def start_ranks(sizes: Sizes, device: str = "cpu") -> Iterator[Ranks]:
    """Join the other processes, as torchrun's environment names them, until the block ends.

    `device` is a type: "cuda" takes the GPU of the local rank and NCCL, "cpu" Gloo. A group that
    is there already is used and left. Raises UserError when the environment is not torchrun's,
    ValueError when the sizes are not those of the world.
    """
    if sizes.world != world_size():
        raise ValueError(f"sizes make {sizes.world} processes, but {world_size()} were started")
    if sizes.world == 1:
        yield Ranks.single(device)
        return
    began = not distributed.is_initialized()
    rank = _from_environment("RANK") if began else distributed.get_rank()
    place = torch.device(device)
    if place.type == "cuda":
        place = torch.device("cuda", _from_environment("LOCAL_RANK"))
        torch.cuda.set_device(place)
    if began:
        distributed.init_process_group(
            "cpu:gloo,cuda:nccl" if place.type == "cuda" else "gloo",
            device_id=place if place.type == "cuda" else None,
            # The others wait for as long as the first prepares data or writes a model. Who dies
            # meanwhile is noticed by torchrun, which ends them all.
            timeout=timedelta(hours=12),
        )
    try:
        yield _placed(sizes, rank, place)
    finally:
        if began:
            distributed.destroy_process_group()


def _placed(sizes: Sizes, rank: int, device: torch.device) -> Ranks:
    together = sizes.shard * sizes.context
    mesh = init_device_mesh(
        device.type,
        (sizes.replicate, together, sizes.tensor),
        mesh_dim_names=("replicate", "shard", "tensor"),
    )
    context = None
    if sizes.context > 1:
        apart = init_device_mesh(
            device.type,
            (sizes.data, sizes.context, sizes.tensor),
            mesh_dim_names=("data", "context", "tensor"),
        )
        context = apart["context"]
    return Ranks(sizes, rank, device, mesh, context)
