"""Hides from the tokenizer what a user wrote, where it reads like a control token.

Before rendering, each such text in the input is replaced by one private character that stands
nowhere else. After rendering, the control tokens that can still be read are the template's own;
then the hidden texts are put back, inside what is encoded as plain text. One character, since a
template may cut a text, but cannot cut a character. Not covered: a template that takes a piece
out of the middle of a message, where what is left on both sides joins to a control token.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

_PRIVATE = range(0xF0000, 0xFFFFE)  # a private plane of Unicode
_ESCAPE = re.compile(r"\\U000f[0-9a-f]{4}|\\udb[89ab][0-9a-f]\\ud[c-f][0-9a-f]{2}")
_COMPARED = ("role", "type")  # values that templates compare with words of their own


class ControlTexts:
    """The control tokens of a vocabulary, and the beginnings and ends that might join to one."""

    def __init__(self, texts: Mapping[str, int]) -> None:
        self.lengths = {index: len(text) for text, index in texts.items()}
        longest_first = sorted(texts, key=len, reverse=True)
        self.whole = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self.beginnings = {text[:n] for text in longest_first for n in range(1, len(text))}
        self.ends = {text[n:] for text in longest_first for n in range(1, len(text))}
        self.reach = max(map(len, longest_first), default=1) - 1


class Veil:
    """Hides texts in one rendering's input, and restores them in its output.

    `taken` is everything that the private characters must differ from: the input, the template.
    """

    def __init__(self, controls: ControlTexts, taken: str) -> None:
        self._controls = controls
        self._free = _unused(taken)
        self._veiled: dict[str, str] = {}
        self._originals: dict[int, str] = {}
        self._escaped: dict[str, str] = {}

    def hide(self, value: Any, key: str = "") -> Any:
        """Return plain values with the control tokens' texts replaced, in keys and values."""
        if isinstance(value, str):
            text = self._controls.whole.sub(lambda match: self._veil(match.group()), value)
            return text if key in _COMPARED else self._hide_edges(text)
        if isinstance(value, list):
            return [self.hide(item) for item in value]
        if isinstance(value, dict):
            return {
                self._controls.whole.sub(lambda match: self._veil(match.group()), name): self.hide(
                    item, name
                )
                for name, item in value.items()
            }
        return value

    def restore(self, text: str) -> str:
        """Put the hidden texts back, also where a template printed a character's escape."""
        text = text.translate(self._originals)
        if "\\" not in text:
            return text
        return _ESCAPE.sub(lambda match: self._escaped.get(match.group(), match.group()), text)

    def draw(self) -> str:
        """Return a private character that stands nowhere else, and that hides nothing."""
        return next(self._free)

    def _veil(self, text: str) -> str:
        if text not in self._veiled:
            char = next(self._free)
            self._veiled[text] = char
            self._originals[ord(char)] = text
            self._escaped.update(dict.fromkeys(_escapes(char), text))
        return self._veiled[text]

    def _hide_edges(self, text: str) -> str:
        """Hide half a control token at either end, that a template might complete or join."""
        for n in range(min(self._controls.reach, len(text)), 0, -1):
            if text[-n:] in self._controls.beginnings:
                text = text[:-n] + self._veil(text[-n:])
                break
        for n in range(min(self._controls.reach, len(text)), 0, -1):
            if text[:n] in self._controls.ends:
                return self._veil(text[:n]) + text[n:]
        return text


def all_text(value: Any) -> str:
    """Every string in plain values, joined."""
    return "\0".join(_strings(value))


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from _strings(item)


def _escapes(char: str) -> tuple[str, str]:
    """The character as Python's repr and as ASCII JSON write it."""
    high, low = divmod(ord(char) - 0x10000, 0x400)
    return f"\\U{ord(char):08x}", f"\\u{0xD800 + high:04x}\\u{0xDC00 + low:04x}"


def _unused(taken: str) -> Iterator[str]:
    for code in _PRIVATE:
        char = chr(code)
        if not any(form in taken for form in (char, *_escapes(char))):
            yield char
