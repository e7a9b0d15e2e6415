"""`armillary evaluate` as a process: whatever ends it, it goes on, and ends with the same bytes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from armillary.cli import main
from armillary.evaluation.records import LossRow
from armillary.evaluation.results import FILE, cells_done, read_results
from armillary.rope_scaling import YaRN
from support.evaluations import MadeUpScorer, made_up_text, worded_model

SMALL = ["--lengths", "256,512", "--windows", "4", "--instances", "2", "--depths", "3"]
FEW = ["--tasks", "perplexity,reasoning,induction", *SMALL, "--hops", "1,2"]


@pytest.fixture(scope="module")
def here(tmp_path_factory) -> Path:
    """Two tiny models, one of them extended, and texts that are long to them."""
    directory = tmp_path_factory.mktemp("evaluations")
    worded_model(directory / "parts").save(directory / "tiny")
    extended = worded_model(
        directory / "parts", window=1024, scaling=YaRN(factor=2.0, original_window=512), seed=1
    )
    extended.save(directory / "extended")
    (directory / "texts").mkdir()
    for number in range(10):
        (directory / "texts" / f"{number}.txt").write_text(made_up_text(1400, number))
    return directory


@pytest.fixture(scope="module", autouse=True)
def no_figures():
    """Drawing takes longer than all that is measured here; one test does it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("armillary.evaluation.figures.write_figures", lambda *_, **__: [])
        yield


def arguments(here: Path, out: str, *options: str, model: str = "tiny") -> list[str]:
    places = ["evaluate", str(here / model), "--out", str(here / out)]
    return [*places, "--text", str(here / "texts"), *options]


@pytest.fixture(scope="module")
def whole(here) -> bytes:
    """The file of an evaluation that nothing disturbs."""
    assert main(arguments(here, "whole", *FEW)) == 0
    return (here / "whole" / FILE).read_bytes()


# The parent starts the same command over and over, each time in a process of its own, and kills it
# when so many cells are done and a moment has passed.
KILLER = """
import json, os, random, signal, sys, time
import armillary.cli._evaluating, armillary.evaluation.decoder_scorer, armillary.language_model
from armillary.cli import main
arguments, path, cells = json.loads(sys.argv[1])
draw = random.Random(6)
done = lambda: open(path, "rb").read().count(b'"kind": "done"') if os.path.exists(path) else 0
kills = []
while len(kills) < 10:
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        os._exit(main(arguments))
    target = draw.randrange(len(kills) * cells // 12, (len(kills) + 1) * cells // 12)
    ended = 0
    while done() < target and not ended:
        time.sleep(0.001)
        ended, _ = os.waitpid(child, os.WNOHANG)
    time.sleep(draw.uniform(0, 0.02))
    if not ended:
        os.kill(child, signal.SIGKILL)
        ended = os.WIFSIGNALED(os.waitpid(child, 0)[1])
        if ended:
            kills.append(done())
            continue
    os.remove(path)  # it was through before it could be killed
print(json.dumps(kills))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_killed_at_ten_moments_it_ends_with_the_same_file(here, whole):
    cells = whole.count(b'"kind": "done"')
    command = arguments(here, "killed", *FEW)
    given = json.dumps([command, str(here / "killed" / FILE), cells])
    killed = subprocess.run(
        [sys.executable, "-c", KILLER, given],
        env=os.environ | {"OMP_NUM_THREADS": "1"},  # beside other tests, threads would only wait
        capture_output=True,
        text=True,
        check=True,
    )
    moments = json.loads(killed.stdout)
    assert len(moments) == 10
    assert len(set(moments)) > 5
    assert main(command) == 0
    assert (here / "killed" / FILE).read_bytes() == whole


def test_a_signal_says_how_to_go_on(here, whole):
    out = here / "signal"
    command = arguments(here, out.name, *FEW)
    process = subprocess.Popen(
        [sys.executable, "-m", "armillary", *command],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    while process.poll() is None:
        if (out / FILE).exists() and len(cells_done(out)) >= 3:
            process.send_signal(signal.SIGTERM)
            break
        time.sleep(0.005)
    _, said = process.communicate()
    assert process.returncode == 143, said
    done = len(cells_done(out))
    cells = whole.count(b'"kind": "done"')
    assert said.splitlines()[-1] == (
        f"armillary: interrupted; {done} of {cells} cells are done and kept; the same command goes "
        "on"
    )
    assert main(command) == 0
    assert (out / FILE).read_bytes() == whole


def refused(capsys, command: list[str]) -> str:
    capsys.readouterr()
    assert main(command) == 2
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("armillary:")]
    assert len(said) == 1
    return said[0]


def test_a_flipped_byte_is_named_by_its_line(here, whole, capsys):
    out = here / "flipped"
    out.mkdir()
    data = bytearray(whole)
    data[len(data) // 2] ^= 1
    (out / FILE).write_bytes(data)
    said = refused(capsys, arguments(here, "flipped", *FEW))
    assert f"flipped/{FILE}: line " in said
    assert refused(capsys, ["compare", str(out), str(here / "whole")]).startswith(
        f"armillary: {out / FILE}: line "
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([*FEW, "--seed", "1"], "is of another evaluation: seed is 0 there, 1 here"),
        ([*FEW, "--windows", "3"], "tasks.perplexity.windows is 4 there, 3 here"),
        ([*FEW, "--original-window", "384"], "original_window is 512 there, 384 here"),
        ([*FEW, "--dtype", "float64"], 'model.dtype is "float32" there, "float64" here'),
        ([*FEW, "--minutes", "9"], "was begun with minutes none, not 9.0"),
    ],
)
def test_another_evaluation_does_not_go_on_there(here, whole, capsys, options, said):
    assert said in refused(capsys, arguments(here, "whole", *options))
    assert (here / "whole" / FILE).read_bytes() == whole


def test_another_model_does_not_go_on_there(here, whole, capsys):
    said = refused(capsys, arguments(here, "whole", *FEW, model="extended"))
    assert 'name is "tiny" there, "extended" here' in said


def test_what_fits_a_time_is_planned_said_and_kept(here, capsys, monkeypatch):
    """A reckoned speed stands for the measured one: 20 ms a token."""
    from armillary.evaluation import budget

    monkeypatch.setattr(
        "armillary.cli._evaluating.measured_speed", lambda scorer: budget.Speed(0.02, 0.0)
    )
    command = arguments(here, "timed", *FEW, "--minutes", "8", "--windows", "9")
    assert main(command) == 0
    said = capsys.readouterr().err
    assert "to end within 8 minutes (about 6 min" in said
    assert "windows 9 → 4\n" in said
    run, rows = read_results(here / "timed")
    assert run.plan["minutes"] == 8.0
    assert run.plan["asked_windows"] == "9"
    assert run.tasks["perplexity"]["windows"] == int(run.plan["windows"])
    assert sum(row.task == "perplexity" and row.group == "all" for row in rows) == 2 * int(
        run.plan["windows"]
    )
    before = (here / "timed" / FILE).read_bytes()

    lines = before.splitlines(keepends=True)
    (here / "timed" / FILE).write_bytes(b"".join(lines[: len(lines) // 2]))
    monkeypatch.setattr(
        "armillary.cli._evaluating.measured_speed", lambda scorer: budget.Speed(1e-9, 0.0)
    )
    assert main(command) == 0
    assert (here / "timed" / FILE).read_bytes() == before
    assert "was begun with windows 9, not 8" in refused(capsys, [*command[:-1], "8"])


def test_a_full_grid_is_left_whole_where_time_is_enough(here, capsys):
    """The speed is measured, and nothing is asserted of it but that an hour and more suffices."""
    assert main(arguments(here, "enough", *FEW, "--minutes", "90")) == 0
    assert "all that is asked takes about" in capsys.readouterr().err
    run, _ = read_results(here / "enough")
    whole_run, _ = read_results(here / "whole")
    assert run.tasks == whole_run.tasks


def test_what_it_prints(here, whole, capsys):
    assert main(arguments(here, "whole", *FEW)) == 0
    printed, said = capsys.readouterr()
    assert printed.startswith("tiny: window 512\n")
    for heading in (
        "loss of the same tokens",
        "variable-tracking",
        "induction: exact answers by depth, %",
    ):
        assert heading in printed
    files = [FILE, "report.html", "card.md"]
    assert printed.splitlines()[-3:] == [str(here / "whole" / name) for name in files]
    assert said.splitlines()[-1].startswith(f"{whole.count(b'done')} of ")


def test_for_programs_each_fact_is_an_object(here, whole, capsys):
    assert main(arguments(here, "whole", *FEW, "--json")) == 0
    facts = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    kinds = {each["kind"] for each in facts}
    assert {"run", "by_context", "by_position", "rates", "effective", "short_loss"} <= kinds
    assert facts[-1]["files"][0] == str(here / "whole" / FILE)
    assert len(facts[-1]["verdict"]) == 2
    first = next(each for each in facts if each["kind"] == "by_context")
    assert first["loss"]["low"] < first["loss"]["value"] < first["loss"]["high"]


def test_without_names_what_cannot_be_made_is_left_out_and_said(here, capsys):
    assert main(arguments(here, "usual", *SMALL, "--lengths", "64,512")) == 0
    said = capsys.readouterr().err
    assert "left out at 64 tokens: retrieval" in said
    tasks = read_results(here / "usual")[0].tasks
    assert tasks["retrieval"]["lengths"] == "512"
    assert tasks["induction"]["lengths"] == "64, 512"


def test_an_extended_model_is_set_beside_cropping(here, capsys):
    command = arguments(
        here,
        "extended-results",
        *("--tasks", "perplexity", "--lengths", "256,1024", "--windows", "4", "--json"),
        model="extended",
    )
    assert main(command) == 0
    run, _ = read_results(here / "extended-results")
    printed, said = capsys.readouterr()
    assert "questions are hidden" not in said
    assert (run.window, run.original_window) == (1024, 512)
    assert run.tasks["perplexity"]["lengths"] == "256, 512, 1024"
    facts = [json.loads(line) for line in printed.splitlines()]
    losses = [each for each in facts if each["kind"] == "by_context"]
    assert [each["at"] for each in losses] == [256, 512, 1024]
    assert [each["over_crop"] is None for each in losses] == [False, True, False]


def test_key_tokens_of_one_model_are_those_of_another(here, capsys, monkeypatch):
    """A model that learned nothing gains nothing: what counts as a gain is made less."""
    monkeypatch.setattr("armillary.evaluation.perplexity.KEY_GAIN", 0.0)
    monkeypatch.setattr("armillary.evaluation.perplexity.KEY_LIKELY", -1e9)
    asked = ["--tasks", "perplexity", "--lengths", "32,512", "--windows", "8", "--reach", "1024"]
    assert main(arguments(here, "choosing", *asked)) == 0
    _, rows = read_results(here / "choosing")
    chosen = {row.instance for row in rows if isinstance(row, LossRow) and row.group == "key"}
    assert chosen
    asked[3] = "32,512,1024"
    given = ["--keys-from", str(here / "choosing")]
    assert main(arguments(here, "given", *asked, *given, model="extended")) == 0
    run, rows = read_results(here / "given")
    assert {row.instance for row in rows if row.group == "key"} == chosen
    assert run.tasks["perplexity"]["keys"] == "given"
    assert "are of other text" not in capsys.readouterr().err
    other = ["--tasks", "perplexity", "--lengths", "64", "--windows", "2", "--seed", "9"]
    assert main(arguments(here, "elsewhere", *other, *given)) == 0
    assert "the key tokens that were given are of other text" in capsys.readouterr().err
    keyless = ["--keys-from", str(here / "elsewhere")]
    assert "no key tokens were chosen there" in refused(
        capsys, arguments(here, "wrong", *other, *keyless)
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--lengths", "1024"], "1,024 tokens are more than the model's window of 512"),
        (["--tasks", "perplexity", "--lengths", "15,256"], "a context of 15 tokens is below 16"),
        (["--lengths", "256,many"], "--lengths '256,many': must be whole numbers of at least 2"),
        (["--hops", "0"], "--hops '0': must be whole numbers of at least 1"),
        (["--distractors", ""], "--distractors '': must be"),
        (["--tasks", "perplexty"], "no 'perplexty' (did you mean 'perplexity'?)"),
        (["--reach", "300"], "--reach 300 is below the longest length, 512"),
        (["--text", "nowhere.txt"], "nowhere.txt: no such file or directory"),
        (["--tasks", "retrieval", "--lengths", "64"], "have no room"),
        (["--tasks", "lambada", "--short-data", "nowhere"], "nowhere: holds none of lambada.jsonl"),
        (["--device", "abacus"], "device 'abacus' cannot be used"),
    ],
)
def test_what_is_wrong_is_one_line_and_exit_code_2(here, capsys, options, message):
    assert message in refused(capsys, arguments(here, "wrong", *options))
    assert not (here / "wrong" / FILE).exists()


def test_short_tasks_come_from_files(here, tmp_path, capsys):
    questions = [{"text": "one two three four"}, {"text": "five six seven"}] * 3
    path = tmp_path / "lambada.jsonl"
    path.write_text("\n".join(map(json.dumps, questions)))
    out = ["evaluate", str(here / "tiny"), "--out", str(tmp_path / "out"), "--limit", "4"]
    assert main([*out, "--tasks", "lambada", "--short-data", str(tmp_path)]) == 0
    _, rows = read_results(tmp_path / "out")
    assert [row.task for row in rows] == ["lambada"] * 4
    assert "short texts" in capsys.readouterr().out


def test_a_served_model_is_asked_with_its_tokenizers_ids(here, tmp_path, capsys, monkeypatch):
    """The adapter has tests of its own; here it is one that answers."""
    asked = {}

    class Served(MadeUpScorer):
        def __init__(self, url, **options):
            super().__init__(window=options["window"] or 300, vocab_size=options["vocab_size"])
            asked.update(options, url=url)
            self.model = options["model"] or "the-only-one"

    monkeypatch.setattr("armillary.evaluation.server_scorer.ServerScorer", Served)
    command = arguments(here, str(tmp_path / "served"), "--tasks", "perplexity", "--windows", "4")
    assert main([*command, "--server", "http://somewhere:1", "--lengths", "64,128"]) == 0
    run, rows = read_results(tmp_path / "served")
    assert (run.name, run.window, run.model["engine"]) == ("the-only-one", 128, "server")
    assert asked["url"] == "http://somewhere:1"
    assert len(rows) > 4
    assert "give its address with --server" in refused(
        capsys, arguments(here, "wrong", "--server-model", "x")
    )


def test_pages_lie_beside_the_results(here, monkeypatch):
    drawn = []
    monkeypatch.setattr(
        "armillary.evaluation.figures.write_figures",
        lambda directory, summaries, **options: drawn.append((directory, summaries, options)),
    )
    options = ["--tasks", "perplexity", "--lengths", "256,1024", "--windows", "4", "--seed", "2"]
    assert main(arguments(here, "pages", *options, model="extended")) == 0
    page = (here / "pages" / "report.html").read_text()
    assert f"armillary evaluate {here / 'extended'} --out pages --tasks perplexity" in page
    assert "--windows 4" in page
    assert "--seed 2" in page
    assert "extended" in (here / "pages" / "card.md").read_text()
    assert main([*arguments(here, "pages", *options, model="extended"), "--no-figures"]) == 0
    ((directory, (summary,), options),) = drawn
    assert directory == here / "pages" / "figures"
    assert summary.run.name == "extended"
    assert (options["frequencies"][0].window, options["frequencies"][0].target) == (512, 1024)
