"""The checksum of weights: remembered for as long as their files are the same."""

import os
from pathlib import Path

import pytest

from armillary.checkpoints import sums
from armillary.checkpoints.sums import Sums


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        path.write_bytes(path.name.encode() * 9)
    return paths


def test_it_is_known_once_it_was_computed(paths: list[Path], tmp_path: Path) -> None:
    assert Sums(paths, tmp_path / "new" / "sums.json").known() is None
    found = Sums(paths, tmp_path / "new" / "sums.json").computed()
    assert Sums(paths, tmp_path / "new" / "sums.json").known() == found
    assert Sums(paths[:1], tmp_path / "new" / "sums.json").known() != found
    assert Sums([*paths, tmp_path / "c"], tmp_path / "new" / "sums.json").known() is None


def test_it_is_that_of_the_contents(paths: list[Path], tmp_path: Path) -> None:
    found = Sums(paths, tmp_path / "sums.json").computed()
    moved = [path.rename(path.with_suffix(".moved")) for path in paths]
    assert Sums(moved, tmp_path / "sums.json").known() is None
    assert Sums(moved, tmp_path / "sums.json").computed() == found
    assert Sums(moved[::-1], tmp_path / "sums.json").computed() != found


def test_a_file_that_changes_is_read_again(paths: list[Path], tmp_path: Path) -> None:
    before = Sums(paths, tmp_path / "sums.json").computed()
    about = paths[0].stat()
    paths[0].write_bytes(b"c" * 9)
    os.utime(paths[0], ns=(about.st_atime_ns, about.st_mtime_ns + 1))
    assert Sums(paths, tmp_path / "sums.json").known() is None
    assert Sums(paths, tmp_path / "sums.json").computed() != before


def test_files_are_not_read_again(
    paths: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Sums(paths, tmp_path / "sums.json").computed()
    monkeypatch.setattr(sums, "sha256", lambda path: pytest.fail(f"{path} was read"))
    assert Sums(paths, tmp_path / "sums.json").computed() == found


@pytest.mark.parametrize("content", [b"", b"[1]", b'{"PATH": 3}', b'{"PATH": {"file": [1]}}'])
def test_nonsense_in_the_memory_is_as_if_there_were_none(
    paths: list[Path], tmp_path: Path, content: bytes
) -> None:
    found = Sums(paths, tmp_path / "sums.json").computed()
    (tmp_path / "sums.json").write_bytes(content.replace(b"PATH", str(paths[0]).encode()))
    assert Sums(paths, tmp_path / "sums.json").known() is None
    assert Sums(paths, tmp_path / "sums.json").computed() == found


def test_a_memory_that_cannot_be_written_is_no_error(paths: list[Path], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")
    found = Sums(paths, tmp_path / "sums.json").computed()
    assert Sums(paths, tmp_path / "file" / "sums.json").computed() == found


def test_large_files_are_told_before_they_are_read(
    paths: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(sums, "_MUCH", 10)
    for _ in range(2):
        Sums(paths, tmp_path / "sums.json", said.append).computed()
    assert said == ["taking the checksum of the weights, once, to know their prompts again"]
    Sums(paths[:1], tmp_path / "other.json", said.append).computed()
    assert len(said) == 1
