"""Files of all ranks make up every tensor exactly once, on any number of ranks."""

import json

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from armillary import files
from armillary.checkpoints.safetensors import read_metadata, write_safetensors
from armillary.checkpoints.tensors import TensorToWrite
from armillary.errors import CheckpointError
from armillary.training.checkpoint import load_checkpoint, save_checkpoint
from armillary.training.checkpoint_folder import CheckpointFolder
from armillary.training.objective import Objective
from armillary.training.optimizer import OptimizerConfig, build_optimizer
from armillary.training.random_states import seed_random_states
from armillary.training.ranks import rank
from armillary.training.shard_storage import Shards, write_shards
from support import models
from support.ranks import on_ranks

# What a rank does is a function of the names below, each of which runs on every rank.

PLAN = {
    "attention.q": ColwiseParallel(),
    "attention.k": ColwiseParallel(),
    "attention.v": ColwiseParallel(),
    "attention.out": RowwiseParallel(),
    "feedforward.gate": ColwiseParallel(),
    "feedforward.up": ColwiseParallel(),
    "feedforward.down": RowwiseParallel(),
}


def build(kind, layout):
    """An objective over all ranks: whole, fsdp, hybrid, or fsdp × tp, and its optimiser."""
    objective = Objective(models.build(models.config(), dtype=torch.float32))
    n = dist.get_world_size() if dist.is_initialized() else 1
    if layout == "hybrid":
        shard(objective, init_device_mesh("cpu", (n, 1), mesh_dim_names=("copies", "shards")))
    elif layout == "fsdp":
        shard(objective, init_device_mesh("cpu", (n,)))
    elif layout == "fsdp x tp":
        mesh = init_device_mesh("cpu", (n // 2, 2), mesh_dim_names=("shards", "tensors"))
        for layer in objective.decoder.layers:
            parallelize_module(layer, mesh["tensors"], PLAN)
        shard(objective, mesh["shards"])
    return objective, build_optimizer(objective, OptimizerConfig(kind=kind))


def shard(objective, mesh):
    for layer in objective.decoder.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(objective, mesh=mesh)


def train(objective, optimizer, steps=2):
    """Steps on random gradients, which are the same whatever the layout."""
    generator = torch.Generator().manual_seed(3)
    for _ in range(steps):
        for parameter in objective.parameters():
            gradient = torch.randn(parameter.shape, generator=generator)
            if isinstance(parameter, DTensor):
                mesh = parameter.device_mesh
                whole = DTensor.from_local(gradient, mesh, [Replicate()] * mesh.ndim)
                gradient = whole.redistribute(placements=parameter.placements)
            parameter.grad = gradient
        optimizer.step()


def everything(objective, optimizer):
    """All parameters and all that the optimiser holds of them, gathered."""
    found = {}
    for name, parameter in objective.named_parameters():
        found[name] = gathered(parameter)
        for key, value in optimizer.state[parameter].items():
            found[f"{name}/{key}"] = gathered(value)
    return found


def gathered(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().numpy().copy()


def save(path, kind, layout):
    objective, optimizer = build(kind, layout)
    train(objective, optimizer)
    if layout != "fsdp x tp":
        with torch.no_grad():  # as after a validation, sharded modules stand gathered
            objective(models.tokens(2, 9), models.tokens(2, 9))
    save_checkpoint(path, 2, objective, optimizer, {"layout": layout})
    return everything(objective, optimizer)


def load(path, kind, layout):
    objective, optimizer = build(kind, layout)
    with torch.no_grad():
        for parameter in objective.parameters():
            parameter.fill_(float("nan"))
    lines = []
    seed = 5 if layout == "fsdp x tp" else 5 + rank()
    state = load_checkpoint(
        path, objective, optimizer, seed=seed, reseed=layout == "fsdp x tp", report=lines.append
    )
    loaded = everything(objective, optimizer)
    drawn = float(torch.rand(()))
    train(objective, optimizer, steps=1)  # it can go on
    return loaded, state.ranks, lines, drawn


def load_and_save(path, kind, layout):
    """Both in one go: what one process saved as sharded state, and that saved once more."""
    one = load(path / "whole", kind, layout)
    return one, save(path / layout, kind, layout)


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, array in found.items():
        assert array.dtype == expected[name].dtype, name
        assert array.tobytes() == expected[name].tobytes(), name


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_sharded_state_goes_from_two_ranks_to_one_and_back(tmp_path, kind):
    whole = save(tmp_path / "whole", kind, "whole")
    (one, saved), (one_too, saved_too) = on_ranks(2, load_and_save, tmp_path, kind, "fsdp")
    assert_equal(saved, saved_too)
    assert_equal(one[0], whole)
    assert_equal(one_too[0], whole)
    back, ranks, lines, _ = load(tmp_path / "fsdp", kind, "whole")
    assert ranks == 2
    assert_equal(back, saved)
    assert len(lines) == 1
    assert "saved by 2 processes and resumed by 1 process: random" in lines[0]
    # Each wrote about half, and nothing twice.
    sizes = [(tmp_path / "fsdp" / f"rank-0000{n}.safetensors").stat().st_size for n in (0, 1)]
    assert max(sizes) < 1.2 * min(sizes)
    assert sum(sizes) < 1.2 * (tmp_path / "whole" / "rank-00000.safetensors").stat().st_size


def test_other_ranks_get_new_random_states_out_of_their_seeds_and_the_step(tmp_path):
    save(tmp_path / "whole", "adamw", "whole")
    results = [one for one, _ in on_ranks(2, load_and_save, tmp_path, "adamw", "hybrid")]
    for number, (_, _, lines, drawn) in enumerate(results):
        seed_random_states(5 + number, 2)
        assert drawn == float(torch.rand(()))
        assert len(lines) == (number == 0)  # said once
    assert "whole: saved by 1 process and resumed by 2 processes: random" in results[0][2][0]


def test_copies_of_a_shard_are_written_once(tmp_path):
    """Two ranks with the same state, which is what copies (hybrid, or no sharding at all) are."""
    save(tmp_path / "whole", "adamw", "whole")
    (_, saved), _ = on_ranks(2, load_and_save, tmp_path, "adamw", "hybrid")
    sizes = [(tmp_path / "hybrid" / f"rank-0000{n}.safetensors").stat().st_size for n in (0, 1)]
    assert min(sizes) > 0.3 * max(sizes)  # and the work is divided
    assert sum(sizes) < 1.2 * (tmp_path / "whole" / "rank-00000.safetensors").stat().st_size
    assert_equal(load(tmp_path / "hybrid", "adamw", "whole")[0], saved)


def test_two_dimensions_of_sharding_of_the_same_rows(tmp_path):
    """FSDP over rows that tensor parallelism has divided already, so that they lie in strides."""
    save(tmp_path / "whole", "adamw", "whole")
    results = on_ranks(4, load_and_save, tmp_path, "adamw", "fsdp x tp")
    whole, *_ = load(tmp_path / "whole", "adamw", "whole")
    assert_equal(results[3][0][0], whole)
    back, ranks, *_ = load(tmp_path / "fsdp x tp", "adamw", "whole")
    assert ranks == 4
    assert_equal(back, results[0][1])
    again = on_ranks(4, load, tmp_path / "fsdp x tp", "adamw", "fsdp x tp")
    assert "by 4 processes and resumed by 4 processes, arranged otherwise" in again[0][2][0]
    assert len({drawn for *_, drawn in again}) == 1  # of one seed, which tensor peers need
    assert_equal(again[1][0], results[0][1])


def save_uneven(path):
    """Rows that are fewer than the ranks: the last two have none."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    pieces = {
        name: distribute_tensor(torch.arange(float(rows * 2)).reshape(rows, 2), mesh)
        for name, rows in (("two", 2), ("seven", 7))
    }
    pieces["number"] = torch.tensor(3.0, dtype=torch.float64)
    target = {name: torch.empty_like(piece) for name, piece in pieces.items()}
    write_shards(path / f"{dist.get_rank()}.safetensors", pieces)
    Shards([path / f"{n}.safetensors" for n in range(4)]).read_into(target)
    return all(torch.equal(gathered_tensor(target[n]), gathered_tensor(pieces[n])) for n in pieces)


def gathered_tensor(tensor):
    return torch.from_numpy(np.atleast_1d(gathered(tensor)))


def test_rows_that_do_not_divide_among_the_ranks(tmp_path):
    assert on_ranks(4, save_uneven, tmp_path) == [True] * 4
    shards = Shards([tmp_path / f"{n}.safetensors" for n in range(4)])
    assert shards.shapes == {"two": (2, 2), "seven": (7, 2), "number": ()}
    target = {"seven": torch.zeros(7, 2)}
    shards.read_into(target)
    assert torch.equal(target["seven"], torch.arange(14.0).reshape(7, 2))


def fill_the_disk_of_one(path):
    """Rank 1 finds no space when it writes; what both then see and find."""
    objective, optimizer = build("adamw", "fsdp")
    folder = CheckpointFolder(path)
    folder.save(1, objective, optimizer, {})
    if dist.get_rank() == 1:

        def full(handle):
            raise OSError(28, "No space left on device")

        real, files.os.fsync = files.os.fsync, full
    try:
        folder.save(2, objective, optimizer, {})
    except files.UserError as error:
        message = str(error)
    if dist.get_rank() == 1:
        files.os.fsync = real
    newest = folder.newest(lambda line: None)
    damage = path / "step-00000001" / "rank-00001.safetensors"
    dist.barrier()
    if dist.get_rank() == 1:
        damage.write_bytes(damage.read_bytes()[:-1] + b"?")
    dist.barrier()
    lines = []
    try:
        folder.newest(lines.append)
    except files.UserError as error:
        lines.append(str(error))
    return message, newest.name, lines


def test_a_full_disk_of_one_rank_stops_all_with_the_same_line(tmp_path):
    (first, newest, zero), (second, _, one) = on_ranks(2, fill_the_disk_of_one, tmp_path)
    assert first == second
    assert "rank-00001.safetensors: cannot be written: No space left on device" in first
    assert newest == "step-00000001"
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    # Each compares some of the checksums, and all hear of what one of them finds.
    assert "rank-00001.safetensors: its SHA-256 is not" in zero[0]
    assert zero[1:] == one
    assert "all 1 checkpoints are damaged" in one[0]


def test_torch_s_own_reader_reads_the_files(tmp_path):
    """They are what DCP's safetensors storage writes, and no pickle is among them."""
    saved, _ = on_ranks(2, save, tmp_path / "step", "adamw", "fsdp")
    target = {}
    for name, array in saved.items():
        parameter, _, key = name.partition("/")
        stored = f"optimizer.state.{parameter}.{key}" if key else parameter
        target[stored] = torch.zeros(array.shape)
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(target, storage_reader=HuggingFaceStorageReader(str(tmp_path / "step")))
    for found, array in zip(target.values(), saved.values(), strict=True):
        assert np.array_equal(found.numpy(), array)
    suffixes = {path.suffix for path in (tmp_path / "step").iterdir()}
    assert suffixes == {".json", ".safetensors"}


def piece(path, tensors, places=None, raw=None):
    """A file of pieces, said to begin at these places of their wholes."""
    to_write = [
        TensorToWrite(name, {4: "F32", 8: "F64"}[a.itemsize], a.shape, [a.reshape(-1).view("u1")])
        for name, a in tensors.items()
    ]
    said = {name: {"saved_offsets": place} for name, place in (places or {}).items()}
    info = json.dumps(said) if raw is None else raw
    write_safetensors(path, to_write, {"DCP_SHARDING_INFO": info})
    return path


ONE = np.arange(6, dtype="<f4").reshape(2, 3)


def test_pieces_are_put_together(tmp_path):
    paths = [
        piece(tmp_path / "0", {"a": ONE[:, :2].copy()}, {"a": [0, 0]}),
        piece(tmp_path / "1", {"a": ONE[:, 2:].copy()}, {"a": [0, 2]}),
    ]
    target = torch.zeros(2, 3)
    Shards(paths).read_into({"a": target})
    assert torch.equal(target, torch.from_numpy(ONE))


@pytest.mark.parametrize(
    ("second", "place", "message"),
    [
        (ONE, [1, 0], "pieces of tensor 'a' overlap"),
        (ONE, [3, 0], r"of tensor 'a', 15 numbers, 12 are there"),
        (ONE, [2, 1], r"of tensor 'a', 16 numbers, 12 are there"),
        (ONE, [0, 0], r"has two pieces at place \[0, 0\]"),
        (ONE, [2], r"has shape \[2, 3\] and place \[2\]"),
        (ONE, [-2, 0], r"tensor 'a' lies at \[-2, 0\]"),
        (ONE, [2**63, 0], r"tensor 'a' lies at"),
        (ONE, [2.0, 0], r"tensor 'a' lies at"),
        (ONE[0].copy(), [2], r"is F32 of shape \[3\], but F32 of \[2, 3\]"),
        (ONE.astype("<f8"), [2, 0], r"is F64 of shape \[2, 3\], but F32"),
    ],
)
def test_pieces_that_do_not_fit_together_are_named(tmp_path, second, place, message):
    paths = [
        piece(tmp_path / "first", {"a": ONE}, {"a": [0, 0]}),
        piece(tmp_path / "second", {"a": second}, {"a": place}),
    ]
    with pytest.raises(CheckpointError, match=message) as error:
        Shards(paths)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ("{", "is not JSON"),
        ("[" * 10**5, "nested too deep"),
        ("[]", "must hold a JSON object"),
        ('{"a": {}}', "does not say where its pieces belong"),
        ('{"a": 1}', "does not say where its pieces belong"),
        ('{"a": {"saved_offsets": 1}}', "does not say where its pieces belong"),
        ("{}", "has no place"),
    ],
)
def test_a_file_that_does_not_say_where_is_named(tmp_path, raw, message):
    with pytest.raises(CheckpointError, match=f"a.safetensors.*{message}"):
        Shards([piece(tmp_path / "a.safetensors", {"a": ONE}, raw=raw)])


def test_a_file_without_a_place_for_one_of_its_tensors_is_named(tmp_path):
    path = piece(tmp_path / "a.safetensors", {"a": ONE, "b": ONE}, {"a": [0, 0], "c": [0, 0]})
    with pytest.raises(CheckpointError, match="tensor 'b' has no place or is not there"):
        Shards([path])
    assert "b" not in json.loads(read_metadata(path)["DCP_SHARDING_INFO"])


def test_a_file_of_others_is_named(tmp_path):
    write_safetensors(tmp_path / "a.safetensors", [])
    with pytest.raises(CheckpointError, match="does not say where its pieces belong"):
        Shards([tmp_path / "a.safetensors"])
