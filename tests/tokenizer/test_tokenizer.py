import concurrent.futures

import pytest
from hypothesis import given
from hypothesis import strategies as st

from armillary.errors import UserError
from armillary.tokenizer import Tokenizer
from support.vocabularies import byte_level, sentencepiece

TEXT = st.text(alphabet=st.characters(exclude_categories=["Cs"]) | st.sampled_from("  ab<|>/s▁\n"))
BYTE_LEVEL = Tokenizer.from_gguf(byte_level())
SENTENCEPIECE = Tokenizer.from_gguf(sentencepiece())


def specials(tokenizer, ids):
    return [i for i in ids if tokenizer.is_special(i)]


def test_facts_are_read():
    assert (BYTE_LEVEL.bos_id, BYTE_LEVEL.pad_id, BYTE_LEVEL.eos_ids) == (1, 0, (2, 0))
    assert BYTE_LEVEL.vocab_size == 3 + 256 + 12 + 1
    assert BYTE_LEVEL.special_tokens == {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2}
    assert BYTE_LEVEL.chat_template is None
    assert SENTENCEPIECE.named_tokens == {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
    }


@given(TEXT)
def test_byte_level_text_survives(text):
    ids = BYTE_LEVEL.encode(text)
    assert BYTE_LEVEL.decode(ids) == text
    assert b"".join(map(BYTE_LEVEL.token_bytes, ids)) == text.encode()


@given(TEXT)
def test_sentencepiece_text_survives(text):
    """All but ▁ itself, with which SentencePiece writes a space."""
    assert SENTENCEPIECE.decode(SENTENCEPIECE.encode(text), skip_specials=True) == text.replace(
        "▁", " "
    )
    plain = SENTENCEPIECE.encode(text, bos=False)
    written = b"".join(map(SENTENCEPIECE.token_bytes, plain)).decode()
    assert written == (" " + text if text else "").replace("▁", " ")


@given(st.lists(st.sampled_from(["<|im_start|>", "<|im_end|>", "<|endoftext|>", "a", " ", "<|"])))
def test_text_never_becomes_a_control_token(pieces):
    """cases.md 101: whatever is written, only `specials=True` makes control tokens."""
    text = "".join(pieces)
    assert specials(BYTE_LEVEL, BYTE_LEVEL.encode(text)) == []
    assert BYTE_LEVEL.decode(BYTE_LEVEL.encode(text)) == text
    wanted = [BYTE_LEVEL.special_tokens[p] for p in pieces if p in BYTE_LEVEL.special_tokens]
    assert specials(BYTE_LEVEL, BYTE_LEVEL.encode(text, specials=True)) == wanted


@pytest.mark.parametrize("text", ["</s>", "a</s>b", "<s>", "<0x0A>", "<unk>"])
def test_merges_spell_no_control_or_byte_token(text):
    """The vocabulary has '</' and 's>', which would merge to the end token by its score of 0."""
    ids = SENTENCEPIECE.encode(text, bos=False)
    assert specials(SENTENCEPIECE, ids) == []
    assert SENTENCEPIECE.decode(ids) == text


def test_a_whole_word_spells_no_control_token():
    """Pre-tokenizers that skip the merges take a word from the vocabulary as it stands."""
    metadata = byte_level(pre="llama-bpe", eos_token_id=byte_level_id("hello"))
    tokenizer = Tokenizer.from_gguf(metadata)
    assert specials(tokenizer, tokenizer.encode("hello hello", bos=False)) == []
    assert tokenizer.decode(tokenizer.encode("hello hello", bos=False)) == "hello hello"


def byte_level_id(text: str) -> int:
    return byte_level()["tokenizer.ggml.tokens"].index(text)


def test_special_tokens_are_read_where_asked_for():
    ids = BYTE_LEVEL.encode("<|im_start|>hello<|im_end|>", specials=True)
    assert ids == [1, byte_level_id("hello"), 2]
    assert BYTE_LEVEL.decode(ids) == "<|im_start|>hello<|im_end|>"
    assert BYTE_LEVEL.decode(ids, skip_specials=True) == "hello"


def test_plain_added_tokens_are_read_always():
    assert BYTE_LEVEL.encode("<think>hello") == [byte_level_id("<think>"), byte_level_id("hello")]
    assert not BYTE_LEVEL.is_special(byte_level_id("<think>"))


@pytest.mark.parametrize("make", [byte_level, sentencepiece])
@pytest.mark.parametrize("rule", [True, False])
@pytest.mark.parametrize("written", [True, False])
def test_a_text_begins_once(make, rule, written):
    """cases.md 99, raw text: exactly one BOS where the rule or the text wants one, else none."""
    tokenizer = Tokenizer.from_gguf(make(add_bos_token=rule))
    bos = tokenizer.named_tokens["bos_token"]
    text = bos + "ab" if written else "ab"
    ids = tokenizer.encode(text, specials=True)
    assert ids.count(tokenizer.bos_id) == (rule or written)
    assert tokenizer.encode(text, specials=True, bos=True).count(tokenizer.bos_id) == 1
    assert tokenizer.encode("ab", bos=False).count(tokenizer.bos_id) == 0
    assert tokenizer.encode("ab", bos=True).count(tokenizer.bos_id) == 1


def test_scoring_and_generating_begin_alike():
    """cases.md 100: a context and the context with its continuation begin with the same ids."""
    tokenizer = Tokenizer.from_gguf(sentencepiece())
    assert tokenizer.encode("")[:1] == tokenizer.encode("ab")[:1] == [tokenizer.bos_id]


def test_bos_without_one_is_an_error():
    tokenizer = Tokenizer.from_gguf(byte_level(bos_token_id=None))
    with pytest.raises(UserError, match="no BOS token"):
        tokenizer.encode("a", bos=True)


def test_token_bytes_are_those_of_the_text():
    """cases.md 104: f0 9f a6 99 come as four tokens of one byte."""
    for tokenizer in (BYTE_LEVEL, SENTENCEPIECE):
        ids = tokenizer.encode("🦙", bos=False)
        assert [tokenizer.token_bytes(i) for i in ids[-4:]] == [b"\xf0", b"\x9f", b"\xa6", b"\x99"]
        assert tokenizer.decode(ids[:-1]).endswith("�")


def test_bytes_of_other_tokens():
    assert BYTE_LEVEL.token_bytes(1) == b"<|im_start|>"
    assert BYTE_LEVEL.token_bytes(byte_level_id("Ġhello")) == b" hello"
    assert BYTE_LEVEL.token_bytes(BYTE_LEVEL.vocab_size) == b""
    with pytest.raises(UserError, match="-1 is negative"):
        BYTE_LEVEL.token_bytes(-1)


@pytest.mark.parametrize("method", ["encode", "encode_specials"])
def test_invalid_unicode_is_named(method):
    with pytest.raises(UserError, match=r"U\+D83E at character 1"):
        BYTE_LEVEL.encode("a\ud83e", specials=method == "encode_specials")


def test_a_byte_without_a_token_is_an_error():
    metadata = byte_level()
    tokens = metadata["tokenizer.ggml.tokens"]
    tokens[tokens.index("z")] = "zz"
    tokenizer = Tokenizer.from_gguf(metadata)
    assert tokenizer.decode(tokenizer.encode("abc")) == "abc"
    with pytest.raises(UserError, match="no token for byte 0x7A"):
        tokenizer.encode("abz")


def test_control_tokens_swallow_spaces_where_they_say_so():
    """Phi-3's markers do, which its files show in the model's name alone."""
    metadata = sentencepiece() | {"general.name": "Phi3"}
    metadata["tokenizer.ggml.tokens"].append("<|end|>")
    metadata["tokenizer.ggml.token_type"].append(3)
    metadata["tokenizer.ggml.scores"].append(0.0)
    tokenizer = Tokenizer.from_gguf(metadata)
    end = tokenizer.special_tokens["<|end|>"]
    assert tokenizer.encode("<|end|>  \nab", specials=True) == tokenizer.encode(
        "<|end|>ab", specials=True
    )
    assert tokenizer.encode("a <|end|>", specials=True)[-1] == end


def test_threads_do_not_disturb_each_other():
    def encode(n):
        return BYTE_LEVEL.encode("<|im_end|>hello", specials=n % 2 == 0)

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        results = list(pool.map(encode, range(400)))
    assert results == [encode(n) for n in range(400)]


def test_each_token_is_located_in_the_parts_that_it_stands_for():
    """Parts of one text may share a token; a character of several tokens lies in one part."""
    tokenizer = Tokenizer.from_gguf(byte_level())
    parts = ["hell", "o", " 1", "2é", 2, "\n", "", "x"]
    ids, places = tokenizer.encode_located(parts)
    assert ids == tokenizer.encode_parts(parts)
    pieces = [tokenizer.token_bytes(index) for index in ids]
    assert list(zip(pieces, map(tuple, places.tolist()), strict=True)) == [
        (b"hello", (0, 1)),
        (b" ", (2, 2)),
        (b"12", (2, 3)),
        (b"\xc3", (3, 3)),
        (b"\xa9", (3, 3)),
        (b"<|im_end|>", (4, 4)),
        (b"\n", (5, 5)),
        (b"x", (7, 7)),
    ]
