"""The figures of a run follow from its events, whether it was interrupted or not."""

import math

from armillary.training.events import RunEnded
from armillary.training.history import History
from support.run_events import done, started, validated, whole_run


def test_a_whole_run_adds_up():
    history = History.of(whole_run())
    assert history.start == started()
    assert (history.step, history.tokens, history.seconds) == (200, 102_400, 61.0)
    assert (history.skipped, history.memory, history.utilisation) == (1, 1_200_000_000, 0.61)
    assert history.resumed_at == []
    assert history.end.model == "runs/tiny/model"
    kinds = (history.steps, history.validations, history.samples, history.checkpoints)
    assert list(map(len, kinds)) == [21, 4, 2, 2]
    assert len(history.notices) == 1


def test_nothing_is_made_up_of_no_events():
    history = History()
    assert (history.start, history.end, history.step, history.tokens) == (None, None, 0, 0)
    assert (history.seconds, history.skipped) == (0.0, 0)
    assert history.tokens_per_second is history.utilisation is history.memory is None
    assert history.last_validation is history.best_validation is None


def test_an_interrupted_run_counts_as_one():
    history = History.of([started(), done(5), started(5), done(6), RunEnded(6, "finished", 9.0)])
    assert (history.step, history.seconds, history.resumed_at) == (6, 9.0, [5])


def test_speed_is_the_median_of_what_is_known():
    speeds = [0.0, math.nan, 1.0, 3.0, 100.0]
    steps = [done(step, tokens_per_second=speed) for step, speed in enumerate(speeds)]
    assert History.of(steps).tokens_per_second == 3.0


def test_the_best_validation_has_the_lowest_loss_that_is_a_number():
    history = History.of([validated(1, math.nan), validated(2, 1.0), validated(3, 2.0)])
    assert (history.best_validation.step, history.last_validation.step) == (2, 3)


def test_a_better_validation_is_told_only_where_it_reads_otherwise():
    first = validated(1, 2.0)
    assert History.of([first, validated(2, 2.1)]).better_validation == first
    assert History.of([first, validated(2, math.nan)]).better_validation == first
    assert History.of([first, validated(2, 2.0004)]).better_validation is None
    assert History.of([validated(2, 2.1), first]).better_validation is None
    assert History.of([validated(1, math.nan)]).better_validation is None
