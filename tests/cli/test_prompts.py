"""`armillary prompts`: what is kept of long prompts, told and removed."""

import json
from pathlib import Path

import pytest

from armillary.cli import main


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ARMILLARY_CACHE", str(tmp_path))
    return tmp_path / "prompts"


def test_nothing_is_kept_at_first(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prompts"]) == 0
    assert capsys.readouterr().out == f"{folder}\n  0 prompts, 0 bytes\n"
    assert main(["prompts", "--clear"]) == 0
    assert not folder.exists(), "nothing is made of it"


def test_prompts_are_counted_and_all_is_removed(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.mkdir()
    for name in ("a.safetensors", "b.safetensors", "weights.json", ".c.safetensors.0.partial"):
        (folder / name).write_bytes(b"x" * 700)
    beside = folder.parent / "models"
    beside.mkdir()
    assert main(["prompts", "--json"]) == 0
    facts = {"path": str(folder), "prompts": 2, "bytes": 1400, "cleared": False}
    assert json.loads(capsys.readouterr().out) == facts
    assert main(["prompts", "--clear"]) == 0
    assert capsys.readouterr().out == f"{folder}\n  2 prompts, 1.4 kB, removed\n"
    assert list(folder.iterdir()) == []
    assert beside.exists()
