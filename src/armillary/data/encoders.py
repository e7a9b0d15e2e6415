"""Documents → ids: texts as they are, chats by the tokenizer's template with a mask.

What is made of a document depends on it, the tokenizer and the settings alone.
"""

import json
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from armillary.chat import ChatTemplate, UnclearAnswersError
from armillary.data.documents import Document, Skipped
from armillary.data.learned import runs_of
from armillary.data.prepared import token_sizes
from armillary.data.shards import Tokens
from armillary.errors import UserError
from armillary.tokenizer import Tokenizer

# What a template takes for today, so that the same chats give the same ids on any day. Templates
# of Llama 3 write this date where they are told none.
TODAY = datetime(2024, 7, 26)


@dataclass(frozen=True)
class Encoded:
    """What a document, or a part of one, has become.

    ids    (n,)
    size   bytes of its text in UTF-8; control tokens have none
    runs   of a chat: where each run of learned tokens starts and stops, (2·r,)
    """

    ids: Tokens
    size: int
    runs: NDArray[np.int64] | None = None

    @property
    def learned(self) -> int:
        """Tokens of a chat that are learned."""
        return 0 if self.runs is None else int((self.runs[1::2] - self.runs[::2]).sum())


Result = Encoded | Skipped


@dataclass(frozen=True)
class EncoderSettings:
    """All that an encoder is made of, to be handed to another process."""

    tokenizer: Path
    end_id: int
    dtype: str
    chats: bool

    def build(self) -> "TextEncoder | ChatEncoder":
        """Read the tokenizer. Raises UserError where chats want a template that it lacks."""
        tokenizer = Tokenizer.from_file(self.tokenizer)
        kind = ChatEncoder if self.chats else TextEncoder
        return kind(tokenizer, self.end_id, np.dtype(self.dtype))


class TextEncoder:
    """Encodes texts: what begins a text before the first part, the end token after the last.

    Text stays text: a control token that is written in a document is spelt out.
    """

    def __init__(
        self, tokenizer: Tokenizer, end_id: int, dtype: np.dtype[np.unsignedinteger]
    ) -> None:
        self._tokenizer, self._end_id, self._dtype = tokenizer, end_id, dtype

    def __call__(self, document: Document) -> Result:
        """Return the ids of a document, or why it has none."""
        try:
            ids = self._tokenizer.encode_parts([document.text])
        except UserError as error:
            return Skipped(document.id, "cannot be encoded", str(error))
        if document.part == 0:
            ids = self._tokenizer.begin(ids)
        if document.last:
            ids.append(self._end_id)
        return Encoded(np.array(ids, dtype=self._dtype), len(document.text.encode()))


class ChatEncoder:
    """Encodes chats as the tokenizer's template writes them; what the assistant wrote is learned.

    The template ends a chat. Where it writes no control token after the last text, the end token
    is put there, and is learned when that text is.
    """

    def __init__(
        self, tokenizer: Tokenizer, end_id: int, dtype: np.dtype[np.unsignedinteger]
    ) -> None:
        self._template = chat_template(tokenizer)
        self._sizes = token_sizes(tokenizer)
        self._tokenizer, self._end_id, self._dtype = tokenizer, end_id, dtype

    def __call__(self, document: Document) -> Result:
        """Return the ids and the mask of a chat, or why it has none."""
        try:
            ids, learned = self._template.encode_answers(json.loads(document.text))
        except UnclearAnswersError as error:
            return Skipped(document.id, "answers unclear", str(error))
        except UserError as error:
            return Skipped(document.id, "cannot be encoded", str(error))
        if not any(learned[1:]):  # the first token is never predicted
            return Skipped(document.id, "no answer", "the assistant says nothing in it")
        self._end(ids, learned)
        size = int(self._sizes[ids].sum())
        return Encoded(np.array(ids, dtype=self._dtype), size, runs_of(learned))

    def _end(self, ids: list[int], learned: list[bool]) -> None:
        last = len(ids) - 1
        while last > 0 and not self._tokenizer.token_bytes(ids[last]).strip():
            last -= 1
        if not self._tokenizer.is_special(ids[last]):
            learned.append(any(learned[last:]))
            ids.append(self._end_id)


def chat_template(tokenizer: Tokenizer) -> ChatTemplate:
    """Return the template that chats are prepared with. Raises UserError where there is none."""
    if tokenizer.chat_template is None:
        raise UserError(
            "the tokenizer has no chat template, which chats are written by; take a chat model's, "
            "or put a chat_template.jinja beside tokenizer.json"
        )
    return ChatTemplate(tokenizer.chat_template, tokenizer, now=TODAY)
