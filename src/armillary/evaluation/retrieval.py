"""Facts among other text, asked for by their keys.

    …text…⏎ key : value ⏎…text…                a record, written over the text at its place
    …⏎ key : value ⏎ key : value ⏎             the end of a context: two records asked, and answered
    key :                                      the question, which goes on with its value

The two at the end show what is asked for; their records stand in the context as well.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import numpy as np

from armillary.errors import UserError
from armillary.evaluation.composition import Ids, check_words, draw, gaps, generator, overlay, place
from armillary.evaluation.filler import filler
from armillary.evaluation.questions import Kind, Prompt, Question, ask
from armillary.evaluation.records import Cell, Row, Setting
from armillary.evaluation.scoring import Scorer
from armillary.evaluation.vocabulary import TaskTokens

TAUGHT = 2
TOGETHER = 2
NUMBER = 5
KINDS = ("key-value", "passkey", "near-miss")


@dataclass(frozen=True)
class _Pair:
    """A key and its value."""

    key: Ids
    value: Ids

    def record(self, tokens: TaskTokens) -> Ids:
        """As it stands in the text."""
        return (tokens.newline, *self.line(tokens))

    def line(self, tokens: TaskTokens) -> Ids:
        """As it is asked and answered."""
        return (*self.key, tokens.colon, *self.value, tokens.newline)


@dataclass(frozen=True)
class Retrieval:
    """Length × depth × distractors, in three variants.

    key-value  keys and values of random words
    passkey    keys of a fixed phrase and random words, and values of five digits
    near-miss  keys of one word more, of which all share all but one

    An instance has a record at each depth, and they are asked for in as few contexts as the number
    of distractors allows: the records of other depths are a record's distractors too, and only what
    they leave open is filled with records that are not asked for. A cell is two instances at one
    length, in the same text: so they have one control.

    lengths      tokens of context, question and answer
    depths       0 right after what begins the text, 1 right before the records that are answered
    distractors  records beside the one asked for, not counting the two that show what is asked
    candidates   the most answers that a rank is taken among; they are values in the same context
    key_tokens   words of a key; value_tokens of a value

    The control is the context without any of the records asked for: it holds the distractors that
    are not asked for, and the two.
    Raises UserError when a length has no room for its records, the vocabulary too few words, and
    for unknown variants.
    """

    tokens: TaskTokens
    lengths: tuple[int, ...]
    depths: tuple[float, ...] = tuple(step / 10 for step in range(11))
    distractors: tuple[int, ...] = (15,)
    variants: tuple[str, ...] = KINDS
    instances: int = 4
    seed: int = 0
    candidates: int = 8
    key_tokens: int = 2
    value_tokens: int = 1

    name: ClassVar[str] = "retrieval"
    version: ClassVar[int] = 1

    def __post_init__(self) -> None:
        for variant in self.variants:
            if variant not in KINDS:
                raise UserError(f"retrieval has no variant {variant!r}; it has {', '.join(KINDS)}")
        for depth in self.depths:
            if not 0 <= depth <= 1:
                raise UserError(f"a depth is {depth}; it lies from 0 (the start) to 1 (the end)")
        for variant in self.variants:
            for distractors in self.distractors:
                self._check_words(variant, self._drawn(distractors))
                for length in self.lengths:
                    self._check_room(variant, length, distractors)

    def cells(self) -> Sequence[Cell]:
        """By variant, length, distractors and instance."""
        return [
            self._cell(
                variant, length, distractors, range(self.instances)[first : first + TOGETHER]
            )
            for variant in self.variants
            for length in self.lengths
            for distractors in self.distractors
            for first in range(0, self.instances, TOGETHER)
        ]

    def run(self, cell: Cell, scorer: Scorer) -> list[Row]:
        """A row for each instance and depth."""
        variant, length = str(cell.settings["variant"]), int(cell.settings["length"] or 0)
        return [*ask(Kind(self.name, variant, length), self.prompts(cell), scorer)]

    def prompts(self, cell: Cell) -> list[Prompt]:
        """What is asked in a cell."""
        variant, length, distractors, first, count = cell.settings.values()
        assert isinstance(variant, str)
        assert isinstance(length, int)
        assert isinstance(distractors, int)
        assert isinstance(first, int)
        assert isinstance(count, int)
        tokens, depths = self.tokens, self.depths
        random = generator(self.name, self.seed, variant, distractors, first)
        spare = self._spare(distractors)
        pairs = self._pairs(variant, self._drawn(distractors), first // TOGETHER, random)
        taught, loose = pairs[:TAUGHT], pairs[: TAUGHT + spare]

        random = generator(self.name, self.seed, variant, distractors, first, length)
        size = self._body(variant, length)
        record = len(pairs[0].record(tokens))
        used = {token for pair in pairs for token in (*pair.key, *pair.value)}
        text = filler(tokens, size, used | set(tokens.digits), random)
        starts = {depth: round(depth * (size - record)) for depth in depths}
        free = gaps(size, [range(start, start + record) for start in starts.values()])
        places = place(free, len(loose), record, random)
        tail = (tokens.newline, *(t for pair in taught for t in pair.line(tokens)))

        def context(facts: Iterable[tuple[int, _Pair]]) -> Ids:
            body = overlay(text, [(start, pair.record(tokens)) for start, pair in facts])
            return (*tokens.begin, *body, *tail)

        prompts = []
        for number in range(count):
            own = pairs[len(loose) + number * len(depths) :]
            asked = dict(zip(depths, own, strict=False))
            for group in self._groups(distractors):
                held = loose[: TAUGHT + distractors + 1 - len(group)]
                beside = list(zip(places, held, strict=False))
                needles = {depth: asked[depth] for depth in group}
                prompts.append(
                    Prompt(
                        context([*beside, *((starts[depth], needles[depth]) for depth in group)]),
                        context(beside),
                        self._questions(
                            f"{variant}/{length}/{distractors}/{first + number}",
                            {"distractors": distractors},
                            needles,
                            held,
                            random,
                        ),
                    )
                )
        return prompts

    def _questions(
        self,
        name: str,
        factors: Mapping[str, Setting],
        needles: Mapping[float, _Pair],
        held: Sequence[_Pair],
        random: np.random.Generator,
    ) -> tuple[Question, ...]:
        """One for each needle, each set beside some of the other values in its context."""
        questions = []
        for depth, needle in needles.items():
            wrong = [*held, *(other for other in needles.values() if other is not needle)]
            count = min(len(wrong), self.candidates - 1)
            some = random.choice(len(wrong), count, replace=False)
            questions.append(
                Question(
                    name=f"{name}/{depth:g}",
                    ask=(*needle.key, self.tokens.colon),
                    answer=needle.value,
                    others=tuple(wrong[index].value for index in some),
                    factors={"depth": depth, **factors},
                    end=(self.tokens.newline,),
                )
            )
        return tuple(questions)

    def _cell(self, variant: str, length: int, distractors: int, instances: range) -> Cell:
        key, value = self._widths(variant)
        context = length - key - value - 2
        room = self._body(variant, length) - (key + value + 3)
        groups = self._groups(distractors) * len(instances)
        shared, work = 0, []
        for group in groups:
            first = round(min(group) * room)
            shared = min(shared, first)
            work.append((shared, context - shared))
            work.append((context, len(group) * (key + 2 + self.candidates * (value - 1))))
            shared = first
        work.append((shared, context - shared))
        work.append((context, len(self.depths) * len(instances) * (key + value + 1)))
        return Cell(
            key=f"{self.name}/{variant}/{length}/{distractors}/{instances[0]}",
            settings={
                "variant": variant,
                "length": length,
                "distractors": distractors,
                "instance": instances[0],
                "instances": len(instances),
            },
            work=tuple(work),
        )

    def _groups(self, distractors: int) -> list[tuple[float, ...]]:
        """The depths that are asked for in one context each, those that begin latest first.

        A context shares with the next what stands before the needles of either.
        """
        per_context = min(len(self.depths), distractors + 1)
        count = -(-len(self.depths) // per_context)
        ordered = sorted(self.depths)
        return [tuple(ordered[first::count]) for first in reversed(range(count))]

    def _spare(self, distractors: int) -> int:
        """Records that fill up a context which asks for few."""
        return distractors + 1 - min(map(len, self._groups(distractors)))

    def _drawn(self, distractors: int) -> int:
        """Records of a cell: those of the text, and of each instance its own."""
        return TAUGHT + self._spare(distractors) + TOGETHER * len(self.depths)

    def _widths(self, variant: str) -> tuple[int, int]:
        """Tokens of a key and of a value."""
        return {
            "key-value": (self.key_tokens, self.value_tokens),
            "passkey": (len(self.tokens.label) + self.key_tokens, NUMBER),
            "near-miss": (self.key_tokens + 1, self.value_tokens),
        }[variant]

    def _body(self, variant: str, length: int) -> int:
        """Tokens of the text in which records stand."""
        key, value = self._widths(variant)
        tail = 1 + TAUGHT * (key + value + 2)
        return length - len(self.tokens.begin) - tail - (key + value + 2)

    def _check_words(self, variant: str, count: int) -> None:
        key, value = self._widths(variant)
        words = {
            "key-value": count * (key + value),
            "passkey": count * self.key_tokens,
            "near-miss": key - 1 + count * (1 + value),
        }[variant]
        check_words(f"{self.name}: {variant}", self.tokens.words, words)

    def _check_room(self, variant: str, length: int, distractors: int) -> None:
        size, record = self._body(variant, length), sum(self._widths(variant)) + 3
        loose = self._spare(distractors) + TAUGHT
        starts = sorted(round(depth * (size - record)) for depth in self.depths)
        close = size < record or any(after - before < record for before, after in pairwise(starts))
        free = [] if close else gaps(size, [range(start, start + record) for start in starts])
        if sum(len(gap) // record for gap in free) < loose:
            raise UserError(
                f"retrieval: {variant}: {length} tokens have no room for {loose} records of "
                f"{record} tokens beside those at {len(self.depths)} depths; ask for a greater "
                "length, fewer depths or fewer distractors"
            )

    def _pairs(
        self, variant: str, count: int, turn: int, random: np.random.Generator
    ) -> list[_Pair]:
        """Keys and values, no two alike in anything but what near misses share.

        In which token of their keys near misses differ takes turns.
        """
        key, value = self._widths(variant)
        if variant == "passkey":
            names = _cut(draw(self.tokens.words, count * self.key_tokens, random), count)
            numbers = random.choice(10**NUMBER, count, replace=False)
            return [
                _Pair(
                    (*self.tokens.label, *name),
                    tuple(self.tokens.digits[int(digit)] for digit in f"{number:0{NUMBER}d}"),
                )
                for name, number in zip(names, numbers, strict=True)
            ]
        if variant == "near-miss":
            words = draw(self.tokens.words, key - 1 + count * (1 + value), random)
            common, words = words[: key - 1], words[key - 1 :]
            differs = turn % key
            keys = [(*common[:differs], word, *common[differs:]) for word in words[:count]]
            rest = words[count:]
        else:
            words = draw(self.tokens.words, count * (key + value), random)
            keys = _cut(words[: count * key], count)
            rest = words[count * key :]
        return [_Pair(*pair) for pair in zip(keys, _cut(rest, count), strict=True)]


def _cut(words: Ids, count: int) -> list[Ids]:
    """Words in as many even parts, in their order."""
    size = len(words) // count
    return [words[first : first + size] for first in range(0, count * size, size)]
