"""Documents come from any source of text, under names that two machines share."""

import json
from pathlib import Path

import pytest

from armillary.data import TokenDataset, prepare
from armillary.data.bpe import train_bpe
from armillary.data.prepared import VALIDATION
from armillary.errors import UserError
from armillary.evaluation import texts
from armillary.evaluation.texts import read_documents
from armillary.tokenizer import Tokenizer
from support.tiny_model import tiny_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """One token a byte."""
    return tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def read(tokenizer, *arguments, least=4):
    documents, notices = read_documents([*map(str, arguments)], tokenizer, least=least)
    return {each.name: tokenizer.decode(each.ids) for each in documents}, notices


def test_each_file_is_a_document_without_bos(tokenizer, tmp_path):
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a.txt").write_text("first")
    assert read(tokenizer, tmp_path) == ({"a.txt": "first", "b.txt": "second"}, ())
    assert str(tmp_path) not in repr(read_documents([str(tmp_path)], tokenizer, least=1))


def test_records_and_names_that_stand_twice_are_told_apart(tokenizer, tmp_path):
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.txt").write_text(f"text of {folder}")
    lines = [json.dumps({"text": text}) for text in ("line one", "line two")]
    (tmp_path / "z.jsonl").write_text("\n".join(lines))
    documents, _ = read(tokenizer, tmp_path)
    assert documents == {
        "a.txt": "text of x",
        "a.txt#2": "text of y",
        "z.jsonl:1": "line one",
        "z.jsonl:2": "line two",
    }


def test_a_long_document_is_whole(tokenizer, tmp_path):
    """Sources give long texts in parts of a MiB."""
    text = "line of text\n" * 100_000
    (tmp_path / "long.txt").write_text(text)
    documents, _ = read(tokenizer, tmp_path / "long.txt")
    assert documents == {"long.txt": text}


def test_what_is_left_out_is_said(tokenizer, tmp_path):
    (tmp_path / "a.txt").write_text("long enough")
    (tmp_path / "b.txt").write_text("no")
    (tmp_path / "c.txt").write_bytes(b"\xff\xfe\xfd\xfc\xfb")
    documents, notices = read(tokenizer, tmp_path)
    assert list(documents) == ["a.txt"]
    assert notices == (
        "1 files or records are no text and are passed over",
        "1 documents have fewer than 4 tokens and are left out",
    )


def test_no_document_long_enough_is_an_error(tokenizer, tmp_path):
    (tmp_path / "a.txt").write_text("no")
    with pytest.raises(UserError, match="no document has 4 tokens; give a longer text"):
        read(tokenizer, tmp_path)


def test_more_text_than_is_read_is_said(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(texts, "_MOST_BYTES", 12)
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text("ten letters")
    documents, notices = read(tokenizer, tmp_path)
    assert list(documents) == ["a.txt", "b.txt"]
    assert notices == ("the first 2 documents are taken; there is more text",)


def test_of_the_standard_library_the_largest_files_are_taken(tokenizer, monkeypatch):
    monkeypatch.setattr(texts, "_LARGEST", 3)
    documents, notices = read(tokenizer, "python-stdlib", least=1000)
    sizes = [len(text.encode()) for text in documents.values()]
    assert len(sizes) == 3
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] > 50_000
    assert all(name.startswith("python-stdlib/") for name in documents)
    assert notices == ()


@pytest.fixture
def learned() -> Tokenizer:
    return train_bpe(["some words and more of them\n" * 9], vocab_size=270)


@pytest.fixture
def prepared(tmp_path: Path, learned: Tokenizer) -> Path:
    """Forty documents of lengths that rise, a third of them held out."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(40):
        (folder / f"{number}.txt").write_text(f"document {number}: " + "x" * number)
    prepare([str(folder)], learned, tmp_path / "data", validation=0.3, workers=1)
    return tmp_path / "data"


def test_held_out_documents_are_those_of_the_split_without_their_end(
    prepared: Path, learned: Tokenizer
) -> None:
    documents, notices = read_documents([str(prepared)], learned, least=2)
    held_out = TokenDataset(prepared, VALIDATION)
    assert len(documents) == len(held_out) > 5
    assert notices == ()
    for document, tokens in zip(documents, held_out, strict=True):
        assert document.ids == tuple(tokens[:-1].tolist())
        assert tokens[-1] == held_out.end_id
        assert learned.decode(list(document.ids)).startswith("document ")


def test_those_too_short_are_left_out_and_told(prepared: Path, learned: Tokenizer) -> None:
    every, _ = read_documents([str(prepared)], learned, least=2)
    least = sorted(len(document.ids) for document in every)[2]
    documents, notices = read_documents([str(prepared)], learned, least=least)
    assert [d for d in every if len(d.ids) >= least] == list(documents)
    short = len(every) - len(documents)
    assert notices == (f"{short} documents have fewer than {least} tokens and are left out",)
    with pytest.raises(UserError, match="no document has 4,000 tokens"):
        read_documents([str(prepared)], learned, least=4000)


def test_data_of_another_tokenizer_is_refused(prepared: Path) -> None:
    other = train_bpe(["quite another text\n" * 9], vocab_size=262)
    with pytest.raises(UserError, match="another tokenizer than the model's"):
        read_documents([str(prepared)], other, least=2)
