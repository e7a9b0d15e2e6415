"""Faults of conversions, planted in SmolLM2's files one at a time, and what the doctor says first.

Each row is a fault in a file of its own, in the format that the fault is known from, or a sound
model, of which the doctor must find nothing. A row holds when the first line names the fault, and
the layer where it is in one. With --json it has the loss on the doctor's text as the file is, and
with the change that the doctor found.

    --only NAME   one row          --keep DIR   the planted files stay there
"""

import json
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from armillary.checkpoints import Checkpoint, open_checkpoint
from armillary.checkpoints.gguf_file import read_gguf_file
from armillary.checkpoints.locate import locate
from armillary.diagnosis.doctor import examine
from armillary.diagnosis.findings import Report
from armillary.diagnosis.probe_text import built_in_texts
from armillary.rope_scaling import Llama3
from armillary.tokenizer import Tokenizer
from protocol import note, parser

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support import faults
from support.downloads import llama_cpp_vocabularies
from support.faults import Fault


def all_faults() -> Iterator[Fault]:
    """The fifteen, and some of them again in another layer or format."""
    yield Fault("Q and K left unpermuted", "layout", ("stored for",), faults.unpermuted_gguf)
    yield Fault("base 10,000", "rotary-base", ("base is 10,000",), faults.wrong_base)
    yield Fault("dropped scaling", "scaling", ("scaling", "dropped"), faults.dropped_scaling)
    yield Fault("epsilon 1e-2", "epsilon", ("epsilon is 0.01",), faults.large_epsilon)
    yield Fault(
        "swapped gate and up", "swapped-gate-up", ("gate and up",), faults.swapped_gate_and_up
    )
    yield Fault("untied head of zeros", "untied-head", ("head", "zeros"), faults.head_of_zeros)
    yield Fault("wrong tokenizer", "tokenizer", ("tokenizer",), faults.other_tokenizer(_other()))
    yield Fault(
        "one layer's tensors swapped",
        "swapped-tensors",
        ("K and V", "layer 7"),
        faults.swapped_in_layer("attention.k", "attention.v", 7),
    )
    yield Fault(
        "transposed square matrix",
        "transposed",
        ("attention.q", "layer 4", "transposed"),
        faults.transposed_matrix("layers.4.attention.q.weight"),
    )
    yield Fault(
        "NaN in one tensor",
        "not-finite",
        ("layers.11.feedforward.up.weight", "NaN"),
        faults.one_nan("layers.11.feedforward.up.weight"),
    )
    yield Fault("1 + weight twice", "norm-offset", ("1 is added",), faults.one_added_twice)
    yield Fault(
        "bf16 frequency table",
        "frequency-table",
        ("frequency table in bf16",),
        faults.narrow_frequencies,
    )
    yield Fault("wrong head count", "head-count", ("head counts",), faults.wrong_head_count)
    yield Fault("missing BOS", "bos", ("BOS is missing",), faults.missing_bos)
    yield Fault("truncated file", "unreadable", ("truncated",), faults.truncated())
    yield Fault(
        "unpermuted, Hugging Face", "layout", ("stored for",), faults.unpermuted_huggingface
    )
    yield Fault(
        "swapped in layer 22",
        "swapped-tensors",
        ("Q and the output", "layer 22"),
        faults.swapped_in_layer("attention.q", "attention.out", 22, faults.as_huggingface),
    )
    yield Fault(
        "transposed in layer 27",
        "transposed",
        ("attention.out", "layer 27"),
        faults.transposed_matrix("layers.27.attention.out.weight", faults.as_ours),
    )
    yield Fault(
        "layers 9 and 10 swapped",
        "swapped-layers",
        ("layers 9 and 10",),
        faults.swapped_layers(9, 10),
    )
    yield Fault(
        "bf16 divisors, GGUF", "frequency-table", ("table in bf16",), faults.narrow_divisors
    )
    yield Fault(
        "truncated, Hugging Face",
        "unreadable",
        ("truncated",),
        faults.truncated(faults.as_huggingface, 0.9),
    )
    yield Fault("sound, GGUF", "", (), faults.as_gguf)
    yield Fault("sound, Hugging Face", "", (), faults.as_huggingface)
    yield Fault("sound, extended", "", (), _extended)


def _other() -> Tokenizer:
    """StarCoder's vocabulary, which has as many tokens as SmolLM2's and none the same."""
    path = llama_cpp_vocabularies() / "ggml-vocab-starcoder.gguf"
    return Tokenizer.from_gguf(read_gguf_file(path).metadata, where=str(path))


def _extended(checkpoint: Checkpoint, folder: Path) -> Path:
    """The window four times as long, with the rule that costs least untrained."""
    window = checkpoint.config.max_positions
    rule = Llama3(factor=4.0, original_window=window)
    config = faults.with_rotary(checkpoint.config, scaling=rule)
    config = config.model_copy(update={"max_positions": 4 * window})
    return faults.as_huggingface(replace(checkpoint, config=config), folder)


def named(fault: Fault, report: Report) -> bool:
    """Whether the first line names the fault."""
    if not fault.code:
        return not report.findings
    first = report.findings[0] if report.findings else None
    return (
        first is not None
        and first.code == fault.code
        and all(word in first.fault for word in fault.words)
    )


def run(fault: Fault, checkpoint: Checkpoint, scratch: Path) -> dict[str, object]:
    """Plant, examine, and hold the first line against what was planted."""
    path = fault.plant(checkpoint, scratch)
    started = time.perf_counter()
    report = examine(path, built_in_texts(), lambda *_: None, model=fault.name)
    return {
        "name": fault.name,
        "format": report.format or path.suffix.lstrip(".") or "directory",
        "said": report.diagnosis,
        "loss": report.loss,
        "cured": report.cured,
        "seconds": round(time.perf_counter() - started, 1),
        "holds": named(fault, report),
    }


def _parse() -> Namespace:
    arguments = parser(__doc__)
    arguments.add_argument("--only", metavar="NAME", help="one row")
    arguments.add_argument("--keep", metavar="DIR", type=Path, help="where planted files stay")
    return arguments.parse_args()


def main() -> None:
    """Print a row for each fault as it is examined."""
    arguments = _parse()
    checkpoint = open_checkpoint(locate("smollm2-135m"))
    rows = []
    chosen = [f for f in all_faults() if arguments.only in (None, f.name)]
    if not chosen:
        sys.exit(f"no row is named {arguments.only!r}")
    for number, fault in enumerate(chosen[:4] if arguments.quick else chosen, start=1):
        note(f"{number} of {len(chosen)}: {fault.name}")
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch) if arguments.keep is None else arguments.keep / f"{number:02}"
            folder.mkdir(parents=True, exist_ok=True)
            row = run(fault, checkpoint, folder)
        rows.append(row)
        if arguments.json:
            print(json.dumps(row), flush=True)
        else:
            holds = "yes" if row["holds"] else "no"
            print(f"{holds:>3}  {fault.name:<28} {row['seconds']:>6} s  {row['said']}", flush=True)
    summary = f"{sum(bool(row['holds']) for row in rows)} of {len(rows)} named"
    print(summary, file=sys.stderr if arguments.json else sys.stdout)
    sys.exit(1 if arguments.check and not all(row["holds"] for row in rows) else 0)


if __name__ == "__main__":
    main()
