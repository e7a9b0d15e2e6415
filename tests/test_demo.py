"""The demo's files fit each other, and its script goes on wherever it was stopped.

Its commands are only recorded here, by a stand-in for `armillary` that leaves what they leave.
"""

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from armillary.extension.adapt_config import AdaptConfig
from armillary.training.run_config import RunConfig

DEMO = Path(__file__).parents[1] / "examples" / "demo"
RULES = ("none", "linear", "ntk", "dynamic", "yarn", "llama3")
INTERRUPTED = 130
STAND_IN = """#!/bin/sh
echo "$*" >> calls
[ "$(wc -l < calls)" -ne "${STOP:-0}" ] || exit 130
case "$1" in
    train) mkdir -p "demo/$(basename "$2" .yaml)/model" ;;
    evaluate) mkdir -p "$4" && touch "$4/report.html" ;;
esac
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "armillary").write_text(STAND_IN)
    (tmp_path / "bin" / "armillary").chmod(0o755)
    return tmp_path


def run(place: Path, stop: int = 0) -> int:
    path = f"{place / 'bin'}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "STOP": str(stop)}
    script = ["sh", str(DEMO / "run.sh")]
    quiet = subprocess.DEVNULL
    return subprocess.run(script, cwd=place, env=environment, stdout=quiet, check=False).returncode


def calls(place: Path) -> list[str]:
    return (place / "calls").read_text().splitlines()


def test_control_and_adaptation_see_as_many_tokens_at_one_learning_rate() -> None:
    base, control = (RunConfig.load(DEMO / f"{name}.yaml") for name in ("base", "control"))
    adapt = AdaptConfig.load(DEMO / "adapt.yaml")
    (stage,) = adapt.stages
    assert control.train.steps == stage.steps
    assert control.train.batch_size * control.data.length == adapt.train.batch_size * stage.length
    assert control.data.length == base.data.length == stage.length // 4
    own, other = control.train.model_dump(), adapt.train.model_dump()
    assert {name: own[name] for name in other if name != "batch_size"} == {
        name: other[name] for name in other if name != "batch_size"
    }


def test_every_rule_is_measured_before_and_after_adapting(place: Path) -> None:
    assert run(place) == 0
    made = calls(place)
    assert made[0] == f"train {DEMO / 'base.yaml'} --resume"
    measured = [shlex.split(call)[3] for call in made if call.startswith("evaluate")]
    ends = [*RULES, "control", *(f"{rule}-adapted" for rule in RULES)]
    assert measured == [f"demo/results/{name}" for name in ("base", *ends)]
    adapted = [call for call in made if "--adapt" in call]
    assert [shlex.split(call)[6] for call in adapted] == list(RULES)
    assert [call.split()[0] for call in made[-2:]] == ["compare", "compare"]


@pytest.mark.parametrize("stop", [1, 2, 3, 4, 14, 15, 16, 17, 28])
def test_it_goes_on_where_it_was_stopped(place: Path, stop: int) -> None:
    assert run(place) == 0
    whole = calls(place)
    for left in ("calls", "demo"):
        subprocess.run(["rm", "-r", str(place / left)], check=True)
    assert run(place, stop) == INTERRUPTED
    assert run(place) == 0
    made = calls(place)
    assert made[:stop] == whole[:stop]
    # What was begun is called again; so is the writing of a model that is not measured yet.
    again = stop - 1 - (whole[stop - 1].startswith("evaluate") and "apply" in whole[stop - 2])
    assert made[stop:] == whole[again:]


def test_what_is_done_is_not_done_again(place: Path) -> None:
    assert run(place) == 0
    whole = calls(place)
    assert run(place) == 0
    assert calls(place)[len(whole) :] == whole[-2:]
    assert all(call.startswith("compare") for call in whole[-2:])
