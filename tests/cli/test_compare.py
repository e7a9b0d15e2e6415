"""`armillary compare` sets results beside each other, without torch."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from armillary.cli import main
from armillary.evaluation.results import FILE
from support.evaluations import made_up_text, worded_model

OPTIONS = ["--tasks", "perplexity,induction", "--lengths", "256,512", "--windows", "9"]
FEWER = ["--instances", "2", "--depths", "3"]


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Path:
    """Two models of the same vocabulary, evaluated alike."""
    directory = tmp_path_factory.mktemp("compared")
    patch = pytest.MonkeyPatch()
    patch.setattr("armillary.evaluation.figures.write_figures", lambda *_, **__: [])
    (directory / "texts").mkdir()
    for number in range(10):
        (directory / "texts" / f"{number}.txt").write_text(made_up_text(800, number))
    for seed, name in enumerate(("one", "other")):
        worded_model(directory / "parts", seed=seed).save(directory / name)
        model, out = str(directory / name), str(directory / f"{name}-results")
        text = str(directory / "texts")
        assert main(["evaluate", model, "--out", out, "--text", text, *OPTIONS, *FEWER]) == 0
    patch.undo()
    return directory


def test_differences_are_told_with_their_intervals(results, capsys):
    capsys.readouterr()
    command = ["compare", str(results / "one-results"), str(results / "other-results")]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert "set against one" in printed
    assert "differences, and which of them are shown to be real" in printed
    assert " to +" in printed
    assert printed.rstrip().endswith(".")

    assert main([*command, "--json"]) == 0
    facts = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    loss = next(each for each in facts if each.get("measure") == "loss")
    assert loss["pairs"] == 9
    assert loss["difference"]["low"] < loss["other"] - loss["first"] < loss["difference"]["high"]
    assert loss["verdict"] in {"better", "worse", "no difference shown"}
    assert [each["name"] for each in facts if each["kind"] == "run"] == ["one", "other"]


def test_it_needs_no_torch_nor_does_its_page(results, tmp_path):
    page = tmp_path / "page.html"
    command = ["compare", str(results / "one-results"), str(results / "other-results")]
    program = (
        "import sys; from armillary.cli import main\n"
        f"code = main({[*command, '--report', str(page)]!r})\n"
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == str(page)
    assert page.read_text().startswith("<!")


def test_an_unfinished_evaluation_is_said_to_be_one(results, tmp_path, capsys):
    lines = (results / "other-results" / FILE).read_bytes().splitlines(keepends=True)
    (tmp_path / FILE).write_bytes(b"".join(lines[: len(lines) // 2]))
    assert main(["compare", str(results / "one-results"), str(tmp_path)]) == 0
    assert f"{tmp_path}: only " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("directories", "message"),
    [
        (["one-results"], "1 result to compare; give two or more"),
        (["one-results", "texts"], "texts: holds no results.jsonl"),
    ],
)
def test_what_is_wrong_is_one_line_and_exit_code_2(results, capsys, directories, message):
    assert main(["compare", *(str(results / name) for name in directories)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert message in said
