"""A Hugging Face directory is the decoder that it means; each key and tensor is used or refused."""

import json

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from armillary.checkpoints.families.llama import LLAMA
from armillary.checkpoints.huggingface import read_huggingface, write_huggingface
from armillary.checkpoints.parameters import parameter_shapes
from armillary.checkpoints.tensors import TensorToWrite, to_write
from armillary.config import DecoderConfig, NormConfig
from armillary.errors import CheckpointError, ConfigError, UserError
from armillary.rope_scaling import NTK, DynamicNTK, Llama3, LongRoPE, Unscaled, YaRN
from support.llama_files import CONFIG, huggingface_tensors, write_huggingface_directory
from support.memory import allocates_less_than
from support.models import layer
from support.tiny_model import tiny_tokenizer


def test_sizes_are_read(tmp_path):
    checkpoint = read_huggingface(write_huggingface_directory(tmp_path / "m"))
    config = checkpoint.config
    attention, feedforward = config.layers[1].attention, config.layers[1].feedforward
    assert (config.vocab_size, config.d_model, config.max_positions) == (61, 40, 64)
    assert (attention.n_heads, attention.n_kv_heads, attention.d_head) == (6, 2, 10)
    assert (attention.rotary.base, attention.rotary.scaling) == (100.0, Unscaled())
    assert attention.rotary.layout == "half_split"
    assert (feedforward.kind, feedforward.d_ff, feedforward.activation) == ("glu", 24, "silu")
    assert config.layers[0].norm == config.final_norm == NormConfig(eps=1e-5)
    assert (checkpoint.format, checkpoint.source) == ("huggingface", tmp_path / "m")
    assert {name: tensor.shape for name, tensor in checkpoint.tensors.items()} == (
        parameter_shapes(config)
    )


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("model.embed_tokens.weight", "embedding.weight"),
        ("model.layers.1.self_attn.q_proj.weight", "layers.1.attention.q.weight"),
        ("model.layers.1.self_attn.k_proj.bias", "layers.1.attention.k.bias"),
        ("model.layers.1.self_attn.v_proj.bias", "layers.1.attention.v.bias"),
        ("model.layers.0.self_attn.o_proj.weight", "layers.0.attention.out.weight"),
        ("model.layers.0.mlp.gate_proj.weight", "layers.0.feedforward.gate.weight"),
        ("model.layers.0.mlp.up_proj.bias", "layers.0.feedforward.up.bias"),
        ("model.layers.0.mlp.down_proj.weight", "layers.0.feedforward.down.weight"),
        ("model.layers.0.input_layernorm.weight", "layers.0.norm1.weight"),
        ("model.layers.0.post_attention_layernorm.weight", "layers.0.norm2.weight"),
        ("model.norm.weight", "final_norm.weight"),
        ("lm_head.weight", "head.weight"),
    ],
)
def test_each_tensor_has_its_place(tmp_path, theirs, ours):
    tensors = huggingface_tensors(biases=True)
    directory = write_huggingface_directory(
        tmp_path / "m", tensors, attention_bias=True, mlp_bias=True
    )
    found = read_huggingface(directory).tensors
    np.testing.assert_array_equal(found[ours].to_float32(), tensors[theirs])


def test_a_head_width_of_its_own_decides_the_shapes(tmp_path):
    """Cases.md 19: 6 heads of 10 in a model of 40, so hidden / heads is not the width."""
    found = read_huggingface(write_huggingface_directory(tmp_path / "m")).tensors
    assert found["layers.0.attention.q.weight"].shape == (60, 40)
    assert found["layers.0.attention.k.weight"].shape == (20, 40)
    assert found["layers.0.attention.out.weight"].shape == (40, 60)
    with pytest.raises(CheckpointError, match=r"has shape \[60, 40\], .* asks for \[24, 40\]"):
        read_huggingface(write_huggingface_directory(tmp_path / "m", head_dim=4))
    with pytest.raises(ConfigError, match="d_model 40 is no multiple of 6 heads"):
        read_huggingface(write_huggingface_directory(tmp_path / "m", head_dim=None))


# What real files carry that says nothing about the model, or says only what holds anyway.
HARMLESS = {
    "_name_or_path": "somewhere",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.041666666666666664,
    "is_llama_config": True,
    "mlp_bias": False,
    "pad_token_id": 2,
    "pretraining_tp": 1,
    "rope_interleaved": False,
    "rope_scaling": None,
    "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
    "transformers_version": "4.42.3",
    "use_cache": True,
}


def test_keys_of_real_files_are_known(tmp_path):
    plain = read_huggingface(write_huggingface_directory(tmp_path / "a"))
    full = read_huggingface(write_huggingface_directory(tmp_path / "b", **HARMLESS))
    assert full.config == plain.config


def test_absent_keys_have_their_documented_meaning_and_are_told(tmp_path):
    directory = write_huggingface_directory(
        tmp_path / "m",
        rope_theta=None,
        rms_norm_eps=None,
        hidden_act=None,
        tie_word_embeddings=None,
        max_position_embeddings=None,
    )
    checkpoint = read_huggingface(directory)
    assert checkpoint.config.layers[0].attention.rotary.base == 10000.0
    assert checkpoint.config.layers[0].norm.eps == 1e-6
    assert checkpoint.config.max_positions == 2048
    told = " ".join(checkpoint.notices)
    for key in ("rope_theta", "rms_norm_eps", "max_position_embeddings"):
        assert f"{key} is absent" in told


def test_key_value_heads_default_to_the_query_heads(tmp_path):
    with pytest.raises(CheckpointError, match=r"k_proj.* has shape \[20, 40\], .* \[60, 40\]"):
        read_huggingface(write_huggingface_directory(tmp_path / "m", num_key_value_heads=None))


NESTED = {"full_attention": {"rope_theta": 1e4}, "sliding_attention": {"rope_theta": 1e6}}


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"max_lenght": 512}, "unknown key 'max_lenght'"),
        ({"rope-theta": 1e6}, r"unknown key 'rope-theta' \(did you mean 'rope_theta'"),
        ({"factor": 2.0}, "unknown key 'factor'"),
        ({"sliding_window": 8}, "'sliding_window'.*can be passed over: --ignore-key NAME"),
        ({"rms_norm_eps": "1e-5"}, "'rms_norm_eps' must be float, not str '1e-5'"),
        ({"hidden_size": 40.0}, "'hidden_size' must be int, not float 40.0"),
        ({"hidden_size": None}, "'hidden_size' is missing"),
        ({"num_key_value_heads": 4}, "n_heads 6 is no multiple of n_kv_heads 4"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; it must be between 1 and"),
        ({"num_hidden_layers": 3}, "missing 'model.layers.2.input_layernorm.weight'"),
        ({"num_hidden_layers": 1}, "belonging to no parameter 'model.layers.1"),
        ({"head_dim": 10**9}, "a head of width 1000000000"),
        ({"num_attention_heads": 0, "head_dim": None}, "is no multiple of 0 heads"),
        ({"hidden_act": "wobbly"}, "hidden_act 'wobbly' is not supported; supported: silu"),
        ({"pretraining_tp": 2}, "pretraining_tp is 2; only 1 is supported"),
        ({"rope_interleaved": True}, "rope_interleaved is True; only False is supported"),
        ({"partial_rotary_factor": 0.4}, "rotation of 4 channels of a head of 10 is not known"),
        (
            {"rope_theta": None, "rope_parameters": NESTED},
            "by layer type .* are not known in Llama",
        ),
        ({"rope_scaling": {"type": "wobbly"}}, "rope_type 'wobbly' is not known; known are"),
        ({"quantization_config": {"bits": 4}}, "quantised weights .* are not read"),
        ({"architectures": ["MambaForCausalLM"]}, "architecture MambaForCausalLM is not supported"),
        ({"architectures": ["LlamaModel"]}, "supported: LlamaForCausalLM"),
        ({"architectures": None, "model_type": "mamba"}, "model_type 'mamba' is not supported"),
        ({"architectures": None, "model_type": None}, "names neither architectures nor model_type"),
        ({"attention_bias": True}, "missing 'model.layers.0.self_attn.q_proj.bias'"),
        ({"eos_token_id": "</s>"}, "'eos_token_id' must be int or list"),
        ({"eos_token_id": [2, "x"]}, "eos_token_id must be token ids"),
        ({"vocab_size": 60}, r"embed_tokens.* has shape \[61, 40\], .* asks for \[60, 40\]"),
    ],
)
def test_what_cannot_be_honoured_is_refused_in_one_line(tmp_path, entries, message):
    """Cases.md 21, 30 and 75."""
    directory = write_huggingface_directory(tmp_path / "m", **entries)
    with (
        allocates_less_than(4 << 20),
        pytest.raises((CheckpointError, ConfigError), match=message) as caught,
    ):
        read_huggingface(directory)
    assert "\n" not in str(caught.value)
    assert str(directory) in str(caught.value)


def test_an_unknown_key_can_be_passed_over_by_name(tmp_path):
    directory = write_huggingface_directory(tmp_path / "m", sliding_window=8, novelty=1)
    with pytest.raises(ConfigError, match="unknown keys 'sliding_window'.*'novelty'"):
        read_huggingface(directory)
    with pytest.raises(ConfigError, match="unknown key 'novelty'"):
        read_huggingface(directory, ignore_keys=["sliding_window"])
    read_huggingface(directory, ignore_keys=["sliding_window", "novelty"])


HOSTILE = [None, True, False, 0, -1, 1, 2, 10**9, 2**63, 10**400, 0.0, -1.5, 1e308, "x", ""]
HOSTILE += [[], [1], ["a"], {}, {"a": 1}, [[]], {"factor": "x"}]
SCALED = {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32}


@given(
    keys=st.lists(st.sampled_from([*CONFIG, *SCALED]), min_size=1, max_size=2),
    value=st.sampled_from(HOSTILE),
)
def test_no_value_of_a_key_escapes_as_another_error(tmp_path_factory, keys, value):
    """Whatever a key says: it is read, or refused in one line, and nothing large is made."""
    directory = tmp_path_factory.mktemp("m")
    write_huggingface_directory(directory, rope_scaling=SCALED)
    config = json.loads((directory / "config.json").read_text())
    for key in keys:
        (config["rope_scaling"] if key in SCALED else config)[key] = value
    (directory / "config.json").write_text(json.dumps(config))
    with allocates_less_than(4 << 20):
        try:
            read_huggingface(directory)
        except UserError as error:
            message = str(error)
        else:
            message = ""
    assert "\n" not in message
    assert len(message) < 600


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"a": 1, "a": 2}', b"\xff"])
def test_a_damaged_config_is_one_line(tmp_path, text):
    directory = write_huggingface_directory(tmp_path / "m")
    (directory / "config.json").write_bytes(text)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read_huggingface(directory)


def test_a_config_cut_anywhere_is_an_error_of_the_user(tmp_path):
    directory = write_huggingface_directory(tmp_path / "m")
    text = (directory / "config.json").read_bytes()
    for length in range(len(text)):
        (directory / "config.json").write_bytes(text[:length])
        with pytest.raises(UserError):
            read_huggingface(directory)


def tied(**change):
    tensors = huggingface_tensors()
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    for name, value in change.items():
        if value is None:
            del tensors[name.replace("__", ".")]
        else:
            tensors[name.replace("__", ".")][3, 5] += value
    return tensors


def test_a_tied_head_that_is_there_and_equal_is_read_once(tmp_path):
    """Cases.md 71, also for NaN, which is not equal to itself."""
    for tensors in (tied(), tied(lm_head__weight=np.nan, model__embed_tokens__weight=np.nan)):
        directory = write_huggingface_directory(tmp_path / "m", tensors, tie_word_embeddings=True)
        checkpoint = read_huggingface(directory)
        assert checkpoint.config.tie_head
        assert "head.weight" not in checkpoint.tensors


def test_a_tied_head_that_is_absent_is_the_embedding(tmp_path):
    directory = write_huggingface_directory(
        tmp_path / "m", tied(lm_head__weight=None), tie_word_embeddings=True
    )
    assert "head.weight" not in read_huggingface(directory).tensors


@pytest.mark.parametrize(
    ("flag", "change", "message"),
    [
        (True, {"lm_head__weight": 1.0}, "tie_word_embeddings is true, but lm_head.weight differs"),
        (False, {"lm_head__weight": None}, "tie_word_embeddings is false, but there is no lm_head"),
    ],
)
def test_a_flag_that_the_tensors_contradict_is_an_error(tmp_path, flag, change, message):
    """Cases.md 71."""
    directory = write_huggingface_directory(
        tmp_path / "m", tied(**change), tie_word_embeddings=flag
    )
    with pytest.raises(CheckpointError, match=message):
        read_huggingface(directory)


@pytest.mark.parametrize(
    "name", ["generation_config.json", "tokenizer_config.json", "special_tokens_map.json"]
)
def test_a_file_that_only_seems_to_be_there_is_not_passed_over(tmp_path, name):
    directory = write_huggingface_directory(tmp_path / "m")
    tiny_tokenizer(directory)
    (directory / name).unlink(missing_ok=True)
    read_huggingface(directory)
    (directory / name).symlink_to("nowhere")
    with pytest.raises(CheckpointError, match=rf"{name}: cannot be read: No such file"):
        read_huggingface(directory)


def test_names_with_a_prefix_are_told_as_such_and_not_as_an_untied_head(tmp_path):
    prefixed = {f"base.{name}": array for name, array in huggingface_tensors().items()}
    directory = write_huggingface_directory(tmp_path / "m", prefixed)
    with pytest.raises(CheckpointError, match=r"missing 'model\.embed_tokens\.weight'"):
        read_huggingface(directory)


def test_an_equal_head_that_is_not_tied_stays_a_head_of_its_own(tmp_path):
    directory = write_huggingface_directory(tmp_path / "m", tied(), tie_word_embeddings=False)
    assert "head.weight" in read_huggingface(directory).tensors


def with_frequencies(base, dtype=np.float32, name="model.layers.1.self_attn.rotary_emb.inv_freq"):
    frequencies = (base ** (-np.arange(0, 10, 2) / 10)).astype(dtype)
    return huggingface_tensors() | {name: frequencies}


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_stored_frequencies_are_checked_and_dropped(tmp_path, dtype):
    directory = write_huggingface_directory(tmp_path / "m", with_frequencies(100.0, dtype))
    assert set(read_huggingface(directory).tensors) == set(
        read_huggingface(write_huggingface_directory(tmp_path / "n")).tensors
    )
    directory = write_huggingface_directory(tmp_path / "m", with_frequencies(110.0, dtype))
    with pytest.raises(CheckpointError, match="inv_freq is not the frequencies of rope_theta 100"):
        read_huggingface(directory)


def renamed(tensors):
    tensors["model.layers.0.self_attn.query.weight"] = tensors.pop(
        "model.layers.0.self_attn.q_proj.weight"
    )


def without_prefix(tensors):
    for name in list(tensors):
        tensors[name.removeprefix("model.")] = tensors.pop(name)


def with_extra(tensors):
    tensors["model.layers.0.self_attn.sinks"] = np.zeros(6, np.float32)


def misshapen(tensors):
    tensors["model.layers.0.self_attn.o_proj.weight"] = np.zeros((60, 40), np.float32)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (renamed, "missing 'model.layers.0.self_attn.q_proj.weight'.*belonging to no parameter"),
        (without_prefix, "missing 'model.embed_tokens.weight'"),
        (with_extra, "belonging to no parameter 'model.layers.0.self_attn.sinks'"),
        (misshapen, r"o_proj.weight' has shape \[60, 40\], the configuration asks for \[40, 60\]"),
    ],
)
def test_tensors_that_do_not_fit_are_fatal(tmp_path, damage, message):
    """Cases.md 75."""
    tensors = huggingface_tensors()
    damage(tensors)
    with pytest.raises(CheckpointError, match=message):
        read_huggingface(write_huggingface_directory(tmp_path / "m", tensors))


def test_pickled_weights_are_refused_and_not_opened(tmp_path):
    """Cases.md 79."""
    directory = write_huggingface_directory(tmp_path / "m")
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin, a pickle, and nothing is unpi"):
        read_huggingface(directory)


@pytest.mark.parametrize(
    ("generation", "entries", "expected"),
    [
        (None, {}, {"bos_token_id": 1, "eos_token_id": (2,)}),
        ({"eos_token_id": [2, 7]}, {}, {"bos_token_id": 1, "eos_token_id": (2, 7)}),
        ({}, {"eos_token_id": [5, 6]}, {"bos_token_id": 1, "eos_token_id": (5, 6)}),
        ({}, {"eos_token_id": None, "bos_token_id": None, "pad_token_id": -1}, {}),
        (
            {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 50, "novelty": [1]},
            {},
            {
                "bos_token_id": 1,
                "eos_token_id": (2,),
                "temperature": 0.6,
                "top_p": 0.9,
                "top_k": 50,
            },
        ),
        (
            {"temperature": 0.6, "repetition_penalty": 1.1},
            {},
            {"bos_token_id": 1, "eos_token_id": (2,), "repetition_penalty": 1.1},
        ),
        (
            {"do_sample": False, "temperature": 0.6},
            {},
            {"bos_token_id": 1, "eos_token_id": (2,), "temperature": 0.0},
        ),
    ],
)
def test_generation_settings(tmp_path, generation, entries, expected):
    directory = write_huggingface_directory(tmp_path / "m", generation=generation, **entries)
    assert read_huggingface(directory).generation == expected


def rewritten(checkpoint, directory, config=None, encoding="F32", **options):
    tensors = [to_write(tensor, encoding) for tensor in checkpoint.tensors.values()]
    write_huggingface(directory, config or checkpoint.config, tensors, **options)
    return read_huggingface(directory)


def rotated(config, rule):
    rotary = config.layers[0].attention.rotary.model_copy(update={"scaling": rule})
    attention = config.layers[0].attention.model_copy(update={"rotary": rotary})
    changed = config.layers[0].model_copy(update={"attention": attention})
    return config.model_copy(update={"layers": (changed,) * config.n_layers})


@pytest.mark.parametrize("shard", [None, 20_000])
def test_a_directory_is_written_and_read_back(tmp_path, shard):
    tensors = huggingface_tensors(biases=True)
    first = read_huggingface(
        write_huggingface_directory(tmp_path / "a", tensors, attention_bias=True, mlp_bias=True)
    )
    generation = {"eos_token_id": (2, 7), "temperature": 0.6, "bos_token_id": 1}
    again = rewritten(first, tmp_path / "b", generation=generation, max_shard_bytes=shard)
    assert again.config == first.config
    assert again.generation == generation
    assert (len(list((tmp_path / "b").glob("*.safetensors"))) > 1) == (shard is not None)
    for name, tensor in first.tensors.items():
        np.testing.assert_array_equal(again.tensors[name].to_float32(), tensor.to_float32())


def test_a_tied_head_is_written_once(tmp_path):
    """Cases.md 71."""
    first = read_huggingface(
        write_huggingface_directory(tmp_path / "a", tied(), tie_word_embeddings=True)
    )
    again = rewritten(first, tmp_path / "b")
    assert again.config.tie_head
    assert "lm_head.weight" not in safetensors.numpy.load_file(tmp_path / "b/model.safetensors")


def test_bfloat16_is_written_and_said(tmp_path):
    first = read_huggingface(write_huggingface_directory(tmp_path / "a"))
    again = rewritten(first, tmp_path / "b", encoding="BF16")
    assert {tensor.encoding for tensor in again.tensors.values()} == {"BF16"}
    assert json.loads((tmp_path / "b/config.json").read_text())["torch_dtype"] == "bfloat16"


@pytest.mark.parametrize(
    "rule",
    [
        YaRN(factor=4.0, original_window=16, truncate=False),
        Llama3(factor=4.0, original_window=16),
        LongRoPE((1.0,) * 5, (2.0,) * 5, 4.0, 16),
        NTK(4.0),
        DynamicNTK(2.0, 16),
    ],
    ids=lambda rule: rule.kind,
)
def test_every_rule_survives_in_both_schemas(tmp_path, rule):
    """Cases.md 23 and 25."""
    first = read_huggingface(write_huggingface_directory(tmp_path / "a"))
    again = rewritten(first, tmp_path / "b", rotated(first.config, rule))
    rotary = again.config.layers[0].attention.rotary
    for length in (1, 17, 64, 100):
        found = rotary.scaling.frequencies(rotary.base, 10, length)
        np.testing.assert_array_equal(found, rule.frequencies(100.0, 10, length))
    entries = json.loads((tmp_path / "b/config.json").read_text())
    assert entries["rope_theta"] == entries["rope_parameters"]["rope_theta"]
    assert entries["max_position_embeddings"] == (16 if isinstance(rule, DynamicNTK) else 64)


def config_with(**entries):
    changed = layer(**entries)
    return DecoderConfig(vocab_size=61, d_model=40, max_positions=64, layers=(changed, changed))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (config_with(attention={"window": 8}), r"layers\.0\.attention\.window 8"),
        (config_with(attention={"qkv_bias": True}), r"layers\.0\.attention\.(qkv|out)_bias"),
        (config_with(norm=NormConfig(offset=1.0)), r"layers\.0\.norm\.offset 1\.0"),
        (config_with(rotary={"layout": "interleaved"}), "rotation, layer 0"),
        (config_with(rotary={"d_rotary": 4}), "rotation of 4 channels of a head of 10"),
        (config_with(attention={"rotary": None}), "layers without rotation"),
        (config_with(norm_placement="sandwich"), 'norm_placement "sandwich"'),
        (
            config_with(feedforward={"activation": "identity"}),
            r'feedforward\.activation "identity"',
        ),
        (config_with().model_copy(update={"embedding_scale": 2.0}), r"embedding_scale 2\.0"),
        (config_with().model_copy(update={"final_norm": None}), "final_norm null"),
        (
            config_with().model_copy(
                update={"layers": (layer(), layer(attention={"n_kv_heads": 3}))}
            ),
            "layers",
        ),
    ],
)
def test_what_the_family_cannot_express_is_named_and_nothing_is_written(tmp_path, config, message):
    shapes = parameter_shapes(config)
    tensors = [TensorToWrite(name, "F32", shape, []) for name, shape in shapes.items()]
    with pytest.raises(ConfigError, match=message):
        write_huggingface(tmp_path / "b", config, tensors, family=LLAMA)
    assert list(tmp_path.iterdir()) == []


def test_tensors_that_are_not_the_parameters_are_a_programming_error(tmp_path):
    first = read_huggingface(write_huggingface_directory(tmp_path / "a"))
    tensors = [to_write(tensor, "F32") for tensor in first.tensors.values()]
    for wrong in (tensors[1:], [*tensors, tensors[0]]):
        with pytest.raises(ValueError, match=r"not: embedding\.weight"):
            write_huggingface(tmp_path / "b", first.config, wrong)
    wrong = [tensors[0]._replace(shape=(40, 61)), *tensors[1:]]
    with pytest.raises(ValueError, match=r"embedding\.weight: shape \(40, 61\), \(61, 40\) needed"):
        write_huggingface(tmp_path / "b", first.config, wrong)


@pytest.mark.peer
def test_transformers_reads_what_is_written(tmp_path):
    """Every weight and the frequencies. 4 heads of 10, since transformers wants 40 to divide."""
    import torch
    import transformers

    rng = np.random.default_rng(1)
    theirs = huggingface_tensors()
    for name in theirs:
        which = name.split(".")[-2]
        if which in {"q_proj", "o_proj"}:
            theirs[name] = rng.normal(size=(40, 40)).astype(np.float32)
    entries = {"num_attention_heads": 4}
    first = read_huggingface(write_huggingface_directory(tmp_path / "a", theirs, **entries))
    rule = YaRN(factor=4.0, original_window=16)
    rewritten(first, tmp_path / "b", rotated(first.config, rule), max_shard_bytes=10_000)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "b", output_loading_info=True, dtype=torch.float32
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    for name, value in model.state_dict().items():
        np.testing.assert_array_equal(value.numpy(), theirs[name])
    found = model.model.rotary_emb.inv_freq.numpy()
    np.testing.assert_allclose(found, rule.frequencies(100.0, 10, 64), rtol=1e-6)
    assert model.model.rotary_emb.attention_scaling == pytest.approx(rule.attention_factor())
