"""Questions after a context: how they are asked, and what the answers are set beside.

What all tasks of `QuestionRow`s share. A context is taken in once for all its questions; each is
scored by forcing its answer, and beside the answer what might be mistaken for it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from armillary.evaluation.composition import Ids
from armillary.evaluation.records import QuestionRow, Setting, prompt_checksum
from armillary.evaluation.scoring import Continuation, Scored, Scorer


@dataclass(frozen=True)
class Question:
    """What is asked, its answer, and other answers of as many tokens that would be wrong.

    `end` is what closes an answer: a number that goes on is another number. It has to be the
    likeliest for an answer to be exact, and counts for nothing else.
    """

    name: str
    ask: Ids
    answer: Ids
    others: tuple[Ids, ...]
    factors: Mapping[str, Setting]
    end: Ids = ()

    def __post_init__(self) -> None:
        if any(len(other) != len(self.answer) for other in self.others):
            raise ValueError("an answer and what it is set beside have to be of one length")

    @property
    def length(self) -> int:
        """Tokens of question, answer and end."""
        return len(self.ask) + len(self.answer) + len(self.end)

    @property
    def forced(self) -> Continuation:
        """The answer and its end."""
        return Continuation((*self.ask, *self.answer, *self.end), len(self.answer) + len(self.end))

    @property
    def wrong(self) -> list[Continuation]:
        """What the answer is set beside."""
        return [Continuation((*self.ask, *other), len(other)) for other in self.others]


@dataclass(frozen=True)
class Prompt:
    """A context with the questions that follow it, each alone.

    control  the context without what answers them
    """

    context: Ids
    control: Ids
    questions: tuple[Question, ...]


@dataclass(frozen=True)
class Kind:
    """What the rows of a cell share."""

    task: str
    variant: str
    length: int


def ask(kind: Kind, prompts: Sequence[Prompt], scorer: Scorer) -> list[QuestionRow]:
    """Ask all questions of all prompts, then of the controls.

    Prompts whose contexts begin alike should follow each other: what is common is computed once.
    """
    asked = [
        scorer.score(
            prompt.context, [each for q in prompt.questions for each in (q.forced, *q.wrong)]
        )
        for prompt in prompts
    ]
    controls = [
        scorer.score(prompt.control, [q.forced for q in prompt.questions]) for prompt in prompts
    ]
    rows = []
    for prompt, scores, without in zip(prompts, asked, controls, strict=True):
        left = iter(scores)
        for question, control in zip(prompt.questions, without, strict=True):
            own = list(islice(left, 1 + len(question.others)))
            rows.append(_row(kind, prompt, question, own, control))
    return rows


def _row(
    kind: Kind, prompt: Prompt, question: Question, own: Sequence[Scored], control: Scored
) -> QuestionRow:
    """What came of a question: scores of its answer and the others, and of the control's answer."""
    size = len(question.answer)
    logprob = float(own[0].logprobs[:size].sum())
    return QuestionRow(
        task=kind.task,
        instance=question.name,
        prompt=prompt_checksum(
            prompt.context, question.ask, question.answer, question.end, *question.others
        ),
        variant=kind.variant,
        length=kind.length,
        factors=question.factors,
        logprob=logprob,
        control=float(control.logprobs[:size].sum()),
        exact=own[0].exact,
        rank=sum(other.total >= logprob for other in own[1:]),
        candidates=len(own) if question.others else 0,
    )
