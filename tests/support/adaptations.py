"""A small adaptation: a model of a few thousand weights over bytes, from 64 to 256 positions.

The functions that adapt end with their process, or by being killed in it.
"""

import contextlib
import copy
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import torch

from armillary.checkpoints import open_checkpoint, write_huggingface
from armillary.checkpoints.checkpoint import Checkpoint
from armillary.evaluation.run import Progress
from armillary.extension.adapt import Adapted, Watch, adapt
from armillary.extension.adapt_config import AdaptConfig
from armillary.training.events import Event, StepDone
from armillary.weights import to_write
from support.runs import WORDS
from support.tiny_model import tiny_model

WINDOW, TARGET = 64, 256


def prepare_directory(directory: Path) -> Path:
    """A model that was never trained, and texts of 20 to 800 bytes."""
    lm = tiny_model(directory / "tokenizer", max_positions=WINDOW)
    write_huggingface(
        directory / "model", lm.config, to_write(lm.decoder), lm.tokenizer, {"eos_token_id": (2,)}
    )
    draw = np.random.default_rng(0)
    (directory / "texts").mkdir()
    for number in range(40):
        words = draw.choice(WORDS.split(), size=int(draw.integers(3, 120)))
        (directory / "texts" / f"{number:03}.txt").write_text(" ".join(words) + ".\n")
    return directory


def entries(directory: Path, **changes: Any) -> dict[str, Any]:
    """An adaptation's settings, with entries of sections replaced."""
    made: dict[str, Any] = {
        "seed": 3,
        "stages": [{"length": 128, "steps": 4}, {"length": TARGET, "steps": 4, "batch_size": 3}],
        "data": {"sources": [str(directory / "texts")], "validation": 0.2, "workers": 1},
        "train": {
            "batch_size": 4,
            "micro_batch_size": 1,
            "lr": 1e-3,
            "warmup": 2,
            "precision": "float32",
            "device": "cpu",
        },
        "validation": {"every": 0, "batch_size": 2, "rows": 4, "compressors": False},
        "checkpoints": {"every": 2},
        "log": {"every": 1},
    }
    for name, values in changes.items():
        both = isinstance(values, dict) and isinstance(made.get(name), dict)
        made[name] = copy.deepcopy(made[name] | values if both else values)
    return made


def source(directory: Path) -> Checkpoint:
    return open_checkpoint(directory / "model")


def run(
    directory: Path, out: str, made: dict[str, Any], watch: Watch | None = None, **arguments: Any
) -> Adapted:
    """Adapt the directory's model to `out` in it; YaRN and 256 positions unless said otherwise."""
    torch.set_num_threads(1)
    config = AdaptConfig.from_dict(made)
    given = {"to": TARGET, "rule": "yarn"} | arguments
    return adapt(source(directory), directory / out, config, watch=watch, **given)


def run_and_die(directory: Path, out: str, made: dict[str, Any], moment: tuple[str, int]) -> None:
    """Adapt, and be killed at a moment: ("step", n-th of all steps) or ("cell", n-th measured)."""
    run(directory, out, made, dying(*moment))
    os._exit(7)  # it has outlived the moment


def dying(kind: str, at: int, with_signal: signal.Signals = signal.SIGKILL) -> Watch:
    """Ends the process by a signal at a moment; counts start with it."""
    counts = {"step": 0, "cell": 0}

    def count(what: str) -> None:
        counts[what] += 1
        if what == kind and counts[what] == at:
            os.kill(os.getpid(), with_signal)

    def heard(event: Event) -> None:
        if isinstance(event, StepDone):
            count("step")

    def measured(_: str, progress: Progress) -> None:
        if progress.cell is not None:
            count("cell")

    return Watch(listeners=lambda: contextlib.nullcontext([heard]), measured=measured)


def on_one_rank(directory: Path, out: str, made: dict[str, Any]) -> dict[str, Any]:
    """What came of an adaptation, as plain values: to be called on each of several ranks."""
    adapted = run(directory, out, made)
    return {
        "reason": adapted.reason,
        "gates": [[gate.passed for gate in stage.gates] for stage in adapted.stages],
    }
