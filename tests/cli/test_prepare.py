"""`armillary prepare` says what it made, what it skipped, and how to go on."""

import json

import pytest

from armillary import cli
from armillary.cli._preparation import line
from armillary.data.preparation import Progress
from support.tiny_model import tiny_tokenizer


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny_tokenizer(tmp_path / "tok")
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("three and more")
    (tmp_path / "texts" / "b.txt").write_text("x" * 70)
    (tmp_path / "texts" / "c.txt").write_bytes(b"\xff")
    return tmp_path


def run(capsys, *arguments):
    code = cli.main(["prepare", "texts", "--out", "out", "--workers", "1", *arguments])
    output, errors = capsys.readouterr()
    return code, output, errors


@pytest.mark.parametrize("name", ["tok", "tok/tokenizer.json"])
def test_it_prints_counts_lengths_and_what_was_skipped(here, capsys, name):
    code, output, errors = run(capsys, "-t", name, "--validation", "0")
    assert (code, errors) == (0, "")
    assert output.splitlines() == [
        "out",
        "  read        3 files, 85 bytes",
        "  train       2 documents, 86 tokens of uint16, 0.98 bytes per token",
        "  documents by tokens",
        "      8 – 15           1  ████████████████████████████████████████",
        "     16 – 31           0",
        "     32 – 63           0",
        "     64 – 127          1  ████████████████████████████████████████",
        "  skipped     1 × invalid UTF-8",
        "                texts/c.txt: at byte 0",
    ]


def test_the_same_facts_come_as_json(here, capsys):
    code, output, errors = run(capsys, "-t", "tok", "--json")
    assert (code, errors, output.count("\n")) == (0, "", 1)
    facts = json.loads(output)
    assert facts["path"] == "out"
    assert facts["lengths"] == {"8": 1, "64": 1}
    assert facts == {"path": "out", **json.loads((here / "out" / "dataset.json").read_text())}


def test_of_chats_the_share_that_is_learned_is_named(here, capsys):
    """The user's turn has 9 tokens, the assistant's 15: of them a, b and the end are learned."""
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "ab"}]
    (here / "texts" / "c.txt").write_text(json.dumps({"messages": chat}))
    for name in "ab":
        (here / "texts" / f"{name}.txt").unlink()
    code, output, _ = run(capsys, "-t", "tok", "--format", "chat", "--validation", "0")
    assert code == 0
    assert output.splitlines()[2] == (
        "  train       1 documents, 24 tokens of uint16, 0.83 bytes per token, 12.5% learned"
    )


def test_an_empty_validation_split_is_said(here, capsys):
    _, output, _ = run(capsys, "-t", "tok")
    assert "  validation  no document fell to it; raise --validation or change --seed\n" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-t", "tok", "--strict"], "texts/c.txt: invalid UTF-8: at byte 0 (only counted"),
        (["-t", "nothing"], "nothing: no such alias"),
        (["-t", "tok", "--end-token", "<eos>"], "end token '<eos>' is no control token"),
    ],
)
def test_what_cannot_be_done_is_one_line(here, capsys, arguments, message):
    code, output, errors = run(capsys, *arguments)
    assert (code, output) == (2, "")
    assert errors.startswith(f"armillary: {message}")
    assert errors.count("\n") == 1


def test_an_interrupt_says_how_to_go_on(here, capsys, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("armillary.data.preparation.prepare", interrupt)
    code, _, errors = run(capsys, "-t", "tok")
    assert code == 130
    assert errors.splitlines()[0] == "full shards are kept; the same command goes on from them"


def test_progress_has_the_rate_of_this_run_and_the_time_left():
    progress = Progress(
        bytes_read=30_000_000,
        bytes_total=100_000_000,
        resumed_bytes=10_000_000,
        documents=1234,
        tokens=7_000_000,
        skipped=2,
        seconds=10.0,
    )
    assert line(progress) == (
        "30.0 MB of 100.0 MB, 1,234 documents, 7,000,000 tokens, 2 skipped, 2.0 MB/s, 0:00:35 left"
    )
