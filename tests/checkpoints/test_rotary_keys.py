"""One meaning for every schema of rotary keys, and no silent default."""

import numpy as np
import pytest

from armillary.checkpoints.families.family import RotaryKeys
from armillary.checkpoints.rotary_keys import (
    read_gguf_rotary,
    read_huggingface_rotary,
    shortest_float,
    write_gguf_rotary,
    write_huggingface_rotary,
)
from armillary.config import (
    AttentionConfig,
    DecoderConfig,
    FeedForwardConfig,
    LayerConfig,
    RotaryConfig,
)
from armillary.errors import ConfigError
from armillary.rope_scaling import (
    NTK,
    DynamicNTK,
    Llama3,
    LongRoPE,
    PositionInterpolation,
    Unscaled,
    YaRN,
)
from armillary.strict_dict import StrictDict


def read_all(entries, d_head=10, max_positions=4096, default_base=None, notices=None):
    settings = read_huggingface_rotary(
        strict := StrictDict(entries, "config.json"),
        d_head=d_head,
        max_positions=max_positions,
        keys=RotaryKeys(default_base=default_base),
        notices=[] if notices is None else notices,
    )
    strict.finish()
    return {
        key: RotaryConfig.model_validate(value, strict=False) for key, value in settings.items()
    }


def read(entries, **options):
    settings = read_all(entries, **options)
    assert set(settings) == {None}
    return settings[None]


def written(rotary):
    attention = AttentionConfig(n_heads=6, n_kv_heads=2, d_head=10, rotary=rotary)
    layer = LayerConfig(attention=attention, feedforward=FeedForwardConfig(d_ff=24))
    config = DecoderConfig(vocab_size=61, d_model=40, max_positions=4096, layers=(layer, layer))
    return write_huggingface_rotary(config, RotaryKeys())


LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
RULE = Llama3(factor=8.0, original_window=8192)


@pytest.mark.parametrize(
    "names",
    [{"rope_type": "llama3"}, {"type": "llama3"}, {"type": "llama3", "rope_type": "llama3"}],
)
def test_either_name_of_the_type_or_both_will_do(names):
    """Cases.md 21."""
    assert read({"rope_theta": 5e5, "rope_scaling": {**names, **LLAMA3}}).scaling == RULE
    new = {"rope_parameters": {"rope_theta": 5e5, **names, **LLAMA3}}
    assert read(new) == read({"rope_theta": 5e5, "rope_scaling": {**names, **LLAMA3}})


@pytest.mark.parametrize(
    "entries",
    [
        {"rope_theta": 5e5},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
        {"rope_parameters": {"rope_theta": 5e5}},
        {"rope_theta": 5e5, "rope_parameters": {"rope_type": "default"}},
        {"rope_theta": 5e5, "rope_scaling": None, "rope_parameters": {"rope_theta": 5e5}},
        {"rope_theta": 500000, "rope_scaling": {}},
    ],
)
def test_the_base_is_found_wherever_it_stands(entries):
    """Cases.md 22 a and b."""
    rotary = read(entries)
    frequencies = rotary.scaling.frequencies(rotary.base, rotary.d_rotary, 1)
    assert frequencies[1] == pytest.approx(5e5 ** (-2 / 10), rel=1e-12)


def test_each_layer_type_has_its_own_settings():
    """Cases.md 22 c."""
    full = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
    both = {"full_attention": full, "sliding_attention": {"rope_theta": 1e4}}
    settings = read_all({"rope_parameters": both})
    assert settings["full_attention"].scaling == PositionInterpolation(8.0)
    assert settings["full_attention"].base == 1e6
    assert settings["sliding_attention"].scaling == Unscaled()
    assert settings["sliding_attention"].base == 1e4
    assert set(read_all({"rope_parameters": {**both, "sliding_attention": None}})) == {
        "full_attention"
    }


def test_an_absent_base_is_an_error_or_a_loud_default():
    """Cases.md 22 d."""
    with pytest.raises(ConfigError, match="rope_theta is missing; add it"):
        read({})
    notices = []
    assert read({}, default_base=10000.0, notices=notices).base == 10000.0
    assert notices == ["rope_theta is absent; the family's default 10000 is used"]


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}}, "rope_theta is 1000000.0 he"),
        (
            {
                "rope_theta": 1e4,
                "rope_scaling": {"type": "linear", "factor": 2.0},
                "rope_parameters": {"rope_type": "linear", "factor": 4.0},
            },
            "rope_scaling and rope_parameters disagree",
        ),
        (
            {
                "rope_theta": 1e4,
                "rope_scaling": {"type": "linear", "factor": 2.0},
                "rope_parameters": {"rope_type": "default"},
            },
            "rope_scaling and rope_parameters disagree",
        ),
        (
            {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "rope_type": "yarn"}},
            "type is 'linear'.* rope_type.* 'yarn'",
        ),
        (
            {"rope_theta": 1e4, "rope_scaling": {"type": "wobbly"}},
            "rope_type 'wobbly' is not known",
        ),
        (
            {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.0, "fudge": 3}},
            "config.json: rope_scaling: unknown key 'fudge'",
        ),
        ({"rope_theta": 1e4, "rope_scaling": {"type": "linear"}}, "'factor' is missing"),
        ({"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": "2"}}, "must be float"),
        (
            {"rope_theta": 1e4, "rope_scaling": {"type": "yarn", "factor": 2.0}},
            "'original_max_position_embeddings' is missing",
        ),
        (
            {
                "rope_theta": 1e4,
                "original_max_position_embeddings": 2048,
                "rope_scaling": {**LLAMA3, "type": "llama3"},
            },
            "original_max_position_embeddings is 8192 here and 2048 at the top",
        ),
        ({"rope_theta": 1e4, "rope_scaling": "linear"}, "'rope_scaling' must be dict"),
        ({"rope_theta": True}, "'rope_theta' must be float, not bool"),
        (
            {"rope_theta": 1e4, "rotary_dim": 4, "partial_rotary_factor": 0.8},
            "partial_rotary_factor 0.8 of a head of 10 is 8, but rotary_dim is 4",
        ),
    ],
)
def test_what_disagrees_or_is_not_known_is_an_error(entries, message):
    with pytest.raises(ConfigError, match=message):
        read(entries)


@pytest.mark.parametrize(
    "entries",
    [
        {"partial_rotary_factor": 0.4},
        {"rotary_dim": 4},
        {"rotary_dim": 4, "partial_rotary_factor": 0.4},
        {"rope_parameters": {"partial_rotary_factor": 0.4, "rope_theta": 1e4}},
    ],
)
def test_a_part_of_the_head_is_rotated_by_either_key(entries):
    """Cases.md 18."""
    assert read({"rope_theta": 1e4, **entries}).d_rotary == 4


def test_factors_beside_the_dict_are_read():
    """Phi-3's files keep the original window at the top. Cases.md 23."""
    lists = {"short_factor": [1.0] * 5, "long_factor": [2.0] * 5}
    entries = {"rope_theta": 1e4, "rope_scaling": {"type": "su", **lists}}
    rotary = read({**entries, "original_max_position_embeddings": 1024})
    assert rotary.scaling == LongRoPE((1.0,) * 5, (2.0,) * 5, 4.0, 1024)


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_yarn_s_factor_is_used_as_it_stands(key):
    """Cases.md 33 and 27: 4, not 40960 / 32768; and the window is not multiplied again."""
    yarn = {key: "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    notices = []
    rotary = read({"rope_theta": 1e4, "rope_scaling": yarn}, max_positions=40960, notices=notices)
    assert rotary.scaling == YaRN(factor=4.0, original_window=32768)
    assert "yarn's factor 4 × 32768 original positions is not max_position_embeddings" in notices[0]
    notices.clear()
    read({"rope_theta": 1e4, "rope_scaling": yarn}, max_positions=131072, notices=notices)
    assert notices == []


SCALINGS = [
    Unscaled(),
    PositionInterpolation(4.0),
    NTK(4.0),
    DynamicNTK(2.0, 512),
    YaRN(4.0, 1024, beta_fast=8.0, truncate=False, explicit_attention_factor=0.5),
    YaRN(4.0, 1024, mscale=0.707, mscale_all_dim=1.0),
    Llama3(8.0, 512),
    LongRoPE((1.0,) * 5, (1.0, 2.0, 3.0, 4.0, 5.0), 4.0, 1024),
]


@pytest.mark.parametrize("rule", SCALINGS, ids=lambda rule: rule.kind)
@pytest.mark.parametrize("left_out", [(), ("rope_parameters",), ("rope_theta", "rope_scaling")])
def test_both_schemas_that_are_written_say_the_same(rule, left_out):
    """Cases.md 23 and 24: read by a reader of either schema, and scaled is not unscaled."""
    rotary = RotaryConfig(d_rotary=10, base=100.0, scaling=rule)
    keys = written(rotary)
    assert {"rope_theta", "rope_scaling", "rope_parameters"} == set(keys)
    kept = {key: value for key, value in keys.items() if key not in left_out}
    again = read(kept)
    for length in (1, 512, 1025, 4096, 9000):
        expected = rule.frequencies(100.0, 10, length)
        found = again.scaling.frequencies(again.base, again.d_rotary, length)
        np.testing.assert_array_equal(found, expected)
    assert again.scaling.attention_factor() == rule.attention_factor()
    unscaled = 100.0 ** (-np.arange(0, 10, 2) / 10)
    longest = again.scaling.frequencies(again.base, 10, 100_000)
    assert np.array_equal(longest, unscaled) == (rule == Unscaled())


def test_a_partial_rotation_is_written_and_read():
    rotary = RotaryConfig(d_rotary=4, base=100.0)
    assert read(written(rotary)) == rotary


@pytest.mark.parametrize("number", [1e-5, 1e-6, 0.1, 10000.0, 5e5, 1.0])
def test_a_float32_is_the_decimal_that_was_meant(number):
    assert shortest_float(np.float32(number)) == number
    assert shortest_float(float(np.float32(number))) == number


SHORT = (1.0, 1.1, 1.2, 1.3, 1.4)
LONG = (1.0, 1.5, 2.0, 3.0, 4.0)


@pytest.mark.parametrize(
    "rule",
    [
        Unscaled(),
        PositionInterpolation(4.0),
        NTK(4.0),
        YaRN(factor=4.0, original_window=64, beta_fast=8.0, beta_slow=2.0),
        YaRN(factor=4.0, original_window=64, explicit_attention_factor=0.7),
        YaRN(factor=4.0, original_window=64, mscale=1.3, mscale_all_dim=0.8),
        Llama3(factor=8.0, original_window=512),
        Llama3(factor=3.0, original_window=100, low_freq_factor=0.5, high_freq_factor=2.0),
        LongRoPE(SHORT, LONG, factor=4.0, original_window=16),
        LongRoPE(SHORT, LONG, factor=4.0, original_window=16, explicit_attention_factor=1.25),
        LongRoPE(LONG, LONG, factor=1.0, original_window=64),
        LongRoPE(LONG, LONG, factor=4.0, original_window=16),
    ],
    ids=lambda rule: rule.kind,
)
def test_what_a_gguf_file_says_of_a_rule_is_read_as_the_same_rotation(rule):
    """To float32, in which the format has its numbers, over lengths on both sides of a window."""
    rotary = RotaryConfig(d_rotary=10, base=5e3, scaling=rule)
    keys, factors = write_gguf_rotary(rotary, 64)
    stored = {k: float(np.float32(v)) if isinstance(v, float) else v for k, v in keys.items()}
    strict = StrictDict(stored, "m.gguf")
    again = RotaryConfig.model_validate(
        read_gguf_rotary(strict, d_head=16, max_positions=64, factors=factors, notices=[]),
        strict=False,
    )
    strict.finish()
    assert again.d_rotary == 10
    for length in (1, 16, 17, 64):
        np.testing.assert_allclose(
            again.scaling.frequencies(again.base, 10, length),
            rule.frequencies(5e3, 10, length),
            rtol=1e-6,
        )
    assert again.scaling.attention_factor() == pytest.approx(rule.attention_factor(), rel=1e-6)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (DynamicNTK(factor=2.0, original_window=16), "no keys for the dynamic rule"),
        (YaRN(factor=4.0, original_window=64, truncate=False), "not rounded"),
    ],
)
def test_a_rule_that_gguf_cannot_say_is_refused(rule, message):
    with pytest.raises(ConfigError, match=message):
        write_gguf_rotary(RotaryConfig(d_rotary=10, base=5e3, scaling=rule), 64)
