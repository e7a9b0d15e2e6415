"""The token ids that tasks are composed from: all that a task knows of a vocabulary."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from armillary.errors import UserError
from armillary.tokenizer import Tokenizer

# Short ones are pieces of words more often than words.
_WORD = re.compile(rb" [a-z]{4,}")
# Vocabularies list what is frequent first; a rare word says little of how a model reads.
_WORDS = 4096


@dataclass(frozen=True)
class TaskTokens:
    """Ids by what they are used for.

    words    a word each, of which keys, names and values are made
    digits   0 to 9, of which numbers are made
    newline  stands at both ends of a record
    colon    stands between what is asked and its answer
    equals   stands between a name and what it is set to
    label    what the passkey's key begins with
    begin    what a text of this model begins with, BOS most often; may be nothing
    prose    the text that haystacks are made of; where there is none, they are words

    Raises ValueError for an id in two places, and when there are not ten digits.
    """

    words: tuple[int, ...]
    digits: tuple[int, ...]
    newline: int
    colon: int
    equals: int
    label: tuple[int, ...] = ()
    begin: tuple[int, ...] = ()
    prose: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if len(self.digits) != 10:
            raise ValueError(f"{len(self.digits)} digits; there are 10")
        marks = (self.newline, self.colon, self.equals)
        ids = [*self.words, *self.digits, *marks, *self.begin]
        if len(set(ids)) < len(ids):
            twice = next(token for token in ids if ids.count(token) > 1)
            raise ValueError(f"token {twice} cannot be two things at once")
        if any(token in self.prose for token in self.begin):
            raise ValueError("the prose holds what a text begins with; encode it with bos=False")

    @classmethod
    def of_tokenizer(cls, tokenizer: Tokenizer, *, prose: Sequence[int] = ()) -> Self:
        """What a tokenizer has; words are the first tokens that are a space and lower-case letters.

        `prose` is text by the same tokenizer, encoded with `bos=False`.
        Raises UserError for a tokenizer that lacks a mark or a digit as a token of its own.
        """
        first: dict[bytes, int] = {}
        for index in range(tokenizer.vocab_size):
            if not tokenizer.is_special(index):
                first.setdefault(tokenizer.token_bytes(index), index)

        def token(text: str) -> int:
            if text.encode() not in first:
                raise UserError(
                    f"the tokenizer has no token for {text!r} alone, which the tasks are made with"
                )
            return first[text.encode()]

        words = [index for data, index in first.items() if _WORD.fullmatch(data)]
        return cls(
            words=tuple(words[:_WORDS]),
            digits=tuple(token(str(digit)) for digit in range(10)),
            newline=token("\n"),
            colon=token(":"),
            equals=token("="),
            label=tuple(tokenizer.encode("The pass key of", bos=False)),
            begin=tuple(tokenizer.begin([])),
            prose=tuple(prose),
        )

    @classmethod
    def of_size(cls, vocab_size: int, *, bos: int | None = None) -> Self:
        """Ids of a synthetic language, in their order: marks, digits, then words; but for BOS.

        Raises ValueError when none are left for words.
        """
        free = [index for index in range(vocab_size) if index != bos]
        newline, colon, equals, label, *rest = free
        if len(rest) <= 10:
            raise ValueError(f"of {vocab_size} tokens none are left for words; there must be more")
        return cls(
            words=tuple(rest[10:]),
            digits=tuple(rest[:10]),
            newline=newline,
            colon=colon,
            equals=equals,
            label=(label,),
            begin=() if bos is None else (bos,),
        )
