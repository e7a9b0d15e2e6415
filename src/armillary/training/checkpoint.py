"""A training run on disk: weights, the optimiser's state, random states, and the loop's facts.

One format for one process and many: a directory, built aside and renamed, with

    state.json               step, metric, what optimised what, and the facts that the loop gave
    rank-00000.safetensors   the tensors that this rank wrote, and where they belong
    rank-00000.json          its random states
    manifest.json            size and SHA-256 of every file, written last

Loading fills what is there in place, on any number of ranks. Hyperparameters of the optimiser are
not saved: they come from the run's configuration.
"""

import contextlib
import json
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from torch import Tensor, nn
from torch.optim import Optimizer

from armillary.errors import CheckpointError
from armillary.files import (
    read_json,
    sha256,
    verify_manifest,
    write_directory_atomically,
    write_json,
)
from armillary.training.named_state import (
    Record,
    check_module,
    check_optimizer,
    module_tensors,
    new_entries,
    optimizer_tensors,
)
from armillary.training.random_states import (
    random_states,
    restore_random_states,
    seed_random_states,
)
from armillary.training.ranks import gather, n_ranks, on_every_rank, on_first_rank, rank

STATE = "state.json"
_FORMAT = "armillary-training"
_VERSION = 1


@dataclass(frozen=True)
class TrainingState:
    """What a checkpoint says beside its tensors.

    step      optimiser steps done
    ranks     how many processes wrote it
    metric    what decides which checkpoint is best, lower being better, or None
    facts     what the loop gave, as it gave it
    record    what optimised which parameter
    """

    step: int
    ranks: int
    metric: float | None
    facts: dict[str, Any]
    record: Record


def save_checkpoint(
    directory: Path,
    step: int,
    module: nn.Module,
    optimizer: Optimizer,
    facts: Mapping[str, Any],
    metric: float | None = None,
) -> None:
    """Write a checkpoint, atomically and tensor by tensor; an older one of that name is replaced.

    `module` is a decoder or its objective: the root that is sharded, where one is. A metric that
    is not finite counts as none. Where there are several ranks, all of them call this, with a
    directory that all of them see.
    Raises UserError on every rank when one cannot write, ValueError for facts that JSON would not
    give back as they are, and for a state that is not of tensors.
    """
    # Torch's distributed checkpointing takes more than a second to import.
    from armillary.training.shard_storage import write_shards

    if json.loads(json.dumps(facts, allow_nan=False)) != facts:
        raise ValueError("facts must be what JSON gives back: objects with text keys, lists, …")
    parameters = module_tensors(module)
    record, state = optimizer_tensors(parameters, optimizer)
    entries = {
        "format": _FORMAT,
        "format_version": _VERSION,
        "step": step,
        "ranks": n_ranks(),
        "metric": metric if metric is not None and math.isfinite(metric) else None,
        "optimizer": record,
        "facts": facts,
    }
    checksums: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        partial = on_first_rank(
            lambda: stack.enter_context(write_directory_atomically(directory, checksums))
        )
        write_shards(partial / _files_of(rank())[0], parameters | state)
        sums = on_every_rank(lambda: _finish_own(partial))
        for of_rank in gather(sums):
            checksums.update(of_rank)
        on_first_rank(lambda: write_json(partial / STATE, entries))
        on_first_rank(stack.close)


def _finish_own(partial: Path) -> dict[str, str]:
    """Write this rank's random states; return the checksums of its files."""
    names = _files_of(rank())
    write_json(partial / names[1], random_states())
    return {name: sha256(partial / name) for name in names}


def _files_of(number: int) -> tuple[str, str]:
    return f"rank-{number:05}.safetensors", f"rank-{number:05}.json"


def load_checkpoint(
    directory: Path,
    module: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    seed: int = 0,
    reseed: bool = False,
    report: Callable[[str], None] = warnings.warn,
    verify: bool = True,
) -> TrainingState:
    """Fill a module, its optimiser and the generators with what was saved, bit for bit.

    Every parameter and every entry of the optimiser's state is filled once, and nothing is changed
    before all of them are known to fit. Without an optimiser only the weights are read.
    When more or fewer ranks wrote it, or with `reseed` (for as many that are arranged otherwise),
    every rank gets new random states out of (seed, step), and rank 0 reports it: give each a seed
    of its own, but the same to those that hold the same activations and must drop alike.
    `verify=False` leaves out the checksums, for a caller that has compared them.
    Raises CheckpointError in one line, on every rank, for a checkpoint that is damaged or does not
    fit.
    """
    from armillary.training.shard_storage import Shards

    if verify:
        verify_checkpoint(directory)

    def prepare() -> tuple[TrainingState, Shards, dict[str, Tensor], dict[Tensor, Any]]:
        state = read_state(directory)
        shards = Shards([directory / _files_of(number)[0] for number in range(state.ranks)])
        targets = module_tensors(module)
        where = str(directory)
        entries: dict[Tensor, Any] = {}
        check_module(where, targets, shards.shapes, shards.dtypes, state.record)
        if optimizer is not None:
            check_optimizer(where, targets, optimizer, state.record)
            entries, named = new_entries(
                where, targets, optimizer, shards.shapes, shards.dtypes, state.record
            )
            targets |= named
        return state, shards, targets, entries

    state, shards, targets, entries = on_every_rank(prepare)
    shards.read_into(targets)
    if optimizer is not None:
        # In place, since the members of a union share it.
        optimizer.state.clear()
        optimizer.state.update(entries)
        if reseed or state.ranks != n_ranks():
            seed_random_states(seed, state.step)
            notices = [_of_other_ranks(directory, state)]
        else:
            path = directory / _files_of(rank())[1]
            notices = on_every_rank(lambda: restore_random_states(read_json(path), str(path)))
        for notice in notices if rank() == 0 else ():
            report(notice)
    return state


def _of_other_ranks(directory: Path, state: TrainingState) -> str:
    before, now = (f"{n} process{'es' if n > 1 else ''}" for n in (state.ranks, n_ranks()))
    arranged = ", arranged otherwise" if before == now else ""
    return (
        f"{directory}: saved by {before} and resumed by {now}{arranged}: random numbers (dropout) "
        "go on anew"
    )


def verify_checkpoint(directory: Path) -> TrainingState:
    """Compare every checksum, the ranks dividing the files; return what the checkpoint says.

    Raises CheckpointError on every rank, naming the file that is damaged.
    """
    on_every_rank(lambda: verify_manifest(directory, True, share=(rank(), n_ranks())))
    return on_every_rank(lambda: read_state(directory))


def read_state(directory: Path) -> TrainingState:
    """What a checkpoint says, its files held against the manifest by size.

    Raises CheckpointError for a directory that is not a whole checkpoint.
    """
    listed = verify_manifest(directory)
    path = directory / STATE
    entries = read_json(path)
    version = entries.get("format_version")
    if entries.get("format") != _FORMAT or version != _VERSION:
        raise CheckpointError(f"{path}: is of format version {version!r}; {_VERSION} is read")
    step, ranks, metric = entries.get("step"), entries.get("ranks"), entries.get("metric")
    facts, record = entries.get("facts"), entries.get("optimizer")
    if type(step) is not int or step < 0 or type(ranks) is not int or ranks < 1:
        raise CheckpointError(f"{path}: step is {step!r:.80} and ranks {ranks!r:.80}")
    if metric is not None and type(metric) is not float and type(metric) is not int:
        raise CheckpointError(f"{path}: metric is {metric!r:.80}, which is no number")
    if not isinstance(facts, dict) or not _is_record(record):
        raise CheckpointError(f"{path}: facts or optimizer are not what was saved")
    if ranks > len(listed):
        raise CheckpointError(f"{path}: ranks is {ranks}, the manifest names {len(listed)} files")
    needed = {STATE, *(name for number in range(ranks) for name in _files_of(number))}
    if missing := sorted(needed - set(listed)):
        raise CheckpointError(f"{directory}: {missing[0]} is not in the manifest")
    return TrainingState(step, ranks, metric, facts, record)


def _is_record(record: object) -> TypeGuard[Record]:
    return isinstance(record, dict) and all(
        isinstance(entry, dict)
        and isinstance(entry.get("kind"), str)
        and isinstance(entry.get("state"), list)
        and all(isinstance(key, str) for key in entry["state"])
        for entry in record.values()
    )
