"""Guesses at what comes next, which the model then checks several at a time.

The model chooses every token itself, from its own logits and the request's own random numbers, and
goes on past a guess only where it has chosen the guessed token: the text is the one that it writes
without guesses. What is gained is that memory is read once for all that are checked together.
Source: Leviathan et al. 2023, §2; guesses from the text itself: Saxena 2023, "prompt lookup".
"""

from collections.abc import Sequence
from typing import Any, Protocol

from armillary.generation.engine import Engine

MOST = 15
"""Guesses at once: with the token before them the rows of one pass of the engine for the CPU."""


class Proposer(Protocol):
    """Guesses the tokens of one text."""

    def extend(self, tokens: Sequence[int]) -> None:
        """Tokens that the text now has."""

    def propose(self, most: int) -> list[int]:
        """Guesses of what follows, `most` at most, perhaps none."""

    def learn(self, proposed: int, accepted: int) -> None:
        """How many of the last guesses came true."""


class Pace:
    """How many guesses are worth their cost: more after those that came true, fewer after others.

    After several that failed at once, a guess is made at every so many chances only, since each
    pass that checks guesses takes longer than one that takes a token.
    """

    def __init__(self) -> None:
        self._count, self._skip, self._waited = 4, 0, 0

    def now(self, most: int) -> int:
        """Guesses to make at this chance."""
        if self._waited < self._skip:
            self._waited += 1
            return 0
        return min(self._count, most, MOST)

    def learn(self, proposed: int, accepted: int) -> None:
        """Take in what came of them."""
        if not proposed:
            return
        self._waited = 0
        if accepted == proposed:
            self._count, self._skip = min(2 * self._count, MOST), 0
        elif accepted:
            self._count, self._skip = max(2, accepted), 0
        else:
            self._count, self._skip = 2, min(2 * self._skip + 1, 31)


class SuffixProposer:
    """Guesses that the text goes on as it did after the longest stretch that is like its end.

    Stretches of `shortest` tokens at least count; of equally long ones the latest does.
    """

    def __init__(self, shortest: int = 3, candidates: int = 16) -> None:
        self._shortest, self._candidates = shortest, candidates
        self._tokens: list[int] = []
        self._ends: dict[tuple[int, ...], list[int]] = {}
        self._pace = Pace()

    def extend(self, tokens: Sequence[int]) -> None:
        """See `Proposer`."""
        for token in tokens:
            # What ends here can be found from the next token on.
            if len(self._tokens) >= self._shortest:
                key = tuple(self._tokens[-self._shortest :])
                self._ends.setdefault(key, []).append(len(self._tokens))
            self._tokens.append(token)

    def propose(self, most: int) -> list[int]:
        """See `Proposer`."""
        ends = self._ends.get(tuple(self._tokens[-self._shortest :]))
        count = self._pace.now(most) if ends else 0
        if not ends or not count:
            return []
        end = max(reversed(ends[-self._candidates :]), key=self._alike)
        return self._tokens[end : end + count]

    def learn(self, proposed: int, accepted: int) -> None:
        """See `Proposer`."""
        self._pace.learn(proposed, accepted)

    def _alike(self, end: int) -> int:
        """How many tokens before `end` are those before the text's end; 64 are enough to know."""
        most = min(end, 64)
        length = 0
        while length < most and self._tokens[end - 1 - length] == self._tokens[-1 - length]:
            length += 1
        return length


class DraftProposer:
    """Guesses what a smaller model of the same vocabulary would write.

    Raises ValueError for a draft that knows other tokens than the model.
    """

    def __init__(self, draft: Engine, vocab_size: int) -> None:
        if draft.config.vocab_size != vocab_size:
            raise ValueError(
                f"the draft knows {draft.config.vocab_size} tokens, the model {vocab_size}; they "
                "must have one vocabulary"
            )
        self._texts: Any = draft.texts([draft.config.max_positions])
        self._window = draft.config.max_positions
        self._tokens: list[int] = []
        self._held = 0
        self._guessed: list[int] = []
        self._pace = Pace()

    def extend(self, tokens: Sequence[int]) -> None:
        """See `Proposer`."""
        self._tokens += tokens

    def propose(self, most: int) -> list[int]:
        """See `Proposer`."""
        count = min(self._pace.now(most), self._window - len(self._tokens))
        self._guessed = []
        if count < 1:
            return []
        new = self._tokens[self._held :]
        logits = self._texts.begin([new])[0] if not self._held else self._texts.steps(new)[-1]
        self._held = len(self._tokens)
        while True:
            self._guessed.append(int(logits.argmax()))
            if len(self._guessed) == count:
                return list(self._guessed)
            logits = self._texts.step([self._guessed[-1]])[0]

    def learn(self, proposed: int, accepted: int) -> None:
        """See `Proposer`."""
        self._pace.learn(proposed, accepted)
        if self._guessed:
            # The draft has taken in all guesses but the last; those that came true stay.
            taken = len(self._guessed) - 1
            kept = min(accepted, taken)
            self._texts.take_back(taken - kept)
            self._held += kept
            self._guessed = []
