"""A rule is written beside the same weights, read back as planned, and nothing else is lost."""

import json

import numpy as np
import pytest

from armillary.checkpoints import open_checkpoint, save_armillary, write_huggingface
from armillary.checkpoints.tensors import StoredTensor
from armillary.errors import CheckpointError, ConfigError, UserError
from armillary.extension.apply import apply, verify
from armillary.extension.rules import RULES, RuleOptions, extend
from armillary.rope_scaling import NTK, DynamicNTK, Unscaled, YaRN
from armillary.weights import to_write
from support.llama_files import huggingface_tensors, write_gguf, write_huggingface_directory
from support.memory import allocates_less_than
from support.models import config, layer
from support.tiny_model import TEMPLATE, tiny_model

OPTIONS = {
    "longrope": RuleOptions(
        short_factors=(1.0, 1.1, 1.2, 1.3, 1.4), long_factors=(1.0, 1.5, 2.0, 3.0, 4.0)
    )
}
GENERATION = {"eos_token_id": (2,), "temperature": 0.6, "top_p": 0.9}


@pytest.fixture
def source(tmp_path):
    """A Hugging Face directory with tokenizer, chat template and generation config."""
    lm = tiny_model(tmp_path / "tokenizer", max_positions=64)
    path = tmp_path / "source"
    write_huggingface(path, lm.config, to_write(lm.decoder), lm.tokenizer, GENERATION)
    return open_checkpoint(path)


def numbers(tensors: dict[str, StoredTensor]) -> dict[str, np.ndarray]:
    return {name: tensor.to_float32() for name, tensor in tensors.items()}


def same_weights(before, after) -> bool:
    a, b = numbers(before.tensors), numbers(after.tensors)
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("format", ["auto", "armillary", "huggingface"])
@pytest.mark.parametrize("rule", RULES)
def test_the_rule_is_read_back_and_the_weights_are_the_same(source, tmp_path, rule, format):
    applied = apply(
        source, tmp_path / "out", to=256, rule=rule, options=OPTIONS.get(rule), format=format
    )
    after = open_checkpoint(tmp_path / "out")
    assert same_weights(source, after)
    assert applied.format == after.format
    assert [(each.layers, each.lengths, each.difference) for each in applied.verified] == [
        ((0, 1), (64, 256), 0.0)
    ]
    planned = extend(source.config, 256, rule, OPTIONS.get(rule)).config
    for length in (1, 64, 65, 256):
        for ours, theirs in zip(planned.layers, after.config.layers, strict=True):
            a, b = ours.attention.rotary, theirs.attention.rotary
            wanted = a.scaling.frequencies(a.base, a.d_rotary, length)
            assert np.array_equal(b.scaling.frequencies(b.base, b.d_rotary, length), wanted)
            assert a.scaling.attention_factor() == b.scaling.attention_factor()
    if (rule, format) != ("dynamic", "huggingface"):
        assert after.config.max_positions == 256


def test_what_stands_beside_the_weights_is_kept(source, tmp_path):
    for format in ("huggingface", "armillary"):
        apply(source, tmp_path / format, to=256, rule="yarn", format=format)
        after = open_checkpoint(tmp_path / format)
        assert after.generation == source.generation
        assert after.generation["temperature"] == 0.6
        assert after.tokenizer.chat_template == TEMPLATE
        assert after.tokenizer.encode("a word") == source.tokenizer.encode("a word")


def test_a_file_says_the_original_window_and_the_new_one(source, tmp_path):
    apply(source, tmp_path / "out", to=256, rule="yarn")
    entries = json.loads((tmp_path / "out" / "config.json").read_text())
    assert entries["max_position_embeddings"] == 256
    assert entries["rope_parameters"]["original_max_position_embeddings"] == 64
    assert entries["rope_scaling"]["factor"] == 4.0


def test_the_dynamic_rule_goes_where_both_windows_can_be_said(source, tmp_path):
    applied = apply(source, tmp_path / "ours", to=256, rule="dynamic")
    assert applied.format == "armillary"
    assert "so this is written in Armillary's format" in applied.notices[0]
    assert open_checkpoint(tmp_path / "ours").config.max_positions == 256
    applied = apply(source, tmp_path / "theirs", to=256, rule="dynamic", format="huggingface")
    assert applied.notices == (
        "Hugging Face's files state the original window 64 for the dynamic rule: readers do not "
        "learn of 256",
    )
    after = open_checkpoint(tmp_path / "theirs").config
    assert after.max_positions == 64
    assert after.layers[0].attention.rotary.scaling == DynamicNTK(4.0, 64)


def test_ntk_becomes_a_larger_base_and_that_is_said(source, tmp_path):
    applied = apply(source, tmp_path / "out", to=256, rule="ntk")
    assert "they say the larger base" in applied.notices[0]
    rotary = open_checkpoint(tmp_path / "out").config.layers[0].attention.rotary
    assert (rotary.scaling, rotary.base) == (Unscaled(), 100.0 * 4 ** (10 / 8))
    kept = apply(source, tmp_path / "ours", to=256, rule="ntk", format="armillary")
    assert kept.notices == ()
    ours = open_checkpoint(tmp_path / "ours").config.layers[0].attention.rotary
    assert ours.scaling == NTK(4.0)


def test_a_gguf_file_becomes_a_directory_with_the_same_weights(tmp_path):
    """Its rows are interleaved in the file, and half-split in ours."""
    path = write_gguf(tmp_path / "tiny.gguf")
    applied = apply(open_checkpoint(path), tmp_path / "out", to=256, rule="llama3")
    assert applied.format == "huggingface"
    after = open_checkpoint(tmp_path / "out")
    assert same_weights(open_checkpoint(path), after)
    assert np.array_equal(
        after.tensors["layers.1.attention.k.weight"].to_float32(),
        huggingface_tensors()["model.layers.1.self_attn.k_proj.weight"],
    )


def test_quantised_weights_are_written_as_the_numbers_that_they_stand_for(tmp_path):
    rng = np.random.default_rng(0)
    wide = {"embedding_length": 64, "feed_forward_length": 32}
    shapes = {
        "token_embd.weight": (61, 64),
        "output_norm.weight": (64,),
        "output.weight": (61, 64),
        "blk.0.attn_norm.weight": (64,),
        "blk.0.ffn_norm.weight": (64,),
        "blk.0.attn_q.weight": (60, 64),
        "blk.0.attn_k.weight": (20, 64),
        "blk.0.attn_v.weight": (20, 64),
        "blk.0.attn_output.weight": (64, 60),
        "blk.0.ffn_gate.weight": (32, 64),
        "blk.0.ffn_up.weight": (32, 64),
        "blk.0.ffn_down.weight": (64, 32),
    }
    tensors = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    path = write_gguf(tmp_path / "q.gguf", tensors, encoding="Q8_0", block_count=1, **wide)
    before = open_checkpoint(path)
    assert before.tensors["layers.0.attention.q.weight"].encoding == "Q8_0"
    apply(before, tmp_path / "out", to=256, rule="yarn")
    after = open_checkpoint(tmp_path / "out")
    assert {tensor.encoding for tensor in after.tensors.values()} == {"F32"}
    assert same_weights(before, after)
    apply(before, tmp_path / "half", to=256, rule="yarn", dtype="bfloat16")
    half = open_checkpoint(tmp_path / "half").tensors
    assert {tensor.encoding for tensor in half.values()} == {"BF16"}


def test_what_no_family_can_say_is_written_in_our_format_with_the_reason(tmp_path):
    """Layers with windows of their own, which are kept and named."""
    model = config(layer(attention={"window": 8}), layer())
    save_random(model, tmp_path / "source")
    before = open_checkpoint(tmp_path / "source")
    applied = apply(before, tmp_path / "out", to=256, rule="yarn")
    assert applied.format == "armillary"
    assert applied.notices[1].startswith("layer 0: window of 8 and frequencies are kept")
    assert applied.notices[2].startswith("written in Armillary's format: the llama family cannot")
    assert [each.layers for each in applied.verified] == [(0,), (1,)]
    after = open_checkpoint(tmp_path / "out").config
    assert [each.attention.window for each in after.layers] == [8, None]
    assert [each.attention.rotary.scaling for each in after.layers] == [Unscaled(), YaRN(4.0, 64)]
    with pytest.raises(ConfigError, match="cannot express that layer 1 rotates"):
        apply(before, tmp_path / "theirs", to=256, rule="yarn", format="huggingface")
    assert not (tmp_path / "theirs").exists()


def save_random(model, directory):
    from support.models import build

    save_armillary(directory, model, to_write(build(model)), None, {})


def test_an_activation_that_no_family_knows_is_no_fault(tmp_path):
    model = config(layer(feedforward={"activation": "identity"}))
    save_random(model, tmp_path / "source")
    applied = apply(open_checkpoint(tmp_path / "source"), tmp_path / "out", to=256, rule="linear")
    assert applied.format == "armillary"


def test_a_rule_over_a_rule_is_refused_and_writes_nothing(tmp_path):
    write_huggingface_directory(
        tmp_path / "source",
        rope_scaling={"rope_type": "linear", "factor": 2.0},
    )
    before = open_checkpoint(tmp_path / "source")
    with pytest.raises(ConfigError, match="say which is meant: not --over replace"):
        apply(before, tmp_path / "out", to=256, rule="linear")
    assert not (tmp_path / "out").exists()
    applied = apply(
        before, tmp_path / "out", to=256, rule="linear", options=RuleOptions(over="multiply")
    )
    assert applied.extension.rule.factor == 8.0


def test_the_model_itself_and_other_people_s_directories_stay(source, tmp_path):
    with pytest.raises(UserError, match="is the model itself"):
        apply(source, source.source, to=256, rule="yarn")
    other = tmp_path / "other"
    other.mkdir()
    (other / "letter.txt").write_text("dear")
    with pytest.raises(UserError, match="was not saved by armillary"):
        apply(source, other, to=256, rule="yarn")
    assert (other / "letter.txt").read_text() == "dear"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"factor": 8.0}, "has the attention factor"),
        ({"factor": 8.0, "attention_factor": YaRN(4.0, 64).attention_factor()}, "are off by up to"),
        ({"max_position_embeddings": 128}, "its window is 128, not 256"),
    ],
)
def test_a_file_that_does_not_say_what_was_planned_is_found(source, tmp_path, change, message):
    out = tmp_path / "out"
    applied = apply(source, out, to=256, rule="yarn")
    entries = json.loads((out / "config.json").read_text())
    for key, value in change.items():
        for part in (entries["rope_scaling"], entries["rope_parameters"]):
            part[key] = value
        if key in entries:
            entries[key] = value
            del entries["rope_scaling"][key], entries["rope_parameters"][key]
    (out / "config.json").write_text(json.dumps(entries))
    with pytest.raises(CheckpointError, match=message):
        verify(out, applied.extension, (64, 256))


def test_no_model_is_held_in_memory(tmp_path):
    """Weights of 8 MB go by in pieces of one."""
    model = config(vocab_size=50_000)
    save_random(model, tmp_path / "source")
    before = open_checkpoint(tmp_path / "source")
    assert before.tensors["embedding.weight"].nbytes == 16_000_000
    with allocates_less_than(6_000_000):
        apply(before, tmp_path / "out", to=256, rule="yarn", dtype="float32")
