"""The families' tables on config.json files as released models have them, old keys and new."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from armillary.checkpoints.families import FAMILIES
from armillary.checkpoints.families.common import HUGGINGFACE_KEYS, changed
from armillary.checkpoints.huggingface import family_for, read_huggingface
from armillary.config import DecoderConfig
from armillary.errors import CheckpointError, ConfigError
from armillary.rope_scaling import LongRoPE, PositionInterpolation, Unscaled, YaRN

COMMON = {"torch_dtype": "bfloat16", "transformers_version": "4.45.0", "use_cache": True}


def llama_like(architecture: str, model_type: str, **entries: Any) -> dict[str, Any]:
    return (
        COMMON
        | {
            "architectures": [architecture],
            "model_type": model_type,
            "vocab_size": 32000,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 4,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-06,
            "initializer_range": 0.02,
            "attention_dropout": 0.0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }
        | entries
    )


def without(entries: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in entries.items() if key not in keys}


MISTRAL = llama_like(
    "MistralForCausalLM",
    "mistral",
    hidden_act="silu",
    rope_theta=10000.0,
    sliding_window=4096,
    tie_word_embeddings=False,
)
QWEN = llama_like(
    "Qwen2ForCausalLM",
    "qwen2",
    hidden_act="silu",
    rope_theta=1000000.0,
    sliding_window=32768,
    use_sliding_window=False,
    max_window_layers=21,
    tie_word_embeddings=True,
    use_mrope=False,
)
QWEN3 = without(QWEN, "use_mrope") | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 128,
    "attention_bias": False,
    "rope_scaling": None,
    "sliding_window": None,
}
GEMMA = llama_like(
    "GemmaForCausalLM",
    "gemma",
    hidden_act="gelu",
    hidden_activation=None,
    head_dim=256,
    rope_theta=10000.0,
    rope_scaling=None,
    attention_bias=False,
    pad_token_id=0,
)
GEMMA2_27B = llama_like(
    "Gemma2ForCausalLM",
    "gemma2",
    hidden_act="gelu_pytorch_tanh",
    head_dim=128,
    hidden_activation="gelu_pytorch_tanh",
    hidden_size=4608,
    num_attention_heads=32,
    num_key_value_heads=16,
    query_pre_attn_scalar=144,
    attn_logit_softcapping=50.0,
    final_logit_softcapping=30.0,
    sliding_window=4096,
    sliding_window_size=4096,
    cache_implementation="hybrid",
    rope_theta=10000.0,
    attention_bias=False,
    num_hidden_layers=46,
)
GEMMA3_1B = llama_like(
    "Gemma3ForCausalLM",
    "gemma3_text",
    hidden_size=1152,
    num_attention_heads=4,
    head_dim=256,
    num_key_value_heads=1,
    hidden_activation="gelu_pytorch_tanh",
    query_pre_attn_scalar=256,
    attn_logit_softcapping=None,
    final_logit_softcapping=None,
    sliding_window=512,
    sliding_window_pattern=6,
    rope_theta=1000000,
    rope_local_base_freq=10000,
    rope_scaling=None,
    cache_implementation="hybrid",
    attention_bias=False,
    num_hidden_layers=26,
)
PHI3_128K = without(
    llama_like(
        "Phi3ForCausalLM",
        "phi3",
        hidden_act="silu",
        rope_theta=10000.0,
        hidden_size=3072,
        num_attention_heads=32,
        num_key_value_heads=32,
        max_position_embeddings=131072,
        original_max_position_embeddings=4096,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attention_bias=False,
        sliding_window=262144,
        tie_word_embeddings=False,
        auto_map={"AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"},
        rope_scaling={
            "type": "longrope",
            "short_factor": [1.0 + i / 100 for i in range(48)],
            "long_factor": [1.0 + i for i in range(48)],
        },
    )
)
PHI4_MINI = PHI3_128K | {
    "num_attention_heads": 24, "num_key_value_heads": 8, "partial_rotary_factor": 0.75,
    "mlp_bias": False, "lm_head_bias": False, "tie_word_embeddings": True,
    "interpolate_factor": None, "full_attn_mod": None,
}  # fmt: skip
OLMO2 = llama_like(
    "Olmo2ForCausalLM",
    "olmo2",
    hidden_act="silu",
    rope_theta=500000,
    attention_bias=False,
    rope_scaling=None,
    tie_word_embeddings=False,
    pad_token_id=100277,
)
SMOLLM3 = llama_like(
    "SmolLM3ForCausalLM",
    "smollm3",
    hidden_act="silu",
    rope_theta=5000000.0,
    mlp_bias=False,
    attention_bias=False,
    rope_scaling=None,
    no_rope_layer_interval=4,
    use_sliding_window=False,
    sliding_window=None,
    max_window_layers=28,
    pretraining_tp=2,
    no_rope_layers=[1, 1, 1, 0],
    layer_types=["full_attention"] * 4,
)
GRANITE = llama_like(
    "GraniteForCausalLM",
    "granite",
    hidden_act="silu",
    rope_theta=5000000.0,
    mlp_bias=False,
    attention_bias=False,
    rope_scaling=None,
    attention_multiplier=0.015625,
    embedding_multiplier=12.0,
    residual_multiplier=0.22,
    logits_scaling=8.0,
    tie_word_embeddings=True,
)
STABLELM_12B = without(
    llama_like(
        "StableLmForCausalLM",
        "stablelm",
        hidden_act="silu",
        rope_theta=10000,
        layer_norm_eps=1e-5,
        partial_rotary_factor=0.25,
        qk_layernorm=True,
        use_parallel_residual=True,
        use_qkv_bias=False,
        hidden_dropout=0.0,
        rope_scaling=None,
        tie_word_embeddings=False,
    ),
    "rms_norm_eps",
)
PYTHIA = COMMON | {
    "architectures": ["GPTNeoXForCausalLM"], "model_type": "gpt_neox", "vocab_size": 50304,
    "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6,
    "num_attention_heads": 8, "max_position_embeddings": 2048, "layer_norm_eps": 1e-05,
    "hidden_act": "gelu", "rotary_pct": 0.25, "rotary_emb_base": 10000,
    "use_parallel_residual": True, "tie_word_embeddings": False, "bos_token_id": 0,
    "eos_token_id": 0, "initializer_range": 0.02,
}  # fmt: skip
GPT2 = COMMON | {
    "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": 50257,
    "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "n_ctx": 1024,
    "activation_function": "gelu_new", "layer_norm_epsilon": 1e-05, "attn_pdrop": 0.1,
    "embd_pdrop": 0.1, "resid_pdrop": 0.1, "initializer_range": 0.02, "summary_type": "cls_index",
    "summary_activation": None, "summary_first_dropout": 0.1, "summary_proj_to_labels": True,
    "summary_use_proj": True, "task_specific_params": {"text-generation": {"max_length": 50}},
    "bos_token_id": 50256, "eos_token_id": 50256,
}  # fmt: skip
FALCON_7B = COMMON | {
    "architectures": ["FalconForCausalLM"], "model_type": "falcon", "vocab_size": 65024,
    "hidden_size": 4544, "num_hidden_layers": 4, "num_attention_heads": 71, "num_kv_heads": 71,
    "layer_norm_epsilon": 1e-05, "hidden_dropout": 0.0, "attention_dropout": 0.0, "alibi": False,
    "apply_residual_connection_post_layernorm": False, "bias": False, "multi_query": True,
    "new_decoder_architecture": False, "parallel_attn": True, "bos_token_id": 11,
    "eos_token_id": 11, "initializer_range": 0.02,
    "auto_map": {"AutoConfig": "configuration_falcon.FalconConfig"},
}  # fmt: skip
FALCON_40B = FALCON_7B | {
    "new_decoder_architecture": True, "num_attention_heads": 128, "num_kv_heads": 8,
    "hidden_size": 8192,
}  # fmt: skip


def read(directory: Path, entries: dict[str, Any]) -> DecoderConfig:
    """What a config.json means; the weights are not there."""
    (directory / "config.json").write_text(json.dumps(entries))
    safetensors.numpy.save_file({}, directory / "model.safetensors")
    return read_huggingface(directory, allow_missing=True).config


def rotary(config: DecoderConfig, layer: int = 0) -> Any:
    return config.layers[layer].attention.rotary


def test_mistral_has_a_window_in_every_layer_or_in_none(tmp_path):
    config = read(tmp_path, MISTRAL)
    assert [layer.attention.window for layer in config.layers] == [4096] * 4
    assert read(tmp_path, MISTRAL | {"sliding_window": None}).layers[0].attention.window is None
    absent = read(tmp_path, without(MISTRAL, "sliding_window"))
    assert absent.layers[0].attention.window == 4096


def test_qwen_has_windows_only_where_they_are_used(tmp_path):
    config = read(tmp_path, QWEN)
    assert config.layers[0].attention.window is None
    assert config.layers[0].attention.qkv_bias
    assert not config.layers[0].attention.out_bias
    used = {"use_sliding_window": True, "max_window_layers": 3}
    windows = [layer.attention.window for layer in read(tmp_path, QWEN | used).layers]
    assert windows == [None, None, None, 32768]


def test_qwen3_has_heads_of_its_own_width_and_normed(tmp_path):
    attention = read(tmp_path, QWEN3).layers[0].attention
    assert (attention.d_head, attention.qk_norm_over) == (128, "head")
    assert attention.qk_norm is not None
    assert attention.qk_norm.eps == 1e-6
    assert read(tmp_path, without(QWEN3, "head_dim")).layers[0].attention.d_head == 128


def test_gelu_of_the_first_gemma_is_its_approximation(tmp_path):
    config = read(tmp_path, GEMMA)
    assert config.layers[0].feedforward.activation == "gelu_tanh"
    assert config.embedding_scale == 2048**0.5
    assert config.tie_head
    assert config.layers[0].norm.offset == 1.0
    assert not config.layers[0].norm.cast_before_weight


def test_the_largest_gemma_2_scales_by_another_width(tmp_path):
    config = read(tmp_path, GEMMA2_27B)
    assert config.layers[0].attention.scale == 144**-0.5
    assert [layer.attention.window for layer in config.layers[:4]] == [4096, None, 4096, None]
    assert (config.layers[0].attention.soft_cap, config.final_soft_cap) == (50.0, 30.0)
    nulls = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
    config = read(tmp_path, GEMMA2_27B | nulls)
    assert (config.layers[0].attention.soft_cap, config.final_soft_cap) == (None, None)
    absent = read(tmp_path, without(GEMMA2_27B, *nulls))
    assert (absent.layers[0].attention.soft_cap, absent.final_soft_cap) == (50.0, 30.0)


def test_gemma_3_has_two_bases_in_both_schemas(tmp_path):
    """Cases.md 22: per layer type, and under the names of their own that came before."""
    old = read(tmp_path, GEMMA3_1B)
    assert [rotary(old, i).base for i in range(6)] == [1e4] * 5 + [1e6]
    assert [layer.attention.window for layer in old.layers[:6]] == [512] * 5 + [None]
    by_type = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {"rope_type": "default", "rope_theta": 1000000.0},
    }
    new = without(GEMMA3_1B, "rope_theta", "rope_local_base_freq", "rope_scaling")
    assert read(tmp_path, new | {"rope_parameters": by_type}) == old
    assert read(tmp_path, GEMMA3_1B | {"rope_parameters": by_type}) == old
    assert read(tmp_path, new) == old  # the family's own
    contrary = by_type | {"sliding_attention": {"rope_type": "default", "rope_theta": 5.0}}
    with pytest.raises(ConfigError, match="rope_theta is 5.0 here and 10000.0 at the top"):
        read(tmp_path, GEMMA3_1B | {"rope_parameters": contrary})


def test_gemma_3_scales_its_full_layers_alone(tmp_path):
    scaling = {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    config = read(tmp_path, GEMMA3_1B | scaling)
    assert rotary(config, 0).scaling == Unscaled()
    assert rotary(config, 5).scaling == PositionInterpolation(factor=8.0)


def test_phi_3_takes_its_factor_from_the_windows(tmp_path):
    config = read(tmp_path, PHI3_128K)
    rule = rotary(config).scaling
    assert isinstance(rule, LongRoPE)
    assert (rule.factor, rule.original_window) == (32.0, 4096)
    np.testing.assert_allclose(rule.attention_factor(), 1.1902380714238083)
    assert config.layers[0].feedforward.fused


def test_phi_4_mini_rotates_three_quarters_of_a_head(tmp_path):
    assert rotary(read(tmp_path, PHI4_MINI)).d_rotary == 96
    with pytest.raises(ConfigError, match="rotary_dim is 64; keep the one that is meant"):
        read(tmp_path, PHI4_MINI | {"rotary_dim": 64})


def test_olmo_2_norms_what_its_parts_give(tmp_path):
    layer = read(tmp_path, OLMO2).layers[0]
    assert (layer.norm_placement, layer.attention.qk_norm_over) == ("post", "all_heads")


def test_every_fourth_layer_of_smollm3_does_not_rotate(tmp_path):
    config = read(tmp_path, SMOLLM3)
    assert [rotary(config, i) is not None for i in range(4)] == [True, True, True, False]
    period = {"no_rope_layers": None, "no_rope_layer_interval": 2}
    config = read(tmp_path, SMOLLM3 | period)
    assert [rotary(config, i) is not None for i in range(4)] == [True, False, True, False]


def test_granite_multiplies(tmp_path):
    config = read(tmp_path, GRANITE)
    assert (config.embedding_scale, config.logit_scale) == (12.0, 0.125)
    layer = config.layers[0]
    assert (layer.residual_scale, layer.attention.scale) == (0.22, 0.015625)


def test_stablelm_norms_each_head_by_weights_of_its_own(tmp_path):
    layer = read(tmp_path, STABLELM_12B).layers[0]
    assert layer.attention.qk_norm_over == "head_own_weights"
    assert layer.residual == "parallel_shared_norm"
    assert layer.attention.rotary is not None
    assert layer.attention.rotary.d_rotary == 32
    default = read(tmp_path, without(STABLELM_12B, "partial_rotary_factor"))
    assert rotary(default).d_rotary == 32


def test_pythia_rotates_a_quarter_of_a_head(tmp_path):
    """Under the keys of its own or the general ones, which must agree (cases.md 18)."""
    config = read(tmp_path, PYTHIA)
    assert (rotary(config).d_rotary, rotary(config).base) == (16, 10000.0)
    general = {"rope_theta": 10000, "partial_rotary_factor": 0.25}
    assert read(tmp_path, PYTHIA | general) == config
    assert read(tmp_path, without(PYTHIA, "rotary_pct", "rotary_emb_base") | general) == config
    with pytest.raises(ConfigError, match=r"rope_theta is 500 but rotary_emb_base is 10000"):
        read(tmp_path, PYTHIA | {"rope_theta": 500})
    assert config.layers[0].residual == "parallel"
    assert config.layers[0].feedforward.kind == "mlp"


def test_gpt2_has_a_table_of_positions(tmp_path):
    config = read(tmp_path, GPT2)
    assert (config.position_table, config.max_positions) == ("learned", 1024)
    assert rotary(config) is None
    assert config.layers[0].feedforward.d_ff == 3072
    assert config.tie_head
    assert config.input_dropout == 0.1
    with pytest.raises(ConfigError, match="scale_attn_by_inverse_layer_idx is True; only False"):
        read(tmp_path, GPT2 | {"scale_attn_by_inverse_layer_idx": True})


@pytest.mark.parametrize(
    ("entries", "kv_heads", "residual"),
    [
        (FALCON_7B, 1, "parallel_shared_norm"),
        (FALCON_40B, 8, "parallel"),
        (FALCON_40B | {"num_ln_in_parallel_attn": 1}, 8, "parallel_shared_norm"),
        (FALCON_7B | {"multi_query": False}, 71, "parallel_shared_norm"),
        (FALCON_7B | {"parallel_attn": False}, 1, "sequential"),
    ],
)
def test_the_flags_of_falcon(tmp_path, entries, kv_heads, residual):
    layer = read(tmp_path, entries).layers[0]
    assert (layer.attention.n_kv_heads, layer.residual) == (kv_heads, residual)
    assert not layer.feedforward.bias


def test_alibi_is_refused_in_one_line(tmp_path):
    with pytest.raises(ConfigError, match=r"config\.json: alibi is True; only False is supported$"):
        read(tmp_path, FALCON_7B | {"alibi": True})


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (QWEN | {"layer_types": ["full_attention"]}, "layer_types has 1 entries for 4 layers"),
        (QWEN | {"layer_types": ["chunked"] * 4}, "layer_types 'chunked' is not supported"),
        (QWEN | {"layer_types": ["sliding_attention"] * 4}, "sliding_window is not given"),
        (SMOLLM3 | {"no_rope_layers": [1]}, "no_rope_layers has 1 entries for 4 layers"),
        (GEMMA2_27B | {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar 0.0 must be a positive"),
        (GRANITE | {"logits_scaling": -1.0}, "logits_scaling -1.0 must be a positive number"),
        (GEMMA | {"hidden_act": "silu"}, "hidden_act 'silu' is not supported"),
        (GEMMA3_1B | {"attn_logit_softcapping": 50.0}, "unknown key 'attn_logit_softcapping'"),
        (OLMO2 | {"clip_qkv": 8.0}, "unknown key 'clip_qkv'"),
        (FALCON_40B | {"parallel_attn": False}, "new_decoder_architecture True and parallel_attn"),
        (PHI3_128K | {"partial_rotary_factor": 0.33}, "d_rotary is 31"),
        (
            without(MISTRAL, "rope_theta")
            | {"rope_parameters": {"sliding_attention": {"rope_theta": 1.5}}},
            "no rope_parameters for layers of type 'full_attention'",
        ),
        (
            GEMMA3_1B | {"architectures": ["Gemma3ForConditionalGeneration"]},
            "architecture Gemma3ForConditionalGeneration is not supported; supported: .*Gemma3For",
        ),
    ],
)
def test_what_cannot_be_honoured_is_refused_in_one_line(tmp_path, entries, message):
    with pytest.raises((CheckpointError, ConfigError), match=message) as caught:
        read(tmp_path, entries)
    assert "\n" not in str(caught.value)


RELEASED = {
    "mistral": MISTRAL, "qwen2": QWEN, "qwen3": QWEN3, "gemma": GEMMA, "gemma2": GEMMA2_27B,
    "gemma3": GEMMA3_1B, "phi3": PHI4_MINI, "olmo2": OLMO2, "smollm3": SMOLLM3,
    "granite": GRANITE, "stablelm": STABLELM_12B, "gpt_neox": PYTHIA, "gpt2": GPT2,
    "falcon": FALCON_40B,
}  # fmt: skip


@pytest.mark.parametrize("name", RELEASED)
def test_a_family_is_found_that_can_say_all(tmp_path, name):
    """The one that it was read by, when that is named; else any that can."""
    config = read(tmp_path, RELEASED[name])
    assert family_for(config, name).name == name
    assert family_for(config).name in {family.name for family in FAMILIES}


@pytest.mark.parametrize("name", RELEASED)
@pytest.mark.parametrize("key", ["novelty", "rope_thetas", "attention_biass"])
def test_unknown_keys_are_errors_in_every_family(tmp_path, name, key):
    with pytest.raises(ConfigError, match=f"unknown key '{key}'"):
        read(tmp_path, RELEASED[name] | {key: 1})


def test_families_of_one_name_or_architecture_do_not_exist():
    for value in ("name", "huggingface.architecture", "huggingface.model_type"):
        found = []
        for family in FAMILIES:
            part: Any = family
            for step in value.split("."):
                part = getattr(part, step)
            found.append(part)
        assert len(set(found)) == len(found)


def test_a_key_that_is_not_there_cannot_be_changed():
    with pytest.raises(ValueError, match="no such keys: mlp_biases, rms_eps"):
        changed(HUGGINGFACE_KEYS, without={"mlp_biases"}, rms_eps=1.0)


def test_yarn_of_a_qwen_is_read(tmp_path):
    scaling = {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"}
    rule = rotary(read(tmp_path, QWEN | {"rope_scaling": scaling})).scaling
    assert rule == YaRN(factor=4.0, original_window=32768)
