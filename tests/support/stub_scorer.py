"""A scorer without a model: what a token costs is any function of what stands before it."""

from collections.abc import Callable, Sequence

import numpy as np

from armillary.evaluation.scoring import Continuation, Scored

Cost = Callable[[tuple[int, ...], int], float]


class StubScorer:
    """`cost(before, token)` in nats. `asked` are the contexts and continuations that came."""

    def __init__(self, cost: Cost, window: int = 1 << 20, vocab_size: int = 1 << 20) -> None:
        self.cost = cost
        self.window = window
        self.vocab_size = vocab_size
        self.asked: list[tuple[tuple[int, ...], tuple[Continuation, ...]]] = []
        self.begun = 0

    def begin(self) -> None:
        self.begun += 1

    def score(self, context: Sequence[int], continuations: Sequence[Continuation]) -> list[Scored]:
        self.asked.append((tuple(context), tuple(continuations)))
        longest = max(len(each.tokens) for each in continuations)
        if not context or len(context) + longest > self.window:
            raise ValueError(f"{len(context)} and {longest} tokens in a window of {self.window}")
        return [self._score(tuple(context), each) for each in continuations]

    def _score(self, context: tuple[int, ...], continuation: Continuation) -> Scored:
        ids = context + continuation.tokens
        first = len(ids) - continuation.scored
        costs = [self.cost(ids[:place], ids[place]) for place in range(first, len(ids))]
        logprobs = -np.asarray(costs, np.float64)
        return Scored(logprobs, logprobs > np.log(0.5))


def costs_its_id(before: tuple[int, ...], token: int) -> float:
    """Token t costs t nats."""
    return float(token)


def costs_less_with_context(before: tuple[int, ...], token: int) -> float:
    """Known ways off from zero: 6 / √(tokens before)."""
    return 6.0 / len(before) ** 0.5
