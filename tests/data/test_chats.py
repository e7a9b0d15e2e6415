"""Records become chats, or say by message what is wrong."""

import json

import pytest

from armillary.data.chats import read_chat
from armillary.data.documents import Document, Skipped

CHAT = [{"role": "user", "content": "é?"}, {"role": "assistant", "content": "yes"}]


def test_a_list_of_messages_is_a_chat():
    (document,) = read_chat("a:1", CHAT)
    assert isinstance(document, Document)
    assert (document.id, document.part, document.last) == ("a:1", 0, True)
    assert json.loads(document.text) == CHAT


def test_entries_that_a_table_fills_up_with_null_are_left_out():
    (document,) = read_chat("a:1", [{**message, "tool_calls": None} for message in CHAT])
    assert json.loads(document.text) == CHAT


def test_messages_of_sharegpt_have_other_names():
    named = [{"from": "human", "value": "é?"}, {"from": "gpt", "value": "yes"}]
    (document,) = read_chat("a:1", named)
    assert json.loads(document.text) == CHAT


@pytest.mark.parametrize(
    ("value", "detail"),
    [
        ("text", "messages must be a list with at least one message"),
        (None, "messages must be a list with at least one message"),
        ([], "messages must be a list with at least one message"),
        ({"role": ["user"], "content": ["x"]}, "messages must be a list"),
        ([{"role": "user"}], "messages[0].content: must be a string"),
        ([*CHAT, {"role": 3, "content": "x"}], "messages[2].role: must be a string"),
        ([{"role": "user", "content": "\ud800"}], "messages[0].content: is not valid Unicode"),
        ([{"from": "bard", "value": "x"}], "messages[0].from: 'bard' is none of: human, gpt, "),
        ([{"from": [], "value": "x"}], "messages[0].from: "),
        ([{"from": "gpt"}], "messages[0].role: must be a string"),
    ],
)
def test_what_is_no_chat_is_skipped_by_its_message(value, detail):
    (event,) = read_chat("a:1", value)
    assert isinstance(event, Skipped)
    assert (event.id, event.reason) == ("a:1", "not a chat")
    assert event.detail.startswith(detail)
