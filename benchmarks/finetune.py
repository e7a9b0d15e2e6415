"""SmolLM2-135M goes on from its GGUF file on State of the Union speeches: 50 steps on the CPU.

Float32 master weights, products in bfloat16 where the machine is built for it, 4 rows of 256 tokens
a step; all weights, then low-rank adapters alone. Each run is a process of its own, whose peak is
its resident memory's. What comes out is loaded in transformers: the logits of a held-out passage
and the loss on the held-out rows are to be ours. That loss before the first step is the peer of
that after the last.

Fetches with pip and npm what it needs, once.
"""

import argparse
import multiprocessing
import resource
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protocol import Row, finish, note, parser

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

LIMIT = 6.0  # GiB
LOGITS, NATS = 2e-4, 1e-3  # how far transformers may be from us
PASSAGE = 512  # tokens


@dataclass(frozen=True)
class Outcome:
    """What a run came to: held-out losses in nats per token, bytes at the peak, where it wrote."""

    before: float
    after: float
    peak: int
    model: str


def settings(speeches: Path, directory: Path, quick: bool) -> dict[str, Any]:
    """A run on all weights."""
    from support.downloads import smollm2_gguf

    return {
        "out": str(directory / "all weights"),
        "model": {"checkpoint": str(smollm2_gguf())},
        "data": {"sources": [str(speeches)], "length": 256, "validation": 0.05},
        "train": {
            "steps": 4 if quick else 50,
            "batch_size": 4,
            "lr": 1e-4,
            "warmup": 1 if quick else 5,
            "device": "cpu",
        },
        "validation": {
            "every": 0,
            "rows": 4 if quick else 16,
            "batch_size": 4,
            "compressors": False,
        },
        "checkpoints": {"every": 0},
    }


def with_adapters(run: dict[str, Any], directory: Path) -> dict[str, Any]:
    """The same run on adapters alone, which take a higher learning rate, on the same data."""
    return run | {
        "out": str(directory / "adapters"),
        "data": run["data"] | {"sources": [], "prepared": f"{run['out']}/data"},
        "train": run["train"] | {"lr": 1e-3},
        "lora": {},
    }


def fine_tune(entries: dict[str, Any]) -> Outcome:
    """Make a run; for a process of its own."""
    from armillary.training.events import Event, RunEnded, StepDone, Validated
    from armillary.training.run import train
    from armillary.training.run_config import RunConfig

    losses = []

    def listen(event: Event) -> None:
        if isinstance(event, Validated):
            losses.append(event.loss)
        if isinstance(event, StepDone | Validated):
            note(f"  step {event.step}: {event.kind} loss {event.loss:.4f}")

    ended: RunEnded = train(RunConfig.from_dict(entries), listeners=[listen])
    assert ended.model is not None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    unit = 1 if sys.platform == "darwin" else 1024
    return Outcome(losses[0], losses[-1], peak * unit, ended.model)


def in_a_process(entries: dict[str, Any]) -> Outcome:
    """`fine_tune` in a fresh process."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(fine_tune, entries).result()


def differences(outcome: Outcome, data: Path, run: dict[str, Any]) -> tuple[float, float]:
    """How far transformers is from us: in logits of a passage, and in nats on the held-out rows."""
    import torch

    import armillary
    from armillary.data import PackedBatches, TokenDataset
    from armillary.training.objective import Objective
    from armillary.training.parallel.ranks import Ranks
    from armillary.training.precision import Precision
    from armillary.training.validation import held_out_loss
    from support.peer_llama import held_out_loss_of, load_peer, whole_pass

    held_out, size = TokenDataset(data, "validation"), run["validation"]["batch_size"]
    batches = PackedBatches(held_out, length=run["data"]["length"], batch_size=size, seed=0)
    rows = run["validation"]["rows"]
    ours = armillary.load(outcome.model, dtype="float32", device="cpu")
    peer = load_peer(Path(outcome.model), torch.float32)
    passage = torch.from_numpy(held_out[0][:PASSAGE].astype("int64"))[None]
    with torch.no_grad():
        of_logits = (ours.decoder(passage) - whole_pass(peer, passage)).abs().max()
    loss = held_out_loss(
        Objective(ours.decoder), batches, Precision("float32"), Ranks.single(), rows
    )
    theirs = held_out_loss_of(peer, map(batches.batch, range(rows // size)))
    note(f"  held-out loss in float32: {loss.loss:.5f}, in transformers {theirs:.5f}")
    return float(of_logits), abs(loss.loss - theirs)


def rows_of(name: str, outcome: Outcome, distance: tuple[float, float], quick: bool) -> list[Row]:
    """What was measured of a run."""

    def within(what: str, found: float, allowed: float, unit: str) -> Row:
        # Equal bits are no distance, which has no ratio.
        least = max(found, allowed / 1e6)
        return Row(f"{name}, {what}", least, "allowed", allowed, unit, 1.0, higher_is_better=False)

    return [
        Row(
            f"{name}, held-out loss",
            outcome.after,
            "before the first step",
            outcome.before,
            "nats a token",
            goal=1.0 if quick else 1.02,
            higher_is_better=False,
        ),
        within("peak memory", outcome.peak / 2**30, LIMIT, "GiB"),
        within("logits beside transformers", distance[0], LOGITS, "at most"),
        within("held-out loss beside transformers", distance[1], NATS, "nats a token"),
    ]


def measure(arguments: argparse.Namespace, directory: Path) -> list[Row]:
    """Both runs and what transformers makes of them."""
    from support.downloads import state_of_the_union

    plain = settings(state_of_the_union(), directory, arguments.quick)
    data = Path(plain["out"]) / "data"
    rows, peaks = [], []
    for name, run in {"all weights": plain, "adapters": with_adapters(plain, directory)}.items():
        note(f"{name}: {run['train']['steps']} steps")
        outcome = in_a_process(run)
        distance = differences(outcome, data, run)
        rows += rows_of(name, outcome, distance, arguments.quick)
        peaks.append(outcome.peak / 2**30)
    whole, adapters = peaks
    rows.append(
        Row(
            "adapters, peak memory",
            adapters,
            "all weights",
            whole,
            "GiB",
            goal=1.3,
            higher_is_better=False,
        )
    )
    return rows


def main() -> None:
    """Measure, print and check."""
    arguments = parser(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as directory:
        rows = measure(arguments, Path(directory))
    finish(rows, arguments)


if __name__ == "__main__":
    main()
