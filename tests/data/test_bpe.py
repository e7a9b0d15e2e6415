"""A learnt vocabulary restores every text, and is the same every time."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from armillary.data.bpe import END_OF_TEXT, train_bpe
from armillary.data.prepared import tokenizer_checksum
from armillary.errors import UserError
from armillary.tokenizer import Tokenizer

TEXTS = [
    "def f(x):\n    return x + 12345\n" * 30,
    "the cat's hat, the cat's mat\n" * 20,
    "é 🦙 " * 9,
]


@pytest.fixture(scope="module")
def trained():
    return train_bpe(TEXTS, 290, specials=(END_OF_TEXT, "<|user|>"))


def test_ids_are_control_tokens_then_bytes_then_what_is_learnt(trained):
    assert trained.vocab_size == 290
    assert trained.special_tokens == {END_OF_TEXT: 0, "<|user|>": 1}
    assert trained.eos_ids == (0,)
    assert sorted(trained.token_bytes(n) for n in range(2, 258)) == [bytes([n]) for n in range(256)]
    assert all(len(trained.token_bytes(n)) > 1 for n in range(258, 290))


def test_what_is_learnt_makes_texts_shorter(trained):
    for text in TEXTS[:2]:
        assert len(trained.encode(text)) < 0.6 * len(text.encode())


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_comes_back(trained, text):
    assert trained.decode(trained.encode(text)) == text


@given(st.lists(st.sampled_from([END_OF_TEXT, "<|user|>", " ", "a", "\n", "<|", "|>"])))
def test_control_tokens_written_in_a_text_come_back_as_text(trained, parts):
    text = "".join(parts)
    ids = trained.encode(text)
    assert trained.decode(ids) == text
    assert not any(trained.is_special(index) for index in ids)


def test_it_is_the_same_when_saved_and_read_again(trained, tmp_path):
    trained.save(tmp_path)
    again = Tokenizer.from_file(tmp_path / "tokenizer.json")
    assert tokenizer_checksum(again) == tokenizer_checksum(trained)
    assert again.eos_ids == trained.eos_ids
    assert again.encode(TEXTS[0]) == trained.encode(TEXTS[0])


def test_other_processes_learn_the_same():
    """Hash tables are seeded anew in each process, and threads share the counting."""
    program = (
        "from armillary.data.bpe import train_bpe\n"
        "from armillary.data.prepared import tokenizer_checksum\n"
        f"print(tokenizer_checksum(train_bpe({TEXTS!r}, 300)))"
    )
    wanted = tokenizer_checksum(train_bpe(iter(TEXTS), 300))
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True
        )
        assert done.stdout.strip() == wanted


def test_a_small_text_gives_what_it_has():
    assert train_bpe(["ab ab ab"], 1000).vocab_size < 265


@pytest.mark.parametrize(
    ("vocab_size", "specials", "message"),
    [
        (257, ("<a>", "<b>"), "vocab_size 257: must be at least 258, 256 bytes and 2 control"),
        (300, ("a",), "control token 'a'"),
        (300, ("",), "control token ''"),
        (300, ("<a>", "<a>"), "control token '<a>'"),
        (300, (), "needs a control token"),
    ],
)
def test_what_cannot_be_made_is_refused(vocab_size, specials, message):
    with pytest.raises(UserError, match=message):
        train_bpe(TEXTS, vocab_size, specials=specials)


@pytest.mark.parametrize("texts", [[], ["", ""]])
def test_without_text_there_is_nothing_to_learn(texts):
    with pytest.raises(UserError, match="there is no text"):
        train_bpe(texts, 300)
