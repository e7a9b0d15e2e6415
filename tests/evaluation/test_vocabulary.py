from pathlib import Path

import pytest

from armillary.errors import UserError
from armillary.evaluation.vocabulary import TaskTokens
from armillary.tokenizer import Tokenizer
from support.tiny_model import tiny_tokenizer
from support.vocabularies import byte_level, sentencepiece


def with_words(*words: str) -> Tokenizer:
    """A byte-level vocabulary with these tokens at its end, as written there (Ġ is the space)."""
    metadata = byte_level()
    for key in ("tokens", "token_type"):
        more = words if key == "tokens" else [1] * len(words)
        metadata[f"tokenizer.ggml.{key}"] = [*metadata[f"tokenizer.ggml.{key}"], *more]
    return Tokenizer.from_gguf(metadata)


def test_words_are_single_lower_case_tokens_with_a_space_and_none_twice() -> None:
    tokenizer = with_words(
        "Ġriver", "Ġstone", "Ġthe", "ĠStone", "stones", "Ġriver1", "Ġcaf\u00c3\u00a9"
    )
    found = TaskTokens.of_tokenizer(tokenizer).words
    assert [tokenizer.decode([index]) for index in found] == [" hello", " river", " stone"]


def test_marks_and_digits_are_the_tokens_of_their_texts() -> None:
    tokenizer = with_words("Ġriver")
    tokens = TaskTokens.of_tokenizer(tokenizer, prose=tokenizer.encode("hello 12", bos=False))
    marks = (*tokens.digits, tokens.newline, tokens.colon, tokens.equals)
    assert tokenizer.decode(marks) == "0123456789\n:="
    assert tokenizer.decode(tokens.label) == "The pass key of"
    assert tokenizer.decode(tokens.prose) == "hello 12"


def test_a_text_begins_as_the_tokenizer_says(tmp_path: Path) -> None:
    with_bos = Tokenizer.from_gguf(sentencepiece())
    assert with_bos.begin([]) != []
    assert TaskTokens.of_tokenizer(with_bos).begin == tuple(with_bos.begin([]))
    assert TaskTokens.of_tokenizer(tiny_tokenizer(tmp_path)).begin == ()


def test_a_tokenizer_without_a_mark_is_refused() -> None:
    metadata = byte_level()
    tokens = metadata["tokenizer.ggml.tokens"]
    tokens[tokens.index(":")] = "::"
    with pytest.raises(UserError, match="no token for ':'"):
        TaskTokens.of_tokenizer(Tokenizer.from_gguf(metadata))


def test_ids_of_a_bare_vocabulary_are_all_used_once() -> None:
    tokens = TaskTokens.of_size(30, bos=2)
    used = [
        *tokens.words,
        *tokens.digits,
        *tokens.label,
        *tokens.begin,
        tokens.newline,
        tokens.colon,
        tokens.equals,
    ]
    assert sorted(used) == list(range(30))
    assert tokens.begin == (2,)
    with pytest.raises(ValueError, match="of 14 tokens"):
        TaskTokens.of_size(14)


def test_an_id_has_one_use() -> None:
    with pytest.raises(ValueError, match="token 3 "):
        TaskTokens(tuple(range(20, 30)), tuple(range(10)), newline=3, colon=11, equals=12)
    with pytest.raises(ValueError, match="9 digits"):
        TaskTokens(tuple(range(20, 30)), tuple(range(9)), newline=13, colon=11, equals=12)
    with pytest.raises(ValueError, match="bos=False"):
        TaskTokens((20,), tuple(range(10)), 11, 12, 13, begin=(14,), prose=(20, 14, 20))
