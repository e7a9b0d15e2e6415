"""Copying: a stretch of random words that stood in the context once is begun again."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from armillary.errors import UserError
from armillary.evaluation.composition import Ids, check_words, draw, generator, overlay
from armillary.evaluation.filler import filler
from armillary.evaluation.questions import Kind, Prompt, Question, ask
from armillary.evaluation.records import Cell, Row
from armillary.evaluation.scoring import Scorer
from armillary.evaluation.vocabulary import TaskTokens


@dataclass(frozen=True)
class Induction:
    """Length × depth of a stretch whose beginning is repeated; the answer is how it went on.

    Nothing marks a stretch, and nothing shows what is asked: the least that using far context
    takes. One context holds a stretch at each depth, and all are asked for; an answer is set
    beside what followed on the others.

    lengths  tokens of context, question and answer
    depths   0 right after what begins the text, 1 at the very end of it
    begun    tokens that are repeated; copied  tokens that are to follow

    The control is the context without the stretches.
    Raises UserError when a length has no room for its stretches, or the vocabulary too few words.
    """

    tokens: TaskTokens
    lengths: tuple[int, ...]
    depths: tuple[float, ...] = tuple(step / 10 for step in range(11))
    begun: int = 4
    copied: int = 4
    instances: int = 4
    seed: int = 0

    name: ClassVar[str] = "induction"
    version: ClassVar[int] = 1

    def __post_init__(self) -> None:
        span = self.begun + self.copied
        check_words(self.name, self.tokens.words, span * len(self.depths))
        for length in self.lengths:
            starts = sorted(self._start(depth, length) for depth in self.depths)
            close = any(after - before < span for before, after in pairwise(starts))
            if close or self._body(length) < span:
                raise UserError(
                    f"induction: {length} tokens have no room for stretches of {span} tokens at "
                    f"{len(self.depths)} depths; ask for a greater length or fewer depths"
                )

    def cells(self) -> Sequence[Cell]:
        """By length and instance."""
        return [
            Cell(
                key=f"{self.name}/{length}/{instance}",
                settings={"length": length, "instance": instance},
                work=self._work(length),
            )
            for length in self.lengths
            for instance in range(self.instances)
        ]

    def run(self, cell: Cell, scorer: Scorer) -> list[Row]:
        """A row for each depth."""
        prompt = self.prompt(cell)
        length = len(prompt.context) + self.begun + self.copied
        return [*ask(Kind(self.name, self.name, length), [prompt], scorer)]

    def prompt(self, cell: Cell) -> Prompt:
        """What is asked in a cell."""
        length, instance = cell.settings["length"], cell.settings["instance"]
        assert isinstance(length, int)
        span = self.begun + self.copied
        random = generator(self.name, self.seed, instance)
        words = draw(self.tokens.words, span * len(self.depths), random)
        stretches: list[Ids] = [words[i : i + span] for i in range(0, len(words), span)]
        random = generator(self.name, self.seed, instance, length)
        text = filler(self.tokens, self._body(length), words, random)
        starts = [self._start(depth, length) for depth in self.depths]
        questions = tuple(
            Question(
                name=f"{length}/{instance}/{depth:g}",
                ask=stretch[: self.begun],
                answer=stretch[self.begun :],
                others=tuple(other[self.begun :] for other in stretches if other is not stretch),
                factors={"depth": depth},
            )
            for depth, stretch in zip(self.depths, stretches, strict=True)
        )
        return Prompt(
            context=(
                *self.tokens.begin,
                *overlay(text, list(zip(starts, stretches, strict=True))),
            ),
            control=(*self.tokens.begin, *overlay(text, [])),
            questions=questions,
        )

    def _body(self, length: int) -> int:
        return length - len(self.tokens.begin) - self.begun - self.copied

    def _start(self, depth: float, length: int) -> int:
        return round(depth * (self._body(length) - self.begun - self.copied))

    def _work(self, length: int) -> tuple[tuple[int, int], ...]:
        span, count = self.begun + self.copied, len(self.depths)
        context = length - span
        return (
            (0, context),
            (context, count * (self.begun + count * (self.copied - 1))),
            (0, context),
            (context, count * span),
        )
