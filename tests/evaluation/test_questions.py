import numpy as np
import pytest

from armillary.evaluation.questions import Kind, Prompt, Question, ask
from armillary.evaluation.records import prompt_checksum
from armillary.evaluation.scoring import Scored

KIND = Kind("task", "variant", 9)


def question(**changes: object) -> Question:
    settings = {
        "name": "one",
        "ask": (1, 2),
        "answer": (3, 4),
        "others": ((5, 6), (7, 8), (9, 10)),
        "factors": {"depth": 0.5},
        "end": (0,),
    }
    return Question(**(settings | changes))  # type: ignore[arg-type]


class Told:
    """Gives log-probabilities by the tokens that are scored, and keeps what it was asked."""

    window = vocab_size = 100

    def __init__(self, likely: dict[tuple[int, ...], list[float]]) -> None:
        self.likely = likely
        self.contexts: list[tuple[int, ...]] = []

    def begin(self) -> None:
        pass

    def score(self, context, continuations) -> list[Scored]:
        self.contexts.append(tuple(context))
        scores = []
        for each in continuations:
            assert each.tokens[: -each.scored] == (1, 2)
            logprobs = np.array(self.likely[each.tokens[-each.scored :]]) - (context[0] == 99)
            scores.append(Scored(logprobs, logprobs > -0.7))
        return scores


LIKELY = {
    (3, 4, 0): [-0.5, -0.5, -0.6],
    (5, 6): [-0.4, -0.4],
    (7, 8): [-0.5, -0.5],
    (9, 10): [-0.5, -0.6],
    (3, 4): [-0.5, -0.5],
}


def test_a_row_says_what_came_of_a_question() -> None:
    scorer = Told(LIKELY)
    prompts = [Prompt((11, 12), (99, 12), (question(),)), Prompt((13,), (99,), (question(),))]
    first, second = ask(KIND, prompts, scorer)
    assert scorer.contexts == [(11, 12), (13,), (99, 12), (99,)]
    assert (first.task, first.variant, first.length, first.instance) == (
        "task",
        "variant",
        9,
        "one",
    )
    assert first.factors == {"depth": 0.5}
    assert (first.logprob, first.control) == (-1.0, -3.0)  # the end does not count
    assert first.exact
    assert (first.rank, first.candidates) == (2, 4)  # one is likelier, one as likely
    assert first.prompt == prompt_checksum((11, 12), (1, 2), (3, 4), (0,), (5, 6), (7, 8), (9, 10))
    assert first.prompt != second.prompt


def test_an_answer_that_goes_on_is_not_exact() -> None:
    prompts = [Prompt((11,), (99,), (question(),))]
    (row,) = ask(KIND, prompts, Told(LIKELY | {(3, 4, 0): [-0.5, -0.5, -3.0]}))
    assert not row.exact
    assert row.logprob == -1.0
    (row,) = ask(KIND, [Prompt((11,), (99,), (question(end=()),))], Told(LIKELY))
    assert row.exact


def test_without_others_there_is_no_rank_to_speak_of() -> None:
    (row,) = ask(KIND, [Prompt((11,), (99,), (question(others=()),))], Told(LIKELY))
    assert (row.rank, row.candidates) == (0, 0)


def test_only_answers_of_one_length_compare() -> None:
    with pytest.raises(ValueError, match="of one length"):
        question(others=((5,),))
    assert question().length == 5
