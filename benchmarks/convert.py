"""Time and memory of a conversion beside transformers' load and save, on a made-up checkpoint.

A Llama of 2 GiB in bfloat16 (--quick: 256 MiB), as a Hugging Face directory. Ours ends with a
proof: what was written is hashed, read back, and run on a dozen tokens, source and copy;
transformers loads the model and saves it. Each runs in a process of its own. Memory is the peak of
what a process holds (mapped pages of files counted) over what it held before, imports done.

    python benchmarks/convert.py [--json] [--quick] [--check]
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from protocol import Bound, Row, finish, note, parser

MIB = 1 << 20


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--side", nargs=3, metavar=("WHICH", "SOURCE", "TARGET"))
    options = arguments.parse_args()
    if options.side is not None:
        which, source, target = options.side
        print(json.dumps(measured(SIDES[which], Path(source), Path(target))))
        return
    finish(rows(options), arguments=options)


def rows(options: argparse.Namespace) -> list[Row | Bound]:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "source"
        size, largest = write_source(source, layers=2 if options.quick else 25)
        note(f"a checkpoint of {size / MIB:,.0f} MiB, its largest tensor has {largest / MIB:.0f}")
        found = {}
        for which in SIDES:
            found[which] = best(
                [run(which, source, Path(folder) / f"{which}-{n}") for n in range(2)]
            )
            note(f"{which}: {found[which][0]:.1f} s, {found[which][1] / MIB:,.0f} MiB")
    seconds, memory = zip(found["ours"], found["transformers"], strict=True)
    whole = f"{size / MIB:,.0f} MiB to huggingface"
    return [
        Row(f"{whole}: time", *beside(seconds), "s", goal=None, higher_is_better=False),
        Row(
            f"{whole}: extra memory",
            *beside([x / MIB for x in memory]),
            "MiB",
            goal=2.0,
            higher_is_better=False,
        ),
        Row("to GGUF in float16: time", *beside([found["ours, gguf"][0], seconds[1]]), "s",
            higher_is_better=False),
        Bound("extra memory, in largest tensors", memory[0] / largest, "", high=2.0),
        Bound("the same, to GGUF", found["ours, gguf"][1] / largest, "", high=2.0),
    ]  # fmt: skip


def beside(figures: "list[float] | tuple[float, ...]") -> tuple[float, str, float]:
    return figures[0], "transformers", figures[1]


def best(runs: list[tuple[float, float]]) -> tuple[float, float]:
    """The least time and memory: the first run also fills the page cache."""
    times, memory = zip(*runs, strict=True)
    return min(times), min(memory)


def run(which: str, source: Path, target: Path) -> tuple[float, float]:
    command = [sys.executable, __file__, "--side", which, str(source), str(target)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    subprocess.run(["rm", "-rf", *target.parent.glob(f"{target.name}*")], check=True)
    seconds, memory = json.loads(done.stdout.splitlines()[-1])
    return seconds, memory


def measured(side: Callable[[Path, Path], Callable[[], object]], source: Path, target: Path):
    """Seconds and bytes of a conversion, imports done."""
    work = side(source, target)
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    start = time.perf_counter()
    work()
    return time.perf_counter() - start, _status("VmHWM") - before


def _status(name: str) -> int:
    text = Path("/proc/self/status").read_text()
    match = re.search(rf"{name}:\s+(\d+) kB", text)
    assert match is not None
    return int(match.group(1)) << 10


def ours(source: Path, target: Path) -> Callable[[], object]:
    from armillary.checkpoints import open_checkpoint
    from armillary.conversion.convert import convert

    import_for_a_pass()
    return lambda: convert(open_checkpoint(source), target, "huggingface")


def ours_to_gguf(source: Path, target: Path) -> Callable[[], object]:
    from armillary.checkpoints import open_checkpoint
    from armillary.conversion.convert import convert

    import_for_a_pass()
    path = target.with_name(f"{target.name}.gguf")
    return lambda: convert(open_checkpoint(source), path, "gguf", dtype="float16")


def import_for_a_pass() -> None:
    """What torch imports when a tensor without memory is first used."""
    from armillary.config import DecoderConfig
    from armillary.conversion.streamed import logits

    sizes = {"vocab_size": 8, "d_model": 8, "n_layers": 1, "n_heads": 2, "d_ff": 8}
    config = DecoderConfig.uniform(**sizes, max_positions=8)
    try:
        logits(config, {}, [1], [0], length=1)
    except KeyError:  # there are no tensors
        return


def transformers(source: Path, target: Path) -> Callable[[], object]:
    from transformers import AutoModelForCausalLM

    return lambda: AutoModelForCausalLM.from_pretrained(source, dtype="auto").save_pretrained(
        target
    )


SIDES = {"ours": ours, "ours, gguf": ours_to_gguf, "transformers": transformers}


def write_source(directory: Path, layers: int) -> tuple[int, int]:
    """Random weights of a usual spread; the bytes of all and of the largest tensor."""
    from armillary.checkpoints import write_huggingface
    from armillary.checkpoints.parameters import parameter_shapes
    from armillary.checkpoints.tensors import TensorToWrite, encode
    from armillary.config import DecoderConfig

    config = DecoderConfig.uniform(
        vocab_size=32_000,
        d_model=1920,
        n_layers=layers,
        n_heads=30,
        n_kv_heads=10,
        d_head=64,
        d_ff=5120,
        max_positions=8192,
    )
    rng = np.random.default_rng(0)
    shapes = parameter_shapes(config)

    def chunks(shape: tuple[int, ...]):
        numbers = rng.standard_normal(shape[0], dtype=np.float32)
        for _ in range(shape[-1] if len(shape) > 1 else 1):
            yield encode(0.02 * np.roll(numbers, int(rng.integers(shape[0]))), "BF16")

    tensors = [TensorToWrite(name, "BF16", shape, chunks(shape)) for name, shape in shapes.items()]
    write_huggingface(directory, config, tensors)
    sizes = [2 * int(np.prod(shape)) for shape in shapes.values()]
    return sum(sizes), max(sizes)


if __name__ == "__main__":
    main()
