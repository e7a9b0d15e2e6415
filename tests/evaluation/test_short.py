"""The short tasks, asked of a scorer whose preferences are written down."""

from collections.abc import Sequence

import numpy as np
import pytest

from armillary.errors import UserError
from armillary.evaluation import short
from armillary.evaluation.records import ChoiceRow
from armillary.evaluation.scoring import Continuation, Scored
from armillary.evaluation.short import ShortTasks
from armillary.evaluation.short_data import Question
from armillary.tokenizer import Tokenizer
from support.tiny_model import tiny_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Every byte is a token of its own; there is a BOS, which raw text does not get."""
    return tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))


class Preferring:
    """A scorer with a log-probability for each text; of the last letter only, the rest are sure."""

    vocab_size = 259

    def __init__(self, tokenizer: Tokenizer, preferences: dict[str, float], window: int = 99):
        self.tokenizer, self.preferences, self.window = tokenizer, preferences, window
        self.asked: list[str] = []

    def begin(self) -> None:
        self.asked.append("begin")

    def score(self, context: Sequence[int], continuations: Sequence[Continuation]) -> list[Scored]:
        texts = [self.tokenizer.decode(each.tokens) for each in continuations]
        self.asked.append(self.tokenizer.decode(context) + "|" + "|".join(texts))
        assert all(each.scored == len(each.tokens) for each in continuations)
        return [
            Scored(
                np.array([0.0] * (len(text) - 1) + [self.preferences[text]]),
                np.array([True] * (len(text) - 1) + [self.preferences[text] > -1]),
            )
            for text in texts
        ]


def asked(
    tokenizer: Tokenizer, task: str, questions: Sequence[Question], scorer: Preferring
) -> list[ChoiceRow]:
    tasks = ShortTasks(tokenizer, {task: questions})
    rows = [row for cell in tasks.cells() for row in tasks.run(cell, scorer)]
    assert all(isinstance(row, ChoiceRow) for row in rows)
    return [row for row in rows if isinstance(row, ChoiceRow)]


def test_the_likeliest_choice_and_the_likeliest_per_character_are_taken(tokenizer):
    """−4 for 2 characters is −2 each; −5 for 5 is −1 each. The space before them counts for none:
    with it they would be −4/3 and −5/6, with bytes "é" alone would turn the second question."""
    scorer = Preferring(tokenizer, {" ab": -4.0, " abcde": -5.0, " éé": -4.0, " abc": -5.9})
    questions = [Question("x", ("ab", "abcde"), 0), Question("x", ("éé", "abc"), 1)]
    first, second = asked(tokenizer, "piqa", questions, scorer)
    assert (first.correct, first.correct_normalised) == (True, False)
    assert first.logprobs == (-4.0, -5.0)
    assert (second.correct, second.correct_normalised) == (False, True)
    assert scorer.asked == ["begin", "x| ab| abcde", "x| éé| abc"]


def test_a_single_continuation_is_right_when_it_is_what_would_be_written(tokenizer):
    scorer = Preferring(tokenizer, {" yes": -0.5, " no": -2.0})
    questions = [Question("is it", ("yes",), 0), Question("is it", ("no",), 0)]
    rows = asked(tokenizer, "lambada", questions, scorer)
    assert [row.correct for row in rows] == [True, False]
    assert [row.correct_normalised for row in rows] == [None, None]
    assert [row.logprobs for row in rows] == [(-0.5,), (-2.0,)]


def test_equal_choices_are_told_apart_by_their_order(tokenizer):
    """As numpy's argmax does for lm-eval."""
    scorer = Preferring(tokenizer, {" a": -1.0, " b": -1.0})
    questions = [Question("x", ("a", "b"), 0), Question("x", ("a", "b"), 1)]
    assert [row.correct for row in asked(tokenizer, "piqa", questions, scorer)] == [True, False]


def test_what_does_not_fit_is_cut_at_its_start_each_choice_to_its_own_room_and_counted(tokenizer):
    scorer = Preferring(tokenizer, {" ab": -4.0, " abcde": -5.0}, window=9)
    row, whole = asked(
        tokenizer,
        "piqa",
        [Question("0123456789", ("ab", "abcde"), 0), Question("012", ("ab", "abcde"), 0)],
        scorer,
    )
    assert sorted(scorer.asked[1:3]) == ["456789| ab", "789| abcde"]
    assert row.cut == 7
    assert row.logprobs == (-4.0, -5.0)
    assert whole.cut == 0
    assert scorer.asked[3:] == ["012| ab| abcde"]


def test_a_choice_without_room_is_refused_by_its_name(tokenizer):
    scorer = Preferring(tokenizer, {" abcde": -5.0}, window=6)
    with pytest.raises(UserError, match="lambada/00000: a continuation of 6 tokens"):
        asked(tokenizer, "lambada", [Question("x", ("abcde",), 0)], scorer)


def test_cells_are_groups_whose_settings_say_what_is_asked(tokenizer, monkeypatch):
    monkeypatch.setattr(short, "PER_CELL", 2)
    questions = [Question("x" * n, ("ab", "c"), 0) for n in (1, 2, 3)]
    tasks = ShortTasks(tokenizer, {"piqa": questions, "lambada": [Question("x y", ("z",), 0)]})
    cells = tasks.cells()
    assert [cell.key for cell in cells] == [
        "short/piqa/00000",
        "short/piqa/00002",
        "short/lambada/00000",
    ]
    assert cells[0].work == ((0, 1), (1, 3), (1, 2), (0, 2), (2, 3), (2, 2))
    assert tasks.cells() == cells
    changed = [*questions[:2], Question("xxx", ("ab", "d"), 0)]
    again = ShortTasks(tokenizer, {"piqa": changed}).cells()
    assert again[0] == cells[0]
    assert again[1].settings != cells[1].settings
    rows = tasks.run(cells[1], Preferring(tokenizer, {" ab": -1.0, " c": -2.0}))
    assert [row.instance for row in rows] == ["piqa/00002"]


def test_rows_of_other_prompts_have_other_checksums(tokenizer):
    scorer = Preferring(tokenizer, {" ab": -4.0, " c": -5.0})
    questions = [Question("x", ("ab", "c"), 0), Question("x", ("c", "ab"), 0)]
    first, second = asked(tokenizer, "piqa", questions, scorer)
    assert first.prompt != second.prompt
    assert first.prompt == asked(tokenizer, "piqa", questions, scorer)[0].prompt
