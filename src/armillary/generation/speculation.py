"""Guesses at what comes next, which the model then checks several at a time.

The model chooses every token itself, from its own logits and the request's own random numbers, and
goes on past a guess only where it has chosen the guessed token: the text is the one that it writes
without guesses. What is gained is that memory is read once for all that are checked together.
Source: Leviathan et al. 2023, §2; guesses from the text itself: Saxena 2023, "prompt lookup".
"""

from collections.abc import Iterable, Sequence
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


_ROW = 0.25
"""What a pass takes longer for each token more, as a part of its time for one.

Of weights in 4 bits on a CPU; with wider ones it is less, and a guess too few costs little.
"""


def worthwhile(odds: Iterable[float]) -> int:
    """How many guesses in a row pay, of which each comes true so likely if those before it did.

    The count that gives the most tokens for the time of a pass; 0 where none is worth its row.
    """
    best, count = 1.0, 0
    expected, all_true = 1.0, 1.0
    for number, likely in enumerate(odds, 1):
        all_true *= likely
        expected += all_true
        if expected / (1 + _ROW * number) > best:
            best, count = expected / (1 + _ROW * number), number
    return count


class Odds:
    """How likely a token follows as it did before, by how long a stretch before it is repeated.

    Learnt from each token of the text, whether it was guessed or not; what is older counts less.
    """

    _STAYS = 0.95

    def __init__(self) -> None:
        # As if one of three had come true, to begin with.
        self._seen = [(1.0, 3.0)] * 16

    def of(self, length: int) -> float:
        """After a stretch of so many tokens."""
        true, seen = self._seen[self._place(length)]
        return true / seen

    def learn(self, length: int, *, came_true: bool) -> None:
        """Take in what came after such a stretch."""
        place = self._place(length)
        true, seen = self._seen[place]
        self._seen[place] = (true * self._STAYS + came_true, seen * self._STAYS + 1)

    @staticmethod
    def _place(length: int) -> int:
        """Short lengths apart, longer ones together: 1, 2, 3, 4 to 7, 8 to 15 and so on."""
        return length if length < 4 else min(length.bit_length() + 1, 15)


class SuffixProposer:
    """Guesses that the text goes on as it did after the longest stretch that is like its end.

    Stretches of `shortest` tokens at least count; of equally long ones the latest does. As many
    guesses are made as have been worth their time so far in this text.
    """

    def __init__(self, shortest: int = 2, candidates: int = 16) -> None:
        self._shortest, self._candidates = shortest, candidates
        self._tokens: list[int] = []
        self._ends: dict[tuple[int, ...], list[int]] = {}
        self._odds = Odds()
        self._like: tuple[int, int] | None = None
        """Where the stretch ends that is like the text's end, and its length."""

    def extend(self, tokens: Sequence[int]) -> None:
        """See `Proposer`. Of many tokens the last are learnt from: that takes time."""
        learnt_from = len(tokens) - 256
        for number, token in enumerate(tokens):
            like, self._like = self._like, None
            if like is not None:
                end, length = like
                came_true = self._tokens[end] == token
                self._odds.learn(length, came_true=came_true)
                if came_true:
                    # No other can be longer now, or it would have been before.
                    self._like = end + 1, length + 1
            # What ends here can be found from the next token on.
            if len(self._tokens) >= self._shortest:
                key = tuple(self._tokens[-self._shortest :])
                self._ends.setdefault(key, []).append(len(self._tokens))
            self._tokens.append(token)
            if self._like is None and number >= learnt_from:
                self._like = self._find()

    def propose(self, most: int) -> list[int]:
        """See `Proposer`."""
        if self._like is None:
            return []
        end, length = self._like
        most = min(most, MOST, len(self._tokens) - end)
        count = worthwhile(self._odds.of(length + ahead) for ahead in range(most))
        return self._tokens[end : end + count]

    def learn(self, proposed: int, accepted: int) -> None:
        """See `Proposer`. Each token has told it already."""

    def _find(self) -> tuple[int, int] | None:
        """The longest stretch that is like the text's end."""
        ends = self._ends.get(tuple(self._tokens[-self._shortest :]), [])[-self._candidates :]
        if not ends:
            return None
        end = max(reversed(ends), key=self._alike)
        return end, self._alike(end)

    def _alike(self, end: int) -> int:
        """How many tokens before `end` are those before the text's end; 64 are enough to know."""
        most = min(end, 64)
        length = 0
        while length < most and self._tokens[end - 1 - length] == self._tokens[-1 - length]:
            length += 1
        return length


class Pace:
    """How many guesses of a draft are worth it: more after those that came true, else fewer.

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
