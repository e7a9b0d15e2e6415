"""What a result is of: checksums of the model's parts, and what the model is.

It holds no times and no paths: two runs whose header is the same have measured the same thing.
"""

import functools
import hashlib
import json
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from armillary import __version__
from armillary.checkpoints.checkpoint import Checkpoint
from armillary.config import DecoderConfig, RotaryConfig
from armillary.data.prepared import tokenizer_checksum
from armillary.diagnosis.frequencies import (
    FrequencyChange,
    frequency_change,
    rotary_groups,
)
from armillary.diagnosis.size import parameter_count
from armillary.evaluation.records import Run, Setting, Task
from armillary.files import sha256
from armillary.rope_scaling import Unscaled
from armillary.tokenizer import Tokenizer

_OF_A_RUN = "model"  # what a training run calls its result, whatever the run's name


def run_of(
    name: str,
    checkpoint: Checkpoint,
    *,
    dtype: str,
    device: str = "cpu",
    seed: int = 0,
    original_window: int | None = None,
) -> Run:
    """Return what says that a checkpoint is evaluated by our decoder; its tasks come with them.

    name             as the user calls it; of a path the last part is taken, of the `model` that a
                     training run wrote the run's
    dtype, device    the number type and the kind of device that it is computed in
    original_window  the window before any extension, where it is not what the rule says
    """
    config = checkpoint.config
    return Run(
        name=_called(name),
        model={
            "weights_sha256": weights_checksum(checkpoint),
            "config_sha256": _checksum_of(config.to_dict()),
            "tokenizer_sha256": (
                None if checkpoint.tokenizer is None else tokenizer_checksum(checkpoint.tokenizer)
            ),
            "parameters": parameter_count(config),
            **_rotation(config),
            "dtype": dtype,
            "device": device,
            "engine": f"armillary {__version__}, torch {metadata.version('torch')}",
        },
        window=config.max_positions,
        original_window=original_window or original_window_of(config),
        seed=seed,
    )


def _called(name: str) -> str:
    path = Path(name).resolve()
    if not path.exists():
        return name
    return path.parent.name if path.name == _OF_A_RUN and path.parent.name else path.name


def run_served(
    name: str,
    tokenizer: Tokenizer,
    window: int,
    *,
    seed: int = 0,
    original_window: int | None = None,
) -> Run:
    """Return the same of a model behind a server, of which only name and tokenizer are known."""
    return Run(
        name=name,
        model={"tokenizer_sha256": tokenizer_checksum(tokenizer), "engine": "server"},
        window=window,
        original_window=original_window or window,
        seed=seed,
    )


def frequencies_of(run: Run) -> FrequencyChange | None:
    """What a model's rule did to its channel pairs; None for a model as it was trained.

    Raises ValueError for settings that are none.
    """
    stated = run.model.get("rotary")
    if not isinstance(stated, str):
        return None
    after = RotaryConfig.model_validate_json(stated)
    if isinstance(after.scaling, Unscaled) and run.window == run.original_window:
        return None
    before = after.model_copy(update={"scaling": Unscaled()})
    return frequency_change(before, after, run.original_window, run.window)


def original_window_of(config: DecoderConfig) -> int:
    """The window before the rule, as the rule says it; the window where there is no rule.

    A rule that says only its factor was given so many times the window.
    """
    for group in rotary_groups(config):
        rule = group.rotary.scaling
        window = getattr(rule, "original_window", None)
        factor = float(getattr(rule, "factor", 1.0))
        if window is not None:
            return int(min(window, config.max_positions))
        if factor > 1:
            return max(1, round(config.max_positions / factor))
    return config.max_positions


def weights_checksum(checkpoint: Checkpoint) -> str:
    """SHA-256 of the file of weights; of the sums of all of them where there are several.

    A file that was read before is not read again while its size and time of change stay the same.
    """
    sums = []
    for path in sorted({Path(tensor.where) for tensor in checkpoint.tensors.values()}):
        stat = path.stat()
        sums.append(_file_checksum(path, stat.st_size, stat.st_mtime_ns))
    return sums[0] if len(sums) == 1 else hashlib.sha256("".join(sums).encode()).hexdigest()


@functools.cache
def _file_checksum(path: Path, size: int, changed: int) -> str:
    del size, changed
    return sha256(path)


def _checksum_of(entries: object) -> str:
    return hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()


def _rotation(config: DecoderConfig) -> dict[str, Setting]:
    """Rules, the largest factor, the base, and all settings of the first layer that rotates."""
    groups = rotary_groups(config)
    rules = dict.fromkeys(group.rotary.scaling.kind for group in groups)
    factors = dict.fromkeys(getattr(group.rotary.scaling, "factor", None) for group in groups)
    bases = dict.fromkeys(group.rotary.base for group in groups)
    return {
        "rule": ", ".join(rules) or None,
        "factor": max((factor for factor in factors if factor is not None), default=None),
        "base": next(iter(bases), None),
        "rotary": groups[0].rotary.model_dump_json() if groups else None,
    }


def task_settings(task: Task) -> dict[str, Setting]:
    """What determines a task: its version, what it says of itself, and a checksum of its cells.

    A task says it in `settings`, where it has that, else by its fields: short lists stand in one
    text, and of many ids, a document's say, there is a checksum. Fields that are no plain data (a
    tokenizer, which the run names itself) are left to the cells.
    """
    cells = [[cell.key, dict(cell.settings), cell.work] for cell in task.cells()]
    told = getattr(task, "settings", None)
    if told is None and is_dataclass(task):
        told = {}
        for field in fields(task):
            told |= _setting(field.name, getattr(task, field.name))
    return {
        "version": task.version,
        **(told or {}),
        "cells": len(cells),
        "cells_sha256": _checksum_of(cells)[:16],
    }


_SIMPLE = (str, int, float, bool, type(None))


def _setting(name: str, value: Any) -> dict[str, Setting]:
    if isinstance(value, _SIMPLE):
        return {name: value}
    if isinstance(value, tuple) and len(value) <= 64 and all(isinstance(v, _SIMPLE) for v in value):
        return {name: ", ".join(map(str, value))}
    digest = hashlib.sha256()
    try:
        _feed(digest, value)
    except TypeError:
        return {}
    return {f"{name}_sha256": digest.hexdigest()[:16]}


def _feed(digest: Any, value: Any) -> None:
    """Take in ids, and what is made of them. Raises TypeError for what is no plain data."""
    if is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, field.name) for field in fields(value)]
    if isinstance(value, _SIMPLE):
        digest.update(repr(value).encode() + b"\0")
    elif not isinstance(value, Sequence):
        raise TypeError
    elif value and all(type(entry) is int for entry in value):
        digest.update(f"{len(value)} ids".encode() + np.asarray(value, dtype="<i8").tobytes())
    else:
        digest.update(f"{len(value)} parts".encode())
        for entry in value:
            _feed(digest, entry)
