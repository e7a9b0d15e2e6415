"""The search ends no worse than it began, near a known optimum, and the same when stopped."""

import json
import math
import os
import signal
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from armillary.errors import UserError
from armillary.extension.search import search, starting_factors
from armillary.rope_scaling import NTK, PositionInterpolation, YaRN, base_frequencies
from support.ranks import fresh_processes

BASE, WIDTH, FACTOR, WINDOW = 10000.0, 32, 4.0, 256
STARTS = starting_factors(BASE, WIDTH, factor=FACTOR, window=WINDOW)
# A ramp that begins earlier and ends higher than any start's.
BEST = np.clip(1 + 4 * (np.arange(16) - 3) / 8, 1, 4.6)


def loss(factors, best=BEST) -> float:
    """A stub of a model: nats that grow with the distance to the best divisors."""
    return 3.0 + float(((np.log(factors) - np.log(best)) ** 2).mean())


def found(**options):
    given = {"factor": FACTOR, "evaluations": 400, "population": 16, "seed": 1} | options
    return search(given.pop("fitness", loss), given.pop("starts", STARTS), **given)


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("linear", PositionInterpolation(FACTOR)),
        ("ntk", NTK(FACTOR)),
        ("yarn", YaRN(FACTOR, WINDOW)),
    ],
)
def test_the_first_are_what_other_rules_divide_by(name, rule):
    divided = base_frequencies(BASE, WIDTH) / np.array(STARTS[name])
    np.testing.assert_allclose(divided, rule.frequencies(BASE, WIDTH, WINDOW), rtol=1e-12)


def test_it_comes_near_the_best_and_is_better_than_any_start():
    result = found()
    assert result.evaluations == 400
    assert set(result.starts) == {"linear", "ntk", "yarn"}
    assert result.best.loss < 3.0 + (min(result.starts.values()) - 3.0) / 4
    assert loss(result.best.factors) == result.best.loss


def test_what_is_found_on_one_text_is_better_than_yarn_on_another():
    """A stub of another text: its best divisors are others, by a few per cent each."""
    noise = np.random.default_rng(0).normal(0, 0.05, 16)
    other = np.maximum(1, BEST * np.exp(noise))
    result = found()
    assert loss(result.best.factors, other) < loss(STARTS["yarn"], other)


def test_divisors_never_fall_and_stay_in_their_range():
    seen = []
    found(told=lambda evaluation, best: seen.append(evaluation.factors))
    for factors in seen:
        assert all(a <= b for a, b in pairwise(factors))
        assert factors[0] >= 1 - 1e-12
        assert factors[-1] <= 1.25 * FACTOR + 1e-9
    assert len(set(seen)) == len(seen)  # nothing is measured twice


@pytest.mark.parametrize("evaluations", [3, 4, 20])
def test_with_any_budget_it_is_no_worse_than_its_best_start(evaluations):
    result = found(evaluations=evaluations, fitness=sum)
    assert result.evaluations == evaluations
    assert result.best.loss <= min(result.starts.values())


def test_where_nothing_is_better_the_best_start_is_kept():
    best = np.array(STARTS["yarn"])
    result = found(fitness=lambda factors: loss(factors, best))
    assert result.best.factors == STARTS["yarn"]
    assert result.best.start == "yarn"


def test_seeds_draw_and_nothing_else_does(tmp_path):
    def measured(seed):
        seen = []
        found(seed=seed, evaluations=60, told=lambda e, _: seen.append(e.factors))
        return seen

    assert measured(1) == measured(1)
    assert measured(1) != measured(2)


def test_a_loss_that_is_no_number_is_the_worst(tmp_path):
    notes = tmp_path / "notes.jsonl"
    result = found(evaluations=40, fitness=lambda f: math.nan if f[0] == 1 else sum(f), notes=notes)
    assert result.best.factors[0] > 1
    again = found(evaluations=40, fitness=None, notes=notes)
    assert again == result


# Going on


def search_until(notes: Path, evaluations: int, die_at: int | None) -> None:
    """Search, killed in an evaluation; leaves the divisors in a file."""
    count = 0

    def fitness(factors):
        nonlocal count
        count += 1
        if count == die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return loss(factors)

    result = found(fitness=fitness, evaluations=evaluations, notes=notes)
    notes.with_suffix(".found").write_text(json.dumps(result.best.factors))


def test_killed_again_and_again_it_ends_with_the_same_divisors(tmp_path):
    """Real processes, killed in a start, in the first generation and in later ones."""
    search_until(tmp_path / "whole.jsonl", 90, None)
    notes, context = tmp_path / "killed.jsonl", fresh_processes()
    for die_at in (2, 9, 30, None):
        process = context.Process(target=search_until, args=(notes, 90, die_at), daemon=True)
        process.start()
        process.join(60)
        assert process.exitcode == (0 if die_at is None else -signal.SIGKILL)
    assert notes.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    ours, theirs = (tmp_path / f"{name}.found" for name in ("killed", "whole"))
    assert ours.read_text() == theirs.read_text()


def test_a_line_that_was_cut_short_is_measured_again(tmp_path):
    notes = tmp_path / "notes.jsonl"
    whole = found(evaluations=30, notes=notes)
    written = notes.read_bytes()
    notes.write_bytes(written[:-20])
    measured = []
    again = found(evaluations=30, notes=notes, fitness=lambda f: measured.append(f) or loss(f))
    assert len(measured) == 1
    assert again == whole
    assert notes.read_bytes() == written


def test_more_evaluations_go_on_from_the_notes(tmp_path):
    notes = tmp_path / "notes.jsonl"
    found(evaluations=30, notes=notes)
    measured = []
    more = found(evaluations=50, notes=notes, fitness=lambda f: measured.append(f) or loss(f))
    assert len(measured) == 20
    assert more == found(evaluations=50)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed": 2}, "holds another search, seed is 1 and not 2"),
        ({"about": {"text": "other"}}, 'about is {"text": "this"} and not {"text": "other"}'),
        ({"population": 4}, "population is 16 and not 4"),
    ],
)
def test_notes_of_another_search_are_refused(tmp_path, options, message):
    notes = tmp_path / "notes.jsonl"
    found(evaluations=10, notes=notes, about={"text": "this"})
    with pytest.raises(UserError) as caught:
        found(**{"evaluations": 10, "notes": notes, "about": {"text": "this"}} | options)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{}", "line 5: is no evaluation"),
        ('{"factors": [1.0], "loss": 3.0}', "line 5: is not what this search would have measured"),
        ("{", "line 5: is not JSON"),
    ],
)
def test_notes_that_are_none_are_refused_by_their_line(tmp_path, line, message):
    notes = tmp_path / "notes.jsonl"
    found(evaluations=10, notes=notes)
    lines = notes.read_text().splitlines()
    lines[4] = line
    notes.write_text("\n".join(lines) + "\n")
    with pytest.raises(UserError, match=message):
        found(evaluations=10, notes=notes)


@pytest.mark.parametrize("options", [{"population": 1}, {"evaluations": 2}])
def test_too_little_to_search_with_is_refused(options):
    with pytest.raises(ValueError, match="at least 2 and 3 are needed"):
        found(**options)
