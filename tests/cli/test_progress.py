"""Progress is a bar on a terminal, and elsewhere a line now and then; never on standard output."""

import io

import pytest
from rich.console import Console

from armillary.cli import _progress
from armillary.cli._progress import SECONDS_BETWEEN_LINES, TransferProgress


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(_progress.time, "monotonic", lambda: now[0])
    return now


def test_without_a_terminal_lines_come_now_and_then(clock, capsys):
    with TransferProgress() as progress:
        for done in (1000, 2000, 3000):
            progress.report("[f]", done, 9000)
        clock[0] += SECONDS_BETWEEN_LINES
        progress.report("[f]", 4000, 9000)
        progress.report("[f]", 5000, 9000)
        progress.report("[f]", 9000, 9000)
    assert capsys.readouterr() == (
        "",
        "[f]: 1.0 kB of 9.0 kB\n[f]: 4.0 kB of 9.0 kB\n[f]: 9.0 kB of 9.0 kB\n",
    )


def test_a_total_that_is_not_known_is_not_made_up(clock, capsys):
    with TransferProgress() as progress:
        progress.report("asking", 0, None)
    assert capsys.readouterr().err == "asking\n"


def test_on_a_terminal_there_is_a_bar_that_goes_away(monkeypatch):
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=100)
    monkeypatch.setattr(_progress, "progress_console", lambda: console)
    with TransferProgress() as progress:
        progress.report("looking for [f]", 0, None)
        progress.report("[f]", 3_000_000, 9_000_000)
        progress.report("[f]", 6_000_000, 9_000_000)
    drawn = screen.getvalue()
    assert "looking for [f]\n" in drawn
    assert "looking for [f] " not in drawn  # that would be a bar
    assert "6.0/9.0 MB" in drawn
    assert drawn.endswith("\x1b[2K")  # the line is cleared at the end
