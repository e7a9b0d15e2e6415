"""The example of a loop of one's own runs, learns, is short, and is what the page shows."""

import re
import runpy
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "own_loop.py"


@pytest.fixture
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("_one_thread")
def test_the_loop_learns(capsys):
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    losses = [float(line.split()[2]) for line in capsys.readouterr().out.splitlines()]
    assert len(losses) == 4
    assert losses[0] > 5
    assert losses[-1] < 2


def test_it_takes_at_most_40_lines_and_the_page_shows_the_same():
    text = EXAMPLE.read_text("utf-8")
    assert len(text.splitlines()) <= 40
    page = (ROOT / "docs" / "training.md").read_text("utf-8")
    first = re.search(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert first is not None
    assert text.endswith('"""\n\n' + first[1])
