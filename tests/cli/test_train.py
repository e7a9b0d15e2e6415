"""`armillary train` as a process: it ends as it says, and whatever ends it, it goes on."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import yaml

from armillary.checkpoints import open_checkpoint
from armillary.cli import main
from armillary.training.events import StepDone
from armillary.training.log import read_log
from support.runs import entries, write_texts

COMMAND = [sys.executable, "-m", "armillary", "train"]


def a_file(directory: Path, out: str, **sections) -> Path:
    """A run's file; its texts are written when they are not there."""
    if not (directory / "texts").is_dir():
        write_texts(directory / "texts")
    made = entries(directory, **sections) | {"out": str(directory / out)}
    path = directory / f"{out}.yaml"
    path.write_text(yaml.safe_dump(made))
    return path


def start(run: Path, *options: str) -> subprocess.Popen:
    return subprocess.Popen(
        [*COMMAND, str(run), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_step(process: subprocess.Popen, log: Path, step: int) -> None:
    """Return while the run is past a step, and in the midst of another one."""
    while process.poll() is None:
        if log.exists() and f'"kind": "step", "step": {step},' in log.read_text():
            return
        time.sleep(0.02)
    pytest.fail(f"ended before step {step}: {process.communicate()[1]}")


def losses(log: Path) -> dict[int, float]:
    return {event.step: event.loss for event in read_log(log) if isinstance(event, StepDone)}


def weights(model: Path) -> dict[str, np.ndarray]:
    tensors = open_checkpoint(model).tensors
    return {name: tensor.data.copy() for name, tensor in tensors.items()}


def assert_same_bits(one: Path, other: Path) -> None:
    a, b = weights(one), weights(other)
    assert a.keys() == b.keys()
    for name, data in a.items():
        assert np.array_equal(data, b[name]), name


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of 20 steps that nothing disturbs: dropout, four micro-batches, over an epoch."""
    directory = tmp_path_factory.mktemp("runs")
    assert main(["train", str(a_file(directory, "whole"))]) == 0
    return directory


def test_a_killed_run_goes_on_bit_for_bit(whole):
    """kill -9, three times, each time amid a step; saved last after step 7 or 14."""
    run, log = a_file(whole, "killed"), whole / "killed/log.jsonl"
    for step, saved in ((9, 7), (12, 7), (16, 14)):
        process = start(run, *(["--resume"] if step > 9 else []))
        wait_for_step(process, log, step)
        process.kill()
        process.communicate()
        assert max(losses(log)) < 20
        names = [path.name for path in (whole / "killed/checkpoints").glob("step-*")]
        assert max(names) == f"step-{saved:08}"
    assert main(["train", str(run), "--resume"]) == 0
    assert losses(log) == losses(whole / "whole/log.jsonl")
    assert_same_bits(whole / "killed/model", whole / "whole/model")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_first_and_says_how_to_go_on(whole, number, code):
    run = a_file(whole, f"signal{code}")
    out = whole / f"signal{code}"
    process = start(run)
    wait_for_step(process, out / "log.jsonl", 3)
    process.send_signal(number)
    _, said = process.communicate()
    assert process.returncode == code
    assert f"go on with: armillary train {run} --resume" in said.splitlines()[-1]
    step = max(losses(out / "log.jsonl"))
    assert (out / "checkpoints" / f"step-{step:08}").is_dir()
    assert step < 20
    assert main(["train", str(run), "--resume"]) == 0
    assert losses(out / "log.jsonl") == losses(whole / "whole/log.jsonl")
    assert_same_bits(out / "model", whole / "whole/model")


def test_a_damaged_newest_checkpoint_is_reported_and_the_one_before_is_used(whole, capsys):
    run, out = a_file(whole, "damaged"), whole / "damaged"
    process = start(run)
    wait_for_step(process, out / "log.jsonl", 15)
    process.kill()
    process.communicate()
    newest = out / "checkpoints/step-00000014/rank-00000.safetensors"
    data = bytearray(newest.read_bytes())
    data[-100] ^= 1
    newest.write_bytes(data)
    capsys.readouterr()
    assert main(["train", str(run), "--resume"]) == 0
    said = capsys.readouterr().err
    assert "step-00000014/rank-00000.safetensors" in said
    assert "passed over" in said
    assert losses(out / "log.jsonl") == losses(whole / "whole/log.jsonl")
    assert_same_bits(out / "model", whole / "whole/model")


def test_what_it_prints_is_the_result(whole, capsys):
    run = a_file(whole, "printed", train={"steps": 2})
    assert main(["train", str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == str(whole / "printed/model")
    told = {line.split()[0]: line for line in lines[1:]}
    assert "bits per byte" in told["validation"]
    assert "gzip" in told
    assert "xz" in told


def test_for_programs_every_event_is_an_object(whole, capsys):
    run = a_file(whole, "events")
    assert main(["train", str(run), "--set", "train.steps=2", "--json"]) == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [event["step"] for event in events if event["kind"] == "step"] == [1, 2]
    assert events[-1]["kind"] == "result"
    assert events[-1]["model"] == str(whole / "events/model")


def test_every_key_is_told(capsys):
    assert main(["train", "--explain"]) == 0
    told = capsys.readouterr().out
    assert "train.lr  (number, default 0.0003)" in told
    assert "train.steps  (whole number, must be given)" in told
    assert main(["train", "--explain", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {"key", "type", "default", "meaning"} == set(rows[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "no run is named"),
        (["nowhere.yaml"], "nowhere.yaml: cannot be read"),
        (["{run}", "--set", "train.lrr=1"], "unknown key 'train.lrr' (did you mean 'lr'?)"),
        (["{run}", "--set", "data.sources=[missing.txt]"], "missing.txt: no such file"),
        (["{run}", "--set", "train.device=abacus"], "train.device: 'abacus' cannot be used"),
        (["{run}", "--set", "train.micro_batch_size=3"], "8 rows a step do not divide"),
        (["{run}", "--set", "out=/proc/nothing"], "/proc/nothing: cannot be written"),
    ],
)
def test_what_is_wrong_is_one_line_and_exit_code_2(tmp_path, capsys, options, message):
    run = a_file(tmp_path, "wrong")
    assert main(["train", *(option.format(run=run) for option in options)]) == 2
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("armillary:")]
    assert len(said) == 1
    assert message in said[0]
    assert not (tmp_path / "wrong/model").exists()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="only POSIX has resource limits")
def test_a_file_system_that_takes_no_more_keeps_the_checkpoint_before(whole):
    """The limit on a file's size stands for a full disk: writing fails in the midst."""
    run, out = a_file(whole, "full"), whole / "full"
    script = (
        "import resource, signal, sys; from armillary.cli import main\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "import armillary.training.loop as loop\n"
        "plain = loop.Trainer._save\n"
        "def save(self, *a):\n"
        "    if self.progress.step == 14:\n"
        "        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "    plain(self, *a)\n"
        "loop.Trainer._save = save\n"
        f"sys.exit(main(['train', {str(run)!r}]))"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("armillary: ")
    assert "cannot be written: File too large" in last
    names = sorted(path.name for path in (out / "checkpoints").iterdir())
    assert names == ["step-00000007"]
    assert main(["train", str(run), "--resume"]) == 0
    assert_same_bits(out / "model", whole / "whole/model")
