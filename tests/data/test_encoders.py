"""What becomes of a chat: its ids, its mask, its end, or why it has none."""

import json

import numpy as np
import pytest

from armillary.data.documents import Document, Skipped
from armillary.data.encoders import ChatEncoder, chat_template
from armillary.errors import UserError
from armillary.tokenizer import Tokenizer
from support.vocabularies import CHATML, byte_level, sentencepiece

END = 0  # <|endoftext|>, which no template here writes
PLAIN = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
BARE = "{% for m in messages %}{{ m.content }}{% endfor %}"
ASKED = [{"role": "user", "content": "hello"}]
CHAT = [*ASKED, {"role": "assistant", "content": "o 12"}]


def encoded(messages, template):
    tokenizer = Tokenizer.from_gguf(byte_level())
    tokenizer.chat_templates["default"] = template
    encoder = ChatEncoder(tokenizer, END, np.dtype(np.uint16))
    return tokenizer, encoder(Document("a:3", json.dumps(messages)))


def learned(tokenizer, found):
    mask = [False] * len(found.ids)
    runs = found.runs.tolist()
    for start, stop in zip(runs[::2], runs[1::2], strict=True):
        mask[start:stop] = [True] * (stop - start)
    assert sum(mask) == found.learned
    return [
        tokenizer.token_bytes(int(index)).decode()
        for index, said in zip(found.ids, mask, strict=True)
        if said
    ]


def test_a_chat_that_its_template_ends_gets_no_second_end():
    tokenizer, found = encoded(CHAT, CHATML)
    assert tokenizer.decode(found.ids.tolist()) == (
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\no 12<|im_end|>\n"
    )
    assert "".join(learned(tokenizer, found)) == "o 12<|im_end|>"


def test_a_chat_that_its_template_leaves_open_is_ended_and_learns_to_end():
    tokenizer, found = encoded(CHAT, PLAIN)
    assert tokenizer.decode(found.ids.tolist()) == ("user: hello\nassistant: o 12\n<|endoftext|>")
    assert "".join(learned(tokenizer, found)) == "o 12\n<|endoftext|>"


def test_an_end_after_what_another_says_is_not_learned():
    tokenizer, found = encoded([*CHAT, *ASKED], PLAIN)
    assert found.ids[-1] == END
    assert "".join(learned(tokenizer, found)) == "o 12\n"


def test_the_size_is_that_of_the_text_without_control_tokens():
    _, found = encoded(CHAT, CHATML)
    assert found.size == len("user\nhello\nassistant\no 12\n")


@pytest.mark.parametrize(
    ("messages", "template", "reason", "detail"),
    [
        (ASKED, CHATML, "no answer", "the assistant says nothing in it"),
        ([*ASKED, {"role": "assistant", "content": ""}], BARE, "no answer", "the assistant says"),
        ([{"role": "assistant", "content": "a"}], BARE, "no answer", "the assistant says"),
        (CHAT, CHATML + "{{ raise_exception('no') }}", "cannot be encoded", "chat template: line"),
        (CHAT, "{{ messages | length }}", "answers unclear", "messages[1]: "),
    ],
)
def test_why_a_chat_is_skipped(messages, template, reason, detail):
    _, found = encoded(messages, template)
    assert isinstance(found, Skipped)
    assert (found.id, found.reason) == ("a:3", reason)
    assert found.detail.startswith(detail)


def test_the_same_chat_is_the_same_on_any_day():
    """Templates may write the date."""
    tokenizer, found = encoded(CHAT, "{{ strftime_now('%d %b %Y') }}" + CHATML)
    assert tokenizer.decode(found.ids.tolist()).startswith("26 Jul 2024<|im_start|>")


def test_a_tokenizer_without_a_template_is_refused():
    with pytest.raises(UserError, match="has no chat template"):
        chat_template(Tokenizer.from_gguf(sentencepiece()))
