"""A change is told in the keys of the file that it is for."""

from pathlib import Path

from armillary.config import DecoderConfig
from armillary.diagnosis.patches import patch_for, patch_text
from armillary.rope_scaling import PositionInterpolation
from support.llama_files import write_gguf

CONFIG = DecoderConfig.uniform(
    vocab_size=61, d_model=40, n_layers=2, n_heads=6, n_kv_heads=2, d_head=10, max_positions=64
)


def test_the_same_change_in_the_keys_of_each_format(tmp_path):
    path = write_gguf(tmp_path / "m.gguf")
    change = {"rope_base": 5e5}
    assert patch_for("huggingface", Path("m"), change, CONFIG) == (
        {"rope_theta": 5e5},
        "config.json",
    )
    assert patch_for("gguf", path, change, CONFIG) == ({"llama.rope.freq_base": 5e5}, "m.gguf")
    keys, _ = patch_for("armillary", Path("m"), change, CONFIG)
    assert keys == {"layers[*].attention.rotary.base": 5e5}


def test_a_rule_is_told_as_each_format_writes_it(tmp_path):
    path = write_gguf(tmp_path / "m.gguf")
    change = {"scaling": PositionInterpolation(factor=4.0)}
    keys, _ = patch_for("huggingface", Path("m"), change, CONFIG)
    assert keys["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    keys, _ = patch_for("gguf", path, change, CONFIG)
    assert keys["llama.rope.scaling.type"] == "linear"
    keys, _ = patch_for("armillary", Path("m"), change, CONFIG)
    assert keys == {"layers[*].attention.rotary.scaling": {"kind": "linear", "factor": 4.0}}


def test_what_a_format_has_no_key_for_is_left_to_words():
    keys, _ = patch_for("huggingface", Path("m"), {"norm.offset": -1.0}, CONFIG)
    assert keys == {}


def test_a_patch_is_written_as_it_goes_into_the_file():
    assert patch_text({"rope_theta": 5e5, "a": True}) == '"rope_theta": 500000.0, "a": true'
