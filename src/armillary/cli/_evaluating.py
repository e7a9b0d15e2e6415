"""An evaluation as the command line asks for it: from names and options to files and tables."""

import importlib.util
import os
import shlex
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from armillary.cli._evaluation import EvaluationDisplay, say, show_summary
from armillary.cli._options import Interrupted
from armillary.cli._progress import TransferProgress
from armillary.cli._sampling import load_model
from armillary.errors import UserError
from armillary.evaluation.budget import Grid, Plan, Speed, fitted, kept, measured_speed
from armillary.evaluation.perplexity import chosen_keys
from armillary.evaluation.records import Run, Setting
from armillary.evaluation.results import FILE, header_of, read_results
from armillary.evaluation.run import Stopped, evaluate
from armillary.evaluation.scoring import Scorer
from armillary.evaluation.short_data import TASKS as SHORT
from armillary.evaluation.short_data import read_questions
from armillary.evaluation.suite import (
    NAMES,
    Suite,
    default_grid,
    default_lengths,
    task_tokens,
)
from armillary.evaluation.summary import Summary, summarise
from armillary.evaluation.texts import read_documents
from armillary.strict_dict import nearest
from armillary.wording import duration_text

if TYPE_CHECKING:
    from armillary.tokenizer import Tokenizer

_USUAL = ("perplexity", "retrieval", "reasoning", "induction")
_DEFAULT_TEXT = "python-stdlib"


@dataclass(frozen=True)
class Wish:
    """What was asked on the command line; None is what was left to us."""

    model: str
    out: Path
    minutes: float | None
    tasks: tuple[str, ...] | None
    lengths: tuple[int, ...] | None
    windows: int | None
    instances: int | None
    depths: int | None
    distractors: tuple[int, ...] | None
    hops: tuple[int, ...] | None
    limit: int | None
    text: tuple[str, ...]
    reach: int | None
    keys_from: Path | None
    short_data: Path | None
    original_window: int | None
    ignore_keys: tuple[str, ...]
    server: str | None
    server_model: str | None
    seed: int = 0
    dtype: str = "auto"
    device: str = "auto"
    figures: bool = True

    @property
    def command(self) -> str:
        """The command line that asks for this."""
        parts = ["armillary", "evaluate", self.model, "--out", self.out.name]
        for option in fields(self):
            value, name = getattr(self, option.name), option.name.replace("_", "-")
            if name in {"model", "out", "figures"} or value in (None, (), option.default):
                continue
            if name in {"text", "ignore-keys"}:
                parts += [part for each in value for part in (f"--{name.rstrip('s')}", each)]
            else:
                told = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
                parts += [f"--{name}", told]
        return shlex.join(parts)


@dataclass(frozen=True)
class Subject:
    """What is evaluated."""

    scorer: Scorer
    run: Run
    tokenizer: "Tokenizer"


def run_evaluation(wish: Wish, *, json: bool) -> None:
    """Evaluate, write results and report, and print what came of it.

    Raises UserError for what cannot be asked; Interrupted at a signal.
    """
    started = time.monotonic()
    names, short = _tasks(wish.tasks)
    subject = _open(wish)
    asked = _grid(wish, subject.run)
    suite = _suite(wish, subject, names, short, asked)
    grid, plan, speed = _planned(wish, subject.scorer, suite, asked, started)
    made = suite.make(grid)
    say([*made.notices, *_hints(wish, subject.run, asked)])
    run = replace(subject.run, plan=plan)
    try:
        with EvaluationDisplay() as display:
            run, rows = evaluate(
                subject.scorer, run, made.tasks, wish.out, listeners=[display], speed=speed
            )
    except Stopped as stopped:
        raise Interrupted(
            f"{stopped}; the same command goes on", code=128 + stopped.number
        ) from None
    summary = summarise(run, rows)
    show_summary(summary, [str(wish.out / FILE), *_pages(summary, wish)], json=json)


def _hints(wish: Wish, run: Run, asked: Grid) -> list[str]:
    """What makes an extended model's results comparable with those of the model before."""
    if run.window == run.original_window or wish.reach is not None:
        return []
    return [
        f"for armillary compare, evaluate the model before it was extended with --reach "
        f"{asked.lengths[-1]} on the same text"
    ]


def _pages(summary: Summary, wish: Wish) -> list[str]:
    """Write the page, the card and the figures; return where those are that a person opens."""
    from armillary.evaluation.card import write_card
    from armillary.evaluation.figures import write_figures
    from armillary.evaluation.provenance import frequencies_of
    from armillary.evaluation.report import write_report

    page, card = wish.out / "report.html", wish.out / "card.md"
    frequencies = [frequencies_of(summary.run)]
    commands = [wish.command]
    write_report(page, [summary], frequencies=frequencies, commands=commands)
    write_card(card, [summary], commands=commands)
    if wish.figures:
        if importlib.util.find_spec("matplotlib") is None:
            say(['no figures are drawn without matplotlib: pip install "armillary[figures]"'])
        else:
            write_figures(wish.out / "figures", [summary], frequencies=frequencies)
    return [str(page), str(card)]


def _tasks(wanted: tuple[str, ...] | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The suite's names and those of the short tasks. Raises UserError for an unknown one."""
    names = wanted or _USUAL
    for name in names:
        if name not in NAMES and name not in SHORT:
            raise UserError(
                f"--tasks: there is no {name!r}{nearest(name, [*NAMES, *SHORT])}; known are "
                f"{', '.join([*NAMES, *SHORT])}"
            )
    short = SHORT if "short" in names else tuple(name for name in SHORT if name in names)
    suite = [name for name in NAMES if name in names and name != "short"]
    return (*suite, *(["short"] if short else [])), short


def _open(wish: Wish) -> Subject:
    if wish.server is not None:
        return _served(wish, wish.server)
    if wish.server_model is not None:
        raise UserError("--server-model is one of a server's; give its address with --server")
    from armillary.checkpoints import open_checkpoint
    from armillary.checkpoints.locate import locate
    from armillary.evaluation.decoder_scorer import DecoderScorer
    from armillary.evaluation.provenance import run_of

    lm = load_model(wish.model, wish.dtype, wish.device, list(wish.ignore_keys))
    parameter = next(lm.decoder.parameters())
    run = run_of(
        wish.model,
        open_checkpoint(locate(wish.model), ignore_keys=wish.ignore_keys),
        dtype=str(parameter.dtype).removeprefix("torch."),
        device=parameter.device.type,
        seed=wish.seed,
        original_window=wish.original_window,
    )
    return Subject(DecoderScorer(lm.decoder), run, lm.tokenizer)


def _served(wish: Wish, url: str) -> Subject:
    """A model behind a server, of which only the tokenizer is here."""
    from armillary.checkpoints.tokenizers import open_tokenizer
    from armillary.evaluation.provenance import run_served
    from armillary.evaluation.server_scorer import ServerScorer

    with TransferProgress() as transfer:
        tokenizer = open_tokenizer(wish.model, progress=transfer.report)
    scorer = ServerScorer(
        url,
        vocab_size=tokenizer.vocab_size,
        model=wish.server_model,
        window=None if wish.lengths is None else wish.lengths[-1],
        key=os.environ.get("ARMILLARY_SERVER_KEY"),
    )
    run = run_served(
        scorer.model, tokenizer, scorer.window, seed=wish.seed, original_window=wish.original_window
    )
    return Subject(scorer, run, tokenizer)


def _grid(wish: Wish, run: Run) -> Grid:
    lengths = wish.lengths or default_lengths(run.window, run.original_window)
    if lengths[-1] > run.window:
        raise UserError(
            f"--lengths: {lengths[-1]:,} tokens are more than the model's window of "
            f"{run.window:,}; armillary extend apply gives it a longer one"
        )
    given = {
        name: value
        for name in ("instances", "windows", "depths", "distractors", "hops", "limit")
        if (value := getattr(wish, name)) is not None
    }
    return replace(default_grid(lengths), **given)


def _suite(
    wish: Wish, subject: Subject, names: tuple[str, ...], short: tuple[str, ...], grid: Grid
) -> Suite:
    """Read what the tasks are made of."""
    longest = max(grid.lengths[-1], wish.reach or 0)
    if wish.reach is not None and wish.reach < grid.lengths[-1]:
        raise UserError(
            f"--reach {wish.reach:,} is below the longest length, {grid.lengths[-1]:,}; leave it "
            "out, or give the longest window that is compared"
        )
    run, tokenizer = subject.run, subject.tokenizer
    if not wish.text and set(names) != {"short"}:
        say(
            [
                f"the text is {_DEFAULT_TEXT}, the largest source files of this Python's library; "
                "--text takes another"
            ]
        )
    documents, notices = (
        ((), ())
        if set(names) == {"short"}
        else read_documents(wish.text or (_DEFAULT_TEXT,), tokenizer, least=longest)
    )
    say(notices)
    tokens, why_not = None, ""
    if {"retrieval", "reasoning", "induction"} & set(names):
        tokens, why_not = task_tokens(tokenizer, documents, longest)
        say([why_not] if tokens is not None and why_not else [])
    with TransferProgress() as transfer:
        questions = {
            name: read_questions(
                name, directory=wish.short_data, limit=grid.limit, progress=transfer.report
            )
            for name in short
        }
    return Suite(
        names=names,
        tokenizer=tokenizer,
        tokens=tokens,
        documents=documents,
        questions=questions,
        crop=run.original_window,
        reach=wish.reach,
        keys=None if wish.keys_from is None else _keys(wish.keys_from),
        seed=wish.seed,
        strict=wish.tasks is not None,
        why_not=why_not,
    )


def _keys(results: Path) -> Mapping[str, tuple[int, ...]]:
    """The key tokens that another evaluation chose. Raises UserError when it chose none."""
    keys = chosen_keys(read_results(results)[1])
    if not keys:
        raise UserError(
            f"--keys-from {results}: no key tokens were chosen there; that takes perplexity at two "
            "lengths within the original window"
        )
    return keys


def _planned(
    wish: Wish, scorer: Scorer, suite: Suite, asked: Grid, started: float
) -> tuple[Grid, Mapping[str, Setting], Speed | None]:
    """The grid that fits the time; the one that was planned when this evaluation began."""
    begun = header_of(wish.out)
    if begun is not None:
        grid = kept(asked, wish.minutes, begun.plan, str(wish.out))
        return grid or asked, begun.plan, None
    if wish.minutes is None:
        return asked, {}, None
    speed = measured_speed(scorer)

    def cost(grid: Grid) -> float:
        return sum(
            speed.seconds(cell.work)
            for task in suite.make(grid, check=False).tasks
            for cell in task.cells()
        )

    spent = time.monotonic() - started
    plan = fitted(asked, wish.minutes, cost, suite.matters, spent=spent)
    say(_plan_notices(plan))
    return plan.grid, plan.settings(), speed


def _plan_notices(plan: Plan) -> list[str]:
    about = f"about {duration_text(plan.seconds)}"
    if not plan.fits:
        return [
            f"even the least that can be asked takes {about}; {', '.join(plan.left_out)}",
        ]
    if not plan.left_out:
        return [f"all that is asked takes {about}"]
    return [f"to end within {plan.minutes:g} minutes ({about}): {', '.join(plan.left_out)}"]
