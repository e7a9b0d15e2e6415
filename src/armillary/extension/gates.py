"""What a stage has to hold to: the short loss is back, and retrieval reaches the stage's length.

Both are held against the unextended model, measured once on the same texts and the same facts. What
is measured lies in directories of results like any evaluation's, is gone on with cell by cell, and
can be given to `armillary compare`.
"""

import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

import numpy as np

from armillary.checkpoints import Checkpoint
from armillary.data import TokenDataset
from armillary.data.order import permuted
from armillary.errors import UserError
from armillary.evaluation.perplexity import Document, Perplexity, ShortLoss
from armillary.evaluation.provenance import run_of, task_settings
from armillary.evaluation.records import LossRow, QuestionRow, Row, Task
from armillary.evaluation.results import difference, header_of
from armillary.evaluation.retrieval import Retrieval
from armillary.evaluation.run import Progress, evaluate
from armillary.evaluation.statistics import Estimate, weighted_mean, wilson
from armillary.evaluation.vocabulary import TaskTokens
from armillary.extension.adapt_config import GateSettings
from armillary.tokenizer import Tokenizer

# Depths and distractors, fewer where a window has no room for more.
_GRIDS = ((11, 15), (5, 7), (3, 3))
_PROSE = 4  # windows of text that facts are hidden in
_TARGETS = 256  # of a long text


@dataclass(frozen=True)
class Gate:
    """A gate, and what was measured there; `passed` is None where nothing can be asked."""

    name: str
    passed: bool | None
    said: str


@dataclass(frozen=True)
class Compared:
    """Nats per token of the same targets, unextended, under the rule before any step, and adapted.

    Of long texts the unextended model reads what its window holds before the targets.
    """

    what: str
    unextended: float
    rule_alone: float
    adapted: float


@dataclass(frozen=True)
class Held:
    """What a stage's model was measured to be."""

    gates: tuple[Gate, ...]
    losses: tuple[Compared, ...]


@dataclass(frozen=True)
class Gates:
    """The gates of an adaptation's stages.

    original   the unextended model
    held_out   documents that are not trained on, of which texts and haystacks are made
    folder     where the unextended model's results are kept
    device     what models are computed on, as torch names it
    progress   told before each cell which model is measured, and how far that is

    Raises UserError where fewer than two documents are held out.
    """

    settings: GateSettings
    seed: int
    original: Checkpoint
    tokenizer: Tokenizer
    held_out: TokenDataset | None
    folder: Path
    device: str = "cpu"
    progress: Callable[[str, Progress], None] | None = None

    def __post_init__(self) -> None:
        count = 0 if self.held_out is None else len(self.held_out)
        if count < 2:
            raise UserError(
                f"gates compare losses on held-out texts, and {count} "
                f"{'is' if count == 1 else 'are'} held out; prepare with a larger data.validation, "
                "or say gates: null to measure nothing"
            )

    def measure(
        self, model: Checkpoint, rule_alone: Checkpoint, length: int, folder: Path
    ) -> "Held":
        """Measure a stage's model at the length that it is to read, results going to `folder`.

        Raises `evaluation.run.Stopped` at a signal; the same call goes on from there.
        """
        short = ShortLoss(self._texts, self.short)
        was = [short, *self._retrieval_at(length, self.window)]
        now = [short, *self._retrieval_at(length, length)]
        long = self._long(length, length)
        before = self._rows(self.original, "unextended", was, self.folder)
        cropped = self._long(length, self.window)
        cut = self._rows(self.original, "cropped", cropped, folder / "cropped")
        alone = self._rows(rule_alone, "rule alone", [short, *long], folder / "rule-alone")
        after = self._rows(model, "adapted", [*now, *long], folder / "adapted")
        gates = (
            short_loss(_losses(before), _losses(after), self.settings.short_loss, self.seed),
            self._retrieval(before, after, length),
        )
        told = [Compared("short texts", *(_mean(rows, short) for rows in (before, alone, after)))]
        for task in long:
            each = (_mean(rows, task) for rows in (cut, alone, after))
            told.append(Compared(f"at {length:,} tokens", *each))
        return Held(gates, tuple(told))

    @property
    def window(self) -> int:
        """The unextended model's."""
        return self.original.config.max_positions

    @property
    def short(self) -> int:
        """Tokens of a short text."""
        return min(self.window, self.settings.short_tokens or self.window)

    def _rows(self, model: Checkpoint, name: str, tasks: Sequence[Task], folder: Path) -> list[Row]:
        """What a model is worth. Results of another question are measured anew."""
        from armillary.evaluation.decoder_scorer import DecoderScorer
        from armillary.weights import build_filled

        if not tasks:
            return []
        run = run_of(name, model, dtype="float32", device=self.device, seed=self.seed)
        asked = replace(run, tasks={task.name: task_settings(task) for task in tasks})
        there = header_of(folder)
        if there is not None and difference(there, asked) is not None:
            shutil.rmtree(folder)
        decoder = build_filled(model.config, model.tensors, device=self.device)
        listeners = [] if self.progress is None else [partial(self.progress, name)]
        return evaluate(DecoderScorer(decoder), run, tasks, folder, listeners=listeners)[1]

    @cached_property
    def _texts(self) -> tuple[Document, ...]:
        """Some held-out documents, drawn by the seed."""
        assert self.held_out is not None  # or the gates were refused
        count = len(self.held_out)
        wanted = np.arange(min(count, self.settings.short_texts))
        drawn = permuted(wanted, count, "short texts", self.seed).tolist()
        return tuple(
            Document(
                f"held-out {number}", tuple(self.held_out.read(number, 0, self.window).tolist())
            )
            for number in drawn
        )

    def _long(self, reach: int, length: int) -> list[Task]:
        """The same targets of held-out texts of `reach` tokens, read by so many of them."""
        assert self.held_out is not None  # or the gates were refused
        long = np.flatnonzero(self.held_out.lengths >= reach)
        if not self.settings.long_texts or not len(long):
            return []
        begin = self.tokenizer.begin([])
        some = np.arange(min(len(long), self.settings.long_texts))
        drawn = long[permuted(some, len(long), "long texts", self.seed)].tolist()
        documents = tuple(
            Document(f"held-out {n}", tuple(self.held_out[n].tolist()[len(begin) :])) for n in drawn
        )
        targets = max(1, min(_TARGETS, self.window // 2))
        windows = self.settings.long_texts
        return [
            Perplexity(
                documents,
                (length,),
                targets=targets,
                stretches=1,
                windows=windows,
                reach=reach,
                bos=begin[0] if begin else None,
                seed=self.seed,
            )
        ]

    def _retrieval_at(self, stage: int, length: int) -> list[Task]:
        """The same facts at any length; none where the tokenizer or the window allows none."""
        tokens = self._tokens
        if isinstance(tokens, str):
            return []
        for depths, distractors in _GRIDS:
            asked = (depths, distractors, self.settings.questions, self.seed)
            made = {each: _retrieval(tokens, each, *asked) for each in (self.window, stage)}
            if all(made.values()):
                task = made[length]
                assert task is not None  # as was seen
                return [task]
        return []

    @cached_property
    def _tokens(self) -> TaskTokens | str:
        """What questions are composed of, or why there is nothing."""
        assert self.held_out is not None  # or the gates were refused
        begin, end = self.tokenizer.begin([]), self.held_out.end_id
        prose: list[int] = []
        for number in range(len(self.held_out)):
            if len(prose) < _PROSE * self.window:
                ids = self.held_out.read(number, 0, self.window).tolist()
                prose += [token for token in ids if token not in begin and token != end]
        try:
            return TaskTokens.of_tokenizer(self.tokenizer, prose=prose)
        except UserError as error:
            return str(error)

    def _retrieval(self, before: Sequence[Row], after: Sequence[Row], length: int) -> Gate:
        short, long = _answers(before), _answers(after)
        if not short or not long:
            why = f"a window of {self.window:,} has no room for the facts"
            if isinstance(self._tokens, str):
                why = self._tokens
            return Gate("retrieval", None, f"cannot be asked: {why}")
        return retrieval(short, long, self.settings.retrieval, self.window, length)


def short_loss(
    before: Mapping[str, LossRow], after: Mapping[str, LossRow], tolerance: float, seed: int
) -> Gate:
    """Whether the paired difference's interval reaches down to the tolerance, nats per token."""
    both = [(before[name], row) for name, row in after.items() if name in before]
    tokens = [row.tokens for row, _ in both]
    was = sum(row.nats for row, _ in both) / sum(tokens)
    now = weighted_mean([row.nats - old.nats for old, row in both], tokens, seed)
    said = (
        f"{was + now.value:.4f} nats per token on {len(both)} short texts, {was:.4f} before: "
        f"{now.value:+.4f} (95 %: {now.low:+.4f} to {now.high:+.4f}); its lower end may be "
        f"{tolerance:g} at most"
    )
    return Gate("short loss", now.low <= tolerance, said)


def retrieval(
    before: Sequence[QuestionRow],
    after: Sequence[QuestionRow],
    share: float,
    window: int,
    length: int,
) -> Gate:
    """Whether the interval's lower end is at the bar, a share of what the original finds.

    An original that finds no more than chance within its own window has nothing to keep.
    """
    found, now = _rate(before), _rate(after)
    chance = sum(1 / row.candidates for row in before) / len(before)
    own = f"{found.value:.0%} of {found.count} in the original's own window of {window:,}"
    if found.low <= chance:
        said = f"cannot be asked: {own}, where chance finds {chance:.0%}"
        return Gate("retrieval", None, said)
    bar = share * found.value
    said = (
        f"{now.value:.0%} of {now.count} found at {length:,} tokens (95 %: {now.low:.0%} to "
        f"{now.high:.0%}), {own}; its lower end has to be {bar:.0%} at least"
    )
    return Gate("retrieval", now.low >= bar, said)


def _rate(rows: Sequence[QuestionRow]) -> Estimate:
    return wilson(sum(row.rank == 0 for row in rows), len(rows))


def _losses(rows: Sequence[Row]) -> dict[str, LossRow]:
    """Those of short texts, by what was measured."""
    return {row.instance: row for row in rows if isinstance(row, LossRow) and row.group == "short"}


def _mean(rows: Sequence[Row], task: Task) -> float:
    """Nats per token of a task's targets."""
    counted = [
        row
        for row in rows
        if isinstance(row, LossRow) and row.task == task.name and row.group in {"all", "short"}
    ]
    return sum(row.nats for row in counted) / sum(row.tokens for row in counted)


def _answers(rows: Sequence[Row]) -> list[QuestionRow]:
    return [row for row in rows if isinstance(row, QuestionRow)]


def _retrieval(
    tokens: TaskTokens, length: int, depths: int, distractors: int, questions: int, seed: int
) -> Retrieval | None:
    try:
        return Retrieval(
            tokens,
            lengths=(length,),
            depths=tuple(step / (depths - 1) for step in range(depths)),
            distractors=(distractors,),
            variants=("key-value",),
            instances=math.ceil(questions / depths),
            seed=seed,
        )
    except UserError:
        return None
