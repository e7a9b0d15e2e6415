"""A grid becomes less in one order until it fits, and what was left out is said and kept."""

import itertools
from dataclasses import dataclass

import pytest

from armillary.errors import UserError
from armillary.evaluation import budget
from armillary.evaluation.budget import Grid, Speed, fitted, kept, measured_speed
from support.evaluations import MadeUpScorer

ASKED = Grid(
    lengths=(256, 512, 1024),
    instances=16,
    windows=12,
    depths=7,
    distractors=(0, 4, 8, 16),
    hops=(1, 2, 4),
    limit=400,
)


def cost(grid: Grid) -> float:
    """A second a token of each instance at each place: linear in all that can become less."""
    places = grid.instances * grid.depths * len(grid.distractors) * len(grid.hops)
    return (places + grid.windows + (grid.limit or 0)) * sum(grid.lengths) / 1e4


def test_what_fits_is_left_as_it_was_asked():
    plan = fitted(ASKED, 1e6, cost)
    assert plan.grid == ASKED
    assert plan.left_out == ()
    assert plan.fits


@pytest.mark.parametrize("share", [0.9, 0.5, 0.3, 0.1, 0.05, 0.02])
def test_what_is_planned_fits_and_a_step_more_would_not(share):
    minutes = cost(ASKED) * share / 60
    plan = fitted(ASKED, minutes, cost)
    assert plan.fits
    assert plan.seconds == cost(plan.grid) <= 60 * minutes
    grids = list(budget._less_and_less(ASKED))
    before = grids[grids.index(plan.grid) - 1]
    assert cost(before) > 60 * minutes * 0.9


def test_instances_go_first_then_places_and_lengths_last():
    """Certainty before answers, and the longest lengths only where nothing else is left."""
    grids = list(budget._less_and_less(ASKED))
    first = {
        name: next(i for i, grid in enumerate(grids) if getattr(grid, name) != getattr(ASKED, name))
        for name in ("instances", "windows", "limit", "depths", "distractors", "hops", "lengths")
    }
    assert first["instances"] == first["windows"] == first["limit"] == 1
    order = [first[name] for name in ("instances", "depths", "distractors", "hops", "lengths")]
    assert order == sorted(order)
    assert all(earlier != later for earlier, later in itertools.pairwise(grids))
    last = grids[-1]
    assert (last.instances, last.windows, last.limit, last.depths) == (2, 4, 50, 3)
    assert (last.distractors, last.hops, last.lengths) == ((0, 16), (1, 4), (256,))


def test_what_was_left_out_is_said():
    plan = fitted(ASKED, cost(ASKED) / 60 / 20, cost)
    assert "instances 16 → 2" in plan.left_out
    assert "distractors 0, 4, 8, 16 → 0, 16" in plan.left_out
    assert not any(line.startswith("lengths") for line in plan.left_out)


def test_the_least_grid_is_kept_where_even_that_is_too_much():
    plan = fitted(ASKED, 1e-9, cost)
    assert plan.grid.lengths == (256,)
    assert not plan.fits


def test_a_small_wish_is_not_made_larger():
    small = Grid(lengths=(64,), instances=1, windows=2, depths=2, limit=None)
    plan = fitted(small, 1e-9, cost)
    assert (plan.grid.instances, plan.grid.windows, plan.grid.depths) == (1, 2, 2)
    assert plan.grid.limit is None


def test_time_that_is_gone_is_not_planned_for():
    minutes = cost(ASKED) / 60 * 2
    assert fitted(ASKED, minutes, cost).grid == ASKED
    late = fitted(ASKED, minutes, cost, spent=cost(ASKED))
    assert late.seconds <= 60 * minutes * 0.9 - cost(ASKED)


def test_what_no_task_looks_at_stays_as_it_is():
    plan = fitted(ASKED, 1e-9, cost, {"lengths", "windows"})
    assert {line.split()[0] for line in plan.left_out} == {"lengths", "windows"}


def test_a_plan_is_made_again_from_what_the_header_keeps():
    for minutes in (1e6, 3.0, 0.5, 1e-9):
        plan = fitted(ASKED, minutes, cost)
        assert kept(ASKED, minutes, plan.settings(), "out") == plan.grid
    assert kept(ASKED, None, {}, "out") is None


def test_a_plan_for_another_wish_is_refused():
    settings = fitted(ASKED, 1.0, cost).settings()
    with pytest.raises(UserError, match="out: was begun with minutes 1.0, not 2.0"):
        kept(ASKED, 2.0, settings, "out")
    with pytest.raises(UserError, match=r"was begun with minutes 1.0, not none"):
        kept(ASKED, None, settings, "out")
    with pytest.raises(UserError, match=r"was begun with minutes none, not 1.0"):
        kept(ASKED, 1.0, {}, "out")
    with pytest.raises(UserError, match=r"was begun with depths 7, not 5"):
        kept(Grid((256, 512, 1024), 16, 12, 5, (0, 4, 8, 16), (1, 2, 4), 400), 1.0, settings, "out")


def test_a_speed_counts_tokens_and_what_each_reads():
    speed = Speed(per_token=2.0, per_pair=0.5)
    assert speed.seconds(((0, 4),)) == 2 * 4 + 0.5 * 4 * 2
    assert speed.seconds(((10, 4), (0, 1))) == (8 + 0.5 * 4 * 12) + (2 + 0.25)


@dataclass
class Timed(MadeUpScorer):
    """A model whose time is reckoned: a clock that only it moves."""

    clock: float = 0.0
    per_token: float = 1e-3
    per_pair: float = 1e-6

    def score(self, context, continuations):
        (each,) = continuations
        length = len(context) + len(each.tokens)
        self.clock += self.per_token * length + self.per_pair * length**2 / 2
        return super().score(context, continuations)


@pytest.mark.parametrize("window", [16, 200, 4096])
@pytest.mark.parametrize("per_pair", [0.0, 1e-6, 1e-4])
def test_both_parts_of_a_speed_are_found(monkeypatch, window, per_pair):
    scorer = Timed(window=window, per_pair=per_pair)
    monkeypatch.setattr(budget.time, "perf_counter", lambda: scorer.clock)
    speed = measured_speed(scorer)
    assert speed.per_token == pytest.approx(1e-3)
    assert speed.per_pair == pytest.approx(per_pair, abs=1e-12)


def test_a_slow_model_is_measured_at_shorter_texts(monkeypatch):
    scorer = Timed(window=4096, per_token=0.1)
    monkeypatch.setattr(budget.time, "perf_counter", lambda: scorer.clock)
    assert measured_speed(scorer).per_token == pytest.approx(0.1)
    assert scorer.clock < 0.1 * 4 * 300
