"""Documents come from any source of text, under names that two machines share."""

import json

import pytest

from armillary.errors import UserError
from armillary.evaluation import texts
from armillary.evaluation.texts import read_documents
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
