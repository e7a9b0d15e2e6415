"""What a header says of a model and of tasks changes with what they are, and with nothing else."""

import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from armillary.checkpoints import open_checkpoint
from armillary.diagnosis.frequencies import frequency_change
from armillary.evaluation import provenance
from armillary.evaluation.provenance import (
    frequencies_of,
    original_window_of,
    run_of,
    task_settings,
)
from armillary.rope_scaling import NTK, Llama3, PositionInterpolation, Unscaled, YaRN
from support.evaluations import MadeUpTask
from support.models import SCALINGS
from support.tiny_model import tiny_model


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("models")
    tiny_model(directory / "parts").save(directory / "tiny")
    return directory / "tiny"


def of(path: Path, **options):
    return run_of(str(path), open_checkpoint(path), **({"dtype": "float32"} | options))


def test_a_model_is_told_by_its_parts(saved):
    run = of(saved, seed=3)
    assert (run.name, run.window, run.original_window, run.seed) == ("tiny", 256, 256, 3)
    assert run.model["rule"] == "default"
    assert (run.model["base"], run.model["factor"]) == (100.0, None)
    assert run.model["engine"].startswith("armillary 0.")
    assert len(run.model["weights_sha256"]) == len(run.model["tokenizer_sha256"]) == 64
    assert run.model["parameters"] > 1000


def test_an_alias_stays_the_name(saved):
    assert run_of("smollm2-135m", open_checkpoint(saved), dtype="float32").name == "smollm2-135m"


def test_the_model_of_a_training_run_is_called_as_the_run(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "short-run" / "model")
    assert of(tmp_path / "short-run" / "model").name == "short-run"


def test_a_copy_elsewhere_is_the_same_model(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "tiny")
    assert of(saved) == of(tmp_path / "tiny")
    assert str(saved.parent) not in repr(of(saved))


def test_each_part_has_a_checksum_of_its_own(saved, tmp_path):
    plain = of(saved).model
    lm = tiny_model(tmp_path / "parts", scaling=YaRN(factor=4.0, original_window=64))
    lm.save(tmp_path / "tiny")
    changed = of(tmp_path / "tiny")
    assert {key for key in plain if plain[key] != changed.model[key]} == {
        "config_sha256",
        "rule",
        "factor",
        "rotary",
    }
    assert (changed.model["rule"], changed.model["factor"]) == ("yarn", 4.0)
    assert changed.original_window == 64

    lm.decoder.embedding.weight.data[0, 0] += 1
    lm.save(tmp_path / "other")
    other = of(tmp_path / "other").model
    assert {key for key in other if other[key] != changed.model[key]} == {"weights_sha256"}


def test_a_file_is_read_once_while_it_stays_the_same(saved, tmp_path, monkeypatch):
    shutil.copytree(saved, tmp_path / "tiny")
    calls = []
    plain = provenance.sha256
    monkeypatch.setattr(provenance, "sha256", lambda path: calls.append(path) or plain(path))
    checkpoint = open_checkpoint(tmp_path / "tiny")
    first = provenance.weights_checksum(checkpoint)
    assert provenance.weights_checksum(checkpoint) == first
    assert len(calls) == 1
    os.utime(calls[0], ns=(1, 1))
    provenance.weights_checksum(checkpoint)
    assert len(calls) == 2


@pytest.mark.parametrize(
    ("rule", "window"),
    [
        (Unscaled(), 256),
        (YaRN(factor=4.0, original_window=64), 64),
        (Llama3(factor=2.0, original_window=512), 256),
        (PositionInterpolation(factor=4.0), 64),
        (NTK(factor=2.0), 128),
    ],
)
def test_the_window_before_a_rule(tmp_path, rule, window):
    config = tiny_model(tmp_path, scaling=rule).config
    assert original_window_of(config) == window


@pytest.mark.parametrize("rule", [YaRN(factor=4.0, original_window=64), SCALINGS["longrope"]])
def test_what_a_rule_did_is_read_from_the_run(tmp_path, rule):
    lm = tiny_model(tmp_path / "parts", scaling=rule)
    lm.save(tmp_path / "tiny")
    run = of(tmp_path / "tiny")
    change = frequencies_of(run)
    rotary = lm.config.layers[0].attention.rotary
    plain = rotary.model_copy(update={"scaling": Unscaled()})
    wanted = frequency_change(plain, rotary, rule.original_window, 256)
    assert (change.window, change.target) == (rule.original_window, 256)
    for name in ("before", "after", "after_short"):
        assert np.array_equal(getattr(change, name), getattr(wanted, name))


def test_of_a_model_as_it_was_trained_there_is_nothing_to_draw(saved):
    assert frequencies_of(of(saved)) is None
    assert frequencies_of(replace(of(saved), model={})) is None
    assert frequencies_of(of(saved, original_window=64)).target == 256  # a window without a rule


def test_what_the_user_says_of_it_goes_first(saved):
    assert of(saved, original_window=32).original_window == 32


@dataclass(frozen=True)
class PlainTokens:
    words: tuple[int, ...]
    newline: int


@dataclass(frozen=True)
class Documents(MadeUpTask):
    documents: tuple[tuple[int, ...], ...] = ((1, 2), (3,))
    tokens: PlainTokens = PlainTokens((1, 2), 3)
    tokenizer: object = None


def test_a_task_is_told_by_its_settings():
    settings = task_settings(MadeUpTask())
    assert settings["version"] == 1
    assert settings["lengths"] == "8, 16"
    assert (settings["instances"], settings["seed"], settings["cells"]) == (3, 0, 4)


@pytest.mark.parametrize(
    "changed",
    [
        {"documents": ((1, 2), (4,))},
        {"documents": ((1,), (2, 3))},
        {"tokens": PlainTokens((1, 3), 3)},
        {"tokens": PlainTokens((1, 2), 4)},
        {"version": 2},
        {"lengths": (8,)},
        {"instances": 4},
    ],
)
def test_whatever_a_task_holds_changes_its_settings(changed):
    assert task_settings(Documents()) == task_settings(Documents())
    assert task_settings(replace(Documents(), **changed)) != task_settings(Documents())


def test_what_is_no_plain_data_is_left_to_the_cells():
    assert task_settings(replace(Documents(), tokenizer=object())).keys() == {
        *task_settings(Documents()).keys()
    } - {"tokenizer"}


def test_a_task_may_say_it_itself():
    class Telling(MadeUpTask):
        settings = {"windows": 3}  # noqa: RUF012

    told = task_settings(Telling())
    assert told.pop("cells_sha256")
    assert told == {"version": 1, "windows": 3, "cells": 4}
