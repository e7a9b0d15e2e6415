"""Retrieval's contexts, taken apart again; and what readers that follow a rule make of them."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from armillary.errors import UserError
from armillary.evaluation.decoder_scorer import DecoderScorer
from armillary.evaluation.records import QuestionRow
from armillary.evaluation.retrieval import KINDS, Retrieval
from armillary.evaluation.vocabulary import TaskTokens
from support.models import build, config
from support.readers import Reader, count, went_on

BOS = 5
TOKENS = TaskTokens.of_size(400, bos=BOS)
DEPTHS = (0.0, 0.25, 0.6, 1.0)


def task(**changes: object) -> Retrieval:
    settings = {
        "tokens": TOKENS,
        "lengths": (311, 500),
        "depths": DEPTHS,
        "distractors": (0, 2, 5),
        "instances": 2,
    }
    return Retrieval(**(settings | changes))  # type: ignore[arg-type]


def prompts(of: Retrieval):
    """Every cell, prompt and question."""
    for cell in of.cells():
        for prompt in of.prompts(cell):
            for question in prompt.questions:
                yield cell, prompt, question


def records(text, of: TaskTokens = TOKENS) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The pairs of key and value between newlines of a text."""
    lines, line = [], []
    for token in text:
        if token == of.newline:
            lines.append(tuple(line))
            line = []
        else:
            line.append(token)
    split = [(one, one.index(of.colon)) for one in lines if of.colon in one]
    return [(one[:at], one[at + 1 :]) for one, at in split]


def test_length_is_exactly_as_asked_with_one_bos() -> None:
    """Case 108: room for question and answer is part of it, and nothing is ever cut."""
    for cell, prompt, question in prompts(task()):
        for context in (prompt.context, prompt.control):
            assert len(context) + question.length == cell.settings["length"]
            assert context[0] == BOS
            assert count(context, [BOS]) == 1


def test_without_bos_nothing_stands_in_its_place() -> None:
    of = task(tokens=TaskTokens.of_size(400))
    for cell, prompt, question in prompts(of):
        assert len(prompt.context) + question.length == cell.settings["length"]


def test_the_needle_starts_at_its_depth() -> None:
    """Case 110: measured in tokens, as it went in."""
    for cell, prompt, question in prompts(task()):
        key = question.ask[:-1]
        record = (TOKENS.newline, *question.ask, *question.answer, TOKENS.newline)
        tail = 1 + 2 * (len(record) - 1)
        fixed = 1 + len(record) + tail + question.length
        start = 1 + round(question.factors["depth"] * (cell.settings["length"] - fixed))
        assert prompt.context[start : start + len(record)] == record
        assert count(prompt.context, key) == 1


def test_the_answer_stands_nowhere_else_and_not_in_the_control() -> None:
    for _, prompt, question in prompts(task()):
        assert count(prompt.context, question.answer) == 1
        assert count(prompt.control, question.answer) == 0
        for token in {*question.ask[:-1]} - {*TOKENS.label}:
            near = question.name.startswith("near-miss")
            assert near or count(prompt.control, [token]) == 0


def test_no_key_or_value_occurs_in_the_filler() -> None:
    """Case 110. What is left of a context without its records shares no token with any."""
    for cell, prompt, _ in prompts(task()):
        pairs = records(prompt.context)
        used = {token for key, value in pairs for token in (*key, *value)} - {*TOKENS.label}
        known = sum(len(key) + len(value) + 3 for key, value in pairs[:-2])
        known += sum(len(key) + len(value) + 2 for key, value in pairs[-2:]) + 1
        standing = sum(token in used for token in prompt.context)
        of_records = sum(token in used for key, value in pairs for token in (*key, *value))
        assert standing == of_records
        plain = [t for t in prompt.context if t in TOKENS.words and t not in used]
        assert len(plain) + known + 1 == len(prompt.context), cell


def test_the_control_is_the_same_but_for_the_needles() -> None:
    """Case 112: of the same length, every other token in its place."""
    for _, prompt, _ in prompts(task()):
        needles = {(q.ask[:-1], q.answer) for q in prompt.questions}
        left = [pair for pair in records(prompt.context) if pair not in needles]
        assert records(prompt.control) == left
        differ = sum(a != b for a, b in zip(prompt.context, prompt.control, strict=True))
        size = sum(q.length - 1 + 2 for q in prompt.questions)
        assert size * 0.9 < differ <= size


@pytest.mark.parametrize("variant", KINDS)
def test_there_are_as_many_distractors_as_asked(variant: str) -> None:
    for cell, prompt, question in prompts(task(variants=(variant,))):
        pairs = set(records(prompt.context))
        others = pairs - {(question.ask[:-1], question.answer)}
        assert len(others) == cell.settings["distractors"] + 2
        assert set(question.others) <= {value for _, value in others}
        assert len(set(question.others)) == min(7, len(others))


def test_near_misses_share_all_but_one_token_of_their_key() -> None:
    places = set()
    for _, prompt, question in prompts(task(variants=("near-miss",), instances=8)):
        key = question.ask[:-1]
        for other, _ in set(records(prompt.context)) - {(key, question.answer)}:
            (differs,) = [at for at in range(3) if other[at] != key[at]]
            places.add(differs)
    assert places == {0, 1, 2}


def test_what_shows_how_answers_look_is_recorded_too() -> None:
    for _, prompt, _ in prompts(task()):
        *body, one, two = records(prompt.context)
        assert one in body
        assert two in body
        assert prompt.context[-1] == TOKENS.newline


def test_a_set_is_the_same_in_every_run_and_whatever_else_is_asked_for() -> None:
    """Case 111."""
    wide = task(instances=3)
    again = task(instances=3, lengths=(500,), distractors=(2,), variants=("near-miss",))
    cells = {cell.key: cell for cell in wide.cells()}
    for cell in again.cells():
        assert cells[cell.key] == cell
        assert wide.prompts(cell) == again.prompts(cell)
    assert wide.prompts(cell) != replace(wide, seed=1).prompts(cell)
    one, other = (again.prompts(cell)[0] for cell in again.cells())
    assert one != other


def test_cell_keys_and_instances_are_unique() -> None:
    of = task(instances=3)
    keys = [cell.key for cell in of.cells()]
    assert len(set(keys)) == len(keys) == 3 * 2 * 3 * 2
    assert all(key.startswith("retrieval/") for key in keys)
    names = [question.name for _, _, question in prompts(of)]
    assert len(set(names)) == len(names) == 3 * 2 * 3 * 3 * len(DEPTHS)


def test_the_instances_of_a_cell_ask_for_other_things_in_the_same_text() -> None:
    """So that the control is that of both: a row holds what it would hold if it were its own."""
    for cell in task().cells():
        found = task().prompts(cell)
        half = len(found) // 2
        for one, other in zip(found[:half], found[half:], strict=True):
            assert one.control == other.control
            assert [q.factors for q in one.questions] == [q.factors for q in other.questions]
            asked = {(q.ask, q.answer) for q in one.questions}
            assert asked.isdisjoint((q.ask, q.answer) for q in other.questions)
            tokens = {token for q in one.questions for token in q.answer} - {*TOKENS.digits}
            assert tokens.isdisjoint(other.context)


def test_few_distractors_take_several_contexts_and_many_take_one() -> None:
    of = task(variants=("passkey",), lengths=(500,), instances=1)
    sizes = [[len(p.questions) for p in of.prompts(cell)] for cell in of.cells()]
    assert sizes == [[1, 1, 1, 1], [2, 2], [4]]
    both = replace(of, instances=2)
    assert both.prompts(both.cells()[0])[:4] == of.prompts(of.cells()[0])
    contexts = [prompt.context for prompt in of.prompts(of.cells()[0])]
    shared = [
        next(at for at, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)
        for one, other in pairwise(contexts)
    ]
    assert shared == sorted(shared, reverse=True)
    assert shared[0] > 250


def rows(of: Retrieval, reader: Reader) -> list[QuestionRow]:
    return [row for cell in of.cells() for row in of.run(cell, reader)]


@pytest.mark.parametrize("variant", KINDS)
def test_who_reads_whole_keys_is_always_right(variant: str) -> None:
    for row in rows(task(variants=(variant,)), Reader(went_on(10))):
        assert row.exact
        assert row.rank == 0
        assert row.control < row.logprob
        assert row.candidates == min(8, row.factors["distractors"] + 3)


def test_who_reads_the_end_of_a_key_falls_for_near_misses() -> None:
    of = task(variants=("near-miss",), instances=6, distractors=(5,))
    right = [row.exact for row in rows(of, Reader(went_on(3)))]
    assert 0.1 < np.mean(right) < 0.9


def test_a_longer_number_is_another_one() -> None:
    """Case 110: 48210 is not 4821, however the answer begins; and 4821 in other words is not wrong,
    since the verdict is about ids after the question alone."""
    of = task(variants=("passkey",), lengths=(311,), distractors=(2,), instances=1)
    reads = went_on(10)

    def goes_on(text):
        token = reads(text)
        return TOKENS.digits[0] if token == TOKENS.newline else token

    short, long = rows(of, Reader(reads)), rows(of, Reader(goes_on))
    assert all(row.exact for row in short)
    assert not any(row.exact for row in long)
    assert [row.logprob for row in short] == [row.logprob for row in long]


def test_a_model_that_knows_nothing_is_at_chance() -> None:
    """Case 110: nothing in how answers are chosen gives them away."""
    tokens = TaskTokens.of_size(61)
    of = Retrieval(
        tokens,
        (120,),
        depths=(0.1, 0.7),
        distractors=(1,),
        variants=("key-value",),
        instances=60,
        key_tokens=1,
        value_tokens=1,
    )
    scorer = DecoderScorer(build(config(max_positions=128)))
    found = [row for cell in of.cells() for row in of.run(cell, scorer)]
    assert len(found) == 120
    assert {row.candidates for row in found} == {4}
    assert 0.10 < np.mean([row.rank == 0 for row in found]) < 0.40
    assert np.mean([row.exact for row in found]) < 0.05


def test_the_work_of_a_cell_is_what_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time is told by it beforehand, so it has to know what contexts share."""
    scorer = DecoderScorer(build(config(vocab_size=400, max_positions=500)))
    computed = [0]
    run = scorer.decoder._run

    def counted(ids, *arguments):
        computed[0] += ids.shape[1]
        return run(ids, *arguments)

    monkeypatch.setattr(scorer.decoder, "_run", counted)
    of = task(lengths=(500,), tokens=TaskTokens.of_size(400))
    for cell in of.cells():
        scorer.begin()
        computed[0] = 0
        of.run(cell, scorer)
        assert abs(sum(new for _, new in cell.work) / computed[0] - 1) < 0.1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lengths": (80,)}, "80 tokens have no room"),
        ({"lengths": (20,)}, "20 tokens have no room"),
        ({"depths": tuple(i / 60 for i in range(61))}, "have no room"),
        ({"depths": (0.5, 1.1)}, "a depth is 1.1"),
        ({"variants": ("needle",)}, "no variant 'needle'"),
        ({"tokens": TaskTokens.of_size(40)}, "different words are asked about"),
    ],
)
def test_what_cannot_be_asked_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        list(prompts(task(**changes)))


def test_a_window_too_small_is_an_error_and_never_a_cut() -> None:
    """Case 108."""
    of = task(lengths=(311,), tokens=TaskTokens.of_size(400))
    scorer = DecoderScorer(build(config(vocab_size=400, max_positions=300)))
    with pytest.raises(ValueError, match="window of 300"):
        of.run(of.cells()[0], scorer)
