"""The log of a run holds every event, strictly, through kills and resumes."""

import json
import math

import pytest

from armillary.errors import UserError
from armillary.training.events import Notice, RunEnded, RunStarted, Sampled, StepDone
from armillary.training.log import EVENTS, JsonLog, read_log
from support.run_events import done, started, validated, whole_run


def write(path, *events):
    with JsonLog(path) as log:
        for event in events:
            log(event)


def steps(events):
    return [event.step for event in events if isinstance(event, StepDone)]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "log.jsonl"


def test_what_is_written_is_read_back(path):
    events = [event for event in whole_run() if event.step != 117]
    write(path, *events)
    assert read_log(path) == events
    assert {type(event) for event in whole_run()} == set(EVENTS.values())


def test_what_is_no_number_is_null_in_the_file_and_nan_when_read(path):
    write(path, started(config={"a": [math.inf]}), done(1, loss=math.nan, gradient_norm=-math.inf))
    lines = path.read_text().splitlines()
    assert [json.loads(line, parse_constant=pytest.fail)["kind"] for line in lines] == [
        "start",
        "step",
    ]
    assert json.loads(lines[0])["config"] == {"a": [None]}
    assert json.loads(lines[1])["loss"] is None
    _, step = read_log(path)
    assert math.isnan(step.loss)
    assert math.isnan(step.gradient_norm)
    assert step.skipped is None


def test_texts_come_through_whatever_they_hold(path):
    """Lone surrogates and separators of lines, which a tokenizer of bytes may give."""
    text = "\ud800 \u2028 \x85 \x00 \n ö"
    write(path, started(), Sampled(1, text, text))
    assert path.read_bytes().count(b"\n") == 2
    assert read_log(path) == [started(), Sampled(1, text, text)]


def test_each_event_is_in_the_file_at_once(path):
    with JsonLog(path) as log:
        log(started())
        log(done(1))
        assert steps(read_log(path)) == [1]


def test_a_run_that_begins_begins_a_new_log(path):
    write(path, started(), done(1))
    write(path, started(), done(2))
    assert steps(read_log(path)) == [2]


def test_a_run_that_does_not_start_leaves_the_log_alone(path):
    """As when its settings or its data are refused."""
    write(path, started(), done(1))
    write(path, Notice(0, "a"))
    assert read_log(path) == [started(), done(1)]


def test_what_is_told_before_the_start_is_in_the_log(path):
    write(path, Notice(0, "a"), started(), done(1))
    write(path, Notice(0, "b"), started(1))
    assert read_log(path) == [Notice(0, "a"), started(), done(1), Notice(0, "b"), started(1)]


def test_a_resumed_log_reads_as_one_run(path):
    """Killed after step 9, gone on from the checkpoint of step 7; before, stopped after 4."""
    write(path, started(), *map(done, range(1, 5)), RunEnded(4, "SIGTERM", 1.0))
    write(path, started(4), *map(done, range(5, 10)), validated(9, 1.0))
    write(path, started(7), *map(done, range(8, 11)), RunEnded(10, "finished", 3.0))
    events = read_log(path)
    assert steps(events) == list(range(1, 11))
    assert [e.step for e in events if isinstance(e, RunStarted)] == [0, 4, 7]
    assert [e for e in events if isinstance(e, RunEnded)] == [RunEnded(10, "finished", 3.0)]
    assert not any(e.kind == "validation" for e in events)


def test_lines_that_are_kept_stay_as_they_are(path):
    write(path, started(), done(1), done(2), done(3))
    before = path.read_bytes().splitlines(keepends=True)
    write(path, started(2))
    assert path.read_bytes().splitlines(keepends=True)[:3] == before[:3]
    assert read_log(path) == [started(), done(1), done(2), started(2)]


def test_a_resume_without_a_log_begins_one(path):
    write(path, started(7), done(8))
    assert steps(read_log(path)) == [8]


@pytest.mark.parametrize("cut", [1, 2, 200])
def test_a_line_cut_short_is_left_out_with_a_notice(path, cut):
    write(path, started(), done(1), done(2))
    path.write_bytes(path.read_bytes()[:-cut])
    said = Notice(1, "log.jsonl: the last line was cut short and is left out")
    assert read_log(path) == [started(), done(1), said]
    write(path, started(1), done(2))
    assert read_log(path) == [started(), done(1), said, started(1), done(2)]


def test_a_line_cut_short_among_lines_that_go_anyway_is_no_news(path):
    write(path, started(), done(1), done(2), done(3))
    path.write_bytes(path.read_bytes()[:-5])
    write(path, started(1), done(2))
    assert read_log(path) == [started(), done(1), started(1), done(2)]


LINE = '{"kind": "notice", "step": 1, "text": "a"}\n'


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{\n", "line 2: is not JSON: line 1 column 2"),
        ("[]\n", "line 2: must hold a JSON object, not list"),
        ('{"kind": "stop", "step": 1}\n', "line 2: kind is 'stop', must be one of start, step, "),
        ('{"step": 1}\n', "line 2: kind is None"),
        ('{"kind": ["step"]}\n', "line 2: kind is ['step']"),
        (LINE.replace("text", "txt"), "line 2: a notice has no 'txt' (did you mean 'text'?)"),
        ('{"kind": "notice", "step": 1}\n', "line 2: 'text' is missing"),
        (LINE.replace("1", "1.0"), "line 2: step must be int, found 1.0"),
        (LINE.replace("1", "true"), "line 2: step must be int, found True"),
        (LINE.replace('"a"', "null"), "line 2: text must be str, found None"),
        (
            '{"kind": "end", "step": 1, "reason": "a", "seconds": true}\n',
            "line 2: seconds must be float, found True",
        ),
        (
            '{"kind": "end", "step": 1, "reason": "a", "seconds": 1, "model": 2}\n',
            "line 2: model must be str | None, found 2",
        ),
        (
            '{"kind": "end", "step": 1, "reason": "a", "seconds": 1, "compressors": {"xz": "1"}}\n',
            "line 2: compressors must be dict[str, float], found {'xz': '1'}",
        ),
        (LINE.replace("1", "NaN"), "line 2: is not JSON: NaN is no number"),
        (LINE.replace("}", ', "step": 2}'), "line 2: is not JSON: key 'step' stands there twice"),
    ],
)
def test_a_line_that_is_no_event_is_named(path, line, message):
    path.write_text(LINE + line + LINE)
    with pytest.raises(UserError) as error:
        read_log(path)
    assert str(error.value).startswith(f"{path}: {message}")
    with pytest.raises(UserError, match="move the file away to go on with a new log"):
        write(path, started(5))
    assert path.read_text() == LINE + line + LINE


def test_what_newer_events_may_leave_out_may_be_missing(path):
    path.write_text('{"kind": "end", "step": 3, "reason": "finished", "seconds": 1}\n')
    assert read_log(path) == [RunEnded(3, "finished", 1.0)]


def test_a_log_that_is_not_there_is_one_line(path):
    with pytest.raises(UserError, match="log.jsonl: is not there"):
        read_log(path)


def test_a_disk_that_is_full_is_one_line(tmp_path):
    with pytest.raises(UserError, match="cannot be written"):
        write(tmp_path / "none" / "log.jsonl", started())
    log = JsonLog(tmp_path / "log.jsonl")
    log(started())
    log.close()
    log._file = open("/dev/full", "ab", buffering=0)  # noqa: SIM115  # no space to write to
    with pytest.raises(UserError, match=r"log\.jsonl: cannot be written: No space left on device"):
        log(done(1))
    log.close()
