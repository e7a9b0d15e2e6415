"""Figures as files are the page's plots, drawn the same each time."""

import sys
from dataclasses import replace

import pytest

from armillary.errors import UserError
from armillary.evaluation.figures import all_plots, draw, write_figures
from support.summaries import changes, comparison, summaries

pytest.importorskip("matplotlib", reason="figures need matplotlib: pip install armillary[figures]")


def plot(name):
    several = summaries()
    return next(p for p in all_plots(several, comparison(), changes()) if p.name == name)


def test_every_plot_is_a_file_and_the_same_each_time(tmp_path):
    few = [replace(summaries()[4], rates=(), effective=(), by_position=(), short_tasks=())]
    first = write_figures(tmp_path / "a", few, kinds=("png", "svg"))
    again = write_figures(tmp_path / "b", few, kinds=("png", "svg"))
    assert len(first) == 2 * len([*all_plots(few)])
    assert [path.name for path in first] == [path.name for path in again]
    assert all(a.read_bytes() == b.read_bytes() for a, b in zip(first, again, strict=True))
    assert first[0].read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "name",
    [
        "loss-by-context",
        "loss-by-position",
        "passkey-by-length",
        "passkey-heat-5",
        "short-piqa",
        "frequencies",
    ],
)
def test_a_figure_has_its_message_and_units(name):
    axes = draw(plot(name)).axes[0]
    assert " ".join(axes.get_title(loc="left").split()) == " ".join(plot(name).title.split())
    if not name.startswith("short"):
        assert axes.get_xlabel()
        assert axes.get_ylabel()


def test_curves_have_their_numbers_and_intervals():
    axes = draw(plot("loss-by-context")).axes[0]
    lines = {line.get_label(): line for line in axes.get_lines()}
    for summary in summaries():
        drawn = lines[summary.run.name].get_ydata()
        assert list(drawn) == [each.loss.value for each in summary.by_context]
    assert len(axes.collections) == 5  # bands
    assert len({lines[s.run.name].get_color() for s in summaries()}) == 5
    assert len({lines[s.run.name].get_marker() for s in summaries()}) == 5


def test_a_heat_map_has_a_number_in_each_cell():
    heat = plot("passkey-heat-5")
    axes = draw(heat).axes[0]
    words = [text.get_text() for text in axes.texts]
    for cell in heat.shown.cells.values():
        words.remove(cell.words)
    assert words == ["old window 256"]


def test_without_matplotlib_it_is_said_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match=r"pip install 'armillary\[figures\]'"):
        write_figures(tmp_path / "figures", summaries())
    assert not (tmp_path / "figures").exists()
