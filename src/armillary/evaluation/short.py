"""Short tasks: which continuation of a text a model finds likeliest, as lm-eval counts it.

LAMBADA asks whether the last word of a text is the one that the model would write. The others have
choices, of which the likeliest is taken, and the likeliest per character beside it (lm-eval's acc
and acc_norm). Where a text is longer than the window lm-eval cuts its start off, and its results
do not say so; here it is cut too, and the row says by how much.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import ArrayLike

from armillary.checkpoints.download import Progress
from armillary.errors import UserError
from armillary.evaluation.pairs import Pair, encode_pair, fitted, score_pairs
from armillary.evaluation.records import Cell, ChoiceRow, Row, Setting, prompt_checksum
from armillary.evaluation.scoring import Scorer
from armillary.evaluation.short_data import TASKS, Question, read_questions
from armillary.tokenizer import Tokenizer

PER_CELL = 25  # questions, seconds of work for a small model on a processor


@dataclass(frozen=True)
class ShortTasks:
    """Short tasks by name, asked of a model with this tokenizer, in groups of PER_CELL questions.

    Rows bear the short task's own name. `questions` come from `read`, or are anyone's own.
    """

    tokenizer: Tokenizer
    questions: Mapping[str, Sequence[Question]]

    @classmethod
    def read(
        cls,
        tokenizer: Tokenizer,
        tasks: Sequence[str] = TASKS,
        *,
        directory: Path | None = None,
        limit: int | None = None,
        progress: Progress | None = None,
    ) -> Self:
        """Read the first `limit` questions of each task, as `read_questions` does."""
        questions = {
            task: read_questions(task, directory=directory, limit=limit, progress=progress)
            for task in tasks
        }
        return cls(tokenizer, questions)

    @property
    def name(self) -> str:
        """The first part of its cells' keys."""
        return "short"

    @property
    def version(self) -> int:
        """Which of its definitions this is."""
        return 1

    def cells(self) -> list[Cell]:
        """All groups, task after task."""
        return [
            self._cell(task, first, questions[first : first + PER_CELL])
            for task, questions in self.questions.items()
            for first in range(0, len(questions), PER_CELL)
        ]

    def run(self, cell: Cell, scorer: Scorer) -> list[Row]:
        """Ask a group's questions. Raises UserError for one that does not fit the window."""
        task, first, count = (cell.settings[key] for key in ("task", "first", "count"))
        assert isinstance(task, str)
        assert isinstance(first, int)
        assert isinstance(count, int)
        scorer.begin()
        return [self._ask(task, number, scorer) for number in range(first, first + count)]

    def _cell(self, task: str, first: int, questions: Sequence[Question]) -> Cell:
        text = json.dumps([asdict(question) for question in questions])
        settings: dict[str, Setting] = {
            "task": task,
            "first": first,
            "count": len(questions),
            "checksum": hashlib.sha256(text.encode()).hexdigest()[:16],
        }
        work = tuple(step for question in questions for step in self._work(question))
        return Cell(f"{self.name}/{task}/{first:05d}", settings, work)

    def _work(self, question: Question) -> Iterator[tuple[int, int]]:
        pairs = self._pairs(question)
        context, _ = pairs[0]
        yield 0, len(context)
        for _, continuation in pairs:
            yield len(context), len(continuation)

    def _pairs(self, question: Question) -> list[Pair]:
        return [
            encode_pair(self.tokenizer, question.context, f" {choice}")
            for choice in question.choices
        ]

    def _ask(self, task: str, number: int, scorer: Scorer) -> ChoiceRow:
        question = self.questions[task][number]
        instance = f"{task}/{number:05d}"
        try:
            fits = [fitted(pair, scorer.window) for pair in self._pairs(question)]
        except UserError as error:
            raise UserError(f"{instance}: {error}") from error
        pairs = [pair for pair, _ in fits]
        scored = dict(score_pairs(scorer, pairs))
        logprobs = tuple(scored[choice].total for choice in range(len(pairs)))
        return ChoiceRow(
            task=task,
            instance=instance,
            prompt=prompt_checksum(*chain.from_iterable(pairs)),
            correct=scored[0].exact if question.alone else _first(logprobs) == question.answer,
            correct_normalised=(
                None
                if question.alone
                else _first(np.divide(logprobs, question.lengths)) == question.answer
            ),
            logprobs=logprobs,
            answer=question.answer,
            cut=max(cut for _, cut in fits),
        )


def _first(values: ArrayLike) -> int:
    """The number of the greatest value, the first of those that are equal."""
    return int(np.argmax(values))
