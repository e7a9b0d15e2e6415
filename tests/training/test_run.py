"""Whole runs on several processes: the losses of one, models written by all, and going on.

Without dropout, since each process draws its own; and in a few steps, since rounding grows.
"""

import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

from armillary.errors import ConfigError, UserError
from armillary.language_model import LanguageModel, load
from armillary.training.events import Notice, RunStarted, Sampled, StepDone, Validated
from armillary.training.run import train
from armillary.training.run_config import RunConfig
from support.ranks import on_ranks
from support.runs import entries, write_texts

STEPS = 4


def settings(directory: Path, out: str, **sections) -> dict:
    made = entries(directory, **sections) | {"out": str(directory / out)}
    made["model"] = {**made["model"], "dropout": 0.0}
    made["train"] |= {"steps": STEPS}
    made["samples"] = {"prompts": ["ring turns"], "max_tokens": 5, "temperature": 0.8}
    made["validation"] = {"every": 2, "batch_size": 2}
    made["checkpoints"] = {"every": 2}
    return made


def run(made: dict, resume: bool = False, stop_after: int | None = None) -> dict:
    """Make a run; what the main process heard of it, as plain values."""
    torch.set_num_threads(1)
    events: list = []

    def stop(event):
        if isinstance(event, StepDone) and event.step == stop_after:
            os.kill(os.getpid(), signal.SIGTERM)

    config = RunConfig.from_dict(made)
    ended = train(config, resume=resume, listeners=[events.append, stop])
    return {
        "reason": ended.reason,
        "losses": {e.step: e.loss for e in events if isinstance(e, StepDone)},
        "norms": {e.step: e.gradient_norm for e in events if isinstance(e, StepDone)},
        "validation": [
            (e.loss, e.bits_per_byte, e.targets) for e in events if type(e) is Validated
        ],
        "samples": [e.text for e in events if isinstance(e, Sampled)],
        "notices": [e.text for e in events if isinstance(e, Notice)],
        "processes": [e.processes for e in events if isinstance(e, RunStarted)],
    }


def weights(model: Path) -> dict[str, np.ndarray]:
    decoder = load(model, dtype="float32").decoder
    return {name: value.detach().numpy() for name, value in decoder.named_parameters()}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The run on one process, and what it came to."""
    directory = tmp_path_factory.mktemp("runs")
    write_texts(directory / "texts")
    return directory, run(settings(directory, "alone"))


def assert_same_run(told: dict, alone: dict, steps: range = range(1, STEPS + 1)) -> None:
    assert told["reason"] == "finished"
    assert sorted(told["losses"]) == list(steps)
    for step in steps:
        assert told["losses"][step] == pytest.approx(alone["losses"][step], rel=1e-5)
        assert told["norms"][step] == pytest.approx(alone["norms"][step], rel=1e-4)
    assert told["validation"][-1] == pytest.approx(alone["validation"][-1], rel=1e-4)
    assert told["samples"] == alone["samples"]


def assert_same_model(model: Path, directory: Path) -> None:
    made, expected = weights(model), weights(directory / "alone/model")
    assert made.keys() == expected.keys()
    for name, value in made.items():
        # AdamW's first steps divide gradients by themselves: where one is nearly 0, rounding shows.
        np.testing.assert_allclose(value, expected[name], atol=1e-4, err_msg=name)


PARALLEL = {"fsdp": {}, "tensor": {"tensor": 2}, "context": {"context": 2}}


@pytest.mark.parametrize("kind", PARALLEL)
def test_two_processes_make_the_run_of_one(alone, kind):
    directory, expected = alone
    made = settings(directory, kind, parallel=PARALLEL[kind])
    main, other = on_ranks(2, run, made)
    assert main["processes"] == [2]
    assert not other["losses"]  # only one tells
    assert_same_run(main, expected)
    assert_same_model(directory / kind / "model", directory)


@pytest.mark.parametrize(("first", "then"), [(2, 1), (1, 2)])
def test_a_run_goes_on_with_another_number_of_processes(alone, first, then):
    directory, expected = alone
    made = settings(directory, f"from{first}to{then}")
    stopped = start(first, made, False, 3)
    assert stopped["reason"] == "SIGTERM"
    went_on = start(then, made, True)
    assert_same_run(
        went_on
        | {"losses": stopped["losses"] | went_on["losses"]}
        | {"norms": stopped["norms"] | went_on["norms"]},
        expected,
    )
    assert any("go on anew" in notice for notice in went_on["notices"])
    assert_same_model(Path(made["out"]) / "model", directory)


def start(processes: int, *arguments) -> dict:
    return run(*arguments) if processes == 1 else on_ranks(processes, run, *arguments)[0]


def test_adapters_are_trained_and_merged_on_two_processes(alone):
    directory, _ = alone
    lora = {"targets": ["layers.*.attention.q"], "rank": 3}
    made = settings(directory, "lora2", lora=lora)
    made["model"] = {"checkpoint": str(directory / "alone/model")}
    made["data"]["vocab_size"] = None
    told = on_ranks(2, run, made)[0]
    expected = run(made | {"out": str(directory / "lora1")})
    assert_same_run(told, expected)
    one, other = weights(directory / "lora2/model"), weights(directory / "lora1/model")
    for name, value in one.items():
        np.testing.assert_allclose(value, other[name], atol=1e-4, err_msg=name)


def test_samples_are_those_of_the_model(alone):
    """One process: what the objective writes is what generation gives."""
    directory, expected = alone
    model: LanguageModel = load(directory / "alone/model", dtype="float32")
    made = model.generate("ring turns", max_tokens=5, temperature=0.8, seed=3)
    assert expected["samples"] == [made.text]


def test_sizes_that_do_not_divide_are_refused_at_start(alone):
    directory, _ = alone
    for parallel, message in (
        ({"tensor": 3}, r"1 processes do not divide by"),
        ({"context": 2, "shard": 1}, r"but 1 processes were started"),
    ):
        made = settings(directory, "refused", parallel=parallel)
        with pytest.raises(ConfigError, match=message):
            run(made)
    made = settings(directory, "refused", train={"batch_size": 9})
    with pytest.raises(UserError, match=r"9 rows a step do not divide by the 2"):
        run(made)
    assert not (directory / "refused/checkpoints").exists()
