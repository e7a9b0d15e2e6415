"""8-bit weights with scales are the numbers that torch makes of them, whatever their blocks."""

import json

import numpy as np
import pytest
import safetensors.torch
import torch

from armillary.checkpoints import open_checkpoint
from armillary.checkpoints.tensors import StoredTensor, decode
from armillary.checkpoints.views import ScaledTensor
from armillary.conversion.convert import convert
from armillary.errors import CheckpointError
from support.llama_files import huggingface_tensors, write_huggingface_directory

MATRICES = (".self_attn.", ".mlp.")


def test_each_byte_is_the_number_that_torch_makes_of_it():
    codes = np.arange(256, dtype=np.uint8)
    expected = torch.from_numpy(codes).view(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(decode(codes[None], "F8_E4M3")[0], expected)


def quantised(block, scale_name):
    """Weights by name as published, and what they stand for. Blocks at the edges are smaller."""
    stored, meant = {}, {}
    for name, array in huggingface_tensors().items():
        weight = torch.from_numpy(array)
        if not any(part in name for part in MATRICES):
            stored[name], meant[name] = weight, weight
            continue
        rows, columns = block or weight.shape
        scale = torch.empty(-(-weight.shape[0] // rows), -(-weight.shape[1] // columns))
        eight = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
        exact = torch.empty_like(weight)
        for i in range(scale.shape[0]):
            for j in range(scale.shape[1]):
                at = (slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns))
                scale[i, j] = weight[at].abs().max() / 448
                eight[at] = (weight[at] / scale[i, j]).to(torch.float8_e4m3fn)
                exact[at] = eight[at].float() * scale[i, j]
        stored[name], meant[name] = eight, exact
        stored[name + scale_name] = scale if block else scale.reshape(())
    return stored, meant


def directory(path, stored, **quantization):
    """A directory as such models are published."""
    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"} | quantization
    write_huggingface_directory(path, quantization_config=config)
    safetensors.torch.save_file(stored, path / "model.safetensors")
    return path


@pytest.mark.parametrize("scale_name", ["_scale_inv", "_scale"])
@pytest.mark.parametrize("block", [None, [16, 16], [32, 8]])
def test_weights_are_multiplied_by_the_scales_of_their_blocks(tmp_path, block, scale_name):
    stored, meant = quantised(block, scale_name)
    found = open_checkpoint(directory(tmp_path / "m", stored, weight_block_size=block))
    plain = open_checkpoint(
        write_huggingface_directory(tmp_path / "p", {k: v.numpy() for k, v in meant.items()})
    )
    for name, tensor in plain.tensors.items():
        np.testing.assert_array_equal(
            found.tensors[name].to_float32(), tensor.to_float32(), err_msg=name
        )
    assert any("14 matrices are stored in 8 bits" in notice for notice in found.notices)


@pytest.mark.parametrize("to", ["huggingface", "gguf", "armillary"])
def test_they_are_converted_as_what_they_stand_for(tmp_path, to):
    stored, _ = quantised([16, 16], "_scale_inv")
    found = open_checkpoint(directory(tmp_path / "m", stored, weight_block_size=[16, 16]))
    converted = convert(found, tmp_path / f"out.{to}", to)
    after = open_checkpoint(converted.path)
    for name, tensor in found.tensors.items():
        np.testing.assert_array_equal(after.tensors[name].to_float32(), tensor.to_float32())
    if to == "huggingface":
        assert "quantization_config" not in json.loads((after.source / "config.json").read_text())


def test_rows_keep_their_scales_when_they_change_places():
    codes = np.random.default_rng(0).integers(0, 120, (6, 10)).astype(np.uint8)
    scale = np.arange(1, 7, dtype=np.float32).reshape(3, 2)
    stored = StoredTensor("w", (6, 10), "F8_E4M3", codes.reshape(-1), "f")
    tensor = ScaledTensor.of(stored, scale, (2, 8))
    full = np.repeat(np.repeat(scale, 2, axis=0), 8, axis=1)[:, :10] * decode(codes, "F8_E4M3")
    np.testing.assert_array_equal(tensor.to_float32(), full)
    order = np.array([5, 0, 3])
    np.testing.assert_array_equal(tensor.taking_rows(order).to_float32(), full[order])
    np.testing.assert_array_equal(tensor.row_range(1, 4).to_float32(), full[1:4])


def test_scales_of_activations_are_left_out_and_noticed(tmp_path):
    stored, _ = quantised(None, "_scale")
    stored["model.layers.0.self_attn.q_proj.input_scale"] = torch.ones(())
    found = open_checkpoint(directory(tmp_path / "m", stored, activation_scheme="static"))
    assert any("1 scales of activations are left out" in notice for notice in found.notices)


@pytest.mark.parametrize(
    ("change", "quantization", "message"),
    [
        ("no scale", {}, "has 0 tensors of scales"),
        ("two scales", {}, "has 2 tensors of scales"),
        (
            "shape",
            {"weight_block_size": [16, 16]},
            r"with scales \[1, 2\] for blocks of \[16, 16\]",
        ),
        ("nan", {}, "is not finite"),
        (None, {"fmt": "e5m2"}, "fmt 'e5m2'"),
        (None, {"weight_block_size": [16]}, r"weight_block_size \[16\]"),
        (None, {"quant_method": "awq"}, "quant_method 'awq'"),
        (None, {"wobble": 1}, "unknown key 'wobble'"),
        (None, None, "has no quantization_config"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, change, quantization, message):
    stored, _ = quantised(None, "_scale_inv")
    name = "model.layers.1.mlp.up_proj.weight"
    if change == "no scale":
        del stored[name + "_scale_inv"]
    if change == "two scales":
        stored[name + "_scale"] = torch.ones(())
    if change == "shape":
        stored = {
            key: value if "_scale" not in key else torch.ones(1, 2) for key, value in stored.items()
        }
    if change == "nan":
        stored[name + "_scale_inv"] = torch.tensor(float("nan"))
    path = directory(tmp_path / "m", stored, **(quantization or {}))
    if quantization is None:
        write_huggingface_directory(path)
        safetensors.torch.save_file(stored, path / "model.safetensors")
    with pytest.raises(ValueError, match=message) as caught:
        open_checkpoint(path)
    assert isinstance(caught.value, CheckpointError) or "unknown key" in message
