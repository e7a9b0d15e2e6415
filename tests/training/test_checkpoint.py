"""A checkpoint gives back every bit of what was saved, or says in a line why it cannot."""

import json
import random
import signal
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch import nn

from armillary.checkpoints.safetensors import read_safetensors
from armillary.decoder import Decoder
from armillary.errors import CheckpointError, UserError
from armillary.files import write_json, write_manifest
from armillary.training.checkpoint import (
    STATE,
    load_checkpoint,
    read_state,
    save_checkpoint,
    verify_checkpoint,
)
from armillary.training.lora import LoraConfig, add_lora
from armillary.training.objective import Objective
from armillary.training.optimizer import OptimizerConfig, build_optimizer
from armillary.training.random_states import random_states
from support import models, small_run
from support.memory import allocates_less_than
from support.ranks import fresh_processes
from support.tensor_memory import TensorMemory

FACTS = {"schedule": {"steps": 20}, "loss": 0.1, "best": None, "files": ["a", "b"]}


def trained(kind="adamw", steps=2):
    objective, optimizer = small_run.build(kind)
    for step in range(steps):
        small_run.train_step(objective, optimizer, step)
    return objective, optimizer


def bits(tensor):
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes()


def everything(module, optimizer):
    """Types and bits of all parameters and all that the optimiser holds of them."""
    found = {}
    for name, parameter in module.named_parameters():
        found[name] = (parameter.dtype, bits(parameter))
        for key, value in optimizer.state.get(parameter, {}).items():
            found[name, key] = (value.dtype, value.device, bits(value))
    return found


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_going_on_in_a_new_process_is_going_on_bit_for_bit(tmp_path, kind):
    """Cases.md 92: 20 steps against 7, kill -9 amid the 8th's accumulation, and 13; dropout on."""
    small_run.seed(1)
    objective, optimizer = small_run.build(kind)
    losses = [small_run.train_step(objective, optimizer, step) for step in range(20)]

    context = fresh_processes()
    for function, steps, code in (
        (small_run.train_and_die, 7, -signal.SIGKILL),
        (small_run.go_on, 20, 0),
    ):
        process = context.Process(target=function, args=(tmp_path, kind, steps))
        process.start()
        process.join()
        assert process.exitcode == code
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["losses"] == losses[7:]
    assert result["weights"] == small_run.weights(objective)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_what_was_saved_comes_back_whole(tmp_path, kind):
    objective, optimizer = trained(kind)
    small_run.seed(5)
    random.gauss(0, 1)  # keeps a second number for the next call
    np.random.standard_normal()
    states = random_states()
    save_checkpoint(tmp_path / "step", 7, objective, optimizer, FACTS, metric=1.25)
    assert random_states() == states  # saving draws nothing

    small_run.seed(6)
    other, other_optimizer = small_run.build(kind)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.fill_(float("nan"))
    before = {id(parameter) for parameter in other.parameters()}
    state = load_checkpoint(tmp_path / "step", other, other_optimizer)
    assert (state.step, state.facts, state.metric, state.ranks) == (7, FACTS, 1.25, 1)
    assert everything(other, other_optimizer) == everything(objective, optimizer)
    assert {id(parameter) for parameter in other.parameters()} == before
    assert random_states() == states


def test_numbers_that_rounding_or_arithmetic_would_change_come_back(tmp_path):
    """−0, subnormal numbers, and NaNs with a sign and a payload, quiet and signalling."""
    odd = torch.tensor([-0x80000000, 1, -0x7FFFFFFF, 0x7FC12345, -0x3EDCBB, 0x7F800001])
    objective, optimizer = trained()
    parameter = objective.decoder.head.weight
    for tensor in (parameter.data, optimizer.state[parameter]["exp_avg_sq"]):
        tensor.view(torch.int32).reshape(-1)[: len(odd)] = odd.to(torch.int32)
    save_checkpoint(tmp_path / "step", 2, objective, optimizer, {})
    other, other_optimizer = small_run.build()
    load_checkpoint(tmp_path / "step", other, other_optimizer)
    assert everything(other, other_optimizer) == everything(objective, optimizer)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_every_type_of_parameter_comes_back(tmp_path, dtype):
    def build(seed):
        decoder = models.build(models.config(), dtype=dtype, seed=seed)
        return decoder, build_optimizer(decoder, OptimizerConfig(low_precision="warn"))

    with pytest.warns() if dtype.itemsize == 2 else torch.no_grad():
        (decoder, optimizer), (other, other_optimizer) = build(1), build(2)
    for parameter in decoder.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    save_checkpoint(tmp_path / "step", 1, decoder, optimizer, {})
    load_checkpoint(tmp_path / "step", other, other_optimizer)
    assert everything(other, other_optimizer) == everything(decoder, optimizer)


def test_a_decoder_and_its_objective_are_saved_alike(tmp_path):
    objective, optimizer = trained()
    save_checkpoint(tmp_path / "step", 2, objective, optimizer, {})
    decoder = models.build(objective.decoder.config, dtype=torch.float32, seed=8)
    state = load_checkpoint(tmp_path / "step", decoder)
    assert state.step == 2
    for one, other in zip(decoder.parameters(), objective.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_tied_parameter_is_saved_once(tmp_path):
    module = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    module[1].weight = module[0].weight
    save_checkpoint(tmp_path / "step", 0, module, build_optimizer(module, OptimizerConfig()), {})
    assert list(read_safetensors(tmp_path / "step" / "rank-00000.safetensors")) == [
        "decoder.0.weight"
    ]
    weight = module[0].weight.detach().clone()
    nn.init.zeros_(module[0].weight)
    load_checkpoint(tmp_path / "step", module)
    assert torch.equal(module[1].weight, weight)


def test_weights_alone_leave_the_generators_as_they_are(tmp_path):
    objective, optimizer = trained()
    save_checkpoint(tmp_path / "step", 2, objective, optimizer, {})
    other, _ = small_run.build()
    states = random_states()
    load_checkpoint(tmp_path / "step", other)
    assert random_states() == states


def test_a_state_from_before_the_first_step_empties_the_optimiser(tmp_path):
    objective, optimizer = small_run.build()
    save_checkpoint(tmp_path / "step", 0, objective, optimizer, {})
    other, other_optimizer = trained()
    load_checkpoint(tmp_path / "step", other, other_optimizer)
    assert not other_optimizer.state
    assert small_run.train_step(other, other_optimizer, 0) == pytest.approx(
        small_run.train_step(objective, optimizer, 0), rel=0.5
    )


def test_hyperparameters_are_the_new_run_s_own(tmp_path):
    objective, optimizer = trained()
    save_checkpoint(tmp_path / "step", 2, objective, optimizer, {})
    other, _ = small_run.build()
    other_optimizer = build_optimizer(other, OptimizerConfig(lr=0.5, weight_decay=0.25))
    load_checkpoint(tmp_path / "step", other, other_optimizer)
    assert {group["lr"] for group in other_optimizer.param_groups} == {0.5}
    assert other_optimizer.param_groups[0]["weight_decay"] == 0.25


class Wide(nn.Module):
    """Six matrices of 4 MiB."""

    LARGEST = 4 << 20

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1024, 1024, bias=False) for _ in range(6))


@contextmanager
def holding_less_than(limit, tensors):
    """Fail when new tensors, or arrays and bytes, take more at any moment of the block."""
    with TensorMemory() as memory:
        for tensor in tensors:
            tensor.detach()  # seen now, it does not count as new later
        before = memory.peak
        with allocates_less_than(limit):
            yield
    assert memory.peak - before < limit


def test_saving_and_loading_hold_less_than_two_tensors(tmp_path):
    """Cases.md 81."""
    module = Wide()
    optimizer = build_optimizer(module, OptimizerConfig())
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    save_checkpoint(tmp_path / "first", 1, module, optimizer, {})  # what is imported is not meant
    load_checkpoint(tmp_path / "first", module)

    states = [value for entries in optimizer.state.values() for value in entries.values()]
    there = [*module.parameters(), *states]
    with holding_less_than(2 * Wide.LARGEST, there):
        save_checkpoint(tmp_path / "step", 1, module, optimizer, {})
    with holding_less_than(2 * Wide.LARGEST, there):
        load_checkpoint(tmp_path / "step", module)


def with_adapters(objective):
    add_lora(objective.decoder, LoraConfig(targets=("layers.*.attention.q",), rank=2))


def freeze(objective):
    objective.decoder.embedding.weight.requires_grad_(False)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (None, with_adapters, r"not saved: decoder\.layers\.0\.attention\.q\.lora_a and 3 more"),
        (with_adapters, None, r"decoder does not have: decoder\.layers\.0\.attention\.q\.lora_a"),
        (None, freeze, r"trained that are frozen now: decoder\.embedding\.weight; let train"),
        (freeze, None, r"train now that did not .* saved: decoder\.embedding\.weight; freeze"),
    ],
)
def test_another_set_of_parameters_is_named(tmp_path, before, after, message):
    objective, _ = small_run.build()
    if before is not None:
        before(objective)
    optimizer = build_optimizer(objective, OptimizerConfig())
    small_run.train_step(objective, optimizer, 0)
    save_checkpoint(tmp_path / "step", 1, objective, optimizer, {})
    other, _ = small_run.build()
    if after is not None:
        after(other)
    refused(tmp_path / "step", other, build_optimizer(other, OptimizerConfig()), message)


def refused(path, module, optimizer, message):
    """Loading fails in one line, and changes nothing."""
    weights, states = everything(module, optimizer), random_states()
    with pytest.raises(CheckpointError, match=message) as error:
        load_checkpoint(path, module, optimizer)
    assert "\n" not in str(error.value)
    assert everything(module, optimizer) == weights
    assert random_states() == states


def test_another_optimizer_is_named(tmp_path):
    objective, optimizer = trained("adamw")
    save_checkpoint(tmp_path / "step", 2, objective, optimizer, {})
    refused(
        tmp_path / "step",
        *small_run.build("muon"),
        r"another optimizer than now: \S*q\.weight \(AdamW, now Muon\) and 13 more",
    )


def test_another_shape_or_type_is_named(tmp_path):
    objective, optimizer = trained()
    save_checkpoint(tmp_path / "step", 2, objective, optimizer, {})
    for dtype, entries, message in (
        (torch.float32, {"vocab_size": 67}, r"weight has shape \[61, 40\], the decoder's \[67, 40"),
        (torch.float64, {}, r"embedding\.weight has type float32, the decoder's float64"),
    ):
        decoder = Decoder(models.config(**entries)).to(dtype)
        refused(tmp_path / "step", decoder, build_optimizer(decoder, OptimizerConfig()), message)


def test_an_optimizer_of_another_module_is_a_mistake_of_the_caller(tmp_path):
    objective, _ = small_run.build()
    _, optimizer = small_run.build()
    with pytest.raises(ValueError, match="that the module has not"):
        save_checkpoint(tmp_path / "step", 1, objective, optimizer, {})


def test_a_state_that_is_not_of_numbers_is_refused_before_anything_is_written(tmp_path):
    objective, optimizer = trained()
    optimizer.state[objective.decoder.head.weight]["history"] = [1, 2]
    with pytest.raises(ValueError, match=r"head\.weight\.history is list"):
        save_checkpoint(tmp_path / "step", 1, objective, optimizer, {})
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("facts", [{"loss": float("nan")}, {"pair": (1, 2)}, {3: "three"}])
def test_facts_that_json_would_change_are_refused_before_anything_is_written(tmp_path, facts):
    with pytest.raises(ValueError, match=r"JSON"):
        save_checkpoint(tmp_path / "step", 1, *small_run.build(), facts)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("metric", [float("nan"), float("inf"), None])
def test_a_metric_that_is_no_number_is_none(tmp_path, metric):
    save_checkpoint(tmp_path / "step", 1, *small_run.build(), {}, metric)
    assert read_state(tmp_path / "step").metric is None


def test_a_full_disk_is_one_line_and_leaves_the_older_checkpoint(tmp_path, monkeypatch):
    """Cases.md 80, at each file in turn; on a real full disk: test_checkpoint_folder.py."""
    from armillary import files

    objective, optimizer = trained()
    save_checkpoint(tmp_path / "step", 1, objective, optimizer, {})
    real, calls = files.os.fsync, []
    for last in range(1, 12):

        def fsync(handle, last=last):
            calls.append(handle)
            if len(calls) == last:
                raise OSError(28, "No space left on device")
            real(handle)

        calls.clear()
        monkeypatch.setattr(files.os, "fsync", fsync)
        with pytest.raises(UserError, match="cannot be written: No space left") as error:
            save_checkpoint(tmp_path / "step", 2, objective, optimizer, {})
        monkeypatch.undo()
        assert "\n" not in str(error.value)
        assert [path.name for path in tmp_path.iterdir()] == ["step"]
        assert verify_checkpoint(tmp_path / "step").step == 1


# A pickle that, taken for one, would make a file.
PICKLE = b"cos\nsystem\n(S'touch executed'\ntR."


@pytest.mark.parametrize("name", ["rank-00000.safetensors", "rank-00000.json", STATE])
def test_a_pickle_of_one_of_our_names_is_refused_and_not_run(tmp_path, monkeypatch, name):
    """Cases.md 79; the manifest agrees with it, so that it is the file itself that is refused."""
    objective, optimizer = trained()
    path = tmp_path / "step"
    save_checkpoint(path, 2, objective, optimizer, {})
    (path / name).write_bytes(PICKLE)
    write_manifest(path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=name):
        load_checkpoint(path, objective, optimizer)
    assert not (tmp_path / "executed").exists()


def without(entries, key):
    return {name: value for name, value in entries.items() if name != key}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: {**s, "format": "other"}, "is of format version 1; 1 is read"),
        (lambda s: {**s, "format_version": 2}, "is of format version 2; 1 is read"),
        (lambda s: {**s, "step": "7"}, "step is '7'"),
        (lambda s: {**s, "ranks": 0}, "ranks 0"),
        (lambda s: {**s, "ranks": 2}, "rank-00001.json is not in the manifest"),
        (lambda s: {**s, "ranks": 10**12}, "ranks is 1000000000000, the manifest names 3 files"),
        (lambda s: {**s, "metric": "low"}, "metric is 'low'"),
        (lambda s: without(s, "facts"), "facts or optimizer are not"),
        (lambda s: {**s, "optimizer": {"decoder.head.weight": 1}}, "facts or optimizer are not"),
        (lambda s: {**s, "optimizer": {}}, "tensors were saved that the decoder does not have"),
    ],
)
def test_a_state_that_does_not_make_sense_is_one_line(tmp_path, change, message):
    objective, optimizer = trained()
    path = tmp_path / "step"
    save_checkpoint(path, 2, objective, optimizer, {})
    write_json(path / STATE, change(json.loads((path / STATE).read_text())))
    write_manifest(path)
    refused(path, objective, optimizer, message)


def test_an_entry_of_the_optimizer_that_is_missing_is_named(tmp_path):
    objective, optimizer = trained()
    path = tmp_path / "step"
    save_checkpoint(path, 2, objective, optimizer, {})
    entries = json.loads((path / STATE).read_text())
    entries["optimizer"]["decoder.head.weight"]["state"].append("max_exp_avg_sq")
    write_json(path / STATE, entries)
    write_manifest(path)
    message = r"not complete: optimizer\.state\.decoder\.head\.weight\.max_exp_avg_sq"
    refused(path, objective, optimizer, message)


def test_a_flipped_bit_is_noticed(tmp_path):
    objective, optimizer = trained()
    path = tmp_path / "step"
    save_checkpoint(path, 2, objective, optimizer, {})
    data = bytearray((path / "rank-00000.safetensors").read_bytes())
    data[-1] ^= 1
    (path / "rank-00000.safetensors").write_bytes(data)
    refused(path, objective, optimizer, r"rank-00000\.safetensors: its SHA-256 is not")
    load_checkpoint(path, objective, optimizer, verify=False)  # sizes alone do not tell


def test_objective_names_are_kept(tmp_path):
    """Whoever reads a file by its names finds the decoder's under one prefix."""
    objective, optimizer = trained()
    assert isinstance(objective, Objective)
    save_checkpoint(tmp_path / "step", 2, objective, optimizer, {})
    record = read_state(tmp_path / "step").record
    assert set(record) == {name for name, _ in objective.named_parameters()}
