"""An adaptation's file is read as strictly as a run's, and its stages are runs."""

from pathlib import Path

import pytest

from armillary.errors import ConfigError
from armillary.extension.adapt_config import AdaptConfig
from armillary.training.run_config import explain
from support.adaptations import entries

HERE = Path("data")
EXAMPLES = Path(__file__).parents[2] / "examples"


def test_what_is_written_is_read_again(tmp_path):
    config = AdaptConfig.from_dict(entries(tmp_path))
    (tmp_path / "adapt.yaml").write_text(config.to_yaml())
    assert AdaptConfig.load(tmp_path / "adapt.yaml") == config
    assert AdaptConfig.load(tmp_path / "adapt.yaml", ["train.lr=1e-5"]).train.lr == 1e-5


def test_few_keys_have_to_be_given():
    config = AdaptConfig.from_dict(
        {
            "stages": [{"length": 128, "steps": 400}],
            "data": {"sources": ["texts"]},
            "train": {"batch_size": 64},
        }
    )
    own = config.train
    assert (own.lr, own.weight_decay, own.schedule, own.warmup) == (2e-5, 0.0, "constant", 20)
    assert (own.optimizer, own.beta1, own.beta2) == ("adamw", 0.9, 0.95)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stages": []}, "stages: needs one at least"),
        (
            {"stages": [{"length": 9, "steps": 1}, {"length": 9, "steps": 1}]},
            "stages: a length of 9 after one of 9; they must rise",
        ),
        (
            {"stages": [{"length": 9, "steps": 1, "rows": 10}]},
            "stages.0: rows of 10 are longer than the stage's 9",
        ),
        (
            {"stages": [{"lenght": 9, "length": 9, "steps": 1}]},
            r"unknown key 'stages.0.lenght' \(did you mean 'length'\?\)",
        ),
        ({"stages": [{"length": 9}]}, "stages.0.steps is missing"),
        ({"data": {"length": 9}}, "unknown key 'data.length'"),
        ({"train": {"steps": 9}}, "unknown key 'train.steps'"),
        ({"gates": {"retrieval": 1.5}}, "gates.retrieval must be less than or equal to 1"),
        ({"model": {"checkpoint": "x"}}, "unknown key 'model'"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message) as caught:
        AdaptConfig.from_dict(entries(tmp_path, **changes), "adapt.yaml")
    assert "\n" not in str(caught.value)


def test_every_key_is_explained():
    rows = {name: (kind, default) for name, kind, default, _ in explain(AdaptConfig)}
    assert all(description for *_, description in explain(AdaptConfig))
    assert list(rows)[:3] == ["stages[]", "stages[].length", "stages[].steps"]
    assert rows["stages[].rows"] == ("whole number or null", "null")
    assert rows["train.lr"] == ("number", "2.0e-05")
    assert rows["gates.short_loss"] == ("number", "0.01")
    assert "train.steps" not in rows
    assert "data.length" not in rows


@pytest.mark.parametrize("name", ["adapt-stdlib", "adapt-smollm2"])
def test_the_examples_are_adaptations(name):
    config = AdaptConfig.load(EXAMPLES / f"{name}.yaml")
    for number in range(len(config.stages)):
        assert stage(config, number, window=256).train.steps == config.stages[number].steps


def stage(config, number, window=64):
    return config.run(number, model=Path("m"), data=HERE, out=Path("o"), window=window)


def test_a_stage_is_a_run_on_what_was_prepared(tmp_path):
    config = AdaptConfig.from_dict(entries(tmp_path, lora={"rank": 3}))
    run = stage(config, 1)
    assert (run.out, run.model.checkpoint, run.seed) == ("o", "m", 3)
    assert (run.data.sources, run.data.prepared, run.data.length) == ((), "data", 256)
    assert (run.train.steps, run.train.batch_size, run.train.lr) == (4, 3, 1e-3)
    assert run.lora.rank == 3
    assert run.skip() is None
    assert run.mixture().long == 129


def test_positions_skip_where_rows_are_shorter_than_the_stage(tmp_path):
    stages = [{"length": 256, "steps": 3, "rows": 32, "chunks": 3}]
    run = stage(AdaptConfig.from_dict(entries(tmp_path, stages=stages)), 0)
    assert run.data.length == 32
    assert (run.skip().to, run.skip().chunks) == (256, 3)
    assert (run.mixture().long, run.mixture().short) == (32, 32)


def test_without_shares_lengths_are_left_as_they_are(tmp_path):
    config = AdaptConfig.from_dict(
        entries(tmp_path, mixture={"long_share": 0.0, "short_share": 0.0})
    )
    mixture = stage(config, 0).mixture()
    assert (mixture.long, mixture.short) == (None, None)


def test_a_stage_of_fewer_steps_than_the_warm_up_warms_up_throughout(tmp_path):
    config = AdaptConfig.from_dict(entries(tmp_path, train={"warmup": 20}))
    assert stage(config, 0).train.warmup == 4
