"""Facts that have to be put together: values handed on from name to name, and pointers to follow.

    …text…⏎ name = name ⏎…text…                a fact, written over the text at its place
    …⏎ name : answer ⏎ name : answer ⏎         the end of a context: two chains asked for, answered
    name :                                     the question

The two at the end show what is asked for; their facts stand in the context as well.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import numpy as np

from armillary.errors import UserError
from armillary.evaluation.composition import Ids, check_words, draw, generator, overlay
from armillary.evaluation.filler import filler
from armillary.evaluation.questions import Kind, Prompt, Question, ask
from armillary.evaluation.records import Cell, Row, Setting
from armillary.evaluation.scoring import Scorer
from armillary.evaluation.vocabulary import TaskTokens

TAUGHT = 2
_FACT = 5  # ⏎ name = name ⏎
_ANSWERED = 4  # name : answer ⏎


@dataclass(frozen=True)
class _Chains(ABC):
    """What both tasks share: chains of facts in a context, each asked for where it leads.

    A chain is its names: of each a fact says that it is the next, and the last is the answer.
    """

    tokens: TaskTokens
    lengths: tuple[int, ...]
    hops: tuple[int, ...]
    chains: int = 4
    instances: int = 4
    seed: int = 0

    name: ClassVar[str]
    version: ClassVar[int] = 1
    least_hops: ClassVar[int]

    def __post_init__(self) -> None:
        if self.chains < 2:
            raise UserError(
                f"{self.name}: {self.chains} chains; two at least stand in each other's way"
            )
        for hops in self.hops:
            if hops < self.least_hops:
                raise UserError(
                    f"{self.name}: {hops} hops; there must be {self.least_hops} at least"
                )
            facts = self._count * self.facts(hops)
            check_words(self.name, self.tokens.words, facts + self._count)
            for length in self.lengths:
                if self._body(length) < facts * _FACT:
                    raise UserError(
                        f"{self.name}: {length} tokens have no room for {facts} facts of {_FACT} "
                        "tokens; ask for a greater length, fewer chains or fewer hops"
                    )

    @abstractmethod
    def facts(self, hops: int) -> int:
        """Facts of a chain."""

    @abstractmethod
    def lay(
        self, size: int, hops: int, random: np.random.Generator
    ) -> tuple[list[list[int]], Mapping[str, Setting]]:
        """Where the facts of each chain start, in their order, and what is to be said of that."""

    @abstractmethod
    def others(self, chain: Ids, chains: Sequence[Ids]) -> Ids:
        """What the answer is set beside."""

    def cells(self) -> Sequence[Cell]:
        """By length, hops and instance."""
        return [
            Cell(
                key=f"{self.name}/{length}/{hops}/{instance}",
                settings={"length": length, "hops": hops, "instance": instance},
                work=self._work(length - _ANSWERED),
            )
            for length in self.lengths
            for hops in self.hops
            for instance in range(self.instances)
        ]

    def run(self, cell: Cell, scorer: Scorer) -> list[Row]:
        """A row for each chain."""
        kind = Kind(self.name, self.name, int(cell.settings["length"] or 0))
        return [*ask(kind, [self.prompt(cell)], scorer)]

    def prompt(self, cell: Cell) -> Prompt:
        """What is asked in a cell."""
        length, hops, instance = cell.settings.values()
        assert isinstance(length, int)
        assert isinstance(hops, int)
        random = generator(self.name, self.seed, hops, instance)
        each = self.facts(hops) + 1
        words = draw(self.tokens.words, self._count * each, random)
        chains = [words[at : at + each] for at in range(0, len(words), each)]
        asked, taught = chains[:-TAUGHT], chains[-TAUGHT:]

        random = generator(self.name, self.seed, hops, instance, length)
        size = self._body(length)
        starts, factors = self.lay(size, hops, random)
        text = filler(self.tokens, size, words, random)
        newline, colon, equals = self.tokens.newline, self.tokens.colon, self.tokens.equals
        facts = [
            (start, (newline, left, equals, right, newline))
            for places, chain in zip(starts, chains, strict=True)
            for start, (left, right) in zip(places, pairwise(chain), strict=True)
        ]
        answers = {chain[-1] for chain in asked}
        tail = [
            newline,
            *(t for chain in taught for t in (chain[0], colon, chain[-1], newline)),
        ]
        questions = tuple(
            Question(
                name=f"{length}/{hops}/{instance}/{number}",
                ask=(chain[0], colon),
                answer=chain[-1:],
                others=tuple((name,) for name in self.others(chain, chains)),
                factors={"hops": hops, "chains": self.chains, **factors},
                end=(newline,),
            )
            for number, chain in enumerate(asked)
        )
        begin = self.tokens.begin
        return Prompt(
            (*begin, *overlay(text, facts), *tail),
            (*begin, *overlay(text, [f for f in facts if answers.isdisjoint(f[1])]), *tail),
            questions,
        )

    @property
    def _count(self) -> int:
        """Chains in a context, those that show what is asked among them."""
        return self.chains + TAUGHT

    def _body(self, length: int) -> int:
        """Tokens of the text in which facts stand."""
        return length - len(self.tokens.begin) - 1 - (TAUGHT + 1) * _ANSWERED

    def _work(self, context: int) -> tuple[tuple[int, int], ...]:
        """The context and its questions, then the control and its own."""
        asked = (context, self.chains * (_ANSWERED - 1))
        return ((0, context), asked, (0, context), asked)


@dataclass(frozen=True)
class VariableTracking(_Chains):
    """Values that are handed on: a = v … b = a … c = b, and what is c?

    Two chains at least stand in one another's way, and their facts are not in order. Each is asked
    for its last name; what it is set beside are the other chains' values.

    lengths  tokens of context, question and answer
    hops     how often a value is handed on
    chains   that are asked for, beside the two that show what is asked

    The control is the context without the facts that state the values.
    Raises UserError when a length has no room for its facts, the vocabulary too few words, and for
    fewer than two chains.
    """

    hops: tuple[int, ...] = (1, 2, 4)

    name: ClassVar[str] = "variable-tracking"
    least_hops: ClassVar[int] = 1

    def facts(self, hops: int) -> int:
        """One that states the value, and one for each time that it is handed on."""
        return hops + 1

    def others(self, chain: Ids, chains: Sequence[Ids]) -> Ids:
        """The other chains' values."""
        return tuple(other[-1] for other in chains if other is not chain)

    def lay(
        self, size: int, hops: int, random: np.random.Generator
    ) -> tuple[list[list[int]], Mapping[str, Setting]]:
        """One fact in each of as many even parts of the text, as `_interleaved` orders them."""
        each = self.facts(hops)
        count = self._count * each
        borders = [size * part // count for part in range(count + 1)]
        starts = [[0] * each for _ in range(self._count)]
        order = _interleaved(self._count, each, random)
        for (chain, fact), (low, high) in zip(order, pairwise(borders), strict=True):
            starts[chain][fact] = int(random.integers(low, high - _FACT + 1))
        return starts, {}


@dataclass(frozen=True)
class PointerChase(_Chains):
    """Pointers to follow: a = b … b = c … c = d, and where does a lead?

    The facts of a chain lie as far apart as the length allows, evenly and out of order, and those
    of all chains side by side; the factor `apart` is the distance in tokens. Where it is more than
    a window, no two facts of a chain lie in one. An answer is set beside the other chains' ends and
    the names on the way.

    lengths  tokens of context, question and answer
    hops     facts of a chain, two at least
    chains   that are asked for, beside the two that show what is asked

    The control is the context without the facts that lead to the ends.
    Raises UserError when a length has no room for its facts, the vocabulary too few words, and for
    fewer than two chains.
    """

    hops: tuple[int, ...] = (2, 3, 4)

    name: ClassVar[str] = "pointer-chase"
    least_hops: ClassVar[int] = 2

    def facts(self, hops: int) -> int:
        """One for each hop."""
        return hops

    def others(self, chain: Ids, chains: Sequence[Ids]) -> Ids:
        """The other chains' ends, and the way to its own."""
        ends = tuple(other[-1] for other in chains if other is not chain)
        return (*chain[1:-1], *ends)

    def lay(
        self, size: int, hops: int, random: np.random.Generator
    ) -> tuple[list[list[int]], Mapping[str, Setting]]:
        """A station for each hop, in which every chain has its lane, and goes its own way."""
        apart = (size - self._count * _FACT) // (hops - 1)
        starts = [
            [int(station) * apart + int(lane) * _FACT for station in random.permutation(hops)]
            for lane in random.permutation(self._count)
        ]
        return starts, {"apart": apart}


def _interleaved(chains: int, facts: int, random: np.random.Generator) -> list[tuple[int, int]]:
    """An order of all (chain, fact): no chain stands in one piece, nor every one in its order."""
    entries = [(chain, fact) for chain in range(chains) for fact in range(facts)]
    while True:
        order = [entries[index] for index in random.permutation(len(entries))]
        at = [[order.index((chain, fact)) for fact in range(facts)] for chain in range(chains)]
        in_a_piece = any(max(places) - min(places) == facts - 1 for places in at)
        told = [places == sorted(places, reverse=True) for places in at]
        if not in_a_piece and not all(told):
            return order
