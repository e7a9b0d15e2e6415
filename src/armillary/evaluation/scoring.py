"""What an evaluation asks of a model: how likely given tokens are after given tokens.

Everything is measured through `Scorer`, so that our decoder, a transformers model or a server can
stand behind it. Knows nothing of tasks, files or torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Continuation:
    """Tokens that follow a context, of which the last `scored` are scored.

    Raises ValueError when there are not so many.
    """

    tokens: tuple[int, ...]
    scored: int

    def __post_init__(self) -> None:
        if not 1 <= self.scored <= len(self.tokens):
            raise ValueError(f"{self.scored} of {len(self.tokens)} tokens cannot be scored")


@dataclass(frozen=True)
class Scored:
    """What a model makes of a continuation, an entry for each scored token, in order.

    logprobs  natural logarithms of its probability after all tokens before it
    likeliest whether no other token of the vocabulary was likelier
    """

    logprobs: NDArray[np.float64]
    likeliest: NDArray[np.bool_]

    @property
    def total(self) -> float:
        """The log-probability of all scored tokens together."""
        return float(self.logprobs.sum())

    @property
    def exact(self) -> bool:
        """Whether greedy decoding would write just these tokens."""
        return bool(self.likeliest.all())


class Scorer(Protocol):
    """A model that tells how likely tokens are.

    What it answers depends on what it was asked since the last `begin` at most in rounding, so that
    a piece of work that starts with `begin` gives the same numbers whatever was done before it.
    """

    @property
    def window(self) -> int:
        """The most tokens that a context and a continuation may be together."""

    @property
    def vocab_size(self) -> int:
        """V."""

    def begin(self) -> None:
        """Forget what was kept of earlier contexts."""

    def score(self, context: Sequence[int], continuations: Sequence[Continuation]) -> list[Scored]:
        """How likely each continuation is after the context, each alone.

        The context, BOS included where the model wants one, holds a token at least; what it shares
        with the context before it need not be computed again.
        Raises ValueError for an empty context, and for more tokens than the window.
        """


def check_question(
    context: Sequence[int], continuations: Sequence[Continuation], window: int
) -> None:
    """Raise ValueError for an empty context, or more tokens than the window."""
    if not context:
        raise ValueError("a context needs a token at least; give BOS")
    longest = max((len(each.tokens) for each in continuations), default=0)
    if len(context) + longest > window:
        raise ValueError(
            f"{len(context)} tokens of context and {longest} of continuation are more than the "
            f"window of {window}"
        )
