"""Text from tokens as they come: whole characters only, and nothing of a stop string.

Knows nothing of models, sampling or the terminal. A token stands for bytes, and a character may
be spread over several tokens, so bytes are collected by an incremental UTF-8 decoder: text comes
out as soon as it is certain, and never as a replacement character that a later byte would mend.
Bytes that can belong to no character become U+FFFD, as in `bytes.decode("utf-8", "replace")`.

The pieces of a completion together are what prompt and completion decode to, control tokens left
out, after what the prompt's whole characters decode to.

A stop string may be spread over tokens too. Text that could still grow into one is held back; the
first stop string to be completed ends the text before its first character (the longer one when
two are completed by the same character). Where tokens begin and end makes no difference.
"""

import codecs
from collections.abc import Sequence

from armillary.tokenizer import Tokenizer


class TextStream:
    """Turn one completion's tokens into text that may be shown at once.

    All pieces from `push` and the one from `finish` together are the completion's text. It goes
    on from the prompt: a character that the prompt breaks off in is completed, and a space is
    kept or not as the tokenizer does at that place.
    """

    def __init__(
        self, tokenizer: Tokenizer, stop: Sequence[str] = (), prompt: Sequence[int] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._context: list[int] = []  # the last token that is text, and control tokens after it
        self._held = ""
        self._stopped = False
        for token_id in _last_texts(tokenizer, prompt):
            self._decoder.decode(self._bytes(token_id))

    @property
    def stopped(self) -> bool:
        """Whether a stop string was met; no text comes after that."""
        return self._stopped

    def push(self, token_id: int) -> str:
        """Take the next token and return the text that is now certain, often none."""
        return self._release(self._decoder.decode(self._bytes(token_id)))

    def finish(self) -> str:
        """Return what was held back: no token follows. An unfinished character becomes U+FFFD."""
        shown = self._release(self._decoder.decode(b"", final=True))
        rest, self._held = self._held, ""
        return shown + rest

    def _bytes(self, token_id: int) -> bytes:
        """Return the bytes that the token adds to the text."""
        if self._tokenizer.is_special(token_id):
            self._context.append(token_id)
            return b""
        data = self._tokenizer.token_bytes(token_id)
        if data.startswith(b" "):
            before = self._tokenizer.decode(self._context)
            with_it = self._tokenizer.decode([*self._context, token_id])
            if len(with_it) - len(before) < len(data.decode("utf-8", "replace")):
                data = data[1:]  # SentencePiece sets a space before a text, and takes it off again
        self._context = [token_id]
        return data

    def _release(self, text: str) -> str:
        if self._stopped:
            return ""
        text = self._held + text
        met = [(text.find(s) + len(s), text.find(s)) for s in self._stop if s in text]
        if met:
            _, start = min(met)
            self._stopped, self._held = True, ""
            return text[:start]
        certain = len(text) - self._possible_stop(text)
        self._held = text[certain:]
        return text[:certain]

    def _possible_stop(self, text: str) -> int:
        """How many last characters of the text could be the beginning of a stop string."""
        lengths = (n for s in self._stop for n in range(1, len(s)) if text.endswith(s[:n]))
        return max(lengths, default=0)


def _last_texts(tokenizer: Tokenizer, prompt: Sequence[int]) -> Sequence[int]:
    """Return the end of the prompt that decides how a text goes on.

    These are its last tokens with three bytes of text, which no broken character has more of, or
    the whole prompt when it has fewer.
    """
    count = 0
    for place in range(len(prompt) - 1, -1, -1):
        if not tokenizer.is_special(prompt[place]):
            count += len(tokenizer.token_bytes(prompt[place]))
        if count >= 3:
            return prompt[place:]
    return prompt
