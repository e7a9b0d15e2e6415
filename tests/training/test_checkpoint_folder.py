"""The newest whole checkpoint of a run is never lost, and no other than ours is touched."""

import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from armillary.errors import UserError
from armillary.files import MANIFEST, set_aside
from armillary.training.checkpoint import STATE, load_checkpoint, verify_checkpoint
from armillary.training.checkpoint_folder import CheckpointFolder
from support import small_run
from support.ranks import fresh_processes

TENSORS = "rank-00000.safetensors"


@pytest.fixture
def run():
    """Something to save."""
    return small_run.build()


def names(folder):
    return sorted(path.name for path in folder.root.iterdir())


def no_reports(line):
    raise AssertionError(f"reported: {line}")


def test_the_newest_is_found_by_its_step(tmp_path, run):
    folder = CheckpointFolder(tmp_path / "new" / "folder", keep_last=3)
    assert folder.newest(no_reports) is None
    assert folder.best() is None
    for step in (9, 100_000_000, 10):
        assert folder.save(step, *run, {"at": step}) == folder.root / f"step-{step:08}"
    assert folder.newest(no_reports).name == "step-100000000"


def test_the_last_and_the_best_are_kept(tmp_path, run):
    folder = CheckpointFolder(tmp_path, keep_last=2, keep_best=2)
    for step, metric in enumerate([3.0, 1.0, 2.0, None, 4.0, float("nan"), 5.0], start=1):
        folder.save(step, *run, {}, metric)
        assert f"step-{step:08}" in names(folder)
    assert names(folder) == [f"step-{step:08}" for step in (2, 3, 6, 7)]
    assert folder.best().name == "step-00000002"


def test_of_equal_metrics_the_later_is_best(tmp_path, run):
    folder = CheckpointFolder(tmp_path, keep_last=1, keep_best=1)
    for step in (1, 2, 3):
        folder.save(step, *run, {}, metric=1.0 if step < 3 else 2.0)
    assert folder.best().name == "step-00000002"
    assert names(folder) == ["step-00000002", "step-00000003"]


def test_the_one_just_written_stays_though_later_ones_are_there(tmp_path, run):
    folder = CheckpointFolder(tmp_path, keep_last=1, keep_best=0)
    CheckpointFolder(tmp_path, keep_last=2).save(20, *run, {})
    folder.save(10, *run, {})
    assert names(folder) == ["step-00000010", "step-00000020"]


@pytest.mark.parametrize(("last", "best"), [(0, 1), (1, -1)])
def test_a_folder_that_would_keep_nothing_is_refused(tmp_path, last, best):
    with pytest.raises(ValueError, match=f"keep_last is {last}, keep_best {best}"):
        CheckpointFolder(tmp_path, keep_last=last, keep_best=best)


def cut(path):
    data = (path / TENSORS).read_bytes()
    (path / TENSORS).write_bytes(data[: len(data) // 2])


def flip(path):
    data = bytearray((path / TENSORS).read_bytes())
    data[len(data) // 2] ^= 4
    (path / TENSORS).write_bytes(data)


DAMAGES = [
    (cut, r"rank-00000\.safetensors: has \d+ bytes, the manifest says"),
    (flip, r"rank-00000\.safetensors: its SHA-256 is not"),
    (lambda path: (path / STATE).unlink(), r"state\.json is in the manifest but not there"),
    (lambda path: (path / MANIFEST).unlink(), r"manifest\.json: cannot be read: No such file"),
    (lambda path: (path / MANIFEST).write_text("{"), r"manifest\.json: is not JSON"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGES)
def test_a_damaged_newest_is_reported_and_the_one_before_is_used(tmp_path, run, damage, message):
    """And the run, gone on, writes that step anew; what was damaged is kept beside it."""
    folder = CheckpointFolder(tmp_path, keep_last=2)
    for step in (1, 2, 3):
        folder.save(step, *run, {})
    damage(tmp_path / "step-00000003")
    lines = []
    assert folder.newest(lines.append) == tmp_path / "step-00000002"
    assert len(lines) == 1
    assert "\n" not in lines[0]
    assert "step-00000003" in lines[0]
    assert re.search(message, lines[0])

    folder.save(3, *run, {})
    assert folder.newest(no_reports) == tmp_path / "step-00000003"
    assert {name.split("-")[1][:8] for name in names(folder)} >= {"00000002", "00000003"}


def test_when_all_are_damaged_that_is_an_error(tmp_path, run):
    folder = CheckpointFolder(tmp_path)
    for step in (1, 2):
        flip(folder.save(step, *run, {}))
    lines = []
    with pytest.raises(UserError, match="all 2 checkpoints are damaged; move them away"):
        folder.newest(lines.append)
    assert [line.split("step-")[1][:8] for line in lines] == ["00000002", "00000001"]


def test_what_others_named_or_made_is_left_alone(tmp_path, run):
    """Cases.md 80."""
    others = ["step_abc", "step-12", "step-00000009.tmp", "notes", ".step-00000001.partial"]
    for name in (*others, "step-00000050"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.pt").write_text("theirs")
    (tmp_path / "step-00000060").write_text("a file")
    folder = CheckpointFolder(tmp_path, keep_last=1, keep_best=0)
    assert folder.newest(no_reports) is None
    for step in (1, 2):
        folder.save(step, *run, {})
    assert folder.newest(no_reports) == tmp_path / "step-00000002"
    assert set(names(folder)) == {*others, "step-00000050", "step-00000060", "step-00000002"}
    with pytest.raises(UserError, match="step-00000050: exists and was not saved by armillary"):
        folder.save(50, *run, {})


def test_what_killed_processes_left_is_removed_by_the_next_save(tmp_path, run):
    folder = CheckpointFolder(tmp_path)
    left = [".step-00000001.0a1b2c3d.partial", ".step-00000001.0a1b2c3d.removed"]
    for name in left:
        (tmp_path / name).mkdir()
        (tmp_path / name / TENSORS).write_bytes(b"half")
    folder.save(2, *run, {})
    assert names(folder) == ["step-00000002"]


def test_a_checkpoint_between_two_renames_is_brought_back(tmp_path, run):
    """The moment at which a killed process has moved the old one away, and the new one not yet."""
    folder = CheckpointFolder(tmp_path)
    path = folder.save(1, *run, {})
    path.rename(set_aside(path))
    assert folder.newest(no_reports) == path
    shutil.copytree(path, set_aside(path))
    assert folder.newest(no_reports) == path  # and the moment after the second
    assert names(folder) == ["step-00000001"]


def test_a_checkpoint_that_cannot_be_removed_is_one_line(tmp_path, run, monkeypatch):
    folder = CheckpointFolder(tmp_path, keep_last=1, keep_best=0)
    folder.save(1, *run, {})

    def refuse(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(shutil, "rmtree", refuse)
    with pytest.raises(UserError, match="step-00000001: cannot be removed: Permission denied"):
        folder.save(2, *run, {})
    monkeypatch.undo()
    assert folder.newest(no_reports) == tmp_path / "step-00000002"
    assert not (tmp_path / "step-00000001").exists()  # half removed, it goes by another name


def test_ten_kills_while_saving_lose_nothing(tmp_path):
    """Cases.md 80. Steps rise from process to process; each finds what the ones before saved."""
    moments = random.Random(4)
    folder = CheckpointFolder(tmp_path, keep_last=1, keep_best=0)
    last = 0
    for _ in range(10):
        process = fresh_processes().Process(
            target=small_run.save_forever, args=(tmp_path, last + 1)
        )
        process.start()
        before = last
        while small_run.last_saved(tmp_path) <= before:
            assert process.is_alive()
            time.sleep(0.002)
        time.sleep(moments.random() * 0.15)
        os.kill(process.pid, signal.SIGKILL)
        process.join()

        path = folder.newest(no_reports)
        objective, optimizer = small_run.build()
        state = load_checkpoint(path, objective, optimizer)
        # It may have been killed after the checkpoint stood and before it was told.
        assert state.step >= small_run.last_saved(tmp_path) > before
        assert state.facts == {"step": state.step}
        for parameter in objective.parameters():
            assert torch.equal(parameter, torch.full_like(parameter, state.step))
        last = state.step
    folder.save(last + 1, objective, optimizer, {})
    assert names(folder) == ["saved", f"step-{last + 1:08}"]


FULL = """
import os, sys
from pathlib import Path
from armillary.training.checkpoint_folder import CheckpointFolder
from support import small_run
folder = Path(sys.argv[1])
small_run.save_forever(folder, 1)
print((folder / "error").read_text())
print(sorted(os.listdir(folder)))
print(CheckpointFolder(folder).newest(print).name)
"""


def test_a_real_full_disk_is_one_line_and_the_newest_stays(tmp_path, run):
    """Cases.md 80. The disk has room for two checkpoints and a half, three are needed at a time."""
    path = CheckpointFolder(tmp_path / "size").save(1, *run, {"step": 1})
    size = sum(file.stat().st_size for file in path.iterdir()) * 5 // 2 >> 10
    mount = f"mount -t tmpfs -o size={size}k none {tmp_path} && exec"
    program = [sys.executable, "-c", FULL, str(tmp_path)]
    paths = [str(Path(__file__).parents[1]), *sys.path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    if shutil.which("unshare") is None or in_a_space_of_its_own(f"{mount} true").returncode:
        pytest.skip("no file system can be mounted here")
    done = in_a_space_of_its_own(f"{mount} {shlex.join(program)}", env=environment, timeout=60)
    assert done.returncode == 0, done.stderr
    error, listing, newest = done.stdout.splitlines()
    assert "No space left on device" in error
    assert listing == str(["error", "saved", "step-00000001", "step-00000002"])
    assert newest == "step-00000002"


def in_a_space_of_its_own(command, **entries):
    """Run a shell command that may mount, which nobody else sees."""
    return subprocess.run(
        ["unshare", "-rm", "sh", "-c", command],
        check=False, capture_output=True, text=True, **entries,
    )  # fmt: skip


def test_a_bare_checkpoint_can_be_verified_alone(tmp_path, run):
    path = CheckpointFolder(tmp_path).save(4, *run, {"a": 1}, metric=0.5)
    state = verify_checkpoint(path)
    assert (state.step, state.metric, state.facts) == (4, 0.5, {"a": 1})
