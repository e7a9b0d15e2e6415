"""Facts that have to be put together: values handed on from name to name, and pointers to follow.

Both end as retrieval does: with two questions of the same kind answered, whose facts stand in the
context too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import numpy as np

from armillary.errors import UserError
from armillary.evaluation.composition import Ids, check_words, draw, generator, overlay
from armillary.evaluation.filler import filler
from armillary.evaluation.questions import Kind, Prompt, Question, ask
from armillary.evaluation.records import Cell, Row
from armillary.evaluation.scoring import Scorer
from armillary.evaluation.vocabulary import TaskTokens

TAUGHT = 2
# ⏎ name = name ⏎, and name : answer ⏎, a question with its answer.
_FACT = 5
_ANSWERED = 4


@dataclass(frozen=True)
class _Chain:
    """Facts of which each leads to the next; the answer stands in one of them."""

    facts: tuple[Ids, ...]
    asked: int
    answer: int
    between: tuple[int, ...] = ()


@dataclass(frozen=True)
class VariableTracking:
    """Values that are handed on: a = 7 … b = a … c = b, and what is c?

    At least two chains stand in one another's way, their facts out of order. Each is asked for its
    last name; what it is set beside are the other chains' values.

    lengths  tokens of context, question and answer
    hops     how often a value is handed on
    chains   that are asked for, beside the two that show what is asked

    The control is the context without the facts that state the values.
    Raises UserError when a length has no room for its facts, and for fewer than two chains.
    """

    tokens: TaskTokens
    lengths: tuple[int, ...]
    hops: tuple[int, ...] = (1, 2, 4)
    chains: int = 4
    instances: int = 4
    seed: int = 0

    name: ClassVar[str] = "variable-tracking"
    version: ClassVar[int] = 1

    def __post_init__(self) -> None:
        _check(self.name, self.tokens, self.lengths, self.hops, self.chains, facts_more=1, least=1)

    def cells(self) -> Sequence[Cell]:
        """By length, hops and instance."""
        return _cells(self.name, self.lengths, self.hops, self.instances, self.chains)

    def run(self, cell: Cell, scorer: Scorer) -> list[Row]:
        """A row for each chain."""
        kind = Kind(self.name, self.name, _number(cell, "length"))
        return [*ask(kind, [self.prompt(cell)], scorer)]

    def prompt(self, cell: Cell) -> Prompt:
        """What is asked in a cell."""
        length, hops, instance = (_number(cell, what) for what in ("length", "hops", "instance"))
        random = generator(self.name, self.seed, hops, instance)
        count = self.chains + TAUGHT
        words = draw(self.tokens.words, count * (hops + 2), random)
        chains = [
            _chain(self.tokens, words[first : first + hops + 2], value_first=True)
            for first in range(0, len(words), hops + 2)
        ]
        random = generator(self.name, self.seed, hops, instance, length)
        size = _body(self.tokens, length)
        places = _spread(size, count * (hops + 1), random)
        order = _interleaved(count, hops + 1, random)
        starts = [[0] * (hops + 1) for _ in chains]
        for start, (chain, fact) in zip(places, order, strict=True):
            starts[chain][fact] = start
        factors = {"hops": hops, "chains": self.chains}
        return _prompt(self.tokens, cell, size, chains, starts, factors, random)


@dataclass(frozen=True)
class PointerChase:
    """Pointers to follow: a = b … b = c … c = d, and where does a lead?

    The facts of a chain lie as far apart as the length allows, evenly and out of order, and those
    of all chains side by side; the factor `apart` is the distance. Where it is more than a window,
    no two facts of a chain can be read at once within it. An answer is set beside the other chains'
    ends and the places on the way.

    lengths  tokens of context, question and answer
    hops     facts of a chain, two at least
    chains   that are asked for, beside the two that show what is asked

    The control is the context without the facts that lead to the ends.
    Raises UserError when a length has no room for its facts, and for fewer than two chains.
    """

    tokens: TaskTokens
    lengths: tuple[int, ...]
    hops: tuple[int, ...] = (2, 3, 4)
    chains: int = 4
    instances: int = 4
    seed: int = 0

    name: ClassVar[str] = "pointer-chase"
    version: ClassVar[int] = 1

    def __post_init__(self) -> None:
        _check(self.name, self.tokens, self.lengths, self.hops, self.chains, facts_more=0, least=2)

    def cells(self) -> Sequence[Cell]:
        """By length, hops and instance."""
        return _cells(self.name, self.lengths, self.hops, self.instances, self.chains)

    def run(self, cell: Cell, scorer: Scorer) -> list[Row]:
        """A row for each chain."""
        kind = Kind(self.name, self.name, _number(cell, "length"))
        return [*ask(kind, [self.prompt(cell)], scorer)]

    def prompt(self, cell: Cell) -> Prompt:
        """What is asked in a cell."""
        length, hops, instance = (_number(cell, what) for what in ("length", "hops", "instance"))
        random = generator(self.name, self.seed, hops, instance)
        count = self.chains + TAUGHT
        words = draw(self.tokens.words, count * (hops + 1), random)
        chains = [
            _chain(self.tokens, words[first : first + hops + 1], value_first=False)
            for first in range(0, len(words), hops + 1)
        ]
        random = generator(self.name, self.seed, hops, instance, length)
        size = _body(self.tokens, length)
        apart = (size - count * _FACT) // (hops - 1)
        starts = []
        for lane in random.permutation(count):
            stations = random.permutation(hops)
            starts.append([int(station) * apart + int(lane) * _FACT for station in stations])
        factors = {"hops": hops, "chains": self.chains, "apart": apart}
        return _prompt(self.tokens, cell, size, chains, starts, factors, random)


def _chain(tokens: TaskTokens, words: Ids, *, value_first: bool) -> _Chain:
    """The chain of facts that words give: each is what the next is set to, or the other way."""
    facts = tuple(
        (tokens.newline, one, tokens.equals, other, tokens.newline)
        for one, other in (
            [(after, before) for before, after in pairwise(words)]
            if value_first
            else pairwise(words)
        )
    )
    if value_first:
        return _Chain(facts, asked=words[-1], answer=words[0])
    return _Chain(facts, asked=words[0], answer=words[-1], between=words[1:-1])


def _prompt(
    tokens: TaskTokens,
    cell: Cell,
    size: int,
    chains: Sequence[_Chain],
    starts: Sequence[Sequence[int]],
    factors: dict[str, int],
    random: np.random.Generator,
) -> Prompt:
    """The facts of all chains at their places; the last chains are those that show what is asked.

    A chain's answer stands in just one of its facts, which the control lacks.
    """
    asked, taught = chains[:-TAUGHT], chains[-TAUGHT:]
    text = filler(tokens, size, {t for chain in chains for f in chain.facts for t in f}, random)
    facts = [
        (start, fact, chain in asked and chain.answer in fact)
        for chain, places in zip(chains, starts, strict=True)
        for start, fact in zip(places, chain.facts, strict=True)
    ]
    tail = (
        tokens.newline,
        *(
            token
            for chain in taught
            for token in (chain.asked, tokens.colon, chain.answer, tokens.newline)
        ),
    )
    whole, without = (
        (
            *tokens.begin,
            *overlay(text, [(start, fact) for start, fact, tells in facts if keep or not tells]),
            *tail,
        )
        for keep in (True, False)
    )
    questions = tuple(
        Question(
            name=f"{cell.key.partition('/')[2]}/{number}",
            ask=(chain.asked, tokens.colon),
            answer=(chain.answer,),
            others=tuple(
                (token,)
                for token in (
                    *chain.between,
                    *(other.answer for other in chains if other is not chain),
                )
            ),
            factors=dict(factors),
            end=(tokens.newline,),
        )
        for number, chain in enumerate(asked)
    )
    return Prompt(whole, without, questions)


def _body(tokens: TaskTokens, length: int) -> int:
    """Tokens of the text in which facts stand."""
    return length - len(tokens.begin) - 1 - (TAUGHT + 1) * _ANSWERED


def _spread(size: int, count: int, random: np.random.Generator) -> list[int]:
    """Starts of facts, one drawn in each of as many even parts of the text."""
    borders = [size * part // count for part in range(count + 1)]
    return [int(random.integers(low, high - _FACT + 1)) for low, high in pairwise(borders)]


def _interleaved(chains: int, facts: int, random: np.random.Generator) -> list[tuple[int, int]]:
    """An order of all (chain, fact): no chain in a piece, and not all of them in their order."""
    entries = [(chain, fact) for chain in range(chains) for fact in range(facts)]
    while True:
        order = [entries[index] for index in random.permutation(len(entries))]
        at = [[order.index((chain, fact)) for fact in range(facts)] for chain in range(chains)]
        in_a_piece = any(max(places) - min(places) == facts - 1 for places in at)
        in_order = all(places == sorted(places) for places in at)
        if not in_a_piece and not in_order:
            return order


def _cells(
    name: str,
    lengths: Sequence[int],
    hops: Sequence[int],
    instances: int,
    chains: int,
) -> list[Cell]:
    return [
        Cell(
            key=f"{name}/{length}/{count}/{instance}",
            settings={"length": length, "hops": count, "instance": instance},
            work=_work(length - _ANSWERED, chains),
        )
        for length in lengths
        for count in hops
        for instance in range(instances)
    ]


def _work(context: int, chains: int) -> tuple[tuple[int, int], ...]:
    """The context and its questions, then the control and its own."""
    asked = (context, chains * (_ANSWERED - 1))
    return ((0, context), asked, (0, context), asked)


def _check(
    name: str,
    tokens: TaskTokens,
    lengths: Sequence[int],
    hops: Sequence[int],
    chains: int,
    *,
    facts_more: int,
    least: int,
) -> None:
    if chains < 2:
        raise UserError(f"{name}: {chains} chains; two at least have to stand in each other's way")
    if min(hops, default=least) < least:
        raise UserError(f"{name}: {min(hops)} hops; there must be {least} at least")
    check_words(name, tokens.words, (chains + TAUGHT) * (max(hops, default=0) + facts_more + 1))
    for length in lengths:
        for count in hops:
            facts = (chains + TAUGHT) * (count + facts_more)
            if _body(tokens, length) < 2 * facts * _FACT:
                raise UserError(
                    f"{name}: {length} tokens have no room for {facts} facts of {_FACT} tokens; "
                    "ask for a greater length, fewer chains or fewer hops"
                )


def _number(cell: Cell, what: str) -> int:
    value = cell.settings[what]
    assert isinstance(value, int)
    return value
