"""`armillary tokenizer train` writes what `armillary prepare` reads."""

import json

import pytest

from armillary import cli
from armillary.data.dataset import TokenDataset
from armillary.tokenizer import Tokenizer


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("some words and some more words\n" * 50)
    (tmp_path / "texts" / "b.txt").write_bytes(b"\xff")
    return tmp_path


def run(capsys, *arguments):
    code = cli.main(["tokenizer", "train", *arguments])
    output, errors = capsys.readouterr()
    return code, output, errors


def test_it_says_what_it_made_and_what_it_skipped(here, capsys):
    code, output, errors = run(capsys, "texts", "--vocab-size", "300", "--out", "tok")
    assert code == 0
    assert errors.endswith("reading: 1.6 kB of 1.6 kB\n")
    assert output.splitlines() == [
        "tok",
        "  vocabulary  272, not 300: no other pair occurs 2 times",
        "  controls    <|endoftext|>",
        "  read        1 documents, 1.6 kB",
        "  skipped     1 × invalid UTF-8",
        "                texts/b.txt: at byte 0",
    ]
    assert Tokenizer.from_file("tok/tokenizer.json").vocab_size == 272


def test_the_same_facts_come_as_json(here, capsys):
    arguments = ("texts", "-n", "260", "-o", "tok", "--special", "<end>", "--special", "<user>")
    code, output, _ = run(capsys, *arguments, "--json")
    assert (code, output.count("\n")) == (0, 1)
    assert json.loads(output) == {
        "path": "tok",
        "vocab_size": 260,
        "special_tokens": {"<end>": 0, "<user>": 1},
        "documents": 1,
        "bytes": 1550,
        "skipped": {
            "invalid UTF-8": {
                "count": 1,
                "examples": [{"id": "texts/b.txt", "detail": "at byte 0"}],
            }
        },
    }


def test_prepare_takes_it(here, capsys):
    run(capsys, "texts", "-n", "265", "-o", "tok")
    arguments = ["texts", "-t", "tok", "-o", "data", "--validation", "0", "--workers", "1"]
    assert cli.main(["prepare", *arguments]) == 0
    dataset = TokenDataset("data", tokenizer=Tokenizer.from_file("tok/tokenizer.json"))
    text = (here / "texts" / "a.txt").read_text()
    assert dataset.tokenizer.decode(dataset[0]) == text + "<|endoftext|>"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["texts", "-n", "100"], "vocab_size 100: must be at least 257"),
        (["texts", "-n", "300", "--strict"], "texts/b.txt: invalid UTF-8: at byte 0 (only"),
        (["texts/b.txt", "-n", "300"], "the sources hold no documents; 1 × invalid UTF-8, the"),
        (["nothing", "-n", "300"], "nothing: no such file or directory"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_writes_nothing(here, capsys, arguments, message):
    code, output, errors = run(capsys, *arguments, "--out", "tok")
    assert (code, output) == (2, "")
    last = errors.splitlines()[-1]
    assert last.startswith(f"armillary: {message}")
    assert not (here / "tok").exists()


def test_another_action_is_refused(here, capsys):
    assert cli.main(["tokenizer", "bake", "texts", "-n", "300", "-o", "tok"]) == 2
    assert "'bake' is not one of 'train'" in capsys.readouterr().err
