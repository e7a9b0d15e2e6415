"""Stretches that are begun again."""

import numpy as np
import pytest

from armillary.errors import UserError
from armillary.evaluation.decoder_scorer import DecoderScorer
from armillary.evaluation.induction import Induction
from armillary.evaluation.vocabulary import TaskTokens
from support.models import build, config
from support.readers import Reader, count, went_on

BOS = 3
TOKENS = TaskTokens.of_size(200, bos=BOS)
DEPTHS = (0.0, 0.3, 1.0)


def task(**changes: object) -> Induction:
    settings = {
        "tokens": TOKENS,
        "lengths": (90, 133),
        "depths": DEPTHS,
        "begun": 3,
        "copied": 2,
        "instances": 3,
    }
    return Induction(**(settings | changes))  # type: ignore[arg-type]


def prompts(of: Induction):
    for cell in of.cells():
        prompt = of.prompt(cell)
        for question in prompt.questions:
            yield cell, prompt, question


def test_length_is_exactly_as_asked_with_one_bos() -> None:
    for cell, prompt, question in prompts(task()):
        for context in (prompt.context, prompt.control):
            assert len(context) + question.length == cell.settings["length"]
            assert context[0] == BOS
            assert count(context, [BOS]) == 1


def test_a_stretch_starts_at_its_depth_and_stands_there_once() -> None:
    for cell, prompt, question in prompts(task()):
        stretch = (*question.ask, *question.answer)
        start = 1 + round(question.factors["depth"] * (cell.settings["length"] - 1 - 5 - 5))
        assert prompt.context[start : start + 5] == stretch
        for token in stretch:
            assert count(prompt.context, [token]) == 1
            assert count(prompt.control, [token]) == 0


def test_the_control_is_the_same_but_for_the_stretches() -> None:
    for _, prompt, _ in prompts(task()):
        differ = sum(a != b for a, b in zip(prompt.context, prompt.control, strict=True))
        assert differ == 5 * len(DEPTHS)


def test_who_copies_is_always_right() -> None:
    of = task()
    for cell in of.cells():
        for row in of.run(cell, Reader(went_on(1))):
            assert row.exact
            assert row.rank == 0
            assert row.candidates == 3
            assert row.control < row.logprob
            assert row.length == cell.settings["length"]


def test_a_model_that_knows_nothing_is_at_chance() -> None:
    of = Induction(TaskTokens.of_size(61), (60,), DEPTHS, begun=2, copied=1, instances=40)
    scorer = DecoderScorer(build(config()))
    found = [row for cell in of.cells() for row in of.run(cell, scorer)]
    assert abs(np.mean([row.rank == 0 for row in found]) - 1 / 3) < 0.13
    assert np.mean([row.exact for row in found]) < 0.05


def test_a_set_is_the_same_in_every_run_and_whatever_else_is_asked_for() -> None:
    wide, again = task(), task(lengths=(133,))
    cells = {cell.key: cell for cell in wide.cells()}
    assert len(cells) == 2 * 3
    for cell in again.cells():
        assert cells[cell.key] == cell
        assert wide.prompt(cell) == again.prompt(cell)
        assert wide.prompt(cell) != task(seed=1).prompt(cell)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lengths": (20,)}, "20 tokens have no room"),
        ({"lengths": (9,), "depths": (0.5,)}, "9 tokens have no room"),
        ({"tokens": TaskTokens.of_size(25)}, "different words are asked about"),
    ],
)
def test_what_cannot_be_asked_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        list(prompts(task(**changes)))
