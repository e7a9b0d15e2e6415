"""Chats in records: lists of messages, which are carried as JSON until they are rendered."""

import json
from collections.abc import Iterator

from armillary.chat.messages import checked_messages
from armillary.data.documents import Document, Event, Skipped
from armillary.errors import UserError

# Who speaks, in data sets of the kind of ShareGPT: {"from": "human", "value": "…"}.
_SPEAKERS = {"human": "user", "gpt": "assistant"}
_ROLES = ("user", "assistant", "system", "tool")


def read_chat(name: str, value: object) -> Iterator[Event]:
    """A record's list of messages as one document.

    Messages have a role and a content, or as in ShareGPT from and value.
    """
    try:
        messages = checked_messages(_renamed(value))
    except UserError as error:
        yield Skipped(name, "not a chat", str(error))
    else:
        yield Document(name, json.dumps(messages, ensure_ascii=False))


def _renamed(messages: object) -> object:
    if not isinstance(messages, list):
        return messages
    return [_with_role(message, f"messages[{n}]") for n, message in enumerate(messages)]


def _with_role(message: object, where: str) -> object:
    if not isinstance(message, dict) or "role" in message or not {"from", "value"} <= set(message):
        return message
    speaker = message["from"]
    role = _SPEAKERS.get(speaker, speaker) if isinstance(speaker, str) else None
    if role not in _ROLES:
        known = ", ".join((*_SPEAKERS, *_ROLES))
        raise UserError(f"{where}.from: {ascii(speaker)[:40]} is none of: {known}")
    return {"role": role, "content": message["value"]}
