"""A converted checkpoint is the same decoder; a stopped conversion goes on to the same bytes."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from armillary.checkpoints import open_checkpoint, save_armillary, tensors
from armillary.config import DecoderConfig
from armillary.conversion.convert import FORMATS, convert
from armillary.errors import ConfigError, UserError
from armillary.files import verify_manifest
from armillary.resumable import workplace_of
from armillary.weights import build_filled, to_write
from support.llama_files import write_huggingface_directory
from support.memory import allocates_less_than
from support.models import SCALINGS, VARIANTS, build, config, layer, tokens
from support.tiny_model import tiny_tokenizer

EXPRESSIBLE = ["plain", "tied head", *(f"rope {n}" for n in SCALINGS if n != "dynamic")]


def saved(directory, config, tokenizer=None, dtype=torch.float32, **generation):
    decoder = build(config).to(dtype)
    save_armillary(directory, config, to_write(decoder), tokenizer, generation)
    return open_checkpoint(directory)


def named(tmp_path, to, name="out"):
    return tmp_path / (f"{name}.gguf" if to == "gguf" else name)


def logits_of(checkpoint, length=80):
    with torch.no_grad():
        return build_filled(checkpoint.config, checkpoint.tensors)(tokens(1, length))


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("name", EXPRESSIBLE)
def test_float32_is_the_same_decoder_past_its_window(tmp_path, name, to):
    """Cases.md 116 and 115: logits within 1e-4 of those before, under each rule."""
    before = saved(tmp_path / "m", VARIANTS[name])
    converted = convert(before, named(tmp_path, to), to, dtype="float32")
    after = open_checkpoint(converted.path)
    assert after.format == to
    assert (logits_of(after) - logits_of(before)).abs().max() < 1e-4
    assert max(converted.proof.logits) < 1e-4
    assert converted.proof.rounding is None


@pytest.mark.parametrize("name", VARIANTS)
def test_our_own_format_holds_every_decoder(tmp_path, name):
    before = saved(tmp_path / "m", VARIANTS[name])
    converted = convert(before, tmp_path / "out", "armillary")
    assert max(converted.proof.logits) == 0
    assert converted.proof.frequencies == 0
    assert open_checkpoint(tmp_path / "out").config == before.config


@pytest.mark.parametrize("to", ["huggingface", "gguf"])
def test_over_512_tokens_there_is_no_divergence(tmp_path, to):
    """Cases.md 14: an unpermuted query or key shows in logits long before it shows in a text."""
    before = saved(tmp_path / "m", config(max_positions=512))
    after = open_checkpoint(convert(before, named(tmp_path, to), to).path)
    one, other = (logits_of(each, 512).double() for each in (before, after))
    assert (one - other).abs().max() < 1e-4
    p, q = one.log_softmax(-1), other.log_softmax(-1)
    assert (p.exp() * (p - q)).sum(-1).mean() < 1e-10


@pytest.mark.parametrize("to", FORMATS)
def test_half_precision_is_close(tmp_path, to):
    """Cases.md 116: 2e-2 from float32 to float16, under weights of a usual size."""
    small = config()
    save_armillary(tmp_path / "m", small, to_write(build(small, std=0.1).float()))
    before = open_checkpoint(tmp_path / "m")
    converted = convert(before, named(tmp_path, to), to, dtype="float16")
    after = open_checkpoint(converted.path)
    largest = (logits_of(after) - logits_of(before)).abs().max()
    assert 0 < largest < 2e-2
    assert 0 < max(converted.proof.rounding) < 2e-2
    assert max(converted.proof.logits) < 1e-4


@pytest.mark.parametrize("dtype", ["q8_0", "q5_1", "q5_0", "q4_1", "q4_0"])
@pytest.mark.parametrize("to", ["gguf", "armillary"])
def test_blocks_are_held_against_the_same_rounding(tmp_path, to, dtype):
    wide = config(*[layer()] * 2, d_model=64)
    converted = convert(saved(tmp_path / "m", wide), named(tmp_path, to), to, dtype=dtype)
    assert converted.tensors[dtype.upper()] > 4
    assert max(converted.proof.logits) < 1e-4 * converted.proof.largest_logit
    assert max(converted.proof.rounding) > 1e-3


def test_the_manifest_says_what_was_found(tmp_path):
    scaled = VARIANTS["rope llama3"]
    before = saved(tmp_path / "m", scaled)
    for to in FORMATS:
        converted = convert(before, named(tmp_path, to, to), to)
        if to != "gguf":
            verify_manifest(converted.path, checksums=True)
        facts = json.loads(converted.manifest.read_text())
        assert facts["conversion"]["from"] == {"format": "armillary", "name": "m"}
        proof = facts["conversion"]["proof"]
        assert proof["window"] == 64
        assert proof["positions"] == [0, 63, 64, 65]
        assert len(proof["logits"]) == 4
        assert set(facts["files"]) >= {converted.path.name if to == "gguf" else "config.json"}
    assert converted.proof.line().startswith("read back: frequencies within ")


def test_positions_are_on_both_sides_of_the_original_window_and_at_the_end(tmp_path):
    before = saved(tmp_path / "m", VARIANTS["rope longrope"])
    assert convert(before, tmp_path / "out", "armillary").proof.positions == (0, 7, 8, 9, 63)


@pytest.mark.parametrize("how", ["wrong base", "wrong weights", "nan", "attention factor"])
def test_a_copy_that_is_another_decoder_is_not_kept(tmp_path, how, monkeypatch):
    from armillary.conversion import convert as module

    scaled = VARIANTS["rope yarn"]
    before = saved(tmp_path / "m", scaled)

    def damaged(path):
        after = open_checkpoint(path)
        rotary = after.config.layers[0].attention.rotary
        if how == "wrong base":
            rotary = rotary.model_copy(update={"base": rotary.base * 1.01})
        if how == "attention factor":
            rule = SCALINGS["yarn"]
            rule = type(rule)(**{**vars(rule), "explicit_attention_factor": 1.5})
            rotary = rotary.model_copy(update={"scaling": rule})
        one = layer(rotary=rotary.model_dump() | {"scaling": rotary.scaling})
        after = type(after)(**{**vars(after), "config": config(one, one)})
        name = "layers.1.attention.k.weight"
        data = after.tensors[name].data.copy()
        if how == "wrong weights":
            data.view(np.float32)[:] *= 1.01
        if how == "nan":
            data.view(np.float32)[3] = np.nan
        after.tensors[name] = type(after.tensors[name])(
            name, after.tensors[name].shape, "F32", data, "here"
        )
        return after

    monkeypatch.setattr(module, "open_checkpoint", damaged)
    with pytest.raises(UserError, match="read back, but .*nothing was kept of it"):
        convert(before, tmp_path / "out", "armillary")
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_both_schemas_of_a_config_give_the_same_gguf_keys(tmp_path):
    """Cases.md 23: rules were dropped by converters that knew one schema only."""
    rule = {"factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 8.0}
    old = {"rope_theta": 5e5, "rope_scaling": {"type": "yarn", **rule}}
    new = {
        "rope_theta": None,
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 5e5, **rule},
    }
    found = []
    for name, entries in (("old", old), ("new", new)):
        (tmp_path / name).mkdir()
        directory = write_huggingface_directory(
            tmp_path / name / "m", max_position_embeddings=256, **entries
        )
        convert(open_checkpoint(directory), tmp_path / f"{name}.gguf", "gguf")
        found.append((tmp_path / f"{name}.gguf").read_bytes())
    assert found[0] == found[1]
    assert b"llama.rope.scaling.type" in found[0]


@pytest.mark.parametrize(
    ("name", "to", "message"),
    [
        ("rope dynamic", "gguf", "dynamic rule.*--to armillary has"),
        ("rope dynamic", "huggingface", "dynamic rule.*--to armillary has a place"),
        ("norm offset", "huggingface", "cannot express .*--to armillary has a place"),
        ("parallel sandwich", "gguf", "no name for the parameter .*--to armillary has"),
    ],
)
def test_what_a_format_cannot_say_is_refused_with_another_way(tmp_path, name, to, message):
    before = saved(tmp_path / "m", VARIANTS[name])
    with pytest.raises(UserError, match=message) as caught:
        convert(before, named(tmp_path, to), to)
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


@pytest.mark.parametrize(
    ("dtype", "to", "message"),
    [
        ("q8_0", "huggingface", "--to gguf or armillary, which hold blocks"),
        ("float64", "gguf", "take float32"),
    ],
)
def test_a_type_that_a_format_does_not_hold_is_refused(tmp_path, dtype, to, message):
    with pytest.raises(ConfigError, match=message):
        convert(saved(tmp_path / "m", config()), named(tmp_path, to), to, dtype=dtype)


def test_targets_that_cannot_be_are_refused(tmp_path):
    before = saved(tmp_path / "m", config())
    (tmp_path / "there").mkdir()
    for target, to, message in [
        ("there", "huggingface", "exists; remove it"),
        ("m", "armillary", "exists; remove it"),
        ("no/where", "armillary", "its folder is not there"),
        ("x", "gguf", "ends in .gguf"),
        ("x.gguf", "huggingface", "does not end in .gguf"),
    ]:
        with pytest.raises(UserError, match=message):
            convert(before, tmp_path / target, to)
    with pytest.raises(UserError, match="a GGUF file is written whole"):
        convert(before, tmp_path / "x.gguf", "gguf", max_shard_bytes=1000)


def test_a_directory_comes_with_all_that_belongs_to_it(tmp_path):
    tokenizer = tiny_tokenizer(tmp_path / "t")
    wanted = config(vocab_size=tokenizer.vocab_size)
    before = saved(tmp_path / "m", wanted, tokenizer, eos_token_id=[2], temperature=0.5)
    converted = convert(before, tmp_path / "out", "huggingface", max_shard_bytes=20_000)
    assert converted.proof.texts == 3
    names = {path.name for path in converted.path.iterdir()}
    assert names >= {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "model.safetensors.index.json",
        "manifest.json",
    }
    shards = sorted(converted.path.glob("model-*.safetensors"))
    assert len(shards) > 3
    assert sorted(path.stat().st_size > 20_000 for path in shards)[:-2] == [False] * (
        len(shards) - 2
    )  # embedding and head have more by themselves
    after = open_checkpoint(converted.path)
    assert after.tokenizer.chat_templates == tokenizer.chat_templates
    assert after.generation == {"eos_token_id": (2,), "temperature": 0.5} | {
        key: value for key, value in after.generation.items() if key == "bos_token_id"
    }


@pytest.mark.parametrize("to", FORMATS)
def test_a_round_trip_is_bit_exact(tmp_path, to):
    before = saved(tmp_path / "m", VARIANTS["rope llama3"], dtype=torch.bfloat16)
    first = convert(before, named(tmp_path, to), to)
    again = convert(open_checkpoint(first.path), tmp_path / "back", "armillary", dtype="bfloat16")
    after = open_checkpoint(again.path)
    if to != "gguf":  # which says this rule's divisors, and not its window
        assert after.config == before.config
    for name, tensor in before.tensors.items():
        np.testing.assert_array_equal(
            after.tensors[name].stored_rows(0, tensor.n_rows), tensor.stored_rows(0, tensor.n_rows)
        )


@pytest.mark.parametrize("to", FORMATS)
def test_memory_stays_below_twice_the_largest_tensor(tmp_path, to):
    """Cases.md 81: counted from reading to proof; 15 MB in float32, of 60 MB in all."""
    sizes = {"vocab_size": 30_000, "d_model": 128, "n_layers": 2, "n_heads": 2, "d_ff": 8192}
    wanted = DecoderConfig.uniform(**sizes, max_positions=64)
    save_armillary(tmp_path / "m", wanted, to_write(build(wanted, std=0.02).bfloat16()))
    before = open_checkpoint(tmp_path / "m")
    largest = 30_000 * 128 * 2
    with allocates_less_than(2 * largest):
        convert(before, named(tmp_path, to), to, dtype="float16")


KILLED = """
import os, signal, sys
from pathlib import Path
from armillary import resumable
from armillary.checkpoints import open_checkpoint, tensors
from armillary.conversion.convert import convert

resumable._BETWEEN_NOTES = 1
source, target, to, left = sys.argv[1:]
left = int(left)
encoded = tensors.StoredTensor.encoded

def killing(self, encoding):
    global left
    left -= 1
    for chunk in encoded(self, encoding):
        if left < 0:
            yield chunk[: len(chunk) // 2]
            os.kill(os.getpid(), signal.SIGKILL)
        yield chunk

tensors.StoredTensor.encoded = killing
shard = None if to == "gguf" else 20_000
convert(open_checkpoint(source), Path(target), to, dtype="bfloat16", max_shard_bytes=shard)
"""


@pytest.mark.parametrize("to", FORMATS)
def test_a_conversion_that_was_killed_goes_on_where_it_stopped(tmp_path, to, monkeypatch):
    tokenizer = tiny_tokenizer(tmp_path / "t")
    wanted = config(vocab_size=tokenizer.vocab_size)
    before = saved(tmp_path / "m", wanted, tokenizer, eos_token_id=[2])
    options = {"dtype": "bfloat16", "max_shard_bytes": None if to == "gguf" else 20_000}
    (tmp_path / "whole").mkdir()
    whole = convert(before, named(tmp_path / "whole", to), to, **options).path
    target = named(tmp_path, to)
    command = [sys.executable, "-c", KILLED, str(tmp_path / "m"), str(target), to, "12"]
    ended = subprocess.run(command, env=os.environ, check=False)
    assert ended.returncode == -signal.SIGKILL
    assert not target.exists()
    assert workplace_of(target).is_dir()
    asked = []
    encoded = tensors.StoredTensor.encoded

    def counted(self, encoding):  # begun when the first chunk is taken
        asked.append(self.name)
        yield from encoded(self, encoding)

    monkeypatch.setattr(tensors.StoredTensor, "encoded", counted)
    again = convert(before, target, to, **options)
    assert len(asked) == len(before.tensors) - 12
    assert files_of(again.path) == files_of(whole)
    assert not workplace_of(target).exists()
    monkeypatch.undo()


def files_of(path: Path) -> dict[str, bytes]:
    files = [path, path.with_name(f"{path.name}.json")] if path.is_file() else path.iterdir()
    return {file.name: file.read_bytes() for file in files}
