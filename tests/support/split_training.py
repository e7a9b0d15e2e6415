"""The same steps of training by one process and by many, and how far apart they come."""

from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from armillary.config import DecoderConfig
from armillary.training.loss import IGNORED
from armillary.training.objective import Objective
from armillary.training.optimizer import OptimizerConfig, build_optimizer, clip_gradients
from armillary.training.parallel.config import Sizes
from armillary.training.parallel.ranks import Ranks, start_ranks
from armillary.training.parallel.sharding import parallelise, synchronise
from support.models import build, tokens

ROWS, LENGTH = 8, 16
STEPS, MICRO_BATCHES = 3, 2
# Small enough that most steps are clipped.
MAX_NORM = 0.5


@dataclass
class Record:
    """What a run of a few steps came to: losses, gradients before clipping, weights and logits."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    logits: list[float] = field(default_factory=list)


def batch(step: int) -> dict[str, Tensor]:
    """Rows of packed documents with padding at the end; each has another count of labels."""
    ids = tokens(ROWS, LENGTH, seed=step)
    documents = torch.zeros(ROWS, LENGTH, dtype=torch.int64)
    positions = torch.zeros_like(documents)
    for row in range(ROWS):
        starts = [0, 3 + row % 5, 9 + row % 2, LENGTH - row]
        for number, (start, end) in enumerate(zip(starts, [*starts[1:], LENGTH], strict=True)):
            last = number == 3
            documents[row, start:end] = -1 if last else number
            positions[row, start:end] = 0 if last else torch.arange(max(end - start, 0))
    labels = ids.roll(-1, 1)
    labels[:, -1] = IGNORED
    labels[:, :-1][documents[:, 1:] != documents[:, :-1]] = IGNORED
    labels[documents < 0] = IGNORED
    labels[0] = IGNORED  # a row without any label, and so a rank with few
    return {"tokens": ids, "labels": labels, "documents": documents, "positions": positions}


def count(part: dict[str, Tensor]) -> int:
    return int((part["labels"] != IGNORED).sum())


def train(
    config: DecoderConfig,
    sizes: Sizes,
    optimizer: OptimizerConfig,
    dtype: torch.dtype = torch.float64,
    on_meta: bool = False,
    **options: Any,
) -> Record:
    """A few steps with clipping on two micro-batches each, spread over the ranks."""
    record, compute = Record(), options.get("compute")
    decoder = build(config, dtype=dtype)
    if on_meta:
        options["weights"] = decoder.state_dict().__getitem__
        decoder = deepcopy(decoder).to("meta")
    objective = Objective(decoder.train(), z_loss=0.01, chunk=5, balance_rate=0.01)
    names = [name for name, _ in objective.decoder.named_parameters()]
    with nullcontext(Ranks.single()) if sizes.world == 1 else start_ranks(sizes) as ranks:
        parallelise(objective, ranks, **options)
        made = build_optimizer(objective.decoder, optimizer)
        for step in range(STEPS):
            share = ROWS // ranks.data_ranks
            rows = slice(ranks.data_rank * share, (ranks.data_rank + 1) * share)
            mine = {name: array[rows] for name, array in batch(step).items()}
            total = ranks.sum_of_rows([count(mine)])[0]
            size = share // MICRO_BATCHES
            nats = 0.0
            for number in range(MICRO_BATCHES):
                part = slice(number * size, (number + 1) * size)
                synchronise(objective, number == MICRO_BATCHES - 1)
                with torch.autocast("cpu", compute, enabled=compute is not None):
                    loss = objective(**{name: array[part] for name, array in mine.items()})
                (loss.total / total).backward()
                nats += float(loss.total.detach()) / total
            record.losses.append(ranks.sum_of_parts([nats])[0])
            parameters = dict(objective.decoder.named_parameters())
            assert list(parameters) == names
            trained = {name: p for name, p in parameters.items() if p.requires_grad}
            record.gradients.append({name: whole(p.grad) for name, p in trained.items()})
            record.norms.append(clip_gradients(parameters.values(), MAX_NORM).norm)
            made.step()
            made.zero_grad()
            if objective.balance is not None:
                objective.balance.move_biases(ranks.sum_of_parts)
        with torch.no_grad(), torch.autocast("cpu", compute, enabled=compute is not None):
            record.logits = objective.eval()(batch(0)["tokens"]).flatten().tolist()
        record.weights = {name: whole(p) for name, p in objective.decoder.named_parameters()}
    return record


def whole(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def apart(one: Record, other: Record) -> dict[str, float]:
    """The greatest relative difference of each kind of result."""
    return {
        "losses": _apart(_tensor(one.losses), _tensor(other.losses)),
        "logits": _apart(_tensor(one.logits), _tensor(other.logits)),
        "norms": _apart(_tensor(one.norms), _tensor(other.norms)),
        "gradients": max(
            _apart(a[name], b[name])
            for a, b in zip(one.gradients, other.gradients, strict=True)
            for name in b
        ),
        "weights": max(_apart(one.weights[name], other.weights[name]) for name in other.weights),
    }


def _apart(one: Tensor, other: Tensor) -> float:
    assert one.shape == other.shape
    return float((one - other).abs().max() / other.abs().max())


def _tensor(numbers: list[float]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)
