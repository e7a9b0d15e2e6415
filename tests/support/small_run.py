"""A training run of a few thousand weights with dropout, for tests that stop it and go on.

The functions that train end with their process, or by being killed in it.
"""

import itertools
import json
import os
import random
import signal
from pathlib import Path

import numpy as np
import torch

from armillary.errors import UserError
from armillary.training.checkpoint import load_checkpoint
from armillary.training.checkpoint_folder import CheckpointFolder
from armillary.training.objective import Objective
from armillary.training.optimizer import OptimizerConfig, build_optimizer, clip_gradients
from support import models

MICRO_BATCHES = 2


def build(kind: str = "adamw") -> tuple[Objective, torch.optim.Optimizer]:
    """An objective with dropout and its optimiser, the same every time."""
    dropping = models.layer(dropout=0.2)
    decoder = models.build(models.config(dropping, dropping), dtype=torch.float32).train()
    objective = Objective(decoder)
    return objective, build_optimizer(objective, OptimizerConfig(kind=kind, lr=1e-2))


def seed(number: int) -> None:
    """Seed every generator that a step draws from."""
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def micro_batch(objective: Objective, step: int, number: int) -> float:
    """Forward and backward of one half of a step, on tokens that are drawn from all generators."""
    drawn = random.randrange(8) + int(np.random.randint(8))
    tokens = models.tokens(2, 9, seed=1000 * step + 100 * number + drawn)
    loss = objective(tokens[:, :-1], tokens[:, 1:])
    (loss.total / (16 * MICRO_BATCHES)).backward()
    return float(loss.cross_entropy)


def train_step(objective: Objective, optimizer: torch.optim.Optimizer, step: int) -> float:
    """One step of two micro-batches; returns its loss."""
    loss = sum(micro_batch(objective, step, number) for number in range(MICRO_BATCHES))
    clip_gradients(objective.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def weights(objective: Objective) -> list[str]:
    """Every weight, as the bits that it has."""
    return [p.detach().numpy().tobytes().hex() for p in objective.parameters()]


def train_and_die(folder: Path, kind: str, steps: int) -> None:
    """Train, save, begin the next step, and be killed in the middle of it."""
    seed(1)
    objective, optimizer = build(kind)
    for step in range(steps):
        train_step(objective, optimizer, step)
    CheckpointFolder(folder).save(steps, objective, optimizer, {})
    micro_batch(objective, steps, 0)
    os.kill(os.getpid(), signal.SIGKILL)


def go_on(folder: Path, kind: str, steps: int) -> None:
    """Go on from the newest checkpoint; leave losses and weights in a file."""
    seed(2)
    objective, optimizer = build(kind)
    path = CheckpointFolder(folder).newest(print)
    assert path is not None
    first = load_checkpoint(path, objective, optimizer, verify=False).step
    losses = [train_step(objective, optimizer, step) for step in range(first, steps)]
    result = {"losses": losses, "weights": weights(objective)}
    (folder / "result.json").write_text(json.dumps(result))


def last_saved(folder: Path) -> int:
    """Which step `save_forever` said last that it had saved, in a whole line; 0 for none."""
    told = folder / "saved"
    *lines, _ = told.read_text().split("\n") if told.exists() else [""]
    return int(lines[-1]) if lines else 0


def save_forever(folder: Path, first: int) -> None:
    """Save again and again, the step being in the weights, until killed or the disk is full.

    `folder`/saved says which steps were saved (see `last_saved`), and `folder`/error why no more.
    """
    objective, optimizer = build()
    for step in itertools.count(first):
        with torch.no_grad():
            for parameter in objective.parameters():
                parameter.fill_(step)
        try:
            CheckpointFolder(folder).save(step, objective, optimizer, {"step": step})
        except UserError as error:
            (folder / "error").write_text(str(error))
            return
        with (folder / "saved").open("a") as file:
            file.write(f"{step}\n")
