"""Each kind of schedule, pinned at its ends and in between."""

import math

import pytest
import torch

from armillary.errors import ConfigError
from armillary.training.schedule import ScheduleConfig, factor, set_learning_rates


def curve(**settings):
    schedule = ScheduleConfig(**settings)
    return [factor(schedule, step) for step in range(schedule.steps + 2)]


def test_warm_up_rises_from_its_first_step_to_one():
    assert curve(steps=5, kind="constant", warmup=4) == [0.25, 0.5, 0.75, 1, 1, 1, 1]
    assert curve(steps=2, kind="constant") == [1, 1, 1, 1]


def test_cosine_comes_down_half_a_period():
    found = curve(steps=9, kind="cosine", warmup=1, final=0.1)
    assert found[0] == 1
    for step in range(10):
        assert found[step] == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi * step / 9)) / 2)
    assert found[9] == found[10] == pytest.approx(0.1)


def test_cosine_begins_where_warm_up_ends():
    found = curve(steps=12, kind="cosine", warmup=3)
    assert found[:3] == [pytest.approx(x) for x in (1 / 3, 2 / 3, 1)]
    assert found[3] == pytest.approx((1 + math.cos(math.pi / 10)) / 2)
    assert found[7] == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("shape", "down"), [("linear", [0.25, 0.5, 0.75, 1]), ("sqrt", [0.5, 2**-0.5, 0.75**0.5, 1])]
)
def test_warm_up_stable_decay(shape, down):
    found = curve(steps=10, kind="wsd", warmup=2, decay=4, shape=shape, final=0.2)
    assert found[:7] == [0.5, 1, 1, 1, 1, 1, 1]
    assert found[7:11] == [pytest.approx(1 - 0.8 * progress) for progress in down]
    assert found[11] == pytest.approx(0.2)


@pytest.mark.parametrize("kind", ["cosine", "wsd"])
def test_no_step_of_the_run_is_lost_to_a_rate_of_zero(kind):
    settings = {"decay": 3} if kind == "wsd" else {}
    found = curve(steps=7, kind=kind, warmup=2, **settings)
    assert min(found[:7]) > 0
    assert found[7] == pytest.approx(0, abs=1e-15)


def test_rates_follow_from_the_step_alone():
    """Each group keeps its own top, whatever steps came before, so resuming needs no state."""
    groups = [torch.zeros(1, requires_grad=True), torch.zeros(1, requires_grad=True)]
    optimizer = torch.optim.SGD([{"params": [groups[0]]}, {"params": [groups[1]], "lr": 0.3}], 0.1)
    schedule = ScheduleConfig(steps=10, kind="wsd", warmup=2, decay=4)
    for step, wanted in [(0, 0.5), (9, 0.25), (3, 1.0), (0, 0.5)]:
        assert set_learning_rates(optimizer, schedule, step) == pytest.approx(wanted)
        rates = [group["lr"] for group in optimizer.param_groups]
        assert rates == [pytest.approx(0.1 * wanted), pytest.approx(0.3 * wanted)]


def test_a_step_before_the_first_is_refused():
    with pytest.raises(ValueError, match="step is -1"):
        factor(ScheduleConfig(steps=3), -1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"steps": 0}, "steps is 0; it must be a whole number, 1 or more"),
        ({"steps": 3.0}, "steps is 3.0; it must be a whole number, 1 or more"),
        (
            {"steps": 3, "kind": "cosin"},
            "kind is 'cosin' (did you mean 'cosine'?); known are constant, cosine, wsd",
        ),
        ({"steps": 3, "final": 1.1}, "final is 1.1; it must be a number at least 0 and at most 1"),
        (
            {"steps": 3, "kind": "wsd"},
            "decay is 0, but wsd comes down at its end; give decay 1 or more",
        ),
        ({"steps": 3, "decay": 1}, "decay is 1, but only wsd has it; set kind to 'wsd'"),
        (
            {"steps": 3, "warmup": 4},
            "warmup 4 and decay 0 take more than the 3 steps of the run; make them fewer",
        ),
    ],
)
def test_settings_are_checked(settings, message):
    with pytest.raises(ConfigError) as caught:
        ScheduleConfig(**settings)
    assert str(caught.value) == message
