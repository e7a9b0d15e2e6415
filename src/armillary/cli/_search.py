"""What `armillary extend search` runs and prints: the divisors of the rule longrope."""

import json as json_module
import time
from pathlib import Path
from typing import TYPE_CHECKING

from armillary.cli._options import Interrupted, print_json
from armillary.cli._progress import NowAndThen
from armillary.wording import clock_text

if TYPE_CHECKING:
    from armillary.checkpoints.checkpoint import Checkpoint
    from armillary.extension.rules import RuleOptions
    from armillary.extension.search import Evaluation, Found


def run(
    model: str,
    checkpoint: "Checkpoint",
    text: Path | None,
    out: Path | None,
    *,
    to: int,
    options: "RuleOptions",
    evaluations: int,
    population: int,
    passages: int,
    seed: int,
    json: bool,
) -> None:
    """Search, and write the divisors to `out` and those of short texts beside it.

    What was measured is noted beside them too, and gone on with. Raises UserError for what cannot
    be read or has no room, Interrupted when it is interrupted.
    """
    from armillary.errors import UserError
    from armillary.extension.loss_at_length import LongRoPETarget, LossAtLength
    from armillary.extension.loss_at_length import passages as passages_of
    from armillary.extension.search import search
    from armillary.files import as_user_error

    if out is None or text is None:
        raise UserError(f"extend search needs {'--out FILE' if out is None else '--text FILE'}")
    if options.short_factors is not None or options.long_factors is not None:
        raise UserError("--short-factors and --long-factors are what extend search finds")
    if checkpoint.tokenizer is None:
        raise UserError(f"{checkpoint.source}: has no tokenizer; put tokenizer.json beside it")
    target = LongRoPETarget(checkpoint.config, to, options)
    starts, factor = target.starts(), target.factor
    with as_user_error(text):
        written = text.read_bytes().decode("utf-8", "replace")
    ids = passages_of(checkpoint.tokenizer, written, to, passages)
    fitness = LossAtLength.of(checkpoint, target, ids)
    told = _Told(evaluations)
    about = {"model": str(checkpoint.source.resolve()), "to": to, "passages": fitness.checksum}
    about |= {"rule": {name: value for name, value in vars(options).items() if value is not None}}
    notes = out.with_name(f"{out.stem}.search.jsonl")
    try:
        found = search(
            fitness,
            starts,
            factor=factor,
            evaluations=evaluations,
            population=population,
            seed=seed,
            notes=notes,
            about=about,
            told=told,
        )
    except KeyboardInterrupt:
        raise Interrupted(
            f"what was measured is noted in {notes}, and the same command goes on"
        ) from None
    short = out.with_name(f"{out.stem}.short{out.suffix}")
    _write(out, found.best.factors)
    _write(short, (1.0,) * len(found.best.factors))
    _show(model, found, out, short, notes, to, json)


def _write(path: Path, factors: tuple[float, ...]) -> None:
    from armillary.files import write_atomically

    with write_atomically(path) as file:
        file.write(json_module.dumps([*factors]).encode() + b"\n")


class _Told:
    """Tells on standard error how far a search is."""

    def __init__(self, evaluations: int) -> None:
        self._lines = NowAndThen()
        self._evaluations = evaluations
        self._start = time.monotonic()
        self._first: int | None = None

    def __call__(self, evaluation: "Evaluation", best: "Evaluation") -> None:
        now = time.monotonic()
        if self._first is None:
            self._first = evaluation.number
        improved = best is evaluation
        done = evaluation.number + 1
        each = (now - self._start) / (done - self._first)
        name = f" ({evaluation.start})" if evaluation.start else ""
        parts = [f"{done:,} of {self._evaluations:,}{name}", f"loss {_nats(evaluation.loss)}"]
        if not improved:
            parts.append(f"best {_nats(best.loss)}")
        parts.append(f"{clock_text((self._evaluations - done) * each)} left")
        self._lines.say(", ".join(parts), at_once=improved)


def _show(
    model: str, found: "Found", out: Path, short: Path, notes: Path, to: int, json: bool
) -> None:
    if json:
        print_json(
            {
                "long_factors": str(out),
                "short_factors": str(short),
                "notes": str(notes),
                "evaluations": found.evaluations,
                "loss": found.best.loss,
                "starts": dict(found.starts),
                "factors": [*found.best.factors],
            }
        )
        return
    print(out)
    print(f"  loss        {_nats(found.best.loss)} nats per token, of {found.evaluations:,}")
    for name, loss in found.starts.items():
        print(f"  {name:<10}  {_nats(loss)}")
    print(f"  short       {short}")
    print(f"  measured    {notes}")
    print(
        f"  apply       armillary extend apply {model} --to {to} --rule longrope "
        f"--long-factors {out} --short-factors {short} --out DIR"
    )


def _nats(loss: float) -> str:
    """With as many digits as candidates differ in."""
    return f"{loss:.5f}"
