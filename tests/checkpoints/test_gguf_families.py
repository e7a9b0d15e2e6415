"""GGUF files of every family: what is written comes back, under the names that llama.cpp has.

Models are tiny ones of transformers; llama.cpp itself reads them in tests/parity.
"""

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from armillary.checkpoints.checkpoint import Checkpoint
from armillary.checkpoints.families import FAMILIES
from armillary.checkpoints.gguf import read_gguf
from armillary.checkpoints.gguf_write import gguf_family_for, write_gguf
from armillary.checkpoints.huggingface import family_for, read_huggingface
from armillary.errors import ConfigError, UserError
from support.peer_families import CASES, LLAMA3, PEERS, WITHOUT_KERNELS, build_peer
from support.peer_llama import save_peer

pytestmark = pytest.mark.peer

FAMILY = {family.name: family for family in FAMILIES}
WINDOW = r"cannot express this decoder's layers\.\d\.attention\.window"
HEAD = "without a head of its own"
BIAS = r"no name for the parameter layers\.0\.attention\.q\.bias"
# What llama.cpp's architecture of the family has no place for.
REFUSED = {
    ("mistral", "window"): WINDOW,
    ("qwen2", "window"): WINDOW,
    ("qwen2", "window in some layers"): WINDOW,
    ("qwen3", "window"): WINDOW,
    ("qwen3", "window in some layers"): WINDOW,
    ("qwen3", "biases"): BIAS,
    ("gemma", "own head"): r"no name for the parameter head\.weight",
    ("gemma", "biases"): BIAS,
    ("gemma2", "own scale"): "attention.scale 0.267",
    ("gemma2", "no caps"): "soft_cap null",
    ("gemma2", "other windows"): WINDOW,
    ("gemma3", "own scale"): "attention.scale 0.267",
    ("gemma3", "cap"): r"final_soft_cap 3\.0",
    ("gemma3", "other windows"): WINDOW,
    ("olmo2", "biases"): BIAS,
    ("olmo2", "tied head"): HEAD,
    ("smollm3", "biases"): BIAS,
    ("smollm3", "other layers"): "rotation, layer 0",
    ("smollm3", "windows"): WINDOW,
    ("stablelm", "tied head"): HEAD,
    ("gpt_neox", "no biases"): "qkv_bias false",
    ("gpt_neox", "tied head"): HEAD,
    ("gpt2", "width of its own"): 'feedforward.activation "relu"',
    ("falcon", "sequential"): BIAS,
}
WITHOUT = [case for case in CASES if FAMILY[case[0]].gguf is None]
"""Of families that are read from and written to directories alone."""
EXPRESSIBLE = [case for case in CASES if case not in REFUSED and case not in WITHOUT]


def checkpoint_of(name: str, variant: str, directory: Path, **entries: Any) -> Checkpoint:
    """A model of transformers in float32, as we read it."""
    peer = build_peer(name, variant, **entries).to(torch.float32)
    return read_huggingface(save_peer(peer, directory))


def written(checkpoint: Checkpoint, path: Path, name: str) -> list[str]:
    encodings = dict.fromkeys(checkpoint.tensors, "F32")
    return write_gguf(path, checkpoint, encodings, family=FAMILY[name])


@pytest.mark.parametrize(("name", "variant"), WITHOUT)
def test_a_family_without_an_architecture_is_refused(tmp_path, name, variant):
    before = checkpoint_of(name, variant, tmp_path / "a")
    with pytest.raises(
        ConfigError, match="family is not read from or written to GGUF; write a directory"
    ):
        written(before, tmp_path / "m.gguf", name)
    assert not (tmp_path / "m.gguf").exists()


@pytest.mark.parametrize(("name", "variant"), EXPRESSIBLE)
def test_what_is_written_comes_back(tmp_path, name, variant):
    before = checkpoint_of(name, variant, tmp_path / "a")
    written(before, tmp_path / "m.gguf", name)
    after = read_gguf(tmp_path / "m.gguf")
    assert set(after.tensors) == set(before.tensors)
    for key, tensor in before.tensors.items():
        ours, theirs = tensor.to_float32(), after.tensors[key].to_float32()
        if name.startswith("gemma") and "norm" in key:  # plus one and less one, each rounded
            np.testing.assert_allclose(theirs, ours, atol=1e-6)
        else:
            np.testing.assert_array_equal(theirs, ours)
    again = gguf_family_for(after.config, name)
    assert again.gguf is FAMILY[name].gguf
    assert family_for(after.config, name).name == name


@pytest.mark.parametrize(("name", "variant"), EXPRESSIBLE)
def test_names_are_those_of_llama_cpp(tmp_path, name, variant):
    before = checkpoint_of(name, variant, tmp_path / "a")
    written(before, tmp_path / "m.gguf", name)
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    architecture = reader.fields["general.architecture"].contents()
    (number,) = (key for key, label in gguf.MODEL_ARCH_NAMES.items() if label == architecture)
    known = {gguf.TENSOR_NAMES[tensor] for tensor in gguf.MODEL_TENSORS[number]}
    for tensor in reader.tensors:
        stem = tensor.name.rpartition(".")[0]
        parts = stem.split(".")
        template = f"blk.{{bid}}.{parts[2]}" if parts[0] == "blk" else stem
        assert template in known, tensor.name


@pytest.mark.parametrize(("name", "variant"), REFUSED)
def test_what_llama_cpp_has_no_place_for_is_refused(tmp_path, name, variant):
    before = checkpoint_of(name, variant, tmp_path / "a")
    with pytest.raises(UserError, match=REFUSED[name, variant]) as caught:
        written(before, tmp_path / "m.gguf", name)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "m.gguf").exists()


def test_the_norms_of_gemma_are_stored_plus_one(tmp_path):
    before = checkpoint_of("gemma", "plain", tmp_path / "a")
    written(before, tmp_path / "m.gguf", "gemma")
    stored = {each.name: each.data for each in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    ours = before.tensors["layers.1.norm2.weight"].to_float32()
    np.testing.assert_array_equal(stored["blk.1.ffn_norm.weight"], ours + np.float32(1))


def test_queries_are_permuted_only_where_llama_cpp_rotates_interleaved(tmp_path):
    """Cases.md 11 and 12: of 6 query and 2 key heads, each by its own count."""
    for name, permuted in (("granite", True), ("qwen2", False)):
        before = checkpoint_of(name, "plain", tmp_path / f"{name}.a")
        written(before, tmp_path / f"{name}.gguf", name)
        stored = {
            each.name: each.data for each in gguf.GGUFReader(tmp_path / f"{name}.gguf").tensors
        }
        for which, heads in (("q", 6), ("k", 2)):
            ours = before.tensors[f"layers.0.attention.{which}.weight"].to_float32()
            halves = ours.reshape(heads, 2, 5, 60).swapaxes(1, 2).reshape(ours.shape)
            expected = halves if permuted else ours
            np.testing.assert_array_equal(stored[f"blk.0.attn_{which}.weight"], expected)


def test_what_llama_cpp_passes_over_is_noticed(tmp_path):
    before = checkpoint_of("phi3", "window", tmp_path / "a")
    notices = written(before, tmp_path / "m.gguf", "phi3")
    assert "llama.cpp passes over the window 7 of phi3" in notices


def test_a_rule_whose_tensors_an_architecture_does_not_read_is_refused(tmp_path):
    """Otherwise llama.cpp would refuse the file, or read it unscaled (cases.md 115)."""
    before = checkpoint_of("qwen2", "plain", tmp_path / "a", rope_parameters=dict(LLAMA3))
    with pytest.raises(ConfigError, match=r"no rope_freqs\.weight in qwen2, which the rule llama3"):
        written(before, tmp_path / "m.gguf", "qwen2")


def test_the_kinds_of_numbers_are_those_that_readers_ask_for(tmp_path):
    """llama.cpp refuses a whole number for a scale."""
    before = checkpoint_of("granite", "plain", tmp_path / "a")
    written(before, tmp_path / "m.gguf", "granite")
    fields = gguf.GGUFReader(tmp_path / "m.gguf").fields
    assert fields["granite.logit_scale"].types == [gguf.GGUFValueType.FLOAT32]
    assert fields["granite.logit_scale"].contents() == 3.0
    (scale,) = struct.unpack("<f", struct.pack("<f", 0.4))
    assert fields["granite.residual_scale"].contents() == scale


def test_every_family_with_an_architecture_is_tried():
    without = {name for name, _ in WITHOUT}
    assert without == set(WITHOUT_KERNELS)
    assert {name for name, _ in EXPRESSIBLE} == set(PEERS) - without
