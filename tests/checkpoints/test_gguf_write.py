"""A checkpoint written as GGUF is the same decoder when it is read, or refused beforehand."""

import gguf as library
import numpy as np
import pytest
import torch

from armillary.checkpoints import open_checkpoint, save_armillary
from armillary.checkpoints.families.llama import LLAMA
from armillary.checkpoints.gguf import read_gguf
from armillary.checkpoints.gguf_write import write_gguf
from armillary.checkpoints.huggingface import read_huggingface
from armillary.checkpoints.tensors import encode
from armillary.errors import ConfigError
from armillary.rope_scaling import YaRN
from armillary.weights import build_filled, to_write
from support.llama_files import (
    gguf_tensors,
    huggingface_tensors,
    write_huggingface_directory,
)
from support.llama_files import write_gguf as library_file
from support.memory import allocates_less_than
from support.models import SCALINGS, VARIANTS, build, config, layer, tokens
from support.tiny_model import tiny_tokenizer


def plain(checkpoint, encoding="F32"):
    return {
        name: encoding if len(tensor.shape) > 1 else "F32"
        for name, tensor in checkpoint.tensors.items()
    }


def saved(directory, config, tokenizer=None, **generation):
    save_armillary(directory, config, to_write(build(config)), tokenizer, generation)
    return open_checkpoint(directory)


def arrays_of(path):
    return {
        tensor.name: library.dequantize(tensor.data, tensor.tensor_type)
        for tensor in library.GGUFReader(path).tensors
    }


@pytest.mark.parametrize("biases", [False, True])
def test_tensors_are_those_of_a_converter_row_by_row(tmp_path, biases):
    """Cases.md 12 and 13: 6 heads on 2; the converter's permutation, written without our tables."""
    theirs = huggingface_tensors(biases=biases)
    directory = write_huggingface_directory(
        tmp_path / "m", theirs, attention_bias=biases, mlp_bias=biases
    )
    write_gguf(tmp_path / "m.gguf", checkpoint := read_huggingface(directory), plain(checkpoint))
    found, expected = arrays_of(tmp_path / "m.gguf"), gguf_tensors(theirs)
    assert set(found) == set(expected)
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


NAMES = [f"rope {name}" for name in SCALINGS if name != "dynamic"]
NAMES += ["tied head", "interleaved", "partial rotation", "partial interleaved", "qkv bias"]


@pytest.mark.parametrize("name", ["plain", "one kv head", *NAMES])
def test_the_decoder_that_is_read_gives_the_same_logits(tmp_path, name):
    if name == "qkv bias":
        bias = {"qkv_bias": True, "out_bias": True}
        wanted = config(*[layer(attention=bias, feedforward={"bias": True})] * 2)
    else:
        wanted = VARIANTS[name]
    before = saved(tmp_path / "m", wanted)
    write_gguf(tmp_path / "m.gguf", before, plain(before))
    after = read_gguf(tmp_path / "m.gguf")
    assert after.config.layers[0].attention.rotary.layout == "half_split"
    batch = tokens(2, 40)
    with torch.no_grad():
        ours, again = (
            build_filled(each.config, each.tensors, dtype=torch.float64)(batch)
            for each in (before, after)
        )
    # Weights and settings have become float32.
    torch.testing.assert_close(again, ours, rtol=0, atol=2e-5)


def test_layers_may_differ_in_what_the_format_has_lists_for(tmp_path):
    wanted = config(layer(), layer(attention={"n_kv_heads": 3}, feedforward={"d_ff": 32}))
    before = saved(tmp_path / "m", wanted)
    write_gguf(tmp_path / "m.gguf", before, plain(before))
    assert read_gguf(tmp_path / "m.gguf").config == wanted


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("rope dynamic", "no keys for the dynamic rule"),
        ("window", "cannot express this decoder's layers.0.attention.window 3"),
        ("soft cap", "cannot express this decoder's layers.0.attention.soft_cap"),
        ("glu gelu", "cannot express this decoder's layers.0.feedforward.activation"),
        ("embedding scale", "cannot express this decoder's embedding_scale 6.3"),
        ("no position", "cannot express layers without rotation"),
        ("mixed layers", "cannot express this decoder's"),
        ("layer norm", "cannot express this decoder's layers.0.norm.kind"),
        ("fused glu", "has no name for the parameter layers.0.feedforward.gate_up.weight"),
    ],
)
def test_what_the_family_cannot_express_is_refused_before_anything_is_written(
    tmp_path, name, message
):
    before = saved(tmp_path / "m", VARIANTS[name])
    with pytest.raises(ValueError, match=message) as caught:
        write_gguf(tmp_path / "m.gguf", before, plain(before), family=LLAMA)
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_layers_that_turn_differently_are_refused(tmp_path):
    before = saved(tmp_path / "m", config(layer(), layer(rotary={"base": 200.0})))
    with pytest.raises(ConfigError, match="cannot express this decoder's rotation, layer 1"):
        write_gguf(tmp_path / "m.gguf", before, plain(before))


def test_betas_that_llama_cpp_does_not_read_are_noticed(tmp_path):
    rule = YaRN(factor=4.0, original_window=64)
    for betas, count in [({}, 0), ({"beta_fast": 8.0}, 1)]:
        scaled = layer(rotary={"scaling": YaRN(factor=4.0, original_window=64, **betas)})
        before = saved(tmp_path / f"m{count}", config(scaled, scaled))
        notices = write_gguf(tmp_path / "m.gguf", before, plain(before))
        assert sum("beta_fast" in notice for notice in notices) == count
    assert rule.beta_fast == 32


def test_a_tokenizer_and_suggestions_come_along(tmp_path):
    tokenizer = tiny_tokenizer(tmp_path / "t")
    wanted = config(vocab_size=tokenizer.vocab_size + 3)
    before = saved(tmp_path / "m", wanted, tokenizer, eos_token_id=[2], temperature=0.5, top_k=40)
    assert write_gguf(tmp_path / "m.gguf", before, plain(before)) == []
    after = open_checkpoint(tmp_path / "m.gguf")
    text = "Grüße, 12 <|im_end|> x"
    for specials in (False, True):
        ids = tokenizer.encode(text, specials=specials)
        assert after.tokenizer.encode(text, specials=specials) == ids
    assert after.tokenizer.chat_templates == tokenizer.chat_templates
    assert after.tokenizer.vocab_size == wanted.vocab_size  # as many as there are embeddings
    assert after.generation["temperature"] == 0.5
    assert after.generation["top_k"] == 40
    assert 2 in after.generation["eos_token_id"]
    reader = library.GGUFReader(tmp_path / "m.gguf")
    assert reader.fields["general.name"].contents() == "m"
    assert reader.fields["general.file_type"].contents() == 0


def test_of_a_gguf_file_all_that_describes_it_is_carried_over(tmp_path):
    """Also keys that we do not read; but not what is said of the encoding, which is another now."""
    general = {
        "general.name": "a name",
        "general.license": "apache-2.0",
        "general.file_type": 7,
        "general.alignment": 32,
        "tokenizer.ggml.something": ["x", "y"],
        "other.key": 3,
    }
    library_file(tmp_path / "a.gguf", general=general)
    before = read_gguf(tmp_path / "a.gguf")
    write_gguf(tmp_path / "b.gguf", before, plain(before, "BF16"))
    fields = library.GGUFReader(tmp_path / "b.gguf").fields
    for key in ("general.name", "general.license", "tokenizer.ggml.something"):
        assert fields[key].contents() == general[key]
    assert fields["general.file_type"].contents() == 32
    assert "other.key" not in fields
    assert read_gguf(tmp_path / "b.gguf").config == before.config


def test_rows_of_blocks_are_permuted_as_they_are(tmp_path):
    wide = config(*[layer()] * 2, d_model=64)
    before = saved(tmp_path / "m", wide)
    encodings = {
        name: "Q8_0" if len(t.shape) > 1 and t.shape[1] == 64 else "F32"
        for name, t in before.tensors.items()
    }
    write_gguf(tmp_path / "m.gguf", before, encodings)
    name = "layers.1.attention.k.weight"
    after = read_gguf(tmp_path / "m.gguf").tensors[name]
    assert after.encoding == "Q8_0"
    np.testing.assert_array_equal(
        after.stored_rows(0, 20).reshape(-1), encode(before.tensors[name].to_float32(), "Q8_0")
    )


def test_writing_holds_a_block_of_rows_at_a_time(tmp_path):
    big = config(vocab_size=60_000, d_model=64)
    before = saved(tmp_path / "m", big)
    largest = 60_000 * 64 * 4
    taken = []
    with allocates_less_than(largest // 2):
        write_gguf(tmp_path / "m.gguf", before, plain(before, "BF16"), progress=taken.append)
    assert sum(taken) == sum(tensor.nbytes for tensor in before.tensors.values()) // 4 + sum(
        2 * tensor.shape[0] for tensor in before.tensors.values() if len(tensor.shape) == 1
    )
