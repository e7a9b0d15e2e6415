"""TensorBoard reads back what was written, and a resumed run draws each step once."""

import logging
import math
import sys

import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from armillary.errors import UserError
from armillary.training.events import CheckpointSaved, Notice, Sampled
from armillary.training.tensorboard import TensorBoardLog
from support.run_events import done, started, validated


def write(directory, events):
    with TensorBoardLog(directory) as log:
        for event in events:
            log(event)


def read(directory):
    logging.getLogger("tensorboard").setLevel(logging.ERROR)  # it warns of every resume
    accumulator = EventAccumulator(str(directory), size_guidance={"scalars": 0, "tensors": 0})
    return accumulator.Reload()


def curve(directory, name):
    return [(point.step, point.value) for point in read(directory).Scalars(name)]


def text(directory, name):
    (tensor,) = read(directory).Tensors(f"{name}/text_summary")
    return tensor.step, tensor.tensor_proto.string_val[0].decode()


def test_each_curve_is_there(tmp_path):
    write(tmp_path, [started(), done(10, loss=3.5), validated(10, 3.25), done(20, loss=3.0)])
    assert curve(tmp_path, "train/loss") == [(10, 3.5), (20, 3.0)]
    assert curve(tmp_path, "train/gradient norm")[0][1] == pytest.approx(done(10).gradient_norm)
    assert curve(tmp_path, "train/learning rate")[0][1] == pytest.approx(1e-3)
    assert curve(tmp_path, "speed/tokens per second") == [(10, 2051.0), (20, 2054.0)]
    assert curve(tmp_path, "speed/utilisation")[0][1] == pytest.approx(0.61)
    assert curve(tmp_path, "speed/peak memory in bytes")[0][1] == pytest.approx(1.2e9)
    assert curve(tmp_path, "validation/loss") == [(10, 3.25)]
    assert curve(tmp_path, "validation/bits per byte") == [(10, 1.625)]


def test_a_run_that_starts_anew_takes_back_what_an_earlier_start_drew(tmp_path):
    write(tmp_path, [started(), *(done(step, loss=1.0) for step in range(1, 4))])
    write(tmp_path, [started(), *(done(step, loss=2.0) for step in range(1, 3))])
    assert curve(tmp_path, "train/loss") == [(1, 2.0), (2, 2.0)]


def test_without_a_start_nothing_is_written(tmp_path):
    write(tmp_path, [Notice(0, "n")])
    assert list(tmp_path.iterdir()) == []


def test_a_resumed_curve_does_not_fold_back(tmp_path):
    """Killed after step 9, gone on from step 7: steps 8 and 9 are those of the second run."""
    write(tmp_path, [started(), *(done(step, loss=1.0) for step in range(1, 10))])
    write(tmp_path, [started(7), *(done(step, loss=2.0) for step in range(8, 12))])
    expected = [(step, 1.0 if step <= 7 else 2.0) for step in range(1, 12)]
    assert curve(tmp_path, "train/loss") == expected


def test_what_is_no_number_leaves_a_gap(tmp_path):
    skipped = done(2, loss=math.nan, gradient_norm=math.inf, skipped="nonfinite", skipped_so_far=1)
    steps = [done(1, loss=1.0), skipped, done(3, loss=1.0, skipped_so_far=1)]
    write(tmp_path, [started(), *steps])
    assert [step for step, _ in curve(tmp_path, "train/loss")] == [1, 3]
    assert [step for step, _ in curve(tmp_path, "train/gradient norm")] == [1, 3]
    assert curve(tmp_path, "train/skipped steps") == [(1, 0), (2, 1), (3, 1)]


def test_texts_are_code_to_markdown(tmp_path):
    hostile = "<script>\n# [x](y) \x1b[2J\n\u2028**z**"
    write(tmp_path, [Notice(0, "*n*"), started(), Sampled(5, "a", hostile)])
    assert text(tmp_path, "sample") == (
        5,
        "    a → <script>\n    # [x](y) \\x1b[2J\n    \\u2028**z**",
    )
    assert text(tmp_path, "notice") == (0, "    *n*")
    lines = text(tmp_path, "settings")[1].splitlines()
    assert all(line.startswith("    ") for line in lines)
    settings = yaml.safe_load("\n".join(line[4:] for line in lines))
    assert settings["train"]["steps"] == 200


def test_what_was_drawn_is_on_the_disk_when_a_checkpoint_is(tmp_path):
    with TensorBoardLog(tmp_path) as log:
        log(started())
        log(done(1, loss=1.0))
        log(CheckpointSaved(1, "a", 0.1))
        assert curve(tmp_path, "train/loss") == [(1, 1.0)]


def test_without_tensorboard_the_extra_is_named(tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("torch.utils.tensorboard")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(UserError, match=r'pip install "armillary\[tensorboard\]"') as error:
        TensorBoardLog(tmp_path)
    assert "\n" not in str(error.value)
