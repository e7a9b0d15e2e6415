"""Meta's directories: files joined along the right dimension, and the decoder that wrote them."""

import numpy as np
import pytest
import torch

from armillary.checkpoints import open_checkpoint
from armillary.conversion.convert import convert
from armillary.errors import CheckpointError, ConfigError
from armillary.rope_scaling import Llama3, Unscaled
from armillary.weights import build_filled
from support.memory import allocates_less_than
from support.meta_files import decoder, state, write
from support.models import tokens


@pytest.mark.parametrize("embedding_axis", [0, 1])
@pytest.mark.parametrize("files", [1, 2])
def test_joined_files_are_the_decoder_bit_for_bit(tmp_path, files, embedding_axis):
    """Cases.md 20, and 12 in the layout of queries and keys: 6 heads on 2."""
    before = decoder()
    tensors = state(before)
    directory = write(tmp_path / "m", tensors, files=files, embedding_axis=embedding_axis)
    found = open_checkpoint(directory)
    assert found.format == "meta"
    assert found.config.layers[0].attention.rotary.layout == "half_split"
    for ours, theirs in [
        ("embedding.weight", "tok_embeddings.weight"),
        ("layers.1.attention.v.weight", "layers.1.attention.wv.weight"),
        ("layers.1.attention.out.weight", "layers.1.attention.wo.weight"),
        ("layers.0.feedforward.down.weight", "layers.0.feed_forward.w2.weight"),
        ("head.weight", "output.weight"),
    ]:
        np.testing.assert_array_equal(
            found.tensors[ours].to_float32(), tensors[theirs].float().numpy(), err_msg=ours
        )
    batch = tokens(2, 40)
    with torch.no_grad():
        expected = before(batch)
        again = build_filled(found.config, found.tensors, dtype=torch.float64)(batch)
    torch.testing.assert_close(again, expected, rtol=0, atol=2e-5)  # read as float32


def test_norms_that_differ_between_files_are_refused(tmp_path):
    """Cases.md 20."""
    tensors = state(decoder())
    directory = write(tmp_path / "m", tensors, files=2)
    tensors["layers.0.ffn_norm.weight"] = tensors["layers.0.ffn_norm.weight"] + 1e-6
    other = write(tmp_path / "other", tensors, files=2)
    (other / "consolidated.01.pth").replace(directory / "consolidated.01.pth")
    with pytest.raises(CheckpointError, match=r"01\.pth: layers\.0\.ffn_norm\.weight is not what"):
        open_checkpoint(directory)


def test_files_that_do_not_belong_together_are_refused(tmp_path):
    tensors = state(decoder())
    directory = write(tmp_path / "m", tensors, files=2)
    (directory / "consolidated.01.pth").rename(directory / "consolidated.02.pth")
    with pytest.raises(CheckpointError, match="and not all up to consolidated.01.pth"):
        open_checkpoint(directory)
    del tensors["norm.weight"]
    torch.save(tensors, directory / "consolidated.01.pth")
    (directory / "consolidated.02.pth").unlink()
    with pytest.raises(CheckpointError, match="tensor 'norm.weight' is in this file or in"):
        open_checkpoint(directory)


def test_a_wrong_shape_an_extra_tensor_and_an_unknown_key_are_refused(tmp_path):
    tensors = state(decoder())
    short = tensors | {"norm.weight": torch.ones(59)}
    with pytest.raises(CheckpointError, match="'norm.weight' has shape"):
        open_checkpoint(write(tmp_path / "a", short))
    extra = tensors | {"layers.0.extra.weight": torch.ones(2)}
    with pytest.raises(CheckpointError, match="belonging to no parameter"):
        open_checkpoint(write(tmp_path / "b", extra))
    with pytest.raises(ConfigError, match="unknown key 'lora_args'"):
        open_checkpoint(write(tmp_path / "c", tensors, lora_args={"rank": 16}))


def test_frequencies_of_old_files_are_held_against_the_base(tmp_path):
    exact = 100.0 ** (-torch.arange(0, 10, 2) / 10)
    tensors = state(decoder()) | {"rope.freqs": exact.bfloat16()}
    assert "rope.freqs" not in open_checkpoint(write(tmp_path / "a", tensors)).tensors
    with pytest.raises(CheckpointError, match=r"rope\.freqs is not the frequencies"):
        open_checkpoint(write(tmp_path / "b", tensors, rope_theta=10_000.0))


def test_what_params_do_not_say_is_noticed(tmp_path):
    tensors = state(decoder())
    plain = open_checkpoint(write(tmp_path / "a", tensors, max_seq_len=None, rope_theta=None))
    assert plain.config.max_positions == 4096
    assert plain.config.layers[0].attention.rotary.base == 10_000.0
    assert any("4,096 is taken" in notice for notice in plain.notices)
    scaled = open_checkpoint(
        write(tmp_path / "b", tensors, max_seq_len=None, rope_theta=5e5, use_scaled_rope=True)
    )
    assert scaled.config.max_positions == 131_072
    assert any("by how much the window is scaled" in notice for notice in scaled.notices)
    assert scaled.config.layers[0].attention.rotary.scaling == Llama3(8.0, 8192)
    said = {"use_scaled_rope": True, "rope_scaling_factor": 32.0}
    said = open_checkpoint(write(tmp_path / "c", tensors, **said))
    assert said.config.layers[0].attention.rotary.scaling == Llama3(32.0, 8192)
    assert len(said.notices) == 1  # of the tokenizer
    assert plain.config.layers[0].attention.rotary.scaling == Unscaled()


def test_a_vocabulary_that_is_not_said_is_the_embeddings(tmp_path):
    """Llama 2 says −1; and a head that is not there is the embedding."""
    tensors = state(decoder(tie_head=True))
    found = open_checkpoint(write(tmp_path / "m", tensors, vocab_size=-1, files=2))
    assert found.config.vocab_size == 62
    assert found.config.tie_head


@pytest.mark.parametrize("to", ["huggingface", "gguf"])
def test_it_converts_with_proof(tmp_path, to):
    directory = write(tmp_path / "m", state(decoder()), files=2)
    converted = convert(open_checkpoint(directory), tmp_path / f"out.{to}", to)
    assert max(converted.proof.logits) < 1e-4
    assert converted.proof.frequencies < 1e-6


def test_a_joined_tensor_is_read_by_blocks(tmp_path):
    sizes = {"d_model": 480, "d_ff": 1280, "n_heads": 6, "n_kv_heads": 6}
    tensors = {name: t.half() for name, t in state(decoder(**sizes)).items()}
    found = open_checkpoint(
        write(tmp_path / "m", tensors, files=2, dim=480, n_kv_heads=None, multiple_of=256)
    )
    tensor = found.tensors["layers.0.feedforward.down.weight"]
    assert tensor.shape == (480, 1280)
    with allocates_less_than(3 << 20):
        assert sum(chunk.nbytes for chunk in tensor.encoded("F16")) == tensor.nbytes
