"""Text from tokens as they come: whole characters only, and nothing of a stop string.

Knows nothing of models, sampling or the terminal. A token stands for bytes, and a character may
be spread over several tokens, so bytes are collected by an incremental UTF-8 decoder: text comes
out as soon as it is certain, and never as a replacement character that a later byte would mend.
Bytes that can belong to no character become U+FFFD, as in `bytes.decode("utf-8", "replace")`.

A stop string may be spread over tokens too. Text that could still grow into one is held back; the
first stop string to be completed ends the text before its first character (the longer one when
two are completed by the same character). Where tokens begin and end makes no difference.
"""

import codecs
from collections.abc import Sequence
from typing import Protocol


class TokenBytes(Protocol):
    """What is needed of a tokenizer: the bytes that a token stands for, b"" for a control token."""

    def token_bytes(self, token_id: int) -> bytes: ...  # noqa: D102


class TextStream:
    """Turn one completion's tokens into text that may be shown at once.

    All pieces from `push` and the one from `finish` together are the completion's text. `tail` is
    the unfinished character that the prompt's bytes end on (see `unfinished`), which the
    completion then continues.
    """

    def __init__(self, tokenizer: TokenBytes, stop: Sequence[str] = (), tail: bytes = b"") -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._decoder.decode(tail)
        self._held = ""
        self._stopped = False

    @property
    def stopped(self) -> bool:
        """Whether a stop string was met; no text comes after that."""
        return self._stopped

    def push(self, token_id: int) -> str:
        """Take the next token and return the text that is now certain, often none."""
        return self._release(self._decoder.decode(self._tokenizer.token_bytes(token_id)))

    def finish(self) -> str:
        """Return what was held back: no token follows. An unfinished character becomes U+FFFD."""
        shown = self._release(self._decoder.decode(b"", final=True))
        rest, self._held = self._held, ""
        return shown + rest

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


def unfinished(data: bytes) -> bytes:
    """Return the bytes of the character that `data` breaks off in, b"" if it breaks off in none."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(data[-3:])  # no character has more than three bytes before its last
    return decoder.getstate()[0]
