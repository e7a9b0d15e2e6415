"""An adaptation is training runs with gates between them, and ends alike however it is stopped."""

import hashlib
import json
import signal
from pathlib import Path

import numpy as np
import pytest

from armillary.checkpoints import open_checkpoint
from armillary.data import TokenDataset
from armillary.errors import ConfigError, UserError
from armillary.evaluation.results import read_results
from armillary.extension.adapt import Watch
from armillary.extension.rules import RuleOptions, extend
from armillary.rope_scaling import DynamicNTK, LongRoPE
from armillary.training.log import read_log
from support.adaptations import (
    TARGET,
    WINDOW,
    dying,
    entries,
    on_one_rank,
    prepare_directory,
    run,
    run_and_die,
    source,
)
from support.ranks import fresh_processes, on_ranks


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """A model, texts, and a whole adaptation."""
    directory = prepare_directory(tmp_path_factory.mktemp("adapt"))
    said: list[str] = []
    adapted = run(directory, "whole", entries(directory), Watch(say=said.append))
    return directory, adapted, said


def arrays(model: Path) -> dict[str, np.ndarray]:
    return {name: tensor.to_float32() for name, tensor in open_checkpoint(model).tensors.items()}


def same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


def content(model: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(model.iterdir())
    }


def test_the_model_has_its_rule_and_what_the_last_stage_has_learned(shared):
    directory, adapted, _ = shared
    assert adapted.reason == "finished"
    planned = extend(source(directory).config, TARGET, "yarn").config
    assert open_checkpoint(directory / "whole").config == planned
    assert adapted.applied.verified[0].difference == 0.0
    last = arrays(adapted.work / "stage-2/model")
    assert same(arrays(directory / "whole"), last)
    for before in ("start", "stage-1/model"):
        assert not same(arrays(adapted.work / before), last)
    assert same(arrays(adapted.work / "start"), arrays(directory / "model"))


def test_each_stage_is_a_run_of_its_own_length_that_goes_on_from_the_one_before(shared):
    _, adapted, said = shared
    for number, (length, rows) in enumerate([(128, 4), (256, 3)], 1):
        start, *_ = (e for e in read_log(adapted.work / f"stage-{number}/log.jsonl") if e.step == 0)
        assert (start.length, start.rows, start.steps) == (length, rows, 4)
        before = "start" if number == 1 else "stage-1/model"
        assert start.config["model"]["checkpoint"] == str(adapted.work / before)
        reached = WINDOW if number == 1 else 128
        assert start.config["data"]["mixture"] == {
            "long": reached + 1,
            "long_share": 0.5,
            "long_repeat": 5.0,
            "short": WINDOW,
            "short_share": 0.25,
        }
    lengths = TokenDataset(adapted.work / "data").lengths
    long = int((lengths >= 129).sum())
    assert 0 < long < len(lengths)
    told = f"stage 2: {long} of {len(lengths)} documents have 129 tokens or more"
    assert any(line.startswith(told) for line in said)


def test_gates_say_what_was_measured(shared):
    """An untrained model loses nothing by training, and its window has no room for questions."""
    _, adapted, _ = shared
    for stage in adapted.stages:
        short, retrieval = stage.gates
        assert (short.name, short.passed) == ("short loss", True)
        assert (retrieval.name, retrieval.passed) == ("retrieval", None)
        assert "a window of 64 has no room for the facts" in retrieval.said
        noted = json.loads((adapted.work / f"stage-{stage.number + 1}/gates.json").read_text())
        assert noted["passed"] is True
        assert noted["gates"][0]["said"] == short.said


def test_short_and_long_losses_stand_side_by_side_before_and_after(shared):
    """Cases 45 and 46: what the rule alone does to short texts, and what adapting makes of both."""
    _, adapted, _ = shared
    for stage, length in zip(adapted.stages, (128, 256), strict=True):
        short, long = stage.losses
        assert (short.what, long.what) == ("short texts", f"at {length} tokens")
        for each in stage.losses:
            assert len({each.unextended, each.rule_alone, each.adapted}) == 3
            assert each.adapted < each.unextended - 0.3
    first, second = (stage.losses[0] for stage in adapted.stages)
    assert first.unextended == second.unextended
    assert first.rule_alone == second.rule_alone


def test_killed_again_and_again_it_ends_with_the_same_bytes(shared):
    """Processes that are killed; results of measuring differ in the model's name alone."""
    directory, adapted, _ = shared
    made, context = entries(directory), fresh_processes()
    texts = len(read_results(adapted.work / "unextended")[1])
    # Before and after a checkpoint; measuring the model as it was, and the first stage's; a step of
    # the second stage, and measuring it. Counts begin anew with each process.
    moments = [("step", 1), ("step", 3), ("cell", 2), ("cell", texts + 2), ("step", 3), ("cell", 3)]
    for moment in moments:
        process = context.Process(
            target=run_and_die, args=(directory, "killed", made, moment), daemon=True
        )
        process.start()
        process.join(120)
        assert process.exitcode == -signal.SIGKILL, moment
        assert not (directory / "killed").exists()
    again = run(directory, "killed", made)
    assert again.reason == "finished"
    assert content(directory / "killed") == content(directory / "whole")
    for part in ("unextended", *(f"stage-{n}/measured/adapted" for n in (1, 2))):
        assert read_results(again.work / part)[1] == read_results(adapted.work / part)[1]


@pytest.mark.parametrize(("kind", "at"), [("step", 6), ("cell", 12)])
def test_a_signal_saves_and_is_named(shared, kind, at):
    directory, _, _ = shared
    out, made = f"asked-{kind}", entries(directory)
    stopped = run(directory, out, made, dying(kind, at, signal.SIGTERM))
    assert stopped.reason == "SIGTERM"
    assert not (directory / out).exists()
    assert run(directory, out, made).reason == "finished"
    assert content(directory / out) == content(directory / "whole")


def test_what_is_finished_is_written_again_without_a_step(shared):
    directory, _, _ = shared
    again = run(directory, "whole", entries(directory), dying("step", 1))
    assert again.reason == "finished"


# Gates


def test_a_stage_that_fails_its_gate_stops_and_more_steps_go_on_from_there(shared):
    """A learning rate that does damage; the bar is then lowered, and the steps are those that a
    stage of so many has from the beginning."""
    directory, _, _ = shared
    hurt = {"train": {"lr": 1.0}}
    failed = run(directory, "failed", entries(directory, **hurt))
    assert failed.reason == "gates"
    assert [stage.passed for stage in failed.stages] == [False]
    assert not (directory / "failed").exists()
    assert not (failed.work / "stage-2").exists()

    more = {"stages": [{"length": 128, "steps": 6}, {"length": TARGET, "steps": 1}]}
    lenient = {"gates": {"short_loss": 1000.0}}
    went_on = run(directory, "failed", entries(directory, **hurt, **more, **lenient))
    steps = [e.step for e in read_log(failed.work / "stage-1/log.jsonl") if e.kind == "step"]
    assert steps == [1, 2, 3, 4, 5, 6]
    assert went_on.reason == "finished"
    run(directory, "at-once", entries(directory, **hurt, **more, **lenient))
    assert content(directory / "failed") == content(directory / "at-once")


def test_without_gates_nothing_is_measured(shared):
    directory, _, _ = shared
    adapted = run(directory, "no-gates", entries(directory, gates=None))
    assert adapted.reason == "finished"
    assert [stage.gates for stage in adapted.stages] == [(), ()]
    assert not (adapted.work / "unextended").exists()
    assert same(arrays(directory / "no-gates"), arrays(directory / "whole"))


def test_gates_need_texts_that_are_held_out(shared):
    directory, _, _ = shared
    with pytest.raises(UserError, match="0 are held out; prepare with a larger data.validation"):
        run(directory, "all-trained", entries(directory, data={"validation": 0.0}))
    assert not (directory / "all-trained.adaptation/stage-1").exists()  # not after hours of steps


# Settings


@pytest.mark.parametrize(
    ("changes", "arguments", "message"),
    [
        ({"train": {"lr": 1e-4}}, {}, r"config.train.lr: 0.001 → 0.0001"),
        ({"mixture": {"short_share": 0.5}}, {}, r"config.mixture.short_share: 0.25 → 0.5"),
        ({}, {"rule": "linear"}, r"rule: 'yarn' → 'linear'; settings"),
        ({"stages": [{"length": 128, "steps": 9}]}, {}, r"config.stages: "),
    ],
)
def test_other_settings_in_the_same_place_are_refused(shared, changes, arguments, message):
    directory, _, _ = shared
    with pytest.raises(ConfigError, match=f"was begun under other settings: {message}"):
        run(directory, "whole", entries(directory, **changes), **arguments)


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([{"length": WINDOW, "steps": 1}], "a length of 64 is within the model's window of 64"),
        ([{"length": 512, "steps": 1}], "a length of 512 is beyond the target of 256"),
    ],
)
def test_lengths_have_to_lie_between_window_and_target(shared, stages, message):
    directory, _, _ = shared
    with pytest.raises(ConfigError, match=message):
        run(directory, "lengths", entries(directory, stages=stages))


def test_what_a_later_stage_refuses_is_said_before_anything_is_done(shared):
    directory, _, _ = shared
    stages = [{"length": 128, "steps": 1}, {"length": 256, "steps": 1, "batch_size": 1}]
    with pytest.raises(ConfigError, match="stage 2: of 1 rows a step, 1 short ones leave none"):
        run(directory, "refused", entries(directory, stages=stages))
    assert not (directory / "refused.adaptation").exists()


def test_text_without_a_document_so_long_is_refused_unless_positions_skip(tmp_path, shared):
    directory, _, _ = shared
    short = tmp_path / "short"
    short.mkdir()
    for number in range(12):
        (short / f"{number}.txt").write_text("ring turns slowly around " + str(number))
    data = {"sources": [str(short)], "validation": 0.3}
    with pytest.raises(UserError, match=r"no document has 65 tokens or more \(the longest has "):
        run(directory, "too-short", entries(directory, data=data | {"sources": [str(short)]}))


def test_positions_skip_in_rows_below_the_length(shared):
    directory, _, _ = shared
    stages = [{"length": TARGET, "steps": 3, "rows": WINDOW, "chunks": 3}]
    said: list[str] = []
    made = entries(directory, stages=stages)
    adapted = run(directory, "skipping", made, Watch(say=said.append), to=2 * TARGET)
    assert adapted.reason == "finished"
    assert "the last stage reaches 256 of 512 positions" in "\n".join(said)
    (start, *_) = read_log(adapted.work / "stage-1/log.jsonl")
    assert start.config["data"]["length"] == WINDOW
    assert start.config["data"]["skip"] == {"to": TARGET, "chunks": 3}
    assert start.config["data"]["mixture"]["long"] == WINDOW


@pytest.mark.parametrize(
    ("rule", "options", "kind"),
    [
        ("dynamic", RuleOptions(), DynamicNTK),
        ("longrope", RuleOptions(short_factors=(1.0,) * 5, long_factors=(4.0,) * 5), LongRoPE),
    ],
)
def test_rules_that_vary_with_length_keep_their_window_from_stage_to_stage(
    shared, rule, options, kind
):
    """Hugging Face's files do not say the window of the dynamic rule; ours do."""
    directory, _, _ = shared
    made = entries(directory, gates=None)
    adapted = run(directory, f"with-{rule}", made, rule=rule, options=options)
    for model in (adapted.work / "stage-1/model", directory / f"with-{rule}"):
        config = open_checkpoint(model).config
        assert config.max_positions == TARGET
        assert isinstance(config.layers[0].attention.rotary.scaling, kind)


def test_adapters_are_trained_and_merged_stage_by_stage(shared):
    directory, _, _ = shared
    lora = {"targets": ["layers.*.attention.q"], "rank": 3}
    run(directory, "adapters", entries(directory, lora=lora, gates=None))
    before, after = arrays(directory / "model"), arrays(directory / "adapters")
    changed = {name for name in after if not np.array_equal(before[name], after[name])}
    assert changed == {f"layers.{n}.attention.q.weight" for n in (0, 1)}


def test_two_processes_adapt_as_one(shared):
    directory, _, _ = shared
    stages = [{"length": 128, "steps": 4}, {"length": TARGET, "steps": 4, "batch_size": 4}]
    made = entries(directory, stages=stages)
    alone = on_one_rank(directory, "alone", made)
    main, other = on_ranks(2, on_one_rank, directory, "together", made)
    assert main == other == alone
    one, two = arrays(directory / "alone"), arrays(directory / "together")
    for name, value in one.items():
        np.testing.assert_allclose(two[name], value, atol=1e-4, err_msg=name)
