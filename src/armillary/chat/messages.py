"""Checks messages and what else a template is given, and copies them into plain JSON values."""

from collections.abc import Mapping
from typing import Any

from armillary.errors import UserError

_DEPTH = 64


def checked_messages(messages: object) -> list[dict[str, Any]]:
    """Return a copy in plain values. Entries that are None are left out, as templates expect.

    Raises UserError naming the message and what is wrong with it.
    """
    if not isinstance(messages, list | tuple) or not messages:
        raise UserError(
            "messages must be a list with at least one message, such as "
            f'[{{"role": "user", "content": "…"}}], not {_shown(messages)}'
        )
    return [_message(message, f"messages[{n}]") for n, message in enumerate(messages)]


def plain(value: object, where: str, depth: int = 0) -> Any:
    """Return a copy made of dict, list, str, int, float, bool and None alone.

    Raises UserError for anything else, for text that is not valid Unicode, and for what is nested
    too deep.
    """
    if depth > _DEPTH:
        raise UserError(f"{where.partition('[')[0]}: nested more than {_DEPTH} deep")
    if value is None or type(value) in (bool, int, float):
        return value
    if isinstance(value, str):
        return _valid(str(value), where)
    if isinstance(value, list | tuple):
        return [plain(item, f"{where}[{n}]", depth + 1) for n, item in enumerate(value)]
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise UserError(f"{where}: keys must be strings, not {_shown(key)}")
        return {
            _valid(str(key), where): plain(item, f"{where}.{_name(key)}", depth + 1)
            for key, item in value.items()
        }
    raise UserError(f"{where}: must be plain JSON values, not {_shown(value)}")


def _message(message: object, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise UserError(f"{where}: must be a mapping with role and content, not {_shown(message)}")
    copied = {key: item for key, item in plain(message, where).items() if item is not None}
    role = copied.get("role")
    if not isinstance(role, str) or not role:
        raise UserError(f"{where}.role: must be a string such as 'user', not {_shown(role)}")
    content = copied.get("content")
    if isinstance(content, list):
        for n, part in enumerate(content):
            _check_part(part, f"{where}.content[{n}]")
    elif not isinstance(content, str) and (content is not None or not copied.get("tool_calls")):
        raise UserError(
            f"{where}.content: must be a string or a list of text parts, not {_shown(content)}"
        )
    return copied


def _check_part(part: object, where: str) -> None:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or kind != "text" or not isinstance(part.get("text"), str):
        raise UserError(
            f'{where}: must be {{"type": "text", "text": "…"}}, since only text is read here, '
            f"not {_shown(part)}"
        )


def _valid(text: str, where: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        raise UserError(
            f"{where}: is not valid Unicode: a lone surrogate U+{code:04X} at character "
            f"{error.start}"
        ) from error
    return text


def _name(key: str) -> str:
    return key if key.isidentifier() else ascii(key)[:40]


def _shown(value: object) -> str:
    """A value as it may stand in a message: short, on one line, printable."""
    if value is None:
        return "null"
    if isinstance(value, str | int | float):
        text = ascii(value)
        return text if len(text) <= 40 else f"{text[:40]}…"
    return f"a {type(value).__name__}" + ("" if value else " that is empty")
