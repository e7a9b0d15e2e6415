"""Generation with SmolLM2-135M on the CPU beside llama.cpp and transformers, in one run.

    python benchmarks/generate.py                     everything
    python benchmarks/generate.py --only decode       or prefill, batch, guess, first, reuse
    python benchmarks/generate.py --widths f32,q8_0   some widths
    python benchmarks/generate.py --quick             fewer repeats, shorter prompts

The same weights for all: llama.cpp's quantiser brings the Q4_1 file's to each width, and we and
llama.cpp read the same files; transformers has those widths that it can compute in. Engines live
in processes of their own (benchmarks/engines.py) and take turns; three prompts, medians. A memory
bound stands beside decoding: every weight is read once for each token, so tokens/s can be at most
the machine's bandwidth over the bytes of the weights and of the cache.
"""

import argparse
import ctypes
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from engines import INT8_CACHE, Worker
from protocol import Row, finish, note, parser

THREADS = 2
CONTEXT = 8192 + 256
TEXT_MODULES = ("argparse.py", "ast.py", "datetime.py")
PARTS = ("decode", "prefill", "batch", "guess", "first", "reuse")
REUSED = 2000
"""Tokens of the prompt that comes again."""


@dataclass(frozen=True)
class Width:
    """How weights are held: llama.cpp's number for its files, and what is to be reached.

    `decode` beside llama.cpp at a short context and `long` at 4,096 tokens; `bound` of what memory
    allows.
    """

    name: str
    ftype: int
    torch: str | None = None
    decode: float | None = None
    bound: float | None = None
    long: float | None = None


WIDTHS = (
    Width("f32", 0, torch="float32", decode=1.0),
    Width("bf16", 32, torch="bfloat16", decode=1.0, bound=0.88),
    Width("q8_0", 7, decode=1.35, bound=0.75, long=1.1),
    Width("q4_0", 2, decode=1.3, bound=0.65, long=1.1),
    Width("q4_1", 3, decode=1.5, bound=0.65, long=1.1),
)
INT8_CACHE_GOAL = 1.1
"""Beside our own cache in bfloat16, at 4,096 tokens."""
PREFILL_GOALS = {512: 1.1, 2048: 1.3, 8192: 1.5}


class Run:
    """The models of a run, and what is asked of them."""

    def __init__(self, folder: Path, chosen: argparse.Namespace) -> None:
        self.folder, self.quick = folder, chosen.quick
        self.parts = PARTS if chosen.only is None else (chosen.only,)
        names = [width.name for width in WIDTHS] if chosen.widths is None else chosen.widths
        self.widths = [width for width in WIDTHS if width.name in names]
        self.lengths = [128, 512] if self.quick else list(PREFILL_GOALS)
        self.contexts = [128] if self.quick else [128, 4096]
        self.repeats = 3 if self.quick else 9
        self.prompts = prompts(max(self.lengths))

    def rows(self) -> list[Row]:
        """Everything that was asked for."""
        rows: list[Row] = []
        for width in self.widths:
            path = _written(self.folder, width)
            for part, measure in (
                ("decode", self._decode),
                ("prefill", self._prefill),
                ("batch", self._batch),
                ("guess", self._guess),
            ):
                if part in self.parts:
                    note(f"{width.name}: {part}")
                    rows += measure(width, path)
            if "first" in self.parts:
                note(f"{width.name}: first token")
                rows += _first_token(width, path, 3 if self.quick else 7)
            if "reuse" in self.parts:
                note(f"{width.name}: a prompt that comes again")
                rows += _again(self.folder, width, path, 3 if self.quick else 7)
        return rows

    def _workers(self, width: Width, path: Path) -> list[Worker]:
        """Ours first."""
        workers = [Worker("armillary", path, "auto", THREADS, CONTEXT)]
        if has("llama_cpp"):
            workers.append(Worker("llama.cpp", path, "", THREADS, CONTEXT))
        if width.torch is not None and has("transformers"):
            folder = _for_transformers(self.folder, width)
            workers.append(Worker("transformers", folder, width.torch, THREADS, CONTEXT))
        return workers

    def _decode(self, width: Width, path: Path) -> list[Row]:
        rows = []
        workers = self._workers(width, path)
        if width.name != "f32":
            workers.append(Worker(INT8_CACHE, path, "auto", THREADS, CONTEXT))
        try:
            for context in self.contexts:
                rows += self._decode_after(width, path, workers, context)
        finally:
            for worker in workers:
                worker.close()
        return rows

    def _decode_after(
        self, width: Width, path: Path, workers: Sequence[Worker], context: int
    ) -> list[Row]:
        new = 64
        taken: dict[str, list[float]] = {worker.name: [] for worker in workers}
        memory = []
        for prompt in self.prompts:
            texts = {each.name: each.decode(prompt[:context], 16)[1] for each in workers}
            _same_text(texts)
            for _ in range(self.repeats // 3):
                for worker in workers:
                    taken[worker.name].append(worker.decode(prompt[:context], new)[0])
                memory.append(_seconds_a_byte())
        rate = {name: new / statistics.median(values) for name, values in taken.items()}
        narrow = rate.pop(INT8_CACHE, None)
        ours, *peers = rate
        name = f"{width.name}: decode after {context}"
        goals = {"llama.cpp": width.decode if context < 1000 else width.long}
        rows = [
            Row(name, rate[ours], peer, rate[peer], "tokens/s", goal=goals.get(peer))
            for peer in peers
        ]
        bandwidth = 1 / statistics.median(memory)
        read = _weight_bytes(path) + (context + new / 2) * _cache_bytes(width, path)
        bound = f"memory bound ({bandwidth / 1e9:.1f} GB/s)"
        goal = width.bound if context < 1000 else None
        rows.append(Row(name, rate[ours], bound, bandwidth / read, "tokens/s", goal=goal))
        if narrow is not None:
            goal = None if context < 1000 else INT8_CACHE_GOAL
            rows.append(
                Row(
                    f"{name}, cache in int8",
                    narrow,
                    "cache in bfloat16",
                    rate[ours],
                    "tokens/s",
                    goal=goal,
                )
            )
        return rows

    def _prefill(self, width: Width, path: Path) -> list[Row]:
        rows = []
        for length in self.lengths:
            # Fresh processes for each length: their peak of memory is that length's.
            workers = self._workers(width, path)
            try:
                taken: dict[str, list[float]] = {worker.name: [] for worker in workers}
                turns = max(3, self.repeats // (1 if length < 2000 else 3))
                for turn in range(turns + 1):
                    prompt = self.prompts[turn % len(self.prompts)][:length]
                    for worker in workers:
                        seconds = worker.prefill(prompt)
                        if turn:
                            taken[worker.name].append(seconds)
                rate = {name: length / statistics.median(each) for name, each in taken.items()}
                ours, *peers = rate
                best = max(peers, key=lambda peer: rate[peer], default=None)
                name = f"{width.name}: prefill {length}"
                rows += [
                    Row(
                        name,
                        rate[ours],
                        peer,
                        rate[peer],
                        "tokens/s",
                        goal=PREFILL_GOALS.get(length) if peer == best else None,
                    )
                    for peer in peers
                ]
                rows += [
                    Row(
                        f"{width.name}: peak memory, prefill {length}",
                        workers[0].memory() / 1e6,
                        peer.name,
                        peer.memory() / 1e6,
                        "MB",
                        goal=0.8 if peer.name == "llama.cpp" and length > 8000 else None,
                        higher_is_better=False,
                    )
                    for peer in workers[1:]
                ]
            finally:
                for worker in workers:
                    worker.close()
        return rows

    def _batch(self, width: Width, path: Path) -> list[Row]:
        worker = Worker("armillary", path, "auto", THREADS, CONTEXT)
        try:
            prompts = [self.prompts[0][at : at + 64] for at in range(0, 512, 64)]
            new = 64
            one, eight = [], []
            for turn in range(self.repeats + 1):
                seconds = worker.batch(prompts[:1], new), worker.batch(prompts, new)
                if turn:
                    one.append(new / seconds[0])
                    eight.append(8 * new / seconds[1])
        finally:
            worker.close()
        name = f"{width.name}: 8 prompts together"
        return [
            Row(
                name,
                statistics.median(eight),
                "one prompt",
                statistics.median(one),
                "tokens/s",
                goal=3.0,
            )
        ]

    def _guess(self, width: Width, path: Path) -> list[Row]:
        """Guesses from the text itself: code that is written again, and prose that never is."""
        code = self.prompts[0][:400]
        texts = {
            "code written again": ([*code, *code[:80]], None, 1.8),
            "sampled prose": (self.prompts[2][:64], 1, 0.97),
        }
        worker = Worker("armillary", path, "auto", THREADS, CONTEXT)
        rows = []
        try:
            for name, (prompt, seed, goal) in texts.items():
                taken: dict[bool, list[float]] = {False: [], True: []}
                new = 256
                for turn in range(self.repeats + 1):
                    answers = {
                        guesses: worker.guess(prompt, new, seed, speculate=guesses)
                        for guesses in taken
                    }
                    if answers[False][1] != answers[True][1]:
                        note(f"  {name}: guesses have changed the text")
                    if turn:
                        for guesses, (seconds, _) in answers.items():
                            taken[guesses].append((new - 1) / seconds)
                rate = {guesses: statistics.median(each) for guesses, each in taken.items()}
                rows.append(
                    Row(
                        f"{width.name}: {name}, guessed",
                        rate[True],
                        "without guesses",
                        rate[False],
                        "tokens/s",
                        goal=goal,
                    )
                )
        finally:
            worker.close()
        return rows


def _first_token(width: Width, path: Path, repeats: int) -> list[Row]:
    """Whole processes from start to end, for a prompt and one token."""
    ours = [sys.executable, "-m", "armillary", "generate", str(path), "Once upon a time"]
    commands = {"armillary": [*ours, "--max-tokens", "1", "--temperature", "0"]}
    if has("llama_cpp"):
        peer = (
            "import sys; from llama_cpp import Llama\n"
            f"lm = Llama(sys.argv[1], n_ctx=512, n_threads={THREADS}, verbose=False)\n"
            "print(lm('Once upon a time', max_tokens=1, temperature=0)['choices'][0]['text'])"
        )
        commands["llama.cpp"] = [sys.executable, "-c", peer, str(path)]
    taken: dict[str, list[float]] = {name: [] for name in commands}
    for turn in range(repeats + 1):
        for name, command in commands.items():
            started = time.perf_counter()
            subprocess.run(command, check=True, capture_output=True)
            if turn:
                taken[name].append(time.perf_counter() - started)
    seconds = {name: statistics.median(values) for name, values in taken.items()}
    name = f"{width.name}: first token, from the shell"
    rows = [
        Row(name, seconds["armillary"], "one second", 1.0, "s", goal=1.0, higher_is_better=False)
    ]
    if "llama.cpp" in seconds:
        peer_seconds = seconds["llama.cpp"]
        rows.append(
            Row(name, seconds["armillary"], "llama.cpp", peer_seconds, "s", higher_is_better=False)
        )
    return rows


def _again(folder: Path, width: Width, path: Path, repeats: int) -> list[Row]:
    """Whole processes for a long prompt and one token, where it was computed before and where not.

    llama.cpp reads what its own function has saved of the same prompt.
    """
    prompt = folder / "prompt.txt"
    prompt.write_text(_text(REUSED), encoding="utf-8")
    ours = [sys.executable, "-m", "armillary", "generate", str(path), "-f", str(prompt)]
    ours += ["--max-tokens", "1", "--temperature", "0"]
    commands = {
        "computed before": [*ours, "--prompt-cache"],
        "computed now": [*ours, "--no-prompt-cache"],
    }
    if has("llama_cpp"):
        saved = folder / f"prompt-{width.name}.session"
        peer = [sys.executable, str(Path(__file__).with_name("sessions.py")), str(path)]
        commands["llama.cpp, computed before"] = [*peer, str(prompt), str(saved), str(THREADS)]
    taken: dict[str, list[float]] = {name: [] for name in commands}
    for turn in range(repeats + 1):
        for name, command in commands.items():
            started = time.perf_counter()
            subprocess.run(command, check=True, capture_output=True)
            if turn:
                taken[name].append(time.perf_counter() - started)
    again, *others = ((name, statistics.median(values)) for name, values in taken.items())
    goals = {"computed now": 3.0}
    return [
        Row(
            f"{width.name}: first token after {REUSED} that were computed before, from the shell",
            again[1],
            name,
            seconds,
            "s",
            goal=goals.get(name),
            higher_is_better=False,
        )
        for name, seconds in others
    ]


def _text(tokens: int) -> str:
    """About so many tokens of text."""
    from armillary.checkpoints import open_checkpoint
    from armillary.checkpoints.locate import locate

    tokenizer = open_checkpoint(locate("smollm2-135m")).tokenizer
    assert tokenizer is not None
    return tokenizer.decode(prompts(tokens)[0])


def prompts(longest: int) -> list[list[int]]:
    """Three texts of at least so many tokens."""
    from armillary.checkpoints import open_checkpoint
    from armillary.checkpoints.locate import locate

    tokenizer = open_checkpoint(locate("smollm2-135m")).tokenizer
    assert tokenizer is not None
    library = Path(sysconfig.get_path("stdlib"))
    return [
        tokenizer.encode((library / name).read_text(encoding="utf-8"))[:longest]
        for name in TEXT_MODULES
    ]


def _written(folder: Path, width: Width) -> Path:
    """The model in a width, as llama.cpp's quantiser writes it; else the file as it is."""
    from armillary.checkpoints.locate import locate

    source = locate("smollm2-135m")
    if not has("llama_cpp"):
        note("llama-cpp-python is not installed; left out (make test-llamacpp builds it)")
        return source
    import llama_cpp

    target = folder / f"{width.name}.gguf"
    if not target.exists():
        parameters = llama_cpp.llama_model_quantize_default_params()
        parameters.ftype = width.ftype
        parameters.allow_requantize = True
        silence = llama_cpp.llama_log_callback(lambda *_: None)
        llama_cpp.llama_log_set(silence, ctypes.c_void_p(0))
        if llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), parameters):
            raise RuntimeError(f"llama.cpp could not write the weights as {width.name}")
    return target


def _for_transformers(folder: Path, width: Width) -> Path:
    from armillary.checkpoints import open_checkpoint, write_huggingface
    from armillary.checkpoints.locate import locate
    from armillary.checkpoints.tensors import to_write

    target = folder / f"huggingface-{width.name}"
    if not target.exists():
        checkpoint = open_checkpoint(locate("smollm2-135m"))
        assert checkpoint.tokenizer is not None
        kind = {"float32": "F32", "bfloat16": "BF16"}[str(width.torch)]
        write_huggingface(
            target,
            checkpoint.config,
            [to_write(tensor.renamed(name), kind) for name, tensor in checkpoint.tensors.items()],
            checkpoint.tokenizer,
            checkpoint.generation,
        )
    return target


def _weight_bytes(path: Path) -> int:
    from armillary.checkpoints import open_checkpoint

    return sum(tensor.nbytes for tensor in open_checkpoint(path).tensors.values())


def _cache_bytes(width: Width, path: Path) -> int:
    """Of a token, in the type that our cache has."""
    from armillary.checkpoints import open_checkpoint
    from armillary.diagnosis.size import cache_bytes_per_token

    kind = "float32" if width.name == "f32" else "bfloat16"
    return cache_bytes_per_token(open_checkpoint(path).config, kind)


def _same_text(texts: dict[str, list[int]]) -> None:
    """Engines that compute something else are not to be compared."""
    ours, *peers = texts
    for peer in peers:
        if texts[peer] != texts[ours]:
            note(f"  {peer} continues with {texts[peer]}, {ours} with {texts[ours]}")


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


def has(module: str) -> bool:
    from importlib.util import find_spec

    return find_spec(module) is not None


def main() -> None:
    """Measure, print and check."""
    arguments = parser(__doc__)
    arguments.add_argument("--only", choices=PARTS, help="one part")
    arguments.add_argument(
        "--widths", type=lambda text: text.split(","), help="some of f32,bf16,q8_0,q4_0,q4_1"
    )
    chosen = arguments.parse_args()
    # Settings that some machines have for older builds of OpenBLAS, and that slow the current one.
    for variable in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE"):
        os.environ.pop(variable, None)
    with tempfile.TemporaryDirectory() as scratch:
        rows = Run(Path(scratch), chosen).rows()
    finish(rows, chosen)


if __name__ == "__main__":
    main()
