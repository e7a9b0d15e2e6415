"""A run shows itself in lines that fit 80 columns, and prints its result apart from them."""

import io
import json
import math
from pathlib import Path

import pytest
from rich.console import Console

from armillary.cli import _training
from armillary.cli._progress import SECONDS_BETWEEN_LINES
from armillary.cli._training import (
    Smoothed,
    Status,
    TrainingDisplay,
    fitting,
    print_event,
    print_result,
)
from armillary.training.events import CheckpointSaved, Notice, RunEnded, Sampled
from armillary.training.history import History
from support.run_events import done, started, validated, whole_run


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(_training.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def terminal(monkeypatch):
    """A terminal of 80 columns; called, it gives what was drawn so far."""
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, color_system=None, width=80)
    monkeypatch.setattr(_training, "progress_console", lambda: console)
    return screen.getvalue


def show(events, **options):
    with TrainingDisplay(**options) as display:
        for event in events:
            display(event)


def drawn_lines(drawn):
    """What stays and what stood for a while, without the codes that move the cursor."""
    for code in ("\x1b[1A", "\x1b[2K", "\x1b[?25l", "\x1b[?25h", "\r"):
        drawn = drawn.replace(code, "\n")
    return [line.rstrip() for line in drawn.split("\n")]


def test_without_a_terminal_lines_come_now_and_then(clock, capsys):
    def events():
        yield started()
        for step in (10, 20, 30):
            yield done(step, tokens_per_second=512.0, learning_rate=3e-4, loss=2.0)
        clock[0] += SECONDS_BETWEEN_LINES
        yield done(40, tokens_per_second=512.0, learning_rate=3e-4, loss=2.0)
        yield done(50, tokens_per_second=512.0, learning_rate=3e-4, loss=2.0)

    show(events())
    output, errors = capsys.readouterr()
    assert output == ""
    assert errors.splitlines() == [
        "step 0: trains 5.30 M parameters, bfloat16 on cpu",
        "step 0: 200 steps of 8 × 64 tokens, 1.2 epochs",
        "step 10 of 200, 5 %, 0:03:10 left, loss 2.000, 512 tokens/s, lr 3.0e-04, MFU 61 %",
        "step 40 of 200, 20 %, 0:02:40 left, loss 2.000, 512 tokens/s, lr 3.0e-04, MFU 61 %",
        # The end is always said.
        "step 50 of 200, 25 %, 0:02:30 left, loss 2.000, 512 tokens/s, lr 3.0e-04, MFU 61 %",
    ]


def test_what_happens_on_the_way_is_a_line_of_its_own(clock, capsys):
    show(
        [
            validated(0, 3.0),
            validated(1000, 2.0),
            validated(1010, math.nan, best=False),
            Sampled(1010, "def :smile:(", "a,\nb)\x1b[2J[b]"),
            CheckpointSaved(1010, "runs/[red]x/\x07", 0.5),
            Notice(1010, "one\ntwo"),
        ]
    )
    assert capsys.readouterr().err.splitlines() == [
        "step 0: validation 3.000 nats per token, 1.500 bits per byte",
        "step 1,000: validation 2.000 nats per token, 1.000 bits per byte, the best so far",
        "step 1,010: validation no number nats per token, no number bits per byte",
        "step 1,010 wrote: def :smile:(a,\\nb)\\x1b[2J[b]",
        "step 1,010: saved runs/[red]x/\\x07",
        "step 1,010: one two",
    ]


def test_a_start_says_what_is_trained_and_on_what(clock, capsys):
    show([started(100, trained_parameters=460_000, parameters=134_515_008, processes=4)])
    assert capsys.readouterr().err.splitlines() == [
        "step 100: trains 460 k of 135 M parameters, bfloat16 on cpu, 4 processes",
        "step 100: 200 steps of 8 × 64 tokens, 1.2 epochs",
    ]


def test_on_a_terminal_two_lines_stay_below_and_go_away(clock, terminal):
    show(whole_run())
    drawn = terminal()
    lines = drawn_lines(drawn)
    assert "step 100  saved runs/tiny/checkpoints/step-100" in lines
    assert any(
        line.startswith("━") and line.endswith("  step 200 of 200  100 %  0:00:00 left")
        for line in lines
    )
    assert "loss 2.237  validation 2.000  1 skipped  2,052 tokens/s  lr 2.0e-03  MFU 61 %" in lines
    assert drawn.endswith("\x1b[1A\x1b[2K")  # the two lines are cleared at the end


def test_no_line_is_wider_than_the_terminal(clock, terminal):
    """Figures as wide as they get, a notice of 300 characters, a path and a text without spaces."""
    wide = {"tokens_per_second": 123_456_789.0, "skipped_so_far": 12_345, "loss": 12.345}
    show(
        [
            started(steps=10_000_000, rows=16_384, length=131_072, processes=4096),
            done(9_999_990, **wide),
            validated(9_999_990, 2.0),
            Notice(9_999_990, "word " * 60),
            CheckpointSaved(9_999_990, "x" * 200, 1.0),
            Sampled(9_999_990, "y" * 100, "\n".join(["z z " * 50] * 3)),
            done(9_999_999, **wide),
        ]
    )
    lines = drawn_lines(terminal())
    assert max(map(len, lines)) <= 80
    figures = "loss 12.345  validation 2.000  12,345 skipped  123,456,789 tokens/s"
    assert any(line.startswith(figures) for line in lines)
    # What wraps goes on beside the step, not below it.
    label = "step 9,999,990  "
    assert f"{label}word word" in "\n".join(lines)
    assert sum(line.startswith(" " * len(label) + "word") for line in lines) == 4


def test_results_pass_the_lines_below_by(clock, terminal, capsys):
    with TrainingDisplay() as display:
        display(started())
        print("result")
    assert capsys.readouterr().out == "result\n"
    assert "result" not in terminal()


def test_when_asked_a_terminal_gets_lines_only(clock, terminal):
    show([started(), done(10)], live=False)
    drawn = terminal()
    assert "step 10 of 200, 5 %" in drawn
    assert "\x1b" not in drawn


def test_the_lines_below_go_away_after_an_error_too(clock, terminal):
    def events():
        yield started()
        raise RuntimeError

    with pytest.raises(RuntimeError):
        show(events())
    assert terminal().endswith("\x1b[2K")


def status_of(*events, at=0.0):
    status = Status()
    for event in events:
        status.add(event, at)
    return status


def test_time_left_is_that_of_the_steps_and_of_pauses_like_those_so_far():
    """A second a step; 10 s of validation and 1 s of saving in 50 steps; 150 steps to go."""
    steps = [done(step, tokens_per_second=512.0) for step in (10, 20, 30, 40, 50)]
    status = status_of(started(), *steps)
    assert status.seconds_left(0.0) == pytest.approx(150)
    status = status_of(started(), *steps, validated(50, 1.0), CheckpointSaved(50, "a", 1.0))
    # The clock stood still while it was paused for 3 s.
    assert status.seconds_left(3.0) == pytest.approx(150 * (1 + 3 / 50))
    assert status.seconds_left(13.0) == pytest.approx(150 * (1 + 3 / 50) - 10)
    assert status.seconds_left(1e9) == 0.0


def test_a_pause_before_the_first_step_is_not_expected_again():
    status = status_of(started(40), validated(40, 1.0), done(41, tokens_per_second=512.0))
    assert status.seconds_left(0.0) == pytest.approx(159)


def test_a_slow_first_step_is_forgotten():
    """Compiling: the first step takes a minute, each one after it a second."""
    steps = [done(step, tokens_per_second=512.0) for step in range(2, 101)]
    status = status_of(started(), done(1, tokens_per_second=512 / 60), *steps)
    assert status.seconds_left(0.0) == pytest.approx(100, rel=0.2)


def test_time_left_is_not_made_up():
    assert Status().seconds_left(0.0) is None
    assert status_of(started()).seconds_left(0.0) is None
    assert status_of(started(), done(1, tokens_per_second=0.0)).seconds_left(0.0) is None


def test_what_is_not_known_is_not_said():
    quiet = done(1, loss=math.nan, tokens_per_second=0.0, utilisation=0.0)
    status = status_of(quiet)
    assert status.position(0.0) == ["step 1"]
    assert status.figures() == ["lr 1.0e-04"]


def test_a_skipped_step_leaves_the_loss_alone():
    status = status_of(started(), done(1, loss=2.0), done(2, loss=9.0, skipped="nonfinite"))
    assert status.figures()[0] == "loss 2.000"


def test_half_the_weight_lies_within_thirty_steps():
    smoothed = Smoothed()
    assert smoothed.value is None
    smoothed.add(1.0, 1000)
    smoothed.add(3.0, 30)
    assert smoothed.value == pytest.approx(2.0)
    smoothed.add(math.inf, 30)
    assert smoothed.value == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("width", "line"), [(11, "loss 1  lr2"), (10, "loss 1"), (3, "loss 1"), (99, "loss 1  lr2")]
)
def test_parts_are_shown_whole_or_not_at_all(width, line):
    assert fitting(["loss 1", "lr2"], width) == line


def test_events_for_programs_are_strict_json(capsys):
    print_event(done(1, loss=math.nan))
    facts = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert (facts["kind"], facts["step"], facts["loss"]) == ("step", 1, None)


def test_the_result_stands_beside_what_compressors_reach(capsys):
    print_result(History.of(whole_run()), Path("runs/tiny/summary.html"))
    assert capsys.readouterr().out.splitlines() == [
        "runs/tiny/model",
        "  steps       200 of 200, finished, in 0:01:01",
        "  validation  1.000 bits per byte, 2.000 nats per token",
        "  gzip -9     2.500 bits per byte",
        "  xz -9       1.750 bits per byte",
        "  summary     runs/tiny/summary.html",
    ]


def test_the_result_stands_beside_what_was_before_the_first_step(capsys):
    print_result(History.of([started(), validated(0, 3.5), validated(200, 3.25)]), None)
    assert capsys.readouterr().out.splitlines() == [
        "  steps       0 of 200, in 0:00:00",
        "  before      1.750 bits per byte, 3.500 nats per token",
        "  validation  1.625 bits per byte, 3.250 nats per token",
    ]


def test_a_better_state_on_the_way_is_named(capsys):
    print_result(History.of([started(), validated(50, 1.5), validated(1200, 2.0, False)]), None)
    assert capsys.readouterr().out.splitlines() == [
        "  steps       0 of 200, in 0:00:00",
        "  validation  1.000 bits per byte, 2.000 nats per token",
        "  its best    1.500 nats per token, step 50",
    ]


def test_a_run_that_stopped_has_a_result_too(capsys):
    print_result(History.of([started(), done(7), RunEnded(7, "SIGTERM", 5.0)]), None)
    assert capsys.readouterr().out == "  steps  7 of 200, SIGTERM, in 0:00:05\n"
    print_result(History(), None)
    assert capsys.readouterr().out == "  steps  0, in 0:00:00\n"


def test_the_result_for_programs_has_the_same_facts(capsys):
    print_result(History.of(whole_run()), Path("s.html"), json=True)
    assert json.loads(capsys.readouterr().out) == {
        "kind": "result",
        "step": 200,
        "reason": "finished",
        "model": "runs/tiny/model",
        "summary": "s.html",
        "validation_loss": 2.0,
        "bits_per_byte": 1.0,
        "best_validation_loss": 2.0,
        "best_step": 200,
        "compressors": {"gzip -9": 2.5, "xz -9": 1.75},
        "seconds": 61.0,
        "tokens": 102_400,
    }
    print_result(History.of([validated(1, math.nan)]), None, json=True)
    facts = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert (facts["validation_loss"], facts["best_validation_loss"]) == (None, None)
