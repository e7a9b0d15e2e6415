"""A GGUF model is the decoder that the file means, and every key of it is used or refused."""

import gguf as library
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from armillary.checkpoints.gguf import read_gguf
from armillary.errors import CheckpointError, ConfigError, UserError
from armillary.rope_layout import half_split_from_interleaved
from armillary.rope_scaling import Llama3, LongRoPE, PositionInterpolation, Unscaled, YaRN
from support.llama_files import (
    D_HEAD,
    LAYERS,
    gguf_tensors,
    huggingface_tensors,
    write_gguf,
)
from support.memory import allocates_less_than

OURS = {
    "q_proj": "attention.q",
    "k_proj": "attention.k",
    "v_proj": "attention.v",
    "o_proj": "attention.out",
    "gate_proj": "feedforward.gate",
    "up_proj": "feedforward.up",
    "down_proj": "feedforward.down",
}


def our_name(theirs):
    """Written apart from the library's tables, so that a slip there is noticed."""
    name = theirs.removeprefix("model.").replace("embed_tokens", "embedding")
    name = name.replace("input_layernorm", "norm1").replace("post_attention_layernorm", "norm2")
    name = name.replace("self_attn.", "").replace("mlp.", "").replace("lm_head", "head")
    if name == "norm.weight":
        return "final_norm.weight"
    for their_part, our_part in OURS.items():
        name = name.replace(f".{their_part}.", f".{our_part}.")
    return name


@pytest.mark.parametrize("biases", [False, True])
def test_every_weight_is_read_in_the_layout_of_the_configuration(tmp_path, biases):
    """Cases.md 12 and 13: 6 heads on 2, so a permutation with the wrong count shows."""
    theirs = huggingface_tensors(biases=biases)
    checkpoint = read_gguf(write_gguf(tmp_path / "m.gguf", gguf_tensors(theirs)))
    attention = checkpoint.config.layers[0].attention
    assert (attention.qkv_bias, attention.out_bias) == (biases, biases)
    assert checkpoint.config.layers[0].feedforward.bias is biases
    assert attention.rotary.layout == "half_split"
    expected = {our_name(name): array for name, array in theirs.items()}
    assert set(checkpoint.tensors) == set(expected)
    for name, array in expected.items():
        np.testing.assert_array_equal(checkpoint.tensors[name].to_float32(), array, err_msg=name)


def test_rows_change_places_in_block_types_too(tmp_path):
    theirs = huggingface_tensors()
    rng = np.random.default_rng(3)
    key = "model.layers.0.self_attn.k_proj.weight"
    shapes = {name: array.shape for name, array in theirs.items()}
    wide = {name: (rng.normal(size=_wide(shape)).astype("f4")) for name, shape in shapes.items()}
    path = write_gguf(tmp_path / "m.gguf", gguf_tensors(wide), encoding="Q8_0", embedding_length=64)
    stored = read_gguf(path).tensors["layers.0.attention.k.weight"]
    kind = library.GGMLQuantizationType.Q8_0
    expected = library.quants.dequantize(library.quants.quantize(wide[key], kind), kind)
    assert stored.encoding == "Q8_0"
    np.testing.assert_array_equal(stored.to_float32(), expected)


def _wide(shape):
    return tuple(64 if size == 40 else size for size in shape)


def unpermuted(n_heads, d_head, d_rotary):
    return np.arange(n_heads * d_head)


def permuted_as_one_head(n_heads, d_head, d_rotary):
    return half_split_from_interleaved(1, n_heads * d_head, n_heads * d_head)


@pytest.mark.parametrize("fault", [unpermuted, permuted_as_one_head])
def test_a_fault_in_the_permutation_would_be_noticed(tmp_path, monkeypatch, fault):
    """The test above must fail for each; a wrong head count does not even fit the rows."""
    monkeypatch.setattr("armillary.checkpoints.layouts.half_split_from_interleaved", fault)
    theirs = huggingface_tensors()
    checkpoint = read_gguf(write_gguf(tmp_path / "m.gguf", gguf_tensors(theirs)))
    for which in "qk":
        expected = theirs[f"model.layers.0.self_attn.{which}_proj.weight"]
        found = checkpoint.tensors[f"layers.0.attention.{which}.weight"].to_float32()
        assert not np.array_equal(found, expected)


def test_sizes_are_read(tmp_path):
    config = read_gguf(write_gguf(tmp_path / "m.gguf")).config
    attention, feedforward = config.layers[1].attention, config.layers[1].feedforward
    assert (config.vocab_size, config.d_model, config.max_positions) == (61, 40, 64)
    assert (attention.n_heads, attention.n_kv_heads, attention.d_head) == (6, 2, 10)
    assert (feedforward.kind, feedforward.d_ff, feedforward.activation) == ("glu", 24, "silu")
    assert config.layers[0].norm.eps == 1e-5  # and not float32's 9.999999747378752e-06
    assert (attention.rotary.base, attention.rotary.scaling) == (100.0, Unscaled())
    assert config.n_layers == LAYERS
    assert not config.tie_head


def test_absent_keys_have_the_meaning_of_the_format(tmp_path):
    theirs = huggingface_tensors()
    del theirs["lm_head.weight"]
    path = write_gguf(
        tmp_path / "m.gguf",
        gguf_tensors(theirs),
        vocab_size=None,
        rope__dimension_count=None,
        rope__freq_base=None,
    )
    checkpoint = read_gguf(path)
    assert checkpoint.config.tie_head
    assert checkpoint.config.vocab_size == 61
    rotary = checkpoint.config.layers[0].attention.rotary
    assert (rotary.d_rotary, rotary.base) == (10, 10000.0)
    assert any("rope.freq_base is absent" in notice for notice in checkpoint.notices)


def test_head_counts_may_differ_between_layers(tmp_path):
    theirs = gguf_tensors(huggingface_tensors())
    for name in ("attn_k", "attn_v"):
        theirs[f"blk.1.{name}.weight"] = np.ones((30, 40), np.float32)
    path = write_gguf(tmp_path / "m.gguf", theirs, attention__head_count_kv=[2, 3])
    config = read_gguf(path).config
    assert [layer.attention.n_kv_heads for layer in config.layers] == [2, 3]


def divisors(rule, base=100.0, d=D_HEAD):
    unscaled = base ** (-np.arange(0, d, 2) / d)
    return (unscaled / rule.frequencies(base, d, 1)).astype(np.float32)


def test_divisors_of_llama3_are_recognised(tmp_path):
    rule = Llama3(factor=8.0, original_window=512)
    theirs = gguf_tensors(huggingface_tensors()) | {"rope_freqs.weight": divisors(rule, 5e3)}
    kept, blended, divided = sorted(set(theirs["rope_freqs.weight"]))
    assert (kept, divided) == (1, 8)
    assert 1 < blended < 8
    checkpoint = read_gguf(write_gguf(tmp_path / "m.gguf", theirs, rope__freq_base=5e3))
    assert checkpoint.config.layers[0].attention.rotary.scaling == rule
    assert "rope_freqs.weight" not in checkpoint.tensors


def test_other_divisors_are_kept_as_they_are(tmp_path):
    theirs = gguf_tensors(huggingface_tensors())
    theirs["rope_freqs.weight"] = np.array([1, 1.5, 2, 3, 7], np.float32)
    rule = read_gguf(write_gguf(tmp_path / "m.gguf", theirs)).config.layers[0].attention.rotary
    expected = 100.0 ** (-np.arange(0, 10, 2) / 10) / [1, 1.5, 2, 3, 7]
    for length in (1, 64, 10_000):
        np.testing.assert_allclose(rule.scaling.frequencies(100.0, 10, length), expected)
    assert rule.scaling.attention_factor() == 1.0


def test_divisors_of_one_change_nothing(tmp_path):
    theirs = gguf_tensors(huggingface_tensors()) | {"rope_freqs.weight": np.ones(5, np.float32)}
    config = read_gguf(write_gguf(tmp_path / "m.gguf", theirs)).config
    assert config.layers[0].attention.rotary.scaling == Unscaled()


LONG = np.array([1, 2, 3, 4, 5], np.float32)
YARN = {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0}


@pytest.mark.parametrize(
    ("entries", "rule"),
    [
        ({"rope__scaling__type": "none", "rope__scaling__factor": 4.0}, Unscaled()),
        (
            {"rope__scaling__type": "linear", "rope__scaling__factor": 4.0},
            PositionInterpolation(4.0),
        ),
        ({"rope__scaling__factor": 4.0}, PositionInterpolation(4.0)),
        ({"rope__scale_linear": 2.0}, PositionInterpolation(2.0)),
        ({"rope__scaling__type": "linear", "rope__scaling__factor": 1.0}, Unscaled()),
        (
            YARN | {"rope__scaling__original_context_length": 16, "rope__scaling__finetuned": True},
            YaRN(factor=4.0, original_window=16),
        ),
        (
            YARN
            | {
                "rope__scaling__original_context_length": 16,
                "rope__scaling__yarn_beta_fast": 8.0,
                "rope__scaling__yarn_beta_slow": 2.0,
            },
            YaRN(factor=4.0, original_window=16, beta_fast=8.0, beta_slow=2.0),
        ),
        (YARN, YaRN(factor=4.0, original_window=64)),
    ],
)
def test_scaling_keys_give_their_rule(tmp_path, entries, rule):
    config = read_gguf(write_gguf(tmp_path / "m.gguf", **entries)).config
    assert config.layers[1].attention.rotary.scaling == rule


def test_an_original_window_that_is_not_said_is_the_formats_and_is_told(tmp_path):
    """The engine takes the model's own window then; silence would hide an extended one."""
    checkpoint = read_gguf(write_gguf(tmp_path / "silent.gguf", **YARN))
    assert checkpoint.config.layers[0].attention.rotary.scaling.original_window == 64
    assert any("original_context_length is absent" in notice for notice in checkpoint.notices)
    said = YARN | {"rope__scaling__original_context_length": 16}
    notices = read_gguf(write_gguf(tmp_path / "said.gguf", **said)).notices
    assert not any("original_context_length" in notice for notice in notices)


def test_yarn_attention_factors_multiply_the_engine_s_own(tmp_path):
    """Extension.md §2: an explicit factor A is written as A / (1 + 0.1 ln s)."""
    entries = YARN | {"rope__scaling__original_context_length": 16}
    own = 1 + 0.1 * np.log(4.0)
    for name in ("attn_factor", "yarn_attn_factor"):
        more = {f"rope__scaling__{name}": 0.7 / own}
        config = read_gguf(write_gguf(tmp_path / "m.gguf", **entries, **more)).config
        factor = config.layers[0].attention.rotary.scaling.attention_factor()
        assert factor == pytest.approx(0.7, rel=1e-6)


def test_longrope_has_its_lists_in_tensors(tmp_path):
    theirs = gguf_tensors(huggingface_tensors())
    theirs |= {"rope_factors_long.weight": LONG, "rope_factors_short.weight": LONG / 2}
    path = write_gguf(
        tmp_path / "m.gguf",
        theirs,
        rope__scaling__type="longrope",
        rope__scaling__original_context_length=16,
        rope__scaling__attn_factor=1.25,
    )
    assert read_gguf(path).config.layers[0].attention.rotary.scaling == LongRoPE(
        short_factor=(0.5, 1.0, 1.5, 2.0, 2.5),
        long_factor=(1.0, 2.0, 3.0, 4.0, 5.0),
        factor=4.0,
        original_window=16,
        explicit_attention_factor=1.25,
    )


def with_tensor(name, shape=(5,)):
    return gguf_tensors(huggingface_tensors()) | {name: np.full(shape, 2.0, np.float32)}


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (
            {"rope__scaling__type": "wobbly"},
            "rope.scaling.type is 'wobbly'; known are none, linear",
        ),
        ({"rope__scaling__attn_factor": 2.0}, "unknown key 'rope.scaling.attn_factor'"),
        ({"attention__sliding_window": 8}, "unknown key 'attention.sliding_window'.*--ignore-key"),
        ({"atention__key_length": 8}, "did you mean 'attention.key_length'"),
        ({"logit_scale": 0.5}, "unknown key 'logit_scale'"),
        ({"expert_count": 8}, "'expert_used_count' is missing"),
        ({"attention__causal": False}, "attention.causal is False"),
        ({"attention__value_length": 12}, "value_length is 12, but attention.key_length is 10"),
        ({"block_count": None}, "'block_count' is missing"),
        ({"block_count": 2**32 - 1}, "block_count is 4294967295; it must be between 1 and 1000$"),
        ({"block_count": 0}, "block_count is 0; it must be"),
        ({"block_count": 3}, "tensors do not fit the decoder: missing 'blk.2.attn_norm.weight'"),
        ({"block_count": 1}, "belonging to no parameter 'blk.1.attn_norm.weight'"),
        ({"attention__head_count": "six"}, "'attention.head_count' must be int or list, not str"),
        ({"attention__head_count_kv": [2, 2, 2]}, "has 3 entries for 2 layers"),
        ({"attention__head_count_kv": 4}, "n_heads 6 is no multiple of n_kv_heads 4"),
        ({"attention__head_count": 0, "attention__key_length": None}, "is no multiple of 0 heads"),
        ({"attention__key_length": 2**31}, "a head of width 2147483648"),
        ({"rope__dimension_count": 2**32 - 2}, "d_rotary"),
        ({"rope__dimension_count": 7}, "d_rotary is 7"),
        ({"rope__freq_base": 1.0}, "base"),
        ({"attention__layer_norm_rms_epsilon": None}, "layer_norm_rms_epsilon' is missing"),
        ({"attention__layer_norm_rms_epsilon": float("nan")}, "must be a finite number"),
        ({"vocab_size": 60}, r"'token_embd.weight' has shape \[61, 40\], .* asks for \[60, 40\]"),
        ({"context_length": 0}, "max_positions"),
        (YARN | {"rope__scaling__yarn_log_multiplier": 0.1}, "yarn_log_multiplier is 0.1"),
        ({"rope__scaling__factor": 4.0, "rope__scale_linear": 2.0}, "keep the one that is meant"),
        ({"rope__scaling__type": "longrope"}, "longrope needs rope_factors_short"),
        ({"tensors": with_tensor("rope_freqs.weight"), **YARN}, "yarn does not go with rope_freqs"),
        ({"tensors": with_tensor("rope_freqs.weight", (4,))}, "4 factors for 5 channel pairs"),
        ({"tensors": with_tensor("rope_factors_long.weight")}, "does not go with rope_factors"),
        ({"tensors": with_tensor("blk.0.attn_sinks.weight")}, "'blk.0.attn_sinks.weight'"),
        ({"tensors": with_tensor("blk.0.attn_q.bias", (60,))}, "missing 'blk.0.attn_k.bias'"),
        ({"general": {"general.type": "adapter"}}, "general.type is 'adapter'; only models"),
        ({"general": {"split.count": 3}}, "is one of 3 parts; join them first"),
        ({"architecture": "mamba"}, "general.architecture 'mamba' is not supported; .*: llama"),
    ],
)
def test_what_cannot_be_honoured_is_refused_in_one_line(tmp_path, entries, message):
    path = write_gguf(tmp_path / "m.gguf", **entries)
    with (
        allocates_less_than(4 << 20),
        pytest.raises((CheckpointError, ConfigError), match=message) as caught,
    ):
        read_gguf(path)
    assert "\n" not in str(caught.value)
    assert "m.gguf" in str(caught.value)


def test_an_unknown_key_can_be_passed_over_by_name(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", logit_scale=0.5)
    for name in ("logit_scale", "llama.logit_scale"):
        assert read_gguf(path, ignore_keys=[name]).config.n_layers == 2


def test_a_file_without_a_tokenizer_says_so(tmp_path):
    checkpoint = read_gguf(write_gguf(tmp_path / "m.gguf"))
    assert checkpoint.tokenizer is None
    assert any("no tokenizer" in notice for notice in checkpoint.notices)


def test_sampling_suggestions_are_read(tmp_path):
    general = {"general.sampling.temp": 0.7, "general.sampling.top_k": 40}
    checkpoint = read_gguf(write_gguf(tmp_path / "m.gguf", general=general))
    assert checkpoint.generation == {"temperature": 0.7, "top_k": 40}


def test_a_file_cut_anywhere_is_an_error_of_the_user(tmp_path):
    path = write_gguf(tmp_path / "m.gguf")
    content = path.read_bytes()
    for length in range(0, len(content) - 4000, 997):
        path.write_bytes(content[:length])
        with pytest.raises(UserError):
            read_gguf(path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("whole") / "m.gguf").read_bytes()


PATCHES = [b"\0", b"\1", b"\xff", b"\xff" * 8, b"\0" * 8, b"\0" * 7 + b"\x80", b"\0\0\0\x80"]


@given(
    places=st.lists(st.integers(0, 2500), min_size=1, max_size=3),
    patch=st.sampled_from(PATCHES),
    how=st.sampled_from(["overwrite", "insert", "delete"]),
)
def test_no_damage_of_the_header_escapes_as_another_error(
    tmp_path_factory, whole, places, patch, how
):
    """Whatever the bytes become: read, or refused in one line, and nothing large is made."""
    content = bytearray(whole)
    for place in places:
        end = place if how == "insert" else place + len(patch)
        content[place:end] = b"" if how == "delete" else patch
    path = tmp_path_factory.mktemp("m") / "m.gguf"
    path.write_bytes(content)
    with allocates_less_than(8 << 20):
        try:
            read_gguf(path)
        except UserError as error:
            message = str(error)
        else:
            message = ""
    assert "\n" not in message
    assert len(message) < 600


def test_missing_tensors_can_be_allowed(tmp_path):
    theirs = gguf_tensors(huggingface_tensors())
    del theirs["blk.0.attn_q.weight"]
    path = write_gguf(tmp_path / "m.gguf", theirs)
    with pytest.raises(CheckpointError, match=r"missing 'blk\.0\.attn_q\.weight'"):
        read_gguf(path)
    assert "layers.0.attention.q.weight" not in read_gguf(path, allow_missing=True).tensors
