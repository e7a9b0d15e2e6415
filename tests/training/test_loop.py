"""The loop makes the steps that it should, says so, and goes on as if it had not been stopped."""

import json
import math
import os
import signal
from pathlib import Path

import pytest
import torch

from armillary.checkpoints import open_checkpoint
from armillary.data import IGNORED, TokenDataset
from armillary.errors import ConfigError, UserError
from armillary.language_model import load
from armillary.training.events import (
    CheckpointSaved,
    Notice,
    RunEnded,
    RunStarted,
    Sampled,
    StepDone,
    Validated,
)
from armillary.training.loop import Trainer
from armillary.training.loss import LossSum
from armillary.training.native.build import NotBuiltError, kernels
from armillary.training.parallel.ranks import Ranks
from armillary.training.precision import Precision
from armillary.training.run import train
from armillary.training.setup import open_model, prepare_run
from support.runs import a_run, write_texts
from support.tiny_model import tiny_model


def trainer(config, listeners=()) -> Trainer:
    ranks = Ranks.single()
    work = prepare_run(config, open_model(config), ranks)
    precision = Precision(config.train.precision)
    return Trainer(config, work, ranks, precision, listeners)


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return dict(load(directory, dtype="float32").decoder.named_parameters())


def assert_same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name, value in a.items():
        assert torch.equal(value.view(torch.int32), b[name].view(torch.int32)), name


def losses(events) -> dict[int, float]:
    return {event.step: event.loss for event in events if isinstance(event, StepDone)}


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """Texts, and a whole run on them: 20 steps, dropout, micro-batches, more than one epoch."""
    directory = tmp_path_factory.mktemp("runs")
    write_texts(directory / "texts")
    config = a_run(directory)
    events: list = []
    ended = train(config, listeners=[events.append])
    return directory, config, events, ended


def of(config, directory, **changes):
    """The same run, written elsewhere, on the data that is there."""
    made = config.to_dict()
    made["out"] = str(directory)
    for name, values in changes.items():
        made[name] = {**(made[name] or {}), **values}
    return type(config).from_dict(made)


# What a run does


def test_a_run_learns_and_tells_all_of_it(shared):
    _, config, events, ended = shared
    assert ended.reason == "finished"
    steps = [event for event in events if isinstance(event, StepDone)]
    assert [event.step for event in steps] == list(range(1, 21))
    assert steps[-1].epoch > 1  # the tests of resuming below cross the border of an epoch
    assert sum(e.loss for e in steps[-3:]) < sum(e.loss for e in steps[:3]) - 1
    assert steps[0].learning_rate == pytest.approx(config.train.lr / 2)
    assert steps[-1].tokens == 20 * 8 * 32
    assert all(event.tokens_per_second > 0 and event.memory > 1e6 for event in steps)
    assert isinstance(events[0], RunStarted)
    validated = [event for event in events if isinstance(event, Validated)]
    assert [event.step for event in validated] == [5, 10, 15, 20]
    assert validated[-1].loss < validated[0].loss
    saved = [event for event in events if isinstance(event, CheckpointSaved)]
    assert [event.step for event in saved] == [7, 14, 20]
    assert isinstance(events[-1], RunEnded)
    assert set(events[-1].compressors) == {"gzip -9", "xz -9"}


def test_the_model_that_it_writes_is_the_one_that_was_validated(shared):
    _, config, events, ended = shared
    model = load(ended.model, dtype="float32")
    made = trainer(config)
    made.work.decoder.load_state_dict(model.decoder.state_dict())
    made._began = 0.0
    last = [event for event in events if isinstance(event, Validated)][-1]
    assert made._validate().loss == last.loss
    assert model.generate("ring turns", max_tokens=3, temperature=0).text


@pytest.mark.parametrize("asked", [None, True, False])
@pytest.mark.parametrize("source", ["new", "checkpoint"])
def test_what_a_model_knew_before_is_measured_where_it_knew_something(tmp_path, source, asked):
    run = a_run(tmp_path) if source == "new" else checkpoint_run(tmp_path)[1]
    settings = {"at_start": asked, "every": 0}
    run = of(run, tmp_path / "out", validation=settings, train={"steps": 2, "warmup": 0})
    first, second = [], []
    train(run, listeners=[first.append, stop_after(1)])
    train(run, resume=True, listeners=[second.append])
    expected = source == "checkpoint" if asked is None else asked
    assert [e.step for e in first if isinstance(e, Validated)] == ([0] if expected else [])
    assert [e.step for e in second if isinstance(e, Validated)] == [2]


def test_samples_are_written_at_milestones(shared, tmp_path):
    _, config, *_ = shared
    settings = {"prompts": ["ring"], "every": 2, "max_tokens": 4}
    events: list = []
    short = of(config, tmp_path, samples=settings, train={"steps": 3})
    train(short, listeners=[events.append])
    sampled = [event for event in events if isinstance(event, Sampled)]
    assert [event.step for event in sampled] == [2, 3]
    assert sampled[0].prompt == "ring"


def test_micro_batches_change_nothing(shared, tmp_path):
    """Rows hold unequal numbers of labels; a mean of means would give each row the same say."""
    _, config, *_ = shared
    made = {}
    for size in (8, 4, 2, 1):
        settings = {"micro_batch_size": size, "clip": None}
        run = of(config, tmp_path / str(size), train=settings, model={"dropout": 0.0})
        one = trainer(run)
        counts = {part.n_targets for part in one.work.train.batch(0).split(8)}
        assert len(counts) > 1
        # Stop before the step: gradients are what is to be compared.
        one.precision.step = lambda *_: pytest.fail("unreachable")
        with pytest.raises(pytest.fail.Exception):
            one._step(0)
        made[size] = {n: p.grad for n, p in one.objective.named_parameters()}
    for size in (4, 2, 1):
        for name, expected in made[8].items():
            scale = float(expected.abs().max())
            torch.testing.assert_close(
                made[size][name], expected, rtol=0, atol=1e-6 * scale, msg=name
            )


def test_the_loss_it_tells_is_that_of_the_batch(shared, tmp_path):
    _, config, *_ = shared
    one = trainer(of(config, tmp_path, model={"dropout": 0.0}))
    batch = one.work.train.batch(0)
    tokens, labels, documents = map(torch.from_numpy, (batch.tokens, batch.labels, batch.documents))
    logits = one.work.decoder(tokens, documents=documents)
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    assert one._step(0).loss == pytest.approx(float(expected.detach()), rel=1e-6)


# Going on


def test_a_run_that_goes_on_is_the_run_that_was_not_stopped(shared, tmp_path):
    """Bit for bit: dropout, accumulation, the border of an epoch; 7 steps, then 13."""
    _, config, events, ended = shared
    first, second = [], []
    stopping = [first.append, stop_after(7)]
    run = of(config, tmp_path)
    assert train(run, listeners=stopping).reason == "SIGTERM"
    assert not (tmp_path / "model").exists()
    assert train(run, resume=True, listeners=[second.append]).reason == "finished"
    assert sorted(losses(second)) == list(range(8, 21))
    assert {**losses(first), **losses(second)} == losses(events)
    assert_same_bits(weights(tmp_path / "model"), weights(ended.model))


def stop_after(step):
    """A listener that asks the run to stop, as a machine that is taken away does."""

    def listen(event):
        if isinstance(event, StepDone) and event.step == step:
            os.kill(os.getpid(), signal.SIGTERM)

    return listen


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_half_precision_goes_on_too(shared, tmp_path, precision):
    """float16 has a scaler, whose state must go on."""
    _, config, *_ = shared
    settings = {"precision": precision, "steps": 5, "warmup": 1, "max_skipped": 20}
    whole, parts = (of(config, tmp_path / name, train=settings) for name in ("whole", "parts"))
    train(whole)
    train(parts, listeners=[stop_after(2)])
    train(parts, resume=True)
    one, other = tmp_path / "whole/model", tmp_path / "parts/model"
    assert_same_bits(weights(one), weights(other))


def test_muon_goes_on_too(shared, tmp_path):
    _, config, *_ = shared
    settings = {"optimizer": "muon", "steps": 4, "warmup": 1}
    whole, parts = (of(config, tmp_path / name, train=settings) for name in ("whole", "parts"))
    train(whole)
    train(parts, listeners=[stop_after(2)])
    train(parts, resume=True)
    one, other = tmp_path / "whole/model", tmp_path / "parts/model"
    assert_same_bits(weights(one), weights(other))


def test_mixtures_and_skipped_positions_go_on_too(shared, tmp_path):
    """What is drawn and where positions skip is of the step, not of the process."""
    _, config, *_ = shared
    mixture = {"long": 40, "long_share": 0.6, "short": 8, "short_share": 0.25}
    changes = {
        "train": {"steps": 6, "warmup": 1},
        "data": {"mixture": mixture, "skip": {"to": 100, "chunks": 3}},
    }
    whole, parts = (of(config, tmp_path / name, **changes) for name in ("whole", "parts"))
    events: list = []
    train(whole, listeners=[events.append])
    train(parts, listeners=[stop_after(3)])
    train(parts, resume=True)
    one, other = tmp_path / "whole/model", tmp_path / "parts/model"
    assert_same_bits(weights(one), weights(other))
    assert any("rows reach 100 positions" in e.text for e in events if isinstance(e, Notice))

    plain: list = []
    train(of(config, tmp_path / "plain", train=changes["train"]), listeners=[plain.append])
    assert losses(plain) != losses(events)  # it did draw otherwise
    other = of(parts, tmp_path / "parts", data={"skip": {"to": 100, "chunks": 2}})
    with pytest.raises(ConfigError, match="data.skip.chunks: 3 → 2"):
        train(other, resume=True)


def test_a_finished_run_that_goes_on_has_nothing_left_to_do(shared, tmp_path):
    _, config, *_ = shared
    short = of(config, tmp_path, train={"steps": 2, "warmup": 1})
    train(short)
    before = weights(tmp_path / "model")
    events: list = []
    assert train(short, resume=True, listeners=[events.append]).reason == "finished"
    assert not losses(events)
    assert_same_bits(weights(tmp_path / "model"), before)


def test_changed_settings_are_listed_and_refused_unless_allowed(shared, tmp_path):
    _, config, *_ = shared
    short = of(config, tmp_path, train={"steps": 2, "warmup": 1})
    train(short, listeners=[stop_after(1)])
    changed = of(short, tmp_path, train={"lr": 1e-3, "beta2": 0.99}, log={"every": 2})
    with pytest.raises(ConfigError, match=r"train.lr: 0.003 → 0.001; train.beta2: 0.95 → 0.99"):
        train(changed, resume=True)
    with pytest.raises(ConfigError, match=r"--allow train.beta2$"):
        train(changed, resume=True, allow=["train.lr"])
    assert train(changed, resume=True, allow=["train"]).reason == "finished"


def test_other_data_is_noticed(shared, tmp_path):
    directory, config, *_ = shared
    short = of(config, tmp_path / "out", train={"steps": 2, "warmup": 1})
    train(short, listeners=[stop_after(1)])
    other = of(
        config,
        tmp_path / "other",
        train={"steps": 2, "warmup": 1},
        data={"sources": [str(write_texts(tmp_path / "texts", seed=1))]},
    )
    train(other)
    elsewhere = short.to_dict()
    elsewhere["data"] |= {
        "sources": [],
        "vocab_size": None,
        "prepared": str(tmp_path / "other/data"),
    }
    with pytest.raises(ConfigError, match="prepared documents or their order are others"):
        train(
            type(config).from_dict(elsewhere),
            resume=True,
            allow=["data.sources", "data.vocab_size", "data.prepared"],
        )
    assert directory.is_dir()


def test_a_run_is_not_begun_over_another(shared):
    _, config, *_ = shared
    with pytest.raises(UserError, match=r"holds a run already, saved as step-0*20; go on with"):
        train(config)


def test_two_runs_do_not_share_a_directory(shared, tmp_path):
    _, config, *_ = shared
    run = of(config, tmp_path, train={"steps": 2, "warmup": 1})
    caught = []

    def again(event):
        if isinstance(event, RunStarted):
            with pytest.raises(UserError, match="another process is training here"):
                train(run)
            caught.append(event)

    train(run, listeners=[again])
    assert caught


def test_resuming_where_nothing_was_saved_begins(shared, tmp_path):
    _, config, *_ = shared
    events: list = []
    run = of(config, tmp_path, train={"steps": 1, "warmup": 1})
    assert train(run, resume=True, listeners=[events.append]).reason == "finished"
    assert any(isinstance(e, Notice) and "no checkpoint yet" in e.text for e in events)


# What goes wrong


def spoiled(one: Trainer, steps: set[int]) -> None:
    """Let the loss be infinite in some steps, counted from 0."""
    plain = one.objective.forward

    def forward(*arguments):
        loss = plain(*arguments)
        factor = math.inf if one.progress.step in steps else 1.0
        return LossSum(loss.total * factor, loss.cross_entropy, loss.count)

    one.objective.forward = forward


def test_a_step_that_is_no_number_changes_nothing_and_is_counted(shared, tmp_path):
    _, config, *_ = shared
    events: list = []
    one = trainer(of(config, tmp_path, train={"steps": 4}), [events.append])
    spoiled(one, {1, 2})
    before = {}

    def keep(event):
        if isinstance(event, StepDone):
            state = one.work.decoder.state_dict()
            before[event.step] = {name: value.clone() for name, value in state.items()}

    one.listeners = [*one.listeners, keep]
    one.run()
    skipped = [event.skipped for event in events if isinstance(event, StepDone)]
    assert skipped == [None, "nonfinite", "nonfinite", None]
    assert_same_bits(before[3], before[1])
    assert one.progress.skipped == 2
    assert one.progress.skipped_in_row == 0


def test_too_many_of_them_stop_the_run(shared, tmp_path):
    _, config, *_ = shared
    one = trainer(of(config, tmp_path, train={"max_skipped": 2}))
    spoiled(one, set(range(3, 20)))
    with pytest.raises(UserError, match=r"step 6: gradients were no numbers 3 steps in a row"):
        one.run()


def test_a_step_without_labels_is_skipped(shared, tmp_path):
    """The mean of no losses is no number; such steps are not held against the limit."""
    _, config, *_ = shared
    events: list = []
    one = trainer(of(config, tmp_path, train={"steps": 3, "max_skipped": 1}), [events.append])
    plain = one.work.train.batch

    def batch(step):
        made = plain(step)
        if step < 2:
            made.labels[:] = IGNORED
        return made

    one.work.train.batch = batch
    one.run()
    told = [event for event in events if isinstance(event, StepDone)]
    assert [event.skipped for event in told] == ["no_targets", "no_targets", None]
    assert math.isnan(told[0].loss)
    assert told[-1].skipped_so_far == 2


def test_a_full_disk_stops_with_one_line_and_keeps_what_was_saved(shared, tmp_path, monkeypatch):
    _, config, *_ = shared
    run = of(config, tmp_path)
    real = os.fsync
    full = []

    def fsync(handle):
        if full:
            raise OSError(28, "No space left on device")
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)

    def fill(event):
        if isinstance(event, StepDone) and event.step == 10:
            full.append(event)

    with pytest.raises(UserError, match="No space left on device") as caught:
        train(run, listeners=[fill])
    assert "\n" not in str(caught.value)
    left = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert [name for name in left if not name.startswith(".")] == ["step-00000007"]
    full.clear()
    assert train(run, resume=True).reason == "finished"


# From a checkpoint


def checkpoint_run(tmp_path, **changes):
    model = tiny_model(tmp_path / "tokenizer", max_positions=64)
    model.save(tmp_path / "model")
    run = a_run(tmp_path)
    made = run.to_dict()
    made["model"] = {"checkpoint": str(tmp_path / "model")}
    made["data"] |= {"vocab_size": None}
    made["train"] |= {"steps": 3, "warmup": 0, **changes.pop("train", {})}
    made |= changes
    return model, type(run).from_dict(made)


def test_a_checkpoint_is_gone_on_from(tmp_path):
    model, run = checkpoint_run(tmp_path)
    one = trainer(run)
    assert_same_bits(
        dict(one.work.decoder.named_parameters()), dict(model.decoder.named_parameters())
    )
    one.run()
    made = load(tmp_path / "out/model")
    assert made.tokenizer.chat_template == model.tokenizer.chat_template
    assert made.eos_ids == model.eos_ids


def test_adapters_alone_are_trained_saved_and_merged(tmp_path):
    lora = {"targets": ["layers.*.attention.[qv]"], "rank": 3, "alpha": 6.0}
    model, run = checkpoint_run(tmp_path, lora=lora, train={"lr": 0.05})
    events: list = []
    train(run, listeners=[events.append, stop_after(2)])
    assert train(run, resume=True).reason == "finished"
    started = next(event for event in events if isinstance(event, RunStarted))
    assert started.trained_parameters == 2 * (3 * (40 + 60) + 3 * (40 + 20))
    old, new = dict(model.decoder.named_parameters()), weights(tmp_path / "out/model")
    assert old.keys() == new.keys()
    changed = {name for name in old if not torch.equal(old[name], new[name])}
    assert changed == {f"layers.{n}.attention.{p}.weight" for n in (0, 1) for p in ("q", "v")}


def test_a_vocabulary_that_the_model_lacks_is_refused(tmp_path):
    _, run = checkpoint_run(tmp_path)
    made = run.to_dict()
    other = tmp_path / "other"
    first = a_run(tmp_path).to_dict() | {"out": str(other)}
    first["train"] |= {"steps": 1, "warmup": 0}
    train(type(run).from_dict(first))
    made["data"]["tokenizer"] = str(other / "tokenizer")
    with pytest.raises(UserError, match=r"tokens go up to 299, the model knows 259"):
        train(type(run).from_dict(made))


def test_of_chats_the_answers_are_learned(tmp_path):
    """Losses are of the answers alone; compressors see all of the text, and are left out."""
    model, run = checkpoint_run(tmp_path)
    chats = [
        [
            {"role": "user", "content": f"What is {n} and {n}?"},
            {"role": "assistant", "content": f"{2 * n}."},
        ]
        for n in range(60)
    ]
    lines = "\n".join(json.dumps({"messages": chat}) for chat in chats)
    (tmp_path / "chats.jsonl").write_text(lines)
    made = run.to_dict()
    made["data"] |= {"sources": [str(tmp_path / "chats.jsonl")], "format": "chat", "length": 64}
    events: list = []
    ended = train(type(run).from_dict(made), listeners=[events.append])
    assert ended.reason == "finished"
    assert ended.compressors == {}
    dataset = TokenDataset(tmp_path / "out/data", "train", tokenizer=model.tokenizer)
    learned = [
        model.tokenizer.decode([int(t) for t in dataset[n][dataset.read_learned(n, 0, 99)]])
        for n in range(len(dataset))
    ]
    assert {text.removesuffix("<|im_end|>") for text in learned} < {f"{2 * n}." for n in range(60)}
    steps = [event for event in events if isinstance(event, StepDone)]
    assert 0 < steps[0].targets < 8 * 64 / 4


def test_patterns_that_match_nothing_are_told_before_data_is_prepared(tmp_path):
    _, run = checkpoint_run(tmp_path, lora={"targets": ["q_proj"]})
    with pytest.raises(UserError, match=r"targets: 'q_proj' matches no projection"):
        train(run)
    assert not (tmp_path / "out/data").exists()


def test_a_checkpoint_of_another_version_is_refused(shared, tmp_path):
    _, config, *_ = shared
    one = trainer(of(config, tmp_path, train={"steps": 2}))
    one._began = 0.0
    plain = one._facts
    one._facts = lambda: {"config": plain()["config"]}
    one._save()
    one._facts = plain
    with pytest.raises(UserError, match="was saved by another version of armillary"):
        one.resume(one.folder.newest(print))


def test_dropout_is_of_training_and_not_of_the_model(shared):
    """So that other libraries can read a model that was trained with it."""
    _, config, _, ended = shared
    assert config.model.dropout == 0.1
    made = open_checkpoint(ended.model)
    assert made.format == "huggingface"
    assert made.config.input_dropout == 0
    assert all(layer.dropout == 0 for layer in made.config.layers)


def test_a_compiled_run_goes_on_too(shared, tmp_path):
    """Bit for bit: kernels add up in one order, whatever the threads do."""
    _, config, *_ = shared
    try:
        kernels()
    except NotBuiltError as error:
        pytest.skip(str(error))
    sizes = {"d_model": 64, "n_layers": 2, "n_heads": 2, "n_kv_heads": 1, "d_head": 32, "d_ff": 64}
    changes = {
        "model": {"uniform": sizes, "dropout": None},
        "data": {"length": 64},
        "train": {"precision": "bfloat16", "compile": True, "steps": 5, "warmup": 1},
    }
    whole, parts = (of(config, tmp_path / name, **changes) for name in ("whole", "parts"))
    events: list = []
    train(whole, listeners=[events.append])
    assert any(isinstance(e, Notice) and "run on kernels" in e.text for e in events)
    train(parts, listeners=[stop_after(2)])
    train(parts, resume=True)
    assert_same_bits(weights(tmp_path / "whole/model"), weights(tmp_path / "parts/model"))


# A model with experts


def experts_run(directory: Path, out: str, **train_settings):
    """A run of a model with experts, whose biases are moved, on the texts of the directory."""
    run = a_run(directory)
    opened = open_model(run).decoder
    mixture = {
        "kind": "moe",
        "n_experts": 4,
        "top_k": 2,
        "expert": {"d_ff": 10},
        "router": {"selection_bias": True},
    }
    made = opened.to_dict()
    for entry in made["layers"]:
        entry["feedforward"] = mixture
    path = directory / "decoder.json"
    path.write_text(json.dumps(made))
    settings = {"steps": 8, "balance_loss": 0.1, "balance_rate": 0.001} | train_settings
    own = of(run, directory / out, train=settings).to_dict()
    own["model"] = {"decoder": str(path)}
    return type(run).from_dict(own)


def test_a_run_tells_how_even_the_experts_are_and_goes_on_as_if_not_stopped(tmp_path):
    whole = experts_run(tmp_path, "whole")
    events: list = []
    train(whole, listeners=[events.append])
    told = [event.balance for event in events if isinstance(event, StepDone)]
    assert len(told) == 8
    assert all(0.9 < balance < 4 for balance in told)
    stopped = experts_run(tmp_path, "stopped")
    train(stopped, listeners=[stop_after(3)])
    train(stopped, resume=True)
    assert_same_bits(weights(tmp_path / "whole/model"), weights(tmp_path / "stopped/model"))
    moved = weights(tmp_path / "whole/model")["layers.0.feedforward.router.selection_bias"]
    assert moved.abs().max() >= 0.001 - 1e-9


@pytest.mark.parametrize("setting", ["balance_loss", "balance_rate"])
def test_balance_without_experts_is_refused_before_data_is_prepared(tmp_path, setting):
    run = of(a_run(tmp_path), tmp_path / "out", train={setting: 0.01})
    with pytest.raises(ConfigError, match=f"train.{setting} is 0.01, but .* set it to 0"):
        open_model(run)
