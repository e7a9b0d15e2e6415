"""Time and peak memory of the chunked loss beside torch's cross-entropy on all logits.

4,096 tokens of width 576 on a vocabulary of 49,152 (SmolLM2-135M's), forward and backward, in
float32 and under bfloat16 autocast. Memory is what tensors hold at the peak, beyond the inputs.
The peer is F.linear and F.cross_entropy. A row for each size of chunk says what the choice costs.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from armillary.training.loss import CHUNK, chunked_cross_entropy
from protocol import Row, finish, medians, note, parser

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.tensor_memory import TensorMemory

PEER = "torch cross_entropy"
Step = Callable[[], None]


def steps(n: int, d: int, vocabulary: int, dtype: torch.dtype) -> dict[str, Step]:
    """One pass forward and backward of each, on the same inputs."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(n, d, generator=generator, requires_grad=True)
    weight = torch.randn(vocabulary, d, generator=generator).mul_(0.02).requires_grad_()
    labels = torch.randint(0, vocabulary, (n,), generator=generator)

    def run(loss: Callable[[], Tensor]) -> Step:
        def step() -> None:
            hidden.grad = weight.grad = None
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
                total = loss()
            (total / n).backward()

        return step

    def chunked(chunk: int) -> Step:
        return run(lambda: chunked_cross_entropy(hidden, labels, weight, chunk=chunk).total)

    def plain() -> Tensor:
        return F.cross_entropy(F.linear(hidden, weight), labels, reduction="sum")

    sizes = dict.fromkeys([CHUNK // 2, CHUNK, 2 * CHUNK])
    return {PEER: run(plain)} | {f"chunks of {size}": chunked(size) for size in sizes}


def seconds(step: Step) -> Callable[[], float]:
    """Return a measurement of one step's time."""

    def measure() -> float:
        start = time.perf_counter()
        step()
        return time.perf_counter() - start

    return measure


def megabytes(step: Step) -> float:
    """What tensors hold at the step's peak, gradients included."""
    with TensorMemory() as memory:
        step()
    return memory.peak / 1e6


def main() -> None:
    """Measure, print and check."""
    arguments = parser(__doc__).parse_args()
    n, d, vocabulary = (2048, 192, 16384) if arguments.quick else (4096, 576, 49152)
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        note(f"{name}: {n} × {d} on {vocabulary}")
        runs = steps(n, d, vocabulary, dtype)
        times = medians({key: seconds(step) for key, step in runs.items()}, repeats=3)
        sizes = {key: megabytes(step) for key, step in runs.items()}
        for key in runs:
            if key == PEER:
                continue
            chosen = key == f"chunks of {CHUNK}"
            # As fast, but for the 15 % that machines drift, at less than half the memory.
            for what, unit, taken, goal in (
                ("time", "s", times, 0.85),
                ("peak memory", "MB", sizes, 2.0),
            ):
                rows.append(
                    Row(
                        f"{name}, {key}, {what}",
                        taken[key],
                        PEER,
                        taken[PEER],
                        unit,
                        goal=goal if chosen else None,
                        higher_is_better=False,
                    )
                )
    finish(rows, arguments)


if __name__ == "__main__":
    main()
