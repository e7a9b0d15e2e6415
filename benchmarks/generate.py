"""Prefill and decoding of SmolLM2-135M beside transformers and llama.cpp, in one run.

    python benchmarks/generate.py            every engine, float32 weights, medians of 7
    python benchmarks/generate.py --quick    shorter prompts, medians of 3

The same weights for all: the Q4_1 file's, brought to float32. Engines live in processes of their
own (benchmarks/engines.py) and take turns. The last rows set decoding beside the memory bound:
every weight is read once for each token, so tokens/s can be at most the machine's bandwidth over
the bytes of the weights and of the cache, both measured or counted in the same turns.
"""

import ctypes
import math
import os
import statistics
import sysconfig
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from engines import Worker
from protocol import Row, finish, medians, note, parser

THREADS = 2
CONTEXT = 4096 + 256
TEXT_MODULES = ("argparse.py", "ast.py", "datetime.py")


def main() -> None:
    arguments = parser(__doc__).parse_args()
    # Settings that some machines have for older builds of OpenBLAS, and that slow the current one.
    for variable in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE"):
        os.environ.pop(variable, None)
    lengths = [128, 512] if arguments.quick else [128, 512, 2048]
    contexts = [128] if arguments.quick else [128, 4096]
    repeats = 3 if arguments.quick else 7
    with tempfile.TemporaryDirectory() as scratch:
        paths, read_bytes, prompts = _prepare(Path(scratch), max(*lengths, *contexts))
        workers = [Worker(name, path, "float32", THREADS, CONTEXT) for name, path in paths.items()]
        try:
            rows = _measure(workers, prompts, lengths, contexts, repeats, *read_bytes)
        finally:
            for worker in workers:
                worker.close()
    finish(rows, arguments)


def _prepare(
    scratch: Path, longest: int
) -> tuple[dict[str, Path], tuple[int, int], list[list[int]]]:
    """The model for each engine, bytes of its weights and of a cached token, three prompts."""
    from armillary.checkpoints import open_checkpoint, write_huggingface
    from armillary.checkpoints.locate import locate
    from armillary.checkpoints.tensors import to_write
    from armillary.diagnosis.size import cache_bytes_per_token

    gguf = locate("smollm2-135m")
    checkpoint = open_checkpoint(gguf)
    assert checkpoint.tokenizer is not None
    library = Path(sysconfig.get_path("stdlib"))
    prompts = [
        checkpoint.tokenizer.encode((library / name).read_text(encoding="utf-8"))[:longest]
        for name in TEXT_MODULES
    ]
    paths = {"armillary": gguf}
    note("writing the weights as float32 for the peers")
    try:
        import transformers  # noqa: F401

        write_huggingface(
            scratch / "huggingface",
            checkpoint.config,
            [to_write(tensor.renamed(name), "F32") for name, tensor in checkpoint.tensors.items()],
            checkpoint.tokenizer,
            checkpoint.generation,
        )
        paths["transformers"] = scratch / "huggingface"
    except ImportError:
        note("transformers is not installed; left out")
    try:
        import llama_cpp

        parameters = llama_cpp.llama_model_quantize_default_params()
        parameters.ftype = llama_cpp.LLAMA_FTYPE_ALL_F32
        parameters.allow_requantize = True
        target = scratch / "float32.gguf"
        silence = llama_cpp.llama_log_callback(lambda *_: None)
        llama_cpp.llama_log_set(silence, ctypes.c_void_p(0))
        if llama_cpp.llama_model_quantize(str(gguf).encode(), str(target).encode(), parameters):
            raise RuntimeError("llama.cpp could not write the weights as float32")
        paths["llama.cpp"] = target
    except ImportError:
        note("llama-cpp-python is not installed; left out (make test-llamacpp builds it)")
    weight_bytes = sum(4 * math.prod(tensor.shape) for tensor in checkpoint.tensors.values())
    return paths, (weight_bytes, cache_bytes_per_token(checkpoint.config, "float32")), prompts


def _measure(
    workers: list[Worker],
    prompts: list[list[int]],
    lengths: list[int],
    contexts: list[int],
    repeats: int,
    weight_bytes: int,
    cache_bytes: int,
) -> list[Row]:
    ours, *peers = workers
    rows: list[Row] = []
    turn = iter(range(1_000_000))

    def prompt(length: int) -> list[int]:
        return prompts[next(turn) // len(workers) % len(prompts)][:length]

    for length in lengths:
        note(f"prefill {length}")
        runs = {w.name: partial(_prefill, w, prompt, length) for w in workers}
        seconds = medians(runs, repeats)
        rows += [
            Row(
                f"prefill {length} f32",
                length / seconds[ours.name],
                peer.name,
                length / seconds[peer.name],
                "tokens/s",
            )
            for peer in peers
        ]
    for context in contexts:
        new = 32 if context > 1000 else 64
        note(f"decode after {context}")
        _same_text(workers, prompts[0][:context])
        runs = {w.name: partial(_decode, w, prompt, context, new) for w in workers}
        seconds = medians({**runs, "memory": _seconds_a_byte}, repeats if context < 1000 else 3)
        bandwidth = 1 / seconds.pop("memory")
        rate = {name: new / value for name, value in seconds.items()}
        rows += [
            Row(f"decode after {context} f32", rate[ours.name], p.name, rate[p.name], "tokens/s")
            for p in peers
        ]
        rows.append(
            Row(
                f"decode after {context} f32",
                rate[ours.name],
                f"memory bound ({bandwidth / 1e9:.1f} GB/s)",
                bandwidth / (weight_bytes + (context + new / 2) * cache_bytes),
                "tokens/s",
            )
        )
    rows += [
        Row(
            "peak memory f32",
            ours.memory() / 1e6,
            peer.name,
            peer.memory() / 1e6,
            "MB",
            higher_is_better=False,
        )
        for peer in peers
    ]
    return rows


def _prefill(worker: Worker, prompt: Callable[[int], list[int]], length: int) -> float:
    return worker.prefill(prompt(length))


def _decode(worker: Worker, prompt: Callable[[int], list[int]], length: int, new: int) -> float:
    return worker.decode(prompt(length), new)[0]


def _same_text(workers: list[Worker], prompt: list[int]) -> None:
    """Engines that compute something else are not to be compared."""
    texts = {worker.name: worker.decode(prompt, 16)[1] for worker in workers}
    first = texts[workers[0].name]
    for name, ids in texts.items():
        if ids != first:
            note(f"{name} continues with {ids}, {workers[0].name} with {first}")


def _seconds_a_byte() -> float:
    """What it takes to read a byte from memory: two threads, 1 GB, the median of three passes."""
    import torch

    torch.set_num_threads(THREADS)
    data = torch.ones(1 << 28)
    times = []
    for _ in range(3):
        started = time.perf_counter()
        data.sum()
        times.append(time.perf_counter() - started)
    return statistics.median(times) / data.nbytes


if __name__ == "__main__":
    main()
