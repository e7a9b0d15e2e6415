"""Training steps beside transformers and LitGPT, in one run: speed, share of the ceiling, memory.

    python benchmarks/train.py            32.0 M parameters, 8 × 512 tokens a step, bf16 and f32
    python benchmarks/train.py --quick    a quarter of the layers and of the batch, bf16 only

A step is forward, backward and AdamW. Each trainer, eager and compiled, lives in a process of its
own (benchmarks/trainers.py) and they take turns of two steps, of which the second counts. The
ceiling is what products of large square matrices reach in the same turns; a step's FLOPs come from
armillary.diagnosis.size. Peak memory is the process's, libraries and compiling included. LitGPT
0.5.13 asks for an older torch; beside the one that is there it runs when installed with
    pip install --no-deps litgpt==0.5.13 lightning lightning-utilities torchmetrics jsonargparse
"""

import importlib.util
import os
import time
from collections.abc import Callable

from protocol import Row, finish, medians, note, parser
from trainers import THREADS, Size, Worker, armillary_config

# Rows and columns of the matrices that the ceiling is measured with.
CEILING = 2048


def main() -> None:
    """Measure, print and check."""
    arguments = parser(__doc__).parse_args()
    # Settings that some machines have for older builds of OpenBLAS, and that slow the current one.
    for variable in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE"):
        os.environ.pop(variable, None)
    size = Size(n_layers=2, batch=2) if arguments.quick else Size()
    rows: list[Row] = []
    for compute in ("bf16",) if arguments.quick else ("bf16", "f32"):
        workers = _workers(compute, size)
        try:
            rows += _measure(workers, compute, size, repeats=3 if arguments.quick else 7)
        finally:
            for worker in workers:
                worker.close()
    finish(rows, arguments)


def _workers(compute: str, size: Size) -> list[Worker]:
    """Ours first, as `armillary train` runs it."""
    trainers = ["armillary"]
    for peer in ("transformers", "litgpt"):
        if importlib.util.find_spec(peer) is None:
            note(f"{peer} is not installed; left out")
        else:
            trainers.append(peer)
    workers = []
    for trainer in trainers:
        for mode in ("compiled", "eager"):
            note(f"{compute}: starting {trainer} {mode}")
            workers.append(Worker(trainer, mode, compute, size))
    return workers


def _measure(workers: list[Worker], compute: str, size: Size, repeats: int) -> list[Row]:
    note(f"{compute}: {repeats} steps of each, in turns")
    ceilings = {"bf16": "bfloat16", "f32": "float32"}
    runs = {worker.name: worker.step for worker in workers}
    seconds = medians(
        {**runs, **{name: _product(dtype) for name, dtype in ceilings.items()}}, repeats
    )
    ceiling = 2 * CEILING**3 / seconds[compute]
    ours, *others = workers
    for worker in workers:
        extra = worker.first_seconds - seconds[worker.name]
        note(f"{compute}: {worker.name}: the first step took {extra:.1f} s longer than the rest")
    rate = {worker.name: size.tokens / seconds[worker.name] for worker in workers}
    flops = _flops(size)
    # The fastest peer is the one to compare with, also in memory.
    peers = [worker for worker in others if worker.trainer != ours.trainer]
    best = max(peers, key=lambda worker: rate[worker.name], default=None)
    rows = [
        Row(
            f"{compute} speed",
            rate[ours.name],
            worker.name,
            rate[worker.name],
            "tokens/s",
            goal=1.15 if worker is best and compute == "bf16" else None,
        )
        for worker in others
    ]
    rows += [
        Row(
            f"{compute} share of the ceiling, {worker.name}",
            flops / seconds[worker.name] / 1e9,
            f"{compute} product",
            ceiling / 1e9,
            "GFLOP/s",
        )
        for worker in workers
    ]
    rows += [
        Row(
            f"{compute} peak memory",
            ours.memory() / 1e6,
            worker.name,
            worker.memory() / 1e6,
            "MB",
            goal=1 / 0.6 if worker is best and compute == "bf16" else None,
            higher_is_better=False,
        )
        for worker in others
    ]
    return rows


def _flops(size: Size) -> int:
    """Of a step: backward costs twice what forward does, and attention is causal."""
    from armillary.diagnosis.size import forward_flops

    config = armillary_config(size)
    return 3 * size.batch * sum(forward_flops(config, n + 1) for n in range(size.length))


def _product(dtype: str) -> Callable[[], float]:
    """A measurement of a product of two square matrices, in seconds."""
    import torch

    torch.set_num_threads(THREADS)
    a, b = (torch.randn(CEILING, CEILING).to(getattr(torch, dtype)) for _ in range(2))

    def measure() -> float:
        times = []
        for _ in range(5):
            started = time.perf_counter()
            a @ b
            times.append(time.perf_counter() - started)
        return min(times)

    return measure


if __name__ == "__main__":
    main()
