"""An evaluation as the command line asks for it: from names and options to files and tables."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from armillary.cli._evaluation import EvaluationDisplay, say, show_summary
from armillary.cli._options import Interrupted
from armillary.cli._progress import TransferProgress
from armillary.cli._sampling import load_model
from armillary.errors import UserError
from armillary.evaluation.budget import Grid, Plan, Speed, fitted, kept, measured_speed
from armillary.evaluation.decoder_scorer import DecoderScorer
from armillary.evaluation.records import Run, Setting
from armillary.evaluation.results import FILE, header_of
from armillary.evaluation.run import Stopped, evaluate
from armillary.evaluation.scoring import Scorer
from armillary.evaluation.short_data import TASKS as SHORT
from armillary.evaluation.short_data import read_questions
from armillary.evaluation.suite import NAMES, Suite, default_lengths, task_tokens
from armillary.evaluation.summary import summarise
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
    seed: int
    text: tuple[str, ...]
    reach: int | None
    short_data: Path | None
    original_window: int | None
    dtype: str
    device: str
    ignore_keys: tuple[str, ...]


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
    names, short = _tasks(wish.tasks)
    subject = _open(wish)
    asked = _grid(wish, subject.run.window)
    suite = _suite(wish, subject, names, short, asked)
    grid, plan, speed = _planned(wish, subject.scorer, suite, asked)
    made = suite.make(grid)
    say(made.notices)
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
    show_summary(summary, [str(wish.out / FILE)], json=json)


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
    from armillary.checkpoints import open_checkpoint
    from armillary.checkpoints.locate import locate
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


def _grid(wish: Wish, window: int) -> Grid:
    lengths = wish.lengths or default_lengths(window)
    if lengths[-1] > window:
        raise UserError(
            f"--lengths: {lengths[-1]:,} tokens are more than the model's window of {window:,}; "
            "armillary extend apply gives it a longer one"
        )
    given = {
        name: value
        for name in ("instances", "windows", "depths", "distractors", "hops", "limit")
        if (value := getattr(wish, name)) is not None
    }
    return replace(Grid(lengths), **given)


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
    tokens, why_not = task_tokens(tokenizer, documents, grid.lengths[-1])
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
        seed=wish.seed,
        strict=wish.tasks is not None,
        why_not=why_not,
    )


def _planned(
    wish: Wish, scorer: Scorer, suite: Suite, asked: Grid
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

    plan = fitted(asked, wish.minutes, cost, suite.matters)
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
