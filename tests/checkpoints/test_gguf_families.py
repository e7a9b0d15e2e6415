"""GGUF files of every family: what is written comes back, under the names that llama.cpp has.

Models are tiny ones of transformers; llama.cpp itself reads them in tests/parity.
"""

import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import safetensors.numpy
import torch

from armillary.checkpoints.checkpoint import Checkpoint
from armillary.checkpoints.families import FAMILIES
from armillary.checkpoints.gguf import read_gguf
from armillary.checkpoints.gguf_file import read_gguf_file, write_gguf_file
from armillary.checkpoints.gguf_write import gguf_family_for, write_gguf
from armillary.checkpoints.huggingface import family_for, read_huggingface
from armillary.checkpoints.quantize import choose_encodings
from armillary.checkpoints.tensors import to_write
from armillary.engine.decoder import EngineDecoder
from armillary.errors import CheckpointError, ConfigError, UserError
from support.engine import in_chunks
from support.models import tokens
from support.peer_families import (
    BOUNDS_WITHIN,
    CASES,
    GGUF_ONLY,
    LINEAR,
    LLAMA3,
    PEERS,
    YARN,
    build_peer,
)
from support.peer_llama import save_peer

pytestmark = pytest.mark.peer

FAMILY = {family.name: family for family in FAMILIES}
WINDOW = r"cannot express this decoder's layers\.\d\.attention\.window"
KV_HEADS = r"attention\.head_count_kv 2 of 6 heads"
COUNTS = ("expert_count", "expert_used_count")
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
    ("mixtral", "window"): WINDOW,
    ("qwen3-moe", "plain"): r"router\.normalise false",
    ("qwen3-moe", "normalised"): BIAS,
    ("qwen3-moe", "some layers dense"): r"layers\.0\.feedforward",
    ("qwen3-moe", "one layer dense, window"): r"layers\.\d\.",
    ("olmoe", "plain"): KV_HEADS,
    ("olmoe", "normalised"): BIAS,
    ("olmoe", "as many kv heads, normalised"): r"router\.normalise true",
    ("gpt-oss", "no biases, other windows"): "qkv_bias false",
    ("deepseek-v3", "queries direct, biases"): r"parameter layers\.0\.attention\.kv_down\.bias",
    ("deepseek-v3", "halves"): "interleaved rotation and no other",
}
EXPRESSIBLE = [case for case in CASES if case not in REFUSED]


def checkpoint_of(name: str, variant: str, directory: Path, **entries: Any) -> Checkpoint:
    """A model of transformers in float32, as we read it."""
    peer = build_peer(name, variant, **GGUF_ONLY.get(name, {}) | entries).to(torch.float32)
    return read_huggingface(save_peer(peer, directory))


def written(checkpoint: Checkpoint, path: Path, name: str) -> list[str]:
    encodings = dict.fromkeys(checkpoint.tensors, "F32")
    return write_gguf(path, checkpoint, encodings, family=FAMILY[name])


def test_a_family_without_an_architecture_is_refused(tmp_path):
    before = checkpoint_of("llama", "llama3", tmp_path / "a")
    encodings = dict.fromkeys(before.tensors, "F32")
    family = replace(FAMILY["llama"], gguf=None)
    with pytest.raises(
        ConfigError, match="family is not read from or written to GGUF; write a directory"
    ):
        write_gguf(tmp_path / "m.gguf", before, encodings, family=family)
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
def test_the_engine_computes_the_same_from_either_file(tmp_path, name, variant):
    """Rows that GGUF has in another order, stacks of experts, heads that it holds turned."""
    before = checkpoint_of(name, variant, tmp_path / "a")
    written(before, tmp_path / "m.gguf", name)
    engines = (
        EngineDecoder(each.config, each.tensors, threads=1)
        for each in (before, read_gguf(tmp_path / "m.gguf"))
    )
    ids = tokens(1, 24)[0].tolist()
    a, b = (in_chunks(engine, ids, [17, 1, 6]) for engine in engines)
    np.testing.assert_allclose(b, a, atol=1e-4)


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


@pytest.mark.parametrize(
    ("name", "entries", "message"),
    [
        ("gpt-oss", {"swiglu_limit": 1.5}, r"expert\.limit 1\.5"),
        ("gpt-oss", {"tie_word_embeddings": True}, HEAD),
        ("gpt-oss", {"layer_types": ["full_attention"] * 3}, "'attention.sliding_window' is miss"),
        ("gpt-oss", {"rope_parameters": BOUNDS_WITHIN | {"truncate": True}}, "rotation, layer 0"),
        ("deepseek-v3", {"rms_norm_eps": 1e-3}, r"latent\.norm\.eps 1e-06"),
        ("deepseek-v3", {"topk_group": 4}, "no groups of experts that are all open"),
        ("deepseek-v3", {"num_hidden_layers": 26}, "of 26 layers to have no q_rank"),
        (
            "deepseek-v3",
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 100.0, "factor": 4.0}},
            "linear, under which llama.cpp scales scores",
        ),
    ],
)
def test_what_is_a_number_in_llama_cpp_must_be_that_number(tmp_path, name, entries, message):
    before = checkpoint_of(name, "plain", tmp_path / "a", **entries)
    with pytest.raises(ConfigError, match=message) as caught:
        written(before, tmp_path / "m.gguf", name)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "m.gguf").exists()


def test_that_llama_cpp_rounds_the_bounds_of_gpt_oss_is_noticed(tmp_path):
    """Released models have bounds that are not whole; the file comes back as the model is."""
    before = checkpoint_of("gpt-oss", "bounds within", tmp_path / "a")
    notices = written(before, tmp_path / "m.gguf", "gpt-oss")
    assert any("rounds yarn's bounds to whole pairs" in notice for notice in notices)
    after = read_gguf(tmp_path / "m.gguf")
    assert after.config == before.config


def test_gates_and_ups_of_gpt_oss_lie_apart(tmp_path):
    """In a directory they lie in turn, with rows for columns."""
    before = checkpoint_of("gpt-oss", "plain", tmp_path / "a")
    written(before, tmp_path / "m.gguf", "gpt-oss")
    theirs = safetensors.numpy.load_file(tmp_path / "a" / "model.safetensors")
    found = {each.name: each.data for each in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    both = theirs["model.layers.1.mlp.experts.gate_up_proj"]
    biases = theirs["model.layers.1.mlp.experts.gate_up_proj_bias"]
    for first, name in enumerate(("gate", "up")):
        turned = both[:, :, first::2].swapaxes(1, 2)
        np.testing.assert_array_equal(found[f"blk.1.ffn_{name}_exps.weight"], turned)
        np.testing.assert_array_equal(found[f"blk.1.ffn_{name}_exps.bias"], biases[:, first::2])


def test_keys_of_deepseek_are_turned_and_values_are_not(tmp_path):
    """6 heads of 6 channels that do not turn and of values of 8, out of 12 (cases.md 82)."""
    before = checkpoint_of("deepseek-v3", "plain", tmp_path / "a")
    written(before, tmp_path / "m.gguf", "deepseek-v3")
    ours = before.tensors["layers.2.attention.kv_up.weight"].to_float32().reshape(6, 14, 12)
    found = {each.name: each.data for each in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    np.testing.assert_array_equal(found["blk.2.attn_k_b.weight"], ours[:, :6].swapaxes(1, 2))
    np.testing.assert_array_equal(found["blk.2.attn_v_b.weight"], ours[:, 6:])


@pytest.mark.parametrize("all_dim", [None, 0.707, 1.0])
@pytest.mark.parametrize("mscale", [None, 0.707, 1.0])
def test_the_factors_of_deepseek_come_back_from_two_keys(tmp_path, mscale, all_dim):
    """Of rotation and of scores, for those of released models and for others (cases.md 37)."""
    given = {"mscale": mscale, "mscale_all_dim": all_dim}
    rope = {**YARN, **{key: value for key, value in given.items() if value is not None}}
    before = checkpoint_of("deepseek-v3", "plain", tmp_path / "a", rope_parameters=rope)
    written(before, tmp_path / "m.gguf", "deepseek-v3")
    after = read_gguf(tmp_path / "m.gguf").config.layers[0].attention
    ours = before.config.layers[0].attention
    assert after.score_scale == pytest.approx(ours.score_scale, rel=1e-6)
    assert after.rotary.scaling.attention_factor() == pytest.approx(
        ours.rotary.scaling.attention_factor(), rel=1e-6
    )
    if mscale == all_dim:
        assert after == ours


@pytest.mark.parametrize(
    ("name", "variant", "permuted", "width"),
    [
        ("mixtral", "plain", True, "feed_forward_length"),
        ("qwen3-moe", "as published", False, "expert_feed_forward_length"),
        ("olmoe", "as many kv heads", False, "feed_forward_length"),
    ],
)
def test_experts_lie_as_llama_cpp_reads_them(tmp_path, name, variant, permuted, width):
    """A stack of each projection, expert after expert; queries as the architecture turns them."""
    before = checkpoint_of(name, variant, tmp_path / "a")
    written(before, tmp_path / "m.gguf", name)
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    stored = {each.name: each.data for each in reader.tensors}
    for which in ("gate", "up", "down"):
        ours = before.tensors[f"layers.1.feedforward.experts.{which}.weight"].to_float32()
        np.testing.assert_array_equal(stored[f"blk.1.ffn_{which}_exps.weight"], ours)
    router = before.tensors["layers.1.feedforward.router.weight"].to_float32()
    np.testing.assert_array_equal(stored["blk.1.ffn_gate_inp.weight"], router)
    queries = before.tensors["layers.1.attention.q.weight"].to_float32()
    assert np.array_equal(stored["blk.1.attn_q.weight"], queries) != permuted
    mixture = before.config.layers[0].feedforward
    architecture = FAMILY[name].gguf.architecture
    said = {key: reader.fields[f"{architecture}.{key}"].contents() for key in (width, *COUNTS)}
    assert said == {
        width: mixture.expert.d_ff,
        "expert_count": mixture.n_experts,
        "expert_used_count": mixture.top_k,
    }


@pytest.mark.parametrize("encoding", ["Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K", "BF16"])
def test_stacks_of_experts_are_encoded_read_and_copied_in_blocks(tmp_path, encoding):
    """Each row by itself, whichever expert it is of; the gguf library reads the same numbers."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1}
    before = checkpoint_of("mixtral", "plain", tmp_path / "a", **sizes)
    encodings, _ = choose_encodings(before, encoding)
    write_gguf(tmp_path / "m.gguf", before, encodings)
    after = read_gguf(tmp_path / "m.gguf")
    kept = {name: tensor.encoding for name, tensor in after.tensors.items()}
    write_gguf(tmp_path / "again.gguf", after, kept)
    found, again = (
        {each.name: each for each in gguf.GGUFReader(tmp_path / name).tensors}
        for name in ("m.gguf", "again.gguf")
    )
    for which, shape in {"gate": (5, 512, 256), "up": (5, 512, 256), "down": (5, 256, 512)}.items():
        ours = after.tensors[f"layers.0.feedforward.experts.{which}.weight"]
        theirs = found[f"blk.0.ffn_{which}_exps.weight"]
        assert (ours.shape, ours.encoding) == (shape, encoding)
        numbers = gguf.dequantize(theirs.data, theirs.tensor_type).reshape(shape)
        np.testing.assert_array_equal(ours.to_float32(), numbers)
        np.testing.assert_array_equal(again[theirs.name].data, theirs.data)
    assert after.tensors["layers.0.feedforward.router.weight"].encoding == "F32"


@pytest.mark.parametrize("rule", [LINEAR, YARN, LLAMA3], ids=lambda rule: rule["rope_type"])
@pytest.mark.parametrize(
    ("name", "variant"),
    [("mixtral", "plain"), ("qwen3-moe", "as published"), ("olmoe", "as many kv heads")],
)
def test_rules_of_mixtures_are_written_and_read_or_refused(tmp_path, name, variant, rule):
    """Cases.md 115. Divisors, which llama3 takes, are read of architecture llama alone."""
    before = checkpoint_of(name, variant, tmp_path / "a", rope_parameters=rule)
    if rule is LLAMA3 and name != "mixtral":
        with pytest.raises(UserError, match=r"llama\.cpp reads no rope_freqs\.weight"):
            written(before, tmp_path / "m.gguf", name)
        return
    written(before, tmp_path / "m.gguf", name)
    after = read_gguf(tmp_path / "m.gguf").config
    for one, other in zip(before.config.layers, after.layers, strict=True):
        ours, theirs = one.attention.rotary, other.attention.rotary
        length = 2 * before.config.max_positions
        np.testing.assert_allclose(
            *(
                each.scaling.frequencies(each.base, each.d_rotary, length)
                for each in (ours, theirs)
            ),
            rtol=1e-6,
        )
        assert theirs.scaling.attention_factor() == pytest.approx(ours.scaling.attention_factor())


def test_a_mixture_and_a_dense_model_of_one_architecture_are_told_apart(tmp_path):
    """By a number of experts that is not 0, which dense files may say too."""
    for name, variant in (("mixtral", "plain"), ("llama", "llama3")):
        written(checkpoint_of(name, variant, tmp_path / name), tmp_path / "m.gguf", name)
        assert read_gguf(tmp_path / "m.gguf").family == name
    metadata = {f"llama.{key}": 0 for key in COUNTS}
    file = read_gguf_file(tmp_path / "m.gguf")
    tensors = [to_write(replace(each, name=name), "F32") for name, each in file.tensors.items()]
    write_gguf_file(tmp_path / "zero.gguf", {**file.encoded, **metadata}, tensors)
    assert read_gguf(tmp_path / "zero.gguf").family == "llama"


def test_experts_of_another_shape_than_the_keys_say_are_refused(tmp_path):
    before = checkpoint_of("mixtral", "plain", tmp_path / "a")
    written(before, tmp_path / "m.gguf", "mixtral")
    file = read_gguf_file(tmp_path / "m.gguf")
    tensors = [to_write(replace(each, name=name), "F32") for name, each in file.tensors.items()]
    write_gguf_file(tmp_path / "n.gguf", {**file.encoded, "llama.expert_count": 4}, tensors)
    with pytest.raises(CheckpointError, match=r"blk\.0\.ffn_\w+\.weight"):
        read_gguf(tmp_path / "n.gguf")


def test_every_family_is_tried():
    assert {name for name, _ in EXPRESSIBLE} == set(PEERS)
