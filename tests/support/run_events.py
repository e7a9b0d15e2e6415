"""Made-up events of training runs."""

import math
from typing import Any

from armillary.training.events import (
    CheckpointSaved,
    Event,
    Notice,
    RunEnded,
    RunStarted,
    Sampled,
    StepDone,
    Validated,
)
from armillary.training.run_config import RunConfig

CONFIG: dict[str, Any] = {
    "out": "runs/tiny",
    "model": {"uniform": {"d_model": 40, "n_layers": 2, "n_heads": 6, "n_kv_heads": 2}},
    "data": {"sources": ["python-stdlib"], "vocab_size": 300, "length": 64},
    "train": {"steps": 200, "batch_size": 8, "lr": 2e-3, "warmup": 20},
    "validation": {"every": 50},
    "samples": {"every": 100, "prompts": ["def add("]},
}


def config(**changes: Any) -> dict[str, Any]:
    """A run's settings as the start of a run reports them; sections are replaced by name."""
    return RunConfig.from_dict(CONFIG | changes).to_dict()


def started(step: int = 0, **changes: Any) -> RunStarted:
    facts: dict[str, Any] = {
        "steps": 200,
        "rows": 8,
        "length": 64,
        "parameters": 5_300_000,
        "trained_parameters": 5_300_000,
        "precision": "bfloat16",
        "device": "cpu",
        "processes": 1,
        "flops_per_token": 3.2e7,
        "peak_flops": 2.4e11,
        "epoch_steps": 160.0,
        "config": config(),
    }
    return RunStarted(step, **(facts | changes))


def done(step: int, **changes: Any) -> StepDone:
    """A step of a smooth curve: 2 + 4·0.98^step nats."""
    facts: dict[str, Any] = {
        "loss": 2 + 4 * 0.98**step,
        "learning_rate": 2e-3 * min(step / 20, 1.0),
        "gradient_norm": 0.5 + 0.1 * math.sin(step),
        "targets": 500,
        "tokens": step * 512,
        "epoch": step / 160,
        "seconds": step * 0.25,
        "tokens_per_second": 2048.0 + step % 7,
        "utilisation": 0.61,
        "memory": 1_200_000_000,
    }
    return StepDone(step, **(facts | changes))


def validated(step: int, loss: float, best: bool = True) -> Validated:
    return Validated(
        step, loss=loss, bits_per_byte=loss / 2, targets=9000, bytes=26000, seconds=2.0, best=best
    )


def whole_run() -> list[Event]:
    """200 steps with a skipped one, four validations, two samples, two checkpoints, an end."""
    events: list[Event] = [started()]
    for step in range(10, 201, 10):
        if step == 120:
            events.append(done(117, loss=math.nan, gradient_norm=math.inf, skipped="nonfinite"))
            events.append(Notice(117, "step 117 is skipped: its gradients are no numbers"))
        events.append(done(step, skipped_so_far=int(step > 117)))
        if step % 50 == 0:
            events.append(validated(step, loss=6 - step / 50))
        if step % 100 == 0:
            events.append(Sampled(step, "def add(", f"a, b):\n    return {step}\n"))
            events.append(CheckpointSaved(step, f"runs/tiny/checkpoints/step-{step}", 0.5))
    ended = RunEnded(
        200, "finished", 61.0, model="runs/tiny/model", compressors={"gzip -9": 2.5, "xz -9": 1.75}
    )
    return [*events, ended]
