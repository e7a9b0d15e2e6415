"""Chains of facts, taken apart again; and what readers that follow a rule make of them."""

import numpy as np
import pytest

from armillary.errors import UserError
from armillary.evaluation.decoder_scorer import DecoderScorer
from armillary.evaluation.reasoning import PointerChase, VariableTracking
from armillary.evaluation.vocabulary import TaskTokens
from support.models import build, config
from support.readers import Reader, Rule, count

BOS = 7
TOKENS = TaskTokens.of_size(300, bos=BOS)
TASKS = (VariableTracking, PointerChase)


def task(kind, **changes: object):
    settings = {"tokens": TOKENS, "lengths": (400, 701), "hops": (2, 4), "instances": 3}
    return kind(**(settings | changes))


def prompts(of):
    """Every cell, its prompt, and each question."""
    for cell in of.cells():
        prompt = of.prompt(cell)
        for question in prompt.questions:
            yield cell, prompt, question


def facts(text, of: TaskTokens = TOKENS) -> list[tuple[int, int, int]]:
    """Place, left and right of every equals."""
    return [
        (at - 2, text[at - 1], text[at + 1]) for at, token in enumerate(text) if token == of.equals
    ]


def followed(text, name: int, of: TaskTokens = TOKENS) -> list[tuple[int, int]]:
    """(place, name) of every fact on the way from a name to where it ends."""
    leads = {left: (place, right) for place, left, right in facts(text, of)}
    way = []
    while name in leads:
        way.append(leads[name])
        name = leads[name][1]
    return way


def chases(most: int = 99) -> Rule:
    """A reader that follows facts, so many at most."""

    def rule(text):
        if text[-1] != TOKENS.colon:
            return TOKENS.newline
        way = followed(text, text[-2])[:most]
        return way[-1][1] if way else -1

    return rule


@pytest.mark.parametrize("kind", TASKS)
def test_length_is_exactly_as_asked_with_one_bos(kind) -> None:
    """Down to the length that facts alone make up."""
    facts = 30 if kind is VariableTracking else 24
    for cell, prompt, question in prompts(task(kind, lengths=(1 + 5 * facts + 13, 400))):
        for context in (prompt.context, prompt.control):
            assert len(context) + question.length == cell.settings["length"]
            assert context[0] == BOS
            assert count(context, [BOS]) == 1


@pytest.mark.parametrize("kind", TASKS)
def test_facts_lead_from_the_question_to_the_answer(kind) -> None:
    for cell, prompt, question in prompts(task(kind)):
        way = followed(prompt.context, question.ask[0])
        more = 1 if kind is VariableTracking else 0
        assert len(way) == cell.settings["hops"] + more
        assert (way[-1][1],) == question.answer
        assert (followed(prompt.control, question.ask[0]) or [(0, -1)])[-1][
            1
        ] not in question.answer


@pytest.mark.parametrize("kind", TASKS)
def test_the_answer_stands_nowhere_else_and_not_in_the_control(kind) -> None:
    for _, prompt, question in prompts(task(kind)):
        assert count(prompt.context, question.answer) == 1
        assert count(prompt.control, question.answer) == 0


@pytest.mark.parametrize("kind", TASKS)
def test_no_name_or_value_occurs_in_the_filler(kind) -> None:
    for _, prompt, _ in prompts(task(kind)):
        named = [token for _, *pair in facts(prompt.context) for token in pair]
        answered = sum(token in named for token in prompt.context[-8:])
        assert sum(token in set(named) for token in prompt.context) == len(named) + answered


@pytest.mark.parametrize("kind", TASKS)
def test_the_control_is_the_same_but_for_what_tells_the_answers(kind) -> None:
    for _, prompt, _ in prompts(task(kind)):
        answers = {question.answer[0] for question in prompt.questions}
        left = [fact for fact in facts(prompt.context) if fact[2] not in answers]
        assert facts(prompt.control) == left
        assert len(left) == len(facts(prompt.context)) - len(prompt.questions)


@pytest.mark.parametrize("hops", [1, 2, 4])
@pytest.mark.parametrize("chains", [2, 4])
def test_chains_are_interleaved_and_out_of_order(hops: int, chains: int) -> None:
    of = task(VariableTracking, hops=(hops,), chains=chains, instances=8)
    for cell in of.cells():
        prompt = of.prompt(cell)
        ways = [
            [place for place, _ in followed(prompt.context, question.ask[0])][::-1]
            for question in prompt.questions
        ]
        everything = sorted(place for place, _, _ in facts(prompt.context))
        for way in ways:
            spread = everything.index(max(way)) - everything.index(min(way))
            assert spread > hops
        assert len(everything) == (chains + 2) * (hops + 1)
        shown = [
            followed(prompt.context, name) for name in (prompt.context[-8], prompt.context[-4])
        ]
        ways += [[place for place, _ in way][::-1] for way in shown]
        assert any(way != sorted(way) for way in ways)


def test_facts_of_a_chase_lie_as_far_apart_as_the_length_allows() -> None:
    """Further than any window that is shorter than that: here 128 at 701 tokens and 4 hops."""
    for cell, prompt, question in prompts(task(PointerChase)):
        places = sorted(place for place, _ in followed(prompt.context, question.ask[0]))
        apart = question.factors["apart"]
        assert set(np.diff(places)) == {apart}
        room = cell.settings["length"] - 1 - 13 - 6 * 5
        assert apart == room // (cell.settings["hops"] - 1)


def test_the_order_of_a_chase_differs_from_chain_to_chain() -> None:
    of = task(PointerChase, hops=(4,), instances=6)
    orders = {
        tuple(np.argsort([place for place, _ in followed(prompt.context, question.ask[0])]))
        for _, prompt, question in prompts(of)
    }
    assert len(orders) > 12


@pytest.mark.parametrize("kind", TASKS)
def test_who_follows_all_facts_is_always_right(kind) -> None:
    of = task(kind)
    for cell in of.cells():
        for row in of.run(cell, Reader(chases())):
            assert row.exact
            assert row.rank == 0
            assert row.control < row.logprob
            between = cell.settings["hops"] - 1 if kind is PointerChase else 0
            assert row.candidates == 6 + between


@pytest.mark.parametrize("kind", TASKS)
def test_who_follows_one_fact_less_is_always_wrong(kind) -> None:
    of = task(kind, hops=(2,))
    reader = Reader(chases(1 if kind is PointerChase else 2))
    for cell in of.cells():
        for row in of.run(cell, reader):
            assert not row.exact
            assert row.rank > 0


@pytest.mark.parametrize("kind", TASKS)
def test_a_set_is_the_same_in_every_run_and_whatever_else_is_asked_for(kind) -> None:
    wide, again = task(kind), task(kind, lengths=(701,), hops=(4,))
    cells = {cell.key: cell for cell in wide.cells()}
    assert len(cells) == 2 * 2 * 3
    for cell in again.cells():
        assert cells[cell.key] == cell
        assert wide.prompt(cell) == again.prompt(cell)
        assert wide.prompt(cell) != task(kind, seed=1).prompt(cell)
    names = [question.name for _, _, question in prompts(wide)]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("kind", TASKS)
def test_a_model_that_knows_nothing_is_at_chance(kind) -> None:
    of = kind(TaskTokens.of_size(61), (140,), hops=(2,), chains=2, instances=40)
    scorer = DecoderScorer(build(config(max_positions=140)))
    found = [row for cell in of.cells() for row in of.run(cell, scorer)]
    chance = 1 / found[0].candidates
    assert abs(np.mean([row.rank == 0 for row in found]) - chance) < 0.15
    assert np.mean([row.exact for row in found]) < 0.05


@pytest.mark.parametrize("kind", TASKS)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lengths": (130,)}, "130 tokens have no room"),
        ({"chains": 1}, "two at least"),
        ({"hops": (0, 2)}, "0 hops"),
        ({"tokens": TaskTokens.of_size(40)}, "different words are asked about"),
    ],
)
def test_what_cannot_be_asked_is_refused(kind, changes: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        list(prompts(task(kind, **changes)))
