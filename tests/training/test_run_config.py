"""A run's file is read strictly, told back whole, and every key of it is explained."""

import re
from pathlib import Path

import pytest
import yaml

from armillary.errors import ConfigError
from armillary.extension.adapt_config import AdaptConfig
from armillary.training.optimizer import OptimizerConfig
from armillary.training.run_config import RunConfig, TrainSettings, differences, explain
from armillary.training.schedule import ScheduleConfig
from support.runs import entries


def test_what_is_written_is_read_again(tmp_path):
    config = RunConfig.from_dict(entries(tmp_path))
    (tmp_path / "run.yaml").write_text(config.to_yaml())
    assert RunConfig.load(tmp_path / "run.yaml") == config
    assert config.train.lr == 3e-3
    assert config.data.sources == (str(tmp_path / "texts"),)


def test_set_replaces_entries_by_their_dotted_names(tmp_path):
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(entries(tmp_path)))
    config = RunConfig.load(
        tmp_path / "run.yaml",
        ["train.lr=3e-4", "data.sources=[a, b]", "train.clip=null", "log.tensorboard=true"],
    )
    assert config.train.lr == 3e-4
    assert config.data.sources == ("a", "b")
    assert config.train.clip is None
    assert config.log.tensorboard is True


@pytest.mark.parametrize("setting", ["train.lr", "=3", ".lr=3", "train.=3"])
def test_a_setting_that_is_none_is_refused(tmp_path, setting):
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(entries(tmp_path)))
    with pytest.raises(ConfigError, match=r"must be KEY=VALUE"):
        RunConfig.load(tmp_path / "run.yaml", [setting])


@pytest.mark.parametrize(
    ("section", "changes", "message"),
    [
        ("train", {"step": 3}, r"unknown key 'train.step' \(did you mean 'steps'\?\)"),
        ("train", {"steps": 0}, r"train.steps must be greater than or equal to 1, found 0"),
        ("train", {"steps": 1.5}, r"train.steps must be a valid integer.*found 1.5"),
        ("train", {"steps": True}, r"train.steps must be a valid integer"),
        ("train", {"lr": 0.0}, r"train.lr must be greater than 0"),
        ("train", {"lr": float("nan")}, r"train.lr"),
        ("train", {"optimizer": "sgd"}, r"train.optimizer must be 'adamw' or 'muon', found 'sgd'"),
        ("train", {"schedule": "wsd"}, r"decay is 0, but wsd comes down"),
        ("train", {"warmup": 30}, r"warmup 30 and decay 0 take more than the 20 steps"),
        ("model", {"checkpoint": "x"}, r"model: needs one of .* found checkpoint and uniform"),
        ("data", {"prepared": "x"}, r"data: needs sources or prepared, one of them"),
        ("data", {"tokenizer": "x"}, r"data: vocab_size learns a tokenizer"),
        ("lora", {"rank": 4}, r"lora: adapters need model.checkpoint"),
        ("data", {"skip": {"to": 32}}, r"data: skip.to 32 is not beyond rows of 32"),
        ("data", {"skip": {"to": 64, "chunks": 1}}, r"data.skip.chunks must be greater than"),
        (
            "data",
            {"mixture": {"long_share": 0.5}},
            r"data.mixture: long_share and long go together",
        ),
        ("data", {"mixture": {"short": 16}}, r"data.mixture: short_share and short go together"),
        (
            "data",
            {"mixture": {"short": 16, "short_share": 0.95}},
            r"of 8 rows a step, 8 short ones leave none for the others",
        ),
        ("parallel", {"shard": 0}, r"parallel: shard is 0"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(tmp_path, section, changes, message):
    with pytest.raises(ConfigError, match=message) as caught:
        RunConfig.from_dict(entries(tmp_path, **{section: changes}), "run.yaml")
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("run.yaml: ")


def test_a_missing_key_is_named(tmp_path):
    made = entries(tmp_path)
    del made["train"]["steps"]
    with pytest.raises(ConfigError, match=r"train\.steps is missing"):
        RunConfig.from_dict(made)


def test_every_key_is_explained():
    rows = list(explain())
    names = [name for name, *_ in rows]
    assert len(names) == len(set(names))
    for name, kind, _, description in rows:
        assert description, name
        assert kind, name
    told = {name: (kind, default) for name, kind, default, _ in rows}
    assert told["train.lr"] == ("number", "0.0003")
    assert told["train.steps"] == ("whole number", "")
    assert told["train.optimizer"] == ("adamw, muon", "adamw")
    assert told["lora"] == ("section", "null")
    assert told["parallel.tensor"] == ("whole number", "1")


def test_the_keys_of_a_written_run_are_those_that_are_explained(tmp_path):
    def keys(section, prefix=""):
        for key, value in section.items():
            yield f"{prefix}{key}"
            if isinstance(value, dict):
                yield from keys(value, f"{prefix}{key}.")

    made = entries(tmp_path, lora={})
    made["model"] = {"checkpoint": "x"}
    made["data"] |= {"mixture": {}, "skip": {"to": 64}}
    del made["data"]["vocab_size"]
    written = set(keys(RunConfig.from_dict(made).to_dict()))
    explained = {name for name, *_ in explain()}
    assert written == {name for name in explained if not name.startswith("model.uniform.")}


def test_defaults_are_those_of_the_parts(tmp_path):
    """Two places that say a default must not drift apart."""
    config = RunConfig.from_dict(entries(tmp_path, train={"lr": 3e-4, "warmup": 0}))
    assert config.optimizer() == OptimizerConfig()
    assert config.schedule() == ScheduleConfig(steps=20)


def test_settings_reach_the_parts(tmp_path):
    changes = {
        "optimizer": "muon", "lr": 1e-3, "muon_lr": 2e-2, "weight_decay": 0.3, "beta1": 0.8,
        "decay_embeddings": False, "beta2": 0.9, "eps": 1e-7, "momentum": 0.9,
        "schedule": "wsd", "decay": 5, "decay_shape": "sqrt", "final": 0.1, "warmup": 2,
    }  # fmt: skip
    assert set(changes) <= set(TrainSettings.model_fields)
    config = RunConfig.from_dict(entries(tmp_path, train=changes))
    assert config.optimizer() == OptimizerConfig(
        kind="muon", lr=1e-3, muon_lr=2e-2, weight_decay=0.3, decay_embeddings=False,
        beta1=0.8, beta2=0.9, eps=1e-7, momentum=0.9,
    )  # fmt: skip
    assert config.schedule() == ScheduleConfig(
        steps=20, kind="wsd", warmup=2, decay=5, shape="sqrt", final=0.1
    )


def test_differences_are_told_by_dotted_names():
    old = {"a": 1, "b": {"c": [1], "d": None}}
    new = {"a": 1, "b": {"c": [2], "d": None}, "e": "x"}
    assert differences(old, new) == {"b.c": "[1] → [2]", "e": "None → 'x'"}
    assert differences(old, old) == {}


@pytest.mark.parametrize(
    "path",
    sorted((Path(__file__).parents[2] / "examples").glob("*.yaml")),
    ids=lambda path: path.name,
)
def test_the_shipped_runs_are_runs(path):
    keys = re.findall(r"^(\w+):", path.read_text(), re.MULTILINE)
    if "stages" in keys:
        AdaptConfig.load(path)
    elif "train" in keys:
        RunConfig.load(path)
