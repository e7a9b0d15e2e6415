"""SmolLM2-135M as a GGUF file and as a Hugging Face directory made out of it."""

import gguf
import numpy as np
import pytest

from armillary.checkpoints import open_checkpoint, write_huggingface
from armillary.checkpoints.gguf_file import read_gguf_file
from armillary.checkpoints.tensors import to_write
from support.downloads import smollm2_gguf
from support.memory import allocates_less_than

pytestmark = pytest.mark.download


@pytest.fixture(scope="module")
def path():
    return smollm2_gguf()


def test_each_tensor_reads_as_the_gguf_library_reads_it(path):
    ours = read_gguf_file(path).tensors
    theirs = gguf.GGUFReader(path).tensors
    assert set(ours) == {tensor.name for tensor in theirs}
    for tensor in theirs[:12]:
        expected = gguf.dequantize(tensor.data, tensor.tensor_type)
        np.testing.assert_array_equal(ours[tensor.name].to_float32(), expected)


def test_reading_costs_the_tensor_and_small_change(path):
    tensors = open_checkpoint(path).tensors
    for name in ("embedding.weight", "layers.3.attention.k.weight", "final_norm.weight"):
        tensor = tensors[name]
        result = int(np.prod(tensor.shape)) * 4
        with allocates_less_than(result + (5 << 20)):
            tensor.to_float32()


def test_the_configuration_is_the_published_one(path):
    config = open_checkpoint(path).config
    attention = config.layers[0].attention
    assert (config.n_layers, config.d_model, config.vocab_size) == (30, 576, 49152)
    assert (attention.n_heads, attention.n_kv_heads, attention.d_head) == (9, 3, 64)
    assert (attention.rotary.base, config.max_positions) == (100000.0, 8192)
    assert config.final_norm.eps == 1e-5
    assert config.tie_head


def test_a_directory_made_out_of_it_is_the_same_model(path, tmp_path):
    first = open_checkpoint(path)
    tensors = [to_write(tensor, "F32") for tensor in first.tensors.values()]
    write_huggingface(
        tmp_path / "hf",
        first.config,
        tensors,
        first.tokenizer,
        first.generation,
        max_shard_bytes=200 << 20,
    )
    again = open_checkpoint(tmp_path / "hf")
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) == 3
    assert again.config == first.config
    assert again.generation == first.generation
    assert again.notices == []
    text = "The capital of France is"
    assert again.tokenizer.encode(text) == first.tokenizer.encode(text)
    for name, tensor in list(first.tensors.items())[:20]:
        np.testing.assert_array_equal(again.tensors[name].to_float32(), tensor.to_float32())
