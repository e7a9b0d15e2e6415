"""A small run on made-up text: a decoder of a few thousand weights, a byte-level vocabulary."""

import copy
from pathlib import Path
from typing import Any

import numpy as np

from armillary.training.run_config import RunConfig

WORDS = "ring turns slowly around another and every sphere has its own time to come back"


def write_texts(directory: Path, documents: int = 40, seed: int = 0) -> Path:
    """Write documents of unequal lengths that a model can learn something from."""
    draw = np.random.default_rng(seed)
    directory.mkdir(parents=True, exist_ok=True)
    for number in range(documents):
        words = draw.choice(WORDS.split(), size=int(draw.integers(3, 60)))
        (directory / f"{number:03}.txt").write_text(" ".join(words) + ".\n")
    return directory


def entries(directory: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    """A run's settings, with entries of sections replaced: entries(tmp, train={"steps": 3})."""
    made: dict[str, Any] = {
        "out": str(directory / "out"),
        "seed": 3,
        "model": {
            "uniform": {
                "d_model": 40,
                "n_layers": 2,
                "n_heads": 6,
                "n_kv_heads": 2,
                "d_head": 10,
                "d_ff": 24,
            },
            "dropout": 0.1,
        },
        "data": {
            "sources": [str(directory / "texts")],
            "vocab_size": 300,
            "length": 32,
            "validation": 0.2,
            "workers": 1,
        },
        "train": {
            "steps": 20,
            "batch_size": 8,
            "micro_batch_size": 2,
            "lr": 3e-3,
            "warmup": 2,
            "precision": "float32",
            "device": "cpu",
        },
        "validation": {"every": 5, "batch_size": 4},
        "checkpoints": {"every": 7},
        "log": {"every": 1},
    }
    for name, changes in sections.items():
        made[name] = {**copy.deepcopy(made.get(name, {})), **changes}
    return made


def a_run(directory: Path, **sections: dict[str, Any]) -> RunConfig:
    """The run of `entries`, over texts that are written when they are not there."""
    if not (directory / "texts").is_dir():
        write_texts(directory / "texts")
    return RunConfig.from_dict(entries(directory, **sections))
