"""`armillary pull` says where a model lies, how large it is and its checksums."""

import hashlib
import json

import pytest

from armillary import cli

BODY = b"GGUF and more"
SUM = hashlib.sha256(BODY).hexdigest()


@pytest.fixture
def gguf(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(BODY)
    return path


def test_a_file_is_named_with_size_and_checksum(gguf, capsys):
    assert cli.main(["pull", str(gguf)]) == 0
    assert capsys.readouterr() == (f"{gguf}\n  m.gguf  13 bytes  sha256 {SUM}\n", "")


def test_the_same_facts_come_as_json(gguf, capsys):
    assert cli.main(["pull", str(gguf), "--json"]) == 0
    output, errors = capsys.readouterr()
    facts = json.loads(output)
    assert errors == ""
    assert facts == {
        "model": str(gguf),
        "path": str(gguf),
        "bytes": 13,
        "files": [{"file": "m.gguf", "bytes": 13, "sha256": SUM}],
    }


def test_a_directory_lists_its_files_in_order(gguf, capsys):
    (gguf.parent / "config.json").write_bytes(b"{}")
    (gguf.parent / "below").mkdir()
    assert cli.main(["pull", str(gguf.parent), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert [entry["file"] for entry in facts["files"]] == ["config.json", "m.gguf"]
    assert facts["bytes"] == 15


def test_progress_goes_to_standard_error(gguf, capsys, monkeypatch):
    def locate(name, *, progress):
        progress("a file", 500_000, 2_000_000)
        progress("a file", 2_000_000, 2_000_000)
        return gguf

    monkeypatch.setattr("armillary.checkpoints.locate.locate", locate)
    assert cli.main(["pull", "x"]) == 0
    output, errors = capsys.readouterr()
    assert output.startswith(f"{gguf}\n")
    assert errors == "a file: 500.0 kB of 2.0 MB\na file: 2.0 MB of 2.0 MB\n"
