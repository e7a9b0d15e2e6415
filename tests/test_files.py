"""Files are whole or absent, and what is read from them is checked."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from armillary.errors import CheckpointError, UserError
from armillary.files import (
    map_file,
    parse_json,
    read_json,
    set_aside,
    sha256,
    staged,
    verify_manifest,
    write_atomically,
    write_directory_atomically,
    write_json,
)


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def test_a_file_appears_whole_and_alone(tmp_path):
    with write_atomically(tmp_path / "a.bin") as file:
        file.write(b"half")
        assert "a.bin" not in names(tmp_path)
        file.write(b" and half")
    assert names(tmp_path) == ["a.bin"]
    assert (tmp_path / "a.bin").read_bytes() == b"half and half"


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_interrupted_file_leaves_the_old_one_and_nothing_else(tmp_path, error):
    (tmp_path / "a.bin").write_bytes(b"old")

    def interrupted():
        with write_atomically(tmp_path / "a.bin") as file:
            file.write(b"new")
            raise error

    with pytest.raises(error):
        interrupted()
    assert names(tmp_path) == ["a.bin"]
    assert (tmp_path / "a.bin").read_bytes() == b"old"


def test_a_file_that_cannot_be_written_is_a_user_error(tmp_path):
    with (
        pytest.raises(UserError, match=r"absent/a\.bin: cannot be written: No such file"),
        write_atomically(tmp_path / "absent" / "a.bin"),
    ):
        pass


def test_a_full_disk_is_a_user_error_and_leaves_nothing(tmp_path, monkeypatch):
    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with (
        pytest.raises(UserError, match="cannot be written: No space left"),
        write_atomically(tmp_path / "a.bin") as file,
    ):
        file.write(b"new")
    assert names(tmp_path) == []


@contextlib.contextmanager
def write_staged(path, kind, text):
    """A file or a directory of one, whole before it stands."""
    with staged(path) as written:
        if kind == "file":
            with write_atomically(written) as file:
                file.write(text.encode())
        else:
            with write_directory_atomically(written) as directory:
                (directory / "a.txt").write_text(text)
        yield written


def text_of(path):
    return (path if path.is_file() else path / "a.txt").read_text()


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_what_is_staged_stands_when_the_block_ends_and_replaces_the_older(tmp_path, kind):
    for text in ("one", "two"):
        with write_staged(tmp_path / "a", kind, text) as written:
            assert text_of(written) == text
            assert names(tmp_path) != ["a"]
        assert names(tmp_path) == ["a"]
        assert text_of(tmp_path / "a") == text


@pytest.mark.parametrize("error", [UserError, KeyboardInterrupt])
@pytest.mark.parametrize("kind", ["file", "directory"])
def test_what_is_refused_when_it_is_whole_leaves_the_older_and_nothing_else(tmp_path, kind, error):
    with write_staged(tmp_path / "a", kind, "old"):
        pass

    def refused():
        with write_staged(tmp_path / "a", kind, "new"):
            raise error

    with pytest.raises(error):
        refused()
    assert names(tmp_path) == ["a"]
    assert text_of(tmp_path / "a") == "old"


def test_nothing_is_staged_where_it_could_not_stand(tmp_path):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "letter.txt").write_text("dear")
    for path, message in [
        (tmp_path / "theirs", "was not saved by armillary"),
        (tmp_path / "absent" / "a", "cannot be written: No such file"),
    ]:
        with pytest.raises(UserError, match=message), staged(path):
            raise AssertionError("the block was entered")
    letter = tmp_path / "theirs" / "letter.txt"
    with (
        pytest.raises(UserError, match=r"letter\.txt: exists and was not saved"),
        write_staged(letter, "directory", "new"),
    ):
        pass
    assert names(tmp_path) == ["theirs"]
    assert names(tmp_path / "theirs") == ["letter.txt"]


def save(path, text):
    with write_directory_atomically(path) as directory:
        (directory / "a.txt").write_text(text)
        (directory / "sub").mkdir()
        (directory / "sub" / "b.txt").write_text("b")


def test_a_directory_appears_whole_with_its_manifest(tmp_path):
    save(tmp_path / "model", "one")
    assert names(tmp_path) == ["model"]
    assert names(tmp_path / "model") == ["a.txt", "manifest.json", "sub"]
    verify_manifest(tmp_path / "model", checksums=True)
    manifest = json.loads((tmp_path / "model" / "manifest.json").read_text())
    assert manifest["files"]["a.txt"]["bytes"] == 3
    assert manifest["files"]["sub/b.txt"]["sha256"] == sha256(tmp_path / "model/sub/b.txt")


def test_checksums_that_are_known_are_not_computed_again(tmp_path):
    known = {}
    with write_directory_atomically(tmp_path / "model", known) as directory:
        (directory / "a.txt").write_text("a")
        (directory / "b.txt").write_text("b")
        known["a.txt"] = "0" * 64
    files = json.loads((tmp_path / "model" / "manifest.json").read_text())["files"]
    assert files["a.txt"] == {"bytes": 1, "sha256": "0" * 64}
    assert files["b.txt"]["sha256"] == sha256(tmp_path / "model" / "b.txt")
    verify_manifest(tmp_path / "model")
    with pytest.raises(CheckpointError, match=r"a\.txt: its SHA-256"):
        verify_manifest(tmp_path / "model", checksums=True)


def test_processes_may_divide_the_checksums_among_them(tmp_path):
    with write_directory_atomically(tmp_path / "model") as directory:
        for name in "abcde":
            (directory / name).write_text(name)
    for name in "abcde":
        (tmp_path / "model" / name).write_text("x")
        found = []
        for process in range(3):
            try:
                verify_manifest(tmp_path / "model", checksums=True, share=(process, 3))
            except CheckpointError as error:
                found.append(str(error))
        assert len(found) == 1
        assert f"model/{name}: its SHA-256" in found[0]
        (tmp_path / "model" / name).write_text(name)
    assert verify_manifest(tmp_path / "model", checksums=True) == list("abcde")


def test_a_directory_replaces_an_older_save(tmp_path):
    save(tmp_path / "model", "one")
    save(tmp_path / "model", "two")
    assert names(tmp_path) == ["model"]
    assert (tmp_path / "model" / "a.txt").read_text() == "two"


def test_an_interrupted_directory_leaves_the_old_one(tmp_path):
    save(tmp_path / "model", "one")

    def interrupted():
        with write_directory_atomically(tmp_path / "model") as directory:
            (directory / "a.txt").write_text("two")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert names(tmp_path) == ["model"]
    verify_manifest(tmp_path / "model", checksums=True)
    assert (tmp_path / "model" / "a.txt").read_text() == "one"


def test_a_directory_of_somebody_elses_is_never_replaced(tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter.txt").write_text("dear")
    with pytest.raises(UserError, match="home: exists and was not saved by armillary"):
        save(tmp_path / "home", "one")
    assert names(tmp_path / "home") == ["letter.txt"]
    (tmp_path / "empty").mkdir()
    save(tmp_path / "empty", "one")


def test_the_old_directory_comes_back_when_the_last_rename_fails(tmp_path, monkeypatch):
    save(tmp_path / "model", "one")
    rename = Path.rename

    def fail_for_partial(self, target):
        if self.name.endswith(".partial") and Path(target).name == "model":
            raise OSError(5, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail_for_partial)
    with pytest.raises(UserError, match="Input/output error"):
        save(tmp_path / "model", "two")
    assert names(tmp_path) == ["model"]
    assert (tmp_path / "model" / "a.txt").read_text() == "one"


def test_a_directory_set_aside_by_a_crash_comes_back_at_the_next_write(tmp_path):
    """A crash between the two renames leaves only the set-aside directory."""
    save(tmp_path / "model", "one")
    (tmp_path / "model").rename(set_aside(tmp_path / "model"))
    with (
        pytest.raises(RuntimeError),
        write_directory_atomically(tmp_path / "model"),
    ):
        raise RuntimeError
    assert (tmp_path / "model" / "a.txt").read_text() == "one"


KILLED = """
import sys, itertools
from pathlib import Path
from armillary.files import write_directory_atomically
for i in itertools.count():
    with write_directory_atomically(Path(sys.argv[1])) as directory:
        for name in "abcdef":
            (directory / name).write_bytes(bytes([i % 256]) * 50_000)
    print(i, flush=True)
"""


def test_a_save_killed_at_any_moment_leaves_a_whole_one(tmp_path):
    """Cases.md 80. The whole one is in place, or set aside when the kill fell between renames."""
    target = tmp_path / "model"
    for delay in (0.0, 0.003, 0.007, 0.011, 0.017):
        process = subprocess.Popen(
            [sys.executable, "-c", KILLED, str(target)], stdout=subprocess.PIPE
        )
        process.stdout.readline()
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        verify_manifest(target if target.exists() else set_aside(target), checksums=True)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: (d / "a.txt").unlink(), "a.txt is in the manifest but not there"),
        (lambda d: (d / "a.txt").write_text("longer"), "has 6 bytes, the manifest says 3"),
        (lambda d: (d / "a.txt").write_text("eno"), "its SHA-256 is not the manifest's"),
        (lambda d: (d / "manifest.json").write_text("{}"), "is no manifest"),
        (lambda d: (d / "manifest.json").unlink(), "cannot be read: No such file"),
    ],
)
def test_a_damaged_directory_is_named(tmp_path, damage, message):
    save(tmp_path / "model", "one")
    damage(tmp_path / "model")
    with pytest.raises(CheckpointError, match=message):
        verify_manifest(tmp_path / "model", checksums=True)


@pytest.mark.parametrize("name", ["../a", "/etc/passwd", "a/../../b", "", "a\\b", "./a", "a//b"])
def test_a_manifest_names_only_files_inside(tmp_path, name):
    entry = {"bytes": 1, "sha256": "0"}
    manifest = {"format": "armillary-manifest", "version": 1, "files": {name: entry}}
    write_json(tmp_path / "manifest.json", manifest)
    with pytest.raises(CheckpointError, match="does not name a file inside"):
        verify_manifest(tmp_path)


def test_progress_counts_every_byte(tmp_path):
    (tmp_path / "a").write_bytes(b"x" * 3_000_000)
    steps = []
    digest = sha256(tmp_path / "a", steps.append)
    assert sum(steps) == 3_000_000
    assert len(steps) == 3
    assert digest == sha256(tmp_path / "a")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", r"f\.json: is not JSON: line 1 column 1"),
        (b'{"a": 1,\n "b": }', r"line 2 column 7: Expecting value"),
        (b'{"a": 1, "a": 1}', "key 'a' stands there twice"),
        (b'{"x": {"a": 1, "a": 2}}', "key 'a' stands there twice"),
        (b'{"a": NaN}', "NaN is no number"),
        (b'{"a": -Infinity}', "Infinity is no number"),
        (b"[1]", "must hold a JSON object, not list"),
        (b'{"a": "\xff"}', "utf-8"),
        (b'{"a":' * 100_000, "nested too deep"),
        (b'{"a": ' + b"9" * 10_000 + b"}", "is not JSON"),
    ],
)
def test_json_that_is_wrong_is_named_in_one_line(text, message):
    with pytest.raises(CheckpointError, match=message) as caught:
        parse_json(text, "f.json")
    assert "\n" not in str(caught.value)


def test_json_files_are_bounded_and_errors_name_them(tmp_path):
    write_json(tmp_path / "a.json", {"é": [1]})
    assert read_json(tmp_path / "a.json") == {"é": [1]}
    with pytest.raises(CheckpointError, match="has 24 bytes; at most 8 are read"):
        read_json(tmp_path / "a.json", limit=8)
    with pytest.raises(CheckpointError, match=r"b\.json: cannot be read: No such file"):
        read_json(tmp_path / "b.json")


def test_a_mapped_file_is_its_bytes_and_cannot_be_written(tmp_path):
    (tmp_path / "a").write_bytes(b"abc")
    mapped = map_file(tmp_path / "a")
    assert bytes(mapped) == b"abc"
    with pytest.raises(ValueError, match="read-only"):
        mapped[0] = 1
    (tmp_path / "empty").write_bytes(b"")
    assert map_file(tmp_path / "empty").size == 0
    with pytest.raises(CheckpointError, match="cannot be read"):
        map_file(tmp_path / "absent")
