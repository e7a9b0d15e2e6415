"""A recorded step: on a GPU what it computes, elsewhere in which order it asks for what."""

import contextlib

import pytest
import torch

from armillary.cuda_graph import recorded

CUDA = torch.device("cuda")


def test_on_a_cpu_a_step_is_itself():
    def step():
        return torch.zeros(1)

    assert recorded(step, torch.device("cpu")) is step


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_recorded_step_reads_what_stands_in_its_tensors_now():
    x, total, runs = torch.zeros(3, device=CUDA), torch.zeros(3, device=CUDA), []

    def step():
        runs.append(1)
        total.add_(x)
        return total * 2

    run = recorded(step, x.device)
    for number in range(1, 6):
        x.fill_(number)
        out = run()
        assert out.tolist() == [number * (number + 1)] * 3
    assert len(runs) == 2


class Driver:
    """Stands for torch.cuda, and notes what is asked of it."""

    def __init__(self, monkeypatch):
        self.said = []
        self.current = "main"
        for name in ("device", "stream", "graph"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: Stream(self, self.current))
        monkeypatch.setattr(torch.cuda, "Stream", lambda: Stream(self, "side"))
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: Graph(self))

    @contextlib.contextmanager
    def device(self, device):
        assert device == CUDA
        yield

    @contextlib.contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream.name
        yield
        self.current = before

    @contextlib.contextmanager
    def graph(self, graph, stream, capture_error_mode):
        assert capture_error_mode == "thread_local"
        self.said.append(f"record on {stream.name}")
        with self.stream(stream):
            yield


class Stream:
    def __init__(self, driver, name):
        self._driver, self.name = driver, name

    def wait_stream(self, other):
        self._driver.said.append(f"{self.name} waits for {other.name}")


class Graph:
    def __init__(self, driver):
        self._driver = driver

    def replay(self):
        self._driver.said.append(f"replay on {self._driver.current}")


class Out:
    def __init__(self, driver):
        self._driver = driver

    def record_stream(self, stream):
        self._driver.said.append(f"kept for {stream.name}")


def test_what_records_was_warmed_up_on_the_same_stream_by_a_step_that_counts(monkeypatch):
    driver = Driver(monkeypatch)

    def step():
        driver.said.append(f"step on {driver.current}")
        return Out(driver)

    run = recorded(step, CUDA)
    first = run()
    assert driver.said == [
        "side waits for main",
        "step on side",
        "main waits for side",
        "kept for main",
    ]
    driver.said.clear()
    second = run()
    assert driver.said == ["record on side", "step on side", "replay on main"]
    driver.said.clear()
    assert run() is second is not first
    assert driver.said == ["replay on main"]
