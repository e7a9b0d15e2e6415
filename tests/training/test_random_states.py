"""Every generator comes back to where it stood, through JSON."""

import json
import random

import numpy as np
import pytest
import torch

from armillary.errors import CheckpointError
from armillary.training.random_states import (
    random_states,
    restore_random_states,
    seed_random_states,
)


def draw():
    """From each generator, numbers of both kinds; a normal number may leave a second one over."""
    return (
        [random.random(), random.gauss(0, 1), random.getrandbits(70)],
        [*np.random.standard_normal(3), *np.random.randint(1 << 30, size=2)],
        [*torch.rand(3).tolist(), *torch.randn(17).tolist(), int(torch.randint(1 << 30, ()))],
    )


@pytest.mark.parametrize("drawn_before", [0, 1, 2, 700])
def test_what_is_drawn_after_a_state_is_drawn_again(drawn_before):
    seed_random_states(1, 2)
    for _ in range(drawn_before):
        draw()
    states = json.loads(json.dumps(random_states(), allow_nan=False))
    assert random_states() == states  # looking does not move them
    first = [draw() for _ in range(3)]
    assert restore_random_states(states, "x.json") == []
    assert [draw() for _ in range(3)] == first


def test_seeds_differ_by_seed_and_step_and_are_repeated():
    def drawn(*numbers):
        seed_random_states(*numbers)
        return draw()

    found = [drawn(*numbers) for numbers in ((0, 0), (1, 0), (0, 1))]
    for kind in range(3):
        assert len({tuple(drawn[kind]) for drawn in found}) == 3
    assert drawn(0, 1) == found[2]


def without(key):
    return lambda states: {name: value for name, value in states.items() if name != key}


@pytest.mark.parametrize(
    "change",
    [
        without("python"),
        without("numpy"),
        without("torch"),
        without("accelerators"),
        lambda s: {**s, "python": 5},
        lambda s: {**s, "python": [3, s["python"][1][:-1], None]},
        lambda s: {**s, "python": [3, [*s["python"][1][:-1], 10**6], None]},
        lambda s: {**s, "numpy": {**s["numpy"], "pos": 625}},
        lambda s: {**s, "numpy": {**s["numpy"], "pos": -1}},
        lambda s: {**s, "numpy": {**s["numpy"], "key": s["numpy"]["key"][:-1]}},
        lambda s: {**s, "numpy": {**s["numpy"], "key": [-1] * 624}},
        lambda s: {**s, "torch": s["torch"][:-8]},
        lambda s: {**s, "torch": "é"},
        lambda s: {**s, "torch": "A" * len(s["torch"].rstrip("="))},
        lambda s: {**s, "torch": 7},
    ],
)
def test_a_state_that_is_none_is_one_line(change):
    states = change(random_states())
    with pytest.raises(CheckpointError, match=r"^x\.json: holds no random states: ") as error:
        restore_random_states(states, "x.json")
    assert "\n" not in str(error.value)


class Device:
    """A stand-in for torch.cuda on a machine with two of them."""

    def __init__(self):
        self.states = [torch.full((16,), n, dtype=torch.uint8) for n in (7, 8)]

    def get_rng_state(self, device):
        return self.states[device].clone()

    def set_rng_state(self, state, device):
        self.states[device] = state


@pytest.fixture
def two_devices(monkeypatch):
    device = Device()
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda")
    )
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch, "get_device_module", lambda _: device)
    return device


def test_the_state_of_every_accelerator_is_kept(two_devices):
    states = json.loads(json.dumps(random_states()))
    assert set(states["accelerators"]) == {"cuda:0", "cuda:1"}
    two_devices.states = [torch.zeros(16, dtype=torch.uint8)] * 2
    assert restore_random_states(states, "x.json") == []
    assert [int(state[0]) for state in two_devices.states] == [7, 8]


def test_an_accelerator_without_a_state_is_a_notice(two_devices):
    states = random_states()
    del states["accelerators"]["cuda:1"]
    notices = restore_random_states(states, "x.json")
    assert notices == ["x.json: has no random state of cuda:1; it is left as it is"]
