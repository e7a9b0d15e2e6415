"""A quantisation as the command line asks for it: from a name to a file and what it costs."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from armillary.checkpoints import Checkpoint, open_checkpoint
from armillary.checkpoints.quantize import TARGETS, bytes_of, choose_encodings, write_encoded
from armillary.cli._evaluation import say
from armillary.cli._model import read_checkpoint
from armillary.cli._options import print_json
from armillary.cli._progress import BarOrLines
from armillary.errors import UserError
from armillary.files import staged
from armillary.wording import bytes_text

if TYPE_CHECKING:
    from armillary.evaluation.divergence import Divergence, Window
    from armillary.evaluation.statistics import Estimate

_DEFAULT_TEXT = "python-stdlib"


@dataclass(frozen=True)
class Wish:
    """What was asked on the command line."""

    model: str
    target: str
    out: Path
    max_loss: float | None
    text: tuple[str, ...]
    windows: int
    length: int
    ignore_keys: tuple[str, ...]


def run(wish: Wish, *, json: bool) -> None:
    """Write the copy and print what it costs.

    Raises UserError for what cannot be read or written, and when the loss rises too much; nothing
    is left behind then.
    """
    checkpoint = read_checkpoint(wish.model, wish.ignore_keys)
    out = wish.out
    if out.exists() and checkpoint.source.exists() and out.samefile(checkpoint.source):
        raise UserError(f"{out}: is the model itself; name another file or directory")
    encodings, notices = choose_encodings(checkpoint, TARGETS[wish.target])
    say([*checkpoint.notices, *notices])
    windows = _windows(wish, checkpoint)
    with staged(out) as written:
        with BarOrLines(patient=True) as bar:
            say(_write(written, checkpoint, encodings, bar))
            found = None if windows is None else _measure(checkpoint, written, windows, bar)
        if found is not None:
            _refuse_loss(found, wish)
    _show(wish, checkpoint, encodings, found, json)


def _windows(wish: Wish, checkpoint: Checkpoint) -> "list[Window] | None":
    """The text to measure on, cut; None when nothing is to be measured."""
    if wish.windows == 0:
        if wish.max_loss is not None:
            raise UserError("--max-loss is a rise that is measured; give --windows above 0")
        return None
    tokenizer = checkpoint.tokenizer
    if tokenizer is None:
        raise UserError(
            f"{checkpoint.source}: has no tokenizer, so nothing can be measured; with --windows 0 "
            "it is written all the same"
        )
    from armillary.evaluation.divergence import cut_windows
    from armillary.evaluation.texts import read_documents

    begin = tokenizer.begin([])
    length = min(wish.length, checkpoint.config.max_positions)
    if length <= len(begin) + 1:
        raise UserError(f"--length {length} leaves no room for text; give more tokens")
    documents, notices = read_documents(
        wish.text or (_DEFAULT_TEXT,), tokenizer, least=length - len(begin)
    )
    say(notices)
    return cut_windows(documents, begin, length, wish.windows)


def _write(
    path: Path, checkpoint: Checkpoint, encodings: Mapping[str, str], bar: BarOrLines
) -> list[str]:
    total = bytes_of(checkpoint, encodings)
    done = 0

    def progress(more: int) -> None:
        nonlocal done
        done += more
        bar.show(f"writing: {bytes_text(done)} of {bytes_text(total)}", done, total)

    return write_encoded(path, checkpoint, encodings, progress)


def _measure(
    checkpoint: Checkpoint, written: Path, windows: "list[Window]", bar: BarOrLines
) -> "Divergence":
    from armillary.evaluation.divergence import measure

    def progress(done: int, total: int) -> None:
        bar.show(f"measuring: step {done} of {total}", done, total)

    return measure(checkpoint, open_checkpoint(written), windows, progress=progress)


def _refuse_loss(found: "Divergence", wish: Wish) -> None:
    # Not the other way round: a rise that is no number is refused too.
    if wish.max_loss is not None and not found.rise.value <= wish.max_loss:
        raise UserError(
            f"{wish.out}: not written, since in {wish.target} the loss rises by "
            f"{_interval(found.rise, '+.4f')} nats, more than --max-loss {wish.max_loss:g}; take a "
            "type with more bits, or allow more"
        )


def _show(
    wish: Wish,
    checkpoint: Checkpoint,
    encodings: Mapping[str, str],
    found: "Divergence | None",
    json: bool,
) -> None:
    sizes = bytes_of(checkpoint), bytes_of(checkpoint, encodings)
    counts = Counter(encodings.values())
    if json:
        facts: dict[str, object] = {
            "model": wish.model,
            "out": str(wish.out),
            "format": "gguf" if wish.out.suffix == ".gguf" else "armillary",
            "type": wish.target,
            "tensors": dict(counts.most_common()),
            "bytes_before": sizes[0],
            "bytes_after": sizes[1],
        }
        print_json(facts | ({} if found is None else _facts(wish, found)))
        return
    print(wish.out)
    print(f"  tensors          {', '.join(f'{n} {name}' for name, n in counts.most_common())}")
    share = sizes[1] / sizes[0]
    print(f"  weights          {bytes_text(sizes[0])} → {bytes_text(sizes[1])} ({share:.0%})")
    if found is None:
        return
    before, after = (_interval(_exp(each), ".3f") for each in (found.before, found.after))
    print(f"  perplexity       {before} → {after}")
    print(f"  loss             {_interval(found.rise, '+.4f')} nats per token")
    print(f"  KL divergence    {_interval(found.kl, '.4f')} nats per token")
    print(f"  same top token   {_interval(found.same_top, '.1%')}")
    text = ", ".join(wish.text or (_DEFAULT_TEXT,))
    print(f"  (95 % intervals; {found.tokens:,} tokens of {text} in {found.windows} windows)")


def _facts(wish: Wish, found: "Divergence") -> dict[str, object]:
    estimates = {
        "perplexity_before": _exp(found.before),
        "perplexity_after": _exp(found.after),
        "loss_rise": found.rise,
        "kl": found.kl,
        "same_top": found.same_top,
    }
    return {
        "text": list(wish.text or (_DEFAULT_TEXT,)),
        "tokens": found.tokens,
        "windows": found.windows,
        **{name: _finite(each) for name, each in estimates.items()},
    }


def _finite(estimate: "Estimate") -> dict[str, float | None]:
    """An estimate for JSON, which has no infinity: bounds that one window cannot give are null."""
    bounds = {"value": estimate.value, "low": estimate.low, "high": estimate.high}
    return {name: x if math.isfinite(x) else None for name, x in bounds.items()}


def _exp(loss: "Estimate") -> "Estimate":
    from armillary.evaluation.statistics import Estimate

    low, value, high = (_exp_of(x) for x in (loss.low, loss.value, loss.high))
    return Estimate(value, low, high, loss.count)


def _exp_of(nats: float) -> float:
    return math.exp(nats) if nats < 700 else math.inf


def _interval(estimate: "Estimate", form: str) -> str:
    value = format(estimate.value, form)
    if not math.isfinite(estimate.high):
        return value
    return f"{value} ({format(estimate.low, form)} to {format(estimate.high, form)})"
