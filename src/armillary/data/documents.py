"""What sources give: documents, and what was passed over with its reason."""

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Document:
    """A text of its own, or one part of a text that is longer than the limit; or a chat as JSON.

    The parts of one document have its id, count from 0, and the one that ends it is `last`.
    """

    id: str
    text: str
    part: int = 0
    last: bool = True


@dataclass(frozen=True)
class Skipped:
    """Something that is no document: `reason` is one of a few, `detail` says more of this one."""

    id: str
    reason: str
    detail: str


Event = Document | Skipped


def cut(data: bytes, limit: int) -> int:
    """Return where to cut UTF-8 within `limit` bytes: after a line, else between characters.

    A word, and so a token, seldom reaches over a line end.
    """
    line = data.rfind(b"\n", 0, limit)
    if line >= 0:
        return line + 1
    place = limit
    while place > max(0, limit - 4) and data[place] & 0xC0 == 0x80:
        place -= 1
    return place or limit


def decoded(data: bytes, name: str, start: int = 0, encoding: str = "utf-8") -> str | Skipped:
    """Return the text, or what to say of bytes that are none; `start` is the place of the first."""
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as error:
        return Skipped(name, "invalid UTF-8", f"at byte {start + error.start}")


def in_parts(name: str, text: object, limit: int) -> Iterator[Event]:
    """A record's text as one document, or in parts where it is longer than `limit` bytes."""
    if not isinstance(text, str):
        yield Skipped(name, "field is no text", f"it is {type(text).__name__}")
        return
    if not text.strip():
        yield Skipped(name, "empty", "no text in it")
        return
    try:
        data = text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        yield Skipped(name, "invalid Unicode", f"a lone surrogate U+{code:04X}")
        return
    part, start = 0, 0
    while len(data) - start > limit:
        size = cut(data[start : start + limit + 1], limit)
        yield Document(name, data[start : start + size].decode(), part, last=False)
        part, start = part + 1, start + size
    yield Document(name, data[start:].decode(), part)
