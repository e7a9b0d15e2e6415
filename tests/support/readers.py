"""Models that follow a rule, as scorers: what they write next is said by a function."""

from collections.abc import Callable, Sequence

import numpy as np

from armillary.evaluation.scoring import Continuation, Scored

Rule = Callable[[Sequence[int]], int]


class Reader:
    """Finds what the rule says likely, and everything else unlikely, to the same degree."""

    window = 1 << 20
    vocab_size = 1 << 20

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.contexts: list[tuple[int, ...]] = []

    def begin(self) -> None:
        pass

    def score(self, context: Sequence[int], continuations: Sequence[Continuation]) -> list[Scored]:
        self.contexts.append(tuple(context))
        return [self._score(list(context), each) for each in continuations]

    def _score(self, context: list[int], continuation: Continuation) -> Scored:
        told = len(continuation.tokens) - continuation.scored
        right = np.array(
            [
                self.rule([*context, *continuation.tokens[:at]]) == continuation.tokens[at]
                for at in range(told, len(continuation.tokens))
            ]
        )
        return Scored(np.where(right, -0.5, -9.0), right)


def went_on(most: int) -> Rule:
    """What followed where the most of the last tokens, up to so many, stood the last time."""

    def rule(text: Sequence[int]) -> int:
        text = list(text)
        for size in range(most, 0, -1):
            for start in range(len(text) - size - 1, -1, -1):
                if text[start : start + size] == text[-size:]:
                    return text[start + size]
        return -1

    return rule


def count(text: Sequence[int], part: Sequence[int]) -> int:
    """How often a part stands in a text."""
    return sum(
        tuple(text[start : start + len(part)]) == tuple(part)
        for start in range(len(text) - len(part) + 1)
    )
