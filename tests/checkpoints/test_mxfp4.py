"""Stacks in MXFP4 are the numbers that transformers makes of them, turned as it turns them."""

import json

import gguf
import numpy as np
import pytest
import safetensors.torch
import torch

from armillary.checkpoints import open_checkpoint
from armillary.checkpoints.checkpoint import Checkpoint
from armillary.checkpoints.tensors import StoredTensor, block_size, decode
from armillary.checkpoints.views import PackedStack
from armillary.conversion.convert import convert
from armillary.errors import CheckpointError
from armillary.weights import build_filled
from support import models
from support.mxfp4_files import HIDDEN, INNER, Tensors, packed, published, transformers_numbers
from support.peer_families import in_float64
from support.peer_llama import whole_pass


def stack_of(blocks: torch.Tensor, scales: torch.Tensor) -> PackedStack:
    def stored(name: str, array: torch.Tensor) -> StoredTensor:
        return StoredTensor(name, tuple(array.shape), "U8", array.numpy().reshape(-1), "f")

    return PackedStack.of(stored("w_blocks", blocks), stored("w_scales", scales))


def whole_logits(checkpoint: Checkpoint, ids: torch.Tensor) -> torch.Tensor:
    return build_filled(checkpoint.config, checkpoint.tensors, dtype=torch.float64)(ids).detach()


@pytest.mark.peer
@pytest.mark.parametrize("exponent", [0, 1, 2, 120, 127, 200, 252])
def test_every_number_is_that_of_transformers(exponent):
    """All pairs of 4-bit numbers, at exponents to the ends of what bfloat16 holds."""
    codes = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16)
    scales = torch.full((1, 1, 16), exponent, dtype=torch.uint8)
    found = stack_of(codes, scales)
    expected = transformers_numbers(codes, scales)
    assert found.shape == tuple(expected.shape)
    np.testing.assert_array_equal(found.to_float32(), expected.float().numpy())


@pytest.mark.peer
def test_a_stack_is_turned_as_transformers_turns_it():
    blocks, scales = packed((3, 10, 64), 0)
    expected = transformers_numbers(blocks, scales).float().numpy()
    found = stack_of(blocks, scales)
    assert found.shape == (3, 64, 10)
    np.testing.assert_array_equal(found.to_float32(), expected)
    np.testing.assert_array_equal(found.rows(1, 3), expected[1:])


def test_columns_in_turn_stay_blocks():
    """Gate and up lie in turn, and are copied as they are into GGUF and into our own files."""
    blocks, scales = packed((3, 10, 64), 1)
    stack = stack_of(blocks, scales)
    whole = stack.to_float32()
    for first in range(2):
        part = stack.columns((3, 5, 64), first, 2)
        assert part.encoding == "MXFP4"
        assert part.nbytes == 3 * 5 * 2 * block_size("MXFP4")[1]
        expected = whole[:, :, first::2].swapaxes(1, 2)
        np.testing.assert_array_equal(part.to_float32(), expected)
        last = decode(part.stored_rows(2, 3), "MXFP4")
        np.testing.assert_array_equal(last, expected[2:].reshape(1, -1))
        order = np.array([2, 0])
        np.testing.assert_array_equal(part.taking_rows(order).to_float32(), expected[order])


@pytest.mark.peer
def test_a_model_as_published_gives_the_logits_of_transformers(tmp_path):
    directory, peer = published(tmp_path / "m")
    found = open_checkpoint(directory)
    ids = models.tokens(2, 30)
    with in_float64("gpt-oss"):
        expected = whole_pass(peer, ids)
    assert float((whole_logits(found, ids) - expected).abs().max()) < 1e-9
    assert "6 stacks of experts are stored in MXFP4; bfloat16 holds them exactly" in found.notices
    assert {t.encoding for name, t in found.tensors.items() if "experts" in name} == {
        "MXFP4",
        "BF16",  # of the biases
    }


@pytest.mark.peer
def test_a_directory_is_written_in_bfloat16_and_says_nothing_of_quantisation(tmp_path):
    import transformers

    directory, peer = published(tmp_path / "m")
    converted = convert(open_checkpoint(directory), tmp_path / "out", "huggingface").path
    assert "quantization_config" not in json.loads((converted / "config.json").read_text())
    stored = safetensors.torch.load_file(converted / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    again = transformers.GptOssForCausalLM.from_pretrained(converted, dtype=torch.float64)
    for name, parameter in peer.named_parameters():
        assert torch.equal(again.get_parameter(name), parameter), name


@pytest.mark.peer
def test_our_own_directory_keeps_the_blocks(tmp_path):
    before = open_checkpoint(published(tmp_path / "m")[0])
    after = open_checkpoint(convert(before, tmp_path / "out", "armillary").path)
    for name, tensor in before.tensors.items():
        assert after.tensors[name].encoding == tensor.encoding
        np.testing.assert_array_equal(after.tensors[name].to_float32(), tensor.to_float32())


NAME = "model.layers.1.mlp.experts.down_proj"


def without_scales(tensors: Tensors) -> None:
    del tensors[f"{NAME}_scales"]


def without_blocks(tensors: Tensors) -> None:
    del tensors[f"{NAME}_blocks"]


def twice(tensors: Tensors) -> None:
    tensors[NAME] = torch.zeros(5, INNER, HIDDEN)


def of_another_size(tensors: Tensors) -> None:
    tensors[f"{NAME}_scales"] = tensors[f"{NAME}_scales"][:, :-1].contiguous()


def fewer_experts(tensors: Tensors) -> None:
    for part in ("blocks", "scales"):
        tensors[f"{NAME}_{part}"] = tensors[f"{NAME}_{part}"][:-1].contiguous()


@pytest.mark.peer
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without_scales, rf"there is {NAME}_blocks, and no {NAME}_scales"),
        (without_blocks, rf"{NAME}_scales is U8, of which the method"),
        (twice, rf"there is {NAME}_blocks, and {NAME} as well"),
        (of_another_size, r"with scales \[5, 95, 2\] in U8; MXFP4 is"),
        (fewer_experts, r"has shape \[4, 64, 96\], the configuration asks for \[5, 64, 96\]"),
    ],
)
def test_parts_that_do_not_fit_are_refused(tmp_path, change, message):
    directory, _ = published(tmp_path / "m", change)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(directory)


@pytest.mark.peer
def test_a_key_that_nothing_reads_is_refused(tmp_path):
    directory, _ = published(tmp_path / "m", quantization={"wobble": 1})
    with pytest.raises(ValueError, match="unknown key 'wobble'"):
        open_checkpoint(directory)


@pytest.mark.peer
def test_bytes_without_a_method_are_refused(tmp_path):
    directory, _ = published(tmp_path / "m")
    path = directory / "config.json"
    entries = json.loads(path.read_text())
    del entries["quantization_config"]
    path.write_text(json.dumps(entries))
    with pytest.raises(CheckpointError, match="is U8, but config.json has no quantization_config"):
        open_checkpoint(directory)


@pytest.mark.peer
def test_in_gguf_blocks_are_copied_and_vectors_of_experts_and_routers_are_float32(tmp_path):
    """Engines refuse biases in 16 bits, and a router's rounding picks other experts."""
    directory, _ = published(tmp_path / "m", swiglu_limit=7.0)
    path = convert(open_checkpoint(directory), tmp_path / "m.gguf", "gguf").path
    for tensor in gguf.GGUFReader(path).tensors:
        wanted = "F32" if ".bias" in tensor.name or "gate_inp" in tensor.name else None
        wanted = "MXFP4" if tensor.name.endswith("_exps.weight") else wanted
        assert wanted in {tensor.tensor_type.name, None}, tensor.name
