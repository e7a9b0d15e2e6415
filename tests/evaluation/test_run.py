"""An evaluation goes on where it ended, alone in its directory, and tells how far it is."""

import json
import os
import signal
import threading
from dataclasses import dataclass, replace

import filelock
import pytest

from armillary.errors import UserError
from armillary.evaluation.budget import Speed
from armillary.evaluation.results import FILE, read_results
from armillary.evaluation.run import Progress, Stopped, evaluate
from support.evaluations import MadeUpScorer, MadeUpTask, a_run

TASKS = [MadeUpTask(), MadeUpTask(name="other", lengths=(16, 32), seed=1)]


def test_what_is_returned_is_what_is_written(tmp_path):
    run, rows = evaluate(MadeUpScorer(), a_run(), TASKS, tmp_path / "new" / "out")
    assert (run, rows) == read_results(tmp_path / "new" / "out")
    assert [row.length for row in rows] == [8] * 6 + [16] * 6 + [16] * 6 + [32] * 6
    assert run.tasks["made-up"]["lengths"] == "8, 16"
    assert run.tasks["other"]["cells"] == 4


def test_every_cell_begins_anew(tmp_path):
    scorer = MadeUpScorer()
    evaluate(scorer, a_run(), TASKS, tmp_path)
    assert scorer.begun == 8


def test_what_is_done_is_not_asked_again(tmp_path):
    whole = evaluate(MadeUpScorer(), a_run(), TASKS, tmp_path)
    lines = (tmp_path / FILE).read_bytes()
    cut = list(lines.splitlines(keepends=True))
    (tmp_path / FILE).write_bytes(b"".join(cut[:20]))
    scorer = MadeUpScorer()
    assert evaluate(scorer, a_run(), TASKS, tmp_path) == whole
    assert (tmp_path / FILE).read_bytes() == lines
    done = sum('"done"' in line.decode() for line in cut[:20])
    assert scorer.begun == 8 - done
    assert 0 < done < 8
    scorer = MadeUpScorer()
    assert evaluate(scorer, a_run(), TASKS, tmp_path) == whole
    assert scorer.asked == 0


def stop_after(cells, number=signal.SIGTERM):
    def listener(progress: Progress) -> None:
        if progress.done == cells:
            os.kill(os.getpid(), number)

    return listener


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_at_once_and_loses_no_cell(tmp_path, number):
    with pytest.raises(Stopped, match="3 of 8 cells are done and kept") as raised:
        evaluate(MadeUpScorer(), a_run(), TASKS, tmp_path, listeners=[stop_after(3, number)])
    assert raised.value.number == number
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    evaluate(MadeUpScorer(), a_run(), TASKS, tmp_path)
    evaluate(MadeUpScorer(), a_run(), TASKS, tmp_path / "whole")
    assert (tmp_path / FILE).read_bytes() == (tmp_path / "whole" / FILE).read_bytes()


def test_signals_are_left_alone_outside_the_main_thread(tmp_path):
    worker = threading.Thread(target=evaluate, args=(MadeUpScorer(), a_run(), TASKS, tmp_path))
    worker.start()
    worker.join()
    assert len(read_results(tmp_path)[1]) == 24


@dataclass(frozen=True)
class Breaking(MadeUpTask):
    def run(self, cell, scorer):
        raise ZeroDivisionError


def test_a_fault_of_a_task_goes_through_and_keeps_what_was_done(tmp_path):
    with pytest.raises(ZeroDivisionError):
        evaluate(MadeUpScorer(), a_run(), [MadeUpTask(), Breaking(name="b")], tmp_path)
    assert len(read_results(tmp_path)[1]) == 12


@pytest.mark.parametrize(
    ("run", "tasks", "said"),
    [
        (a_run(seed=5), TASKS, "seed is 0 there, 5 here"),
        (a_run(), TASKS[:1], "tasks.other.version is 1 there, left out here"),
        (a_run(), [replace(TASKS[0], instances=4), TASKS[1]], "instances is 3 there, 4 here"),
        (a_run(), [replace(TASKS[0], version=2), TASKS[1]], "version is 1 there, 2 here"),
        (a_run(), [replace(TASKS[0], lengths=(8, 9)), TASKS[1]], 'lengths is "8, 16" there'),
    ],
)
def test_another_evaluation_is_refused_by_the_setting_that_differs(tmp_path, run, tasks, said):
    evaluate(MadeUpScorer(), a_run(), TASKS, tmp_path)
    before = (tmp_path / FILE).read_bytes()
    with pytest.raises(UserError, match="is of another evaluation") as raised:
        evaluate(MadeUpScorer(), run, tasks, tmp_path)
    assert said in str(raised.value)
    assert (tmp_path / FILE).read_bytes() == before


def test_two_do_not_share_a_directory(tmp_path):
    with (
        filelock.FileLock(tmp_path / ".lock"),
        pytest.raises(UserError, match="another process is evaluating here"),
    ):
        evaluate(MadeUpScorer(), a_run(), TASKS, tmp_path)
    evaluate(MadeUpScorer(), a_run(), TASKS, tmp_path)


def test_tasks_of_one_name_are_refused(tmp_path):
    with pytest.raises(ValueError, match="have one name"):
        evaluate(MadeUpScorer(), a_run(), [MadeUpTask(), MadeUpTask()], tmp_path)


def test_a_directory_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file: cannot be written"):
        evaluate(MadeUpScorer(), a_run(), TASKS, tmp_path / "file")


def test_time_left_comes_from_the_work_that_was_done(tmp_path, monkeypatch):
    """Lengths 8, 8, 16, 16 and 16, 16, 32, 32, and a clock that moves a second a token."""
    now = [0.0]
    monkeypatch.setattr("armillary.evaluation.run.time.monotonic", lambda: now[0])

    @dataclass(frozen=True)
    class Slow(MadeUpTask):
        def run(self, cell, scorer):
            now[0] += cell.work[0][1]
            return super().run(cell, scorer)

    tasks = [Slow(), Slow(name="other", lengths=(16, 32))]
    heard: list[Progress] = []
    evaluate(MadeUpScorer(), a_run(), tasks, tmp_path, listeners=[heard.append])
    assert [progress.done for progress in heard] == list(range(9))
    assert heard[0] == Progress(0, 8, "made-up/8/0", None)
    assert heard[-1].cell is None
    assert [round(each.seconds_left) for each in heard[1:]] == [136, 128, 112, 96, 80, 64, 32, 0]

    heard = []
    evaluate(
        MadeUpScorer(),
        a_run(),
        tasks,
        tmp_path / "b",
        listeners=[heard.append],
        speed=Speed(2.0, 0.0),
    )
    assert heard[0].seconds_left == 288


def test_lines_hold_neither_times_nor_paths(tmp_path):
    evaluate(MadeUpScorer(), a_run(), TASKS, tmp_path)
    text = (tmp_path / FILE).read_text()
    assert str(tmp_path) not in text
    assert all(json.loads(line) for line in text.splitlines())
