"""Tiny models of each family as transformers has them, in float64, and their options.

A family's variants are arguments of its configuration. What must differ when a convention is
wrong has raised values here: the initialisation, norms' epsilon, scales, windows shorter than the
text, positions past the original window.
"""

import contextlib
import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from support.peer_llama import _Float64Torch

LENGTH = 30
WINDOW = 12
"""The original one of scaled rules."""
SLIDING = 7
VOCABULARY, D_HEAD, D_FF, LAYERS = 61, 10, 24, 3

_HEADS = {
    "vocab_size": VOCABULARY,
    "num_attention_heads": 6,
    "num_hidden_layers": LAYERS,
    "max_position_embeddings": 48,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_LIKE_LLAMA = _HEADS | {
    "hidden_size": 60,
    "intermediate_size": D_FF,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-3,
}
# Heads of a width of their own: not 48 / 6. transformers refuses a width that 6 does not divide.
_OWN_WIDTH = _LIKE_LLAMA | {"hidden_size": 48, "head_dim": D_HEAD}
_BASE = {"rope_theta": 100.0}
_SCALED = _BASE | {"factor": 4.0, "original_max_position_embeddings": WINDOW}
DEFAULT = {"rope_type": "default", **_BASE}
YARN = {"rope_type": "yarn", "beta_fast": 2.0, **_SCALED}
# From pair 0.9 to 5.3; rounded, from 0 to 6.
BOUNDS_WITHIN = {**YARN, "beta_fast": 32.0, "truncate": False, "rope_theta": 50.0} | {
    "original_max_position_embeddings": 400
}
LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 0.5, "high_freq_factor": 2.0, **_SCALED}
LINEAR = {"rope_type": "linear", "factor": 4.0, **_BASE}


def longrope(pairs: int) -> dict[str, Any]:
    """LongRoPE of so many channel pairs."""
    return {
        "rope_type": "longrope",
        **_BASE,
        "original_max_position_embeddings": WINDOW,
        "short_factor": [1.0 + 0.1 * i for i in range(pairs)],
        "long_factor": [1.0 + 0.7 * i for i in range(pairs)],
    }


@dataclass(frozen=True)
class PeerFamily:
    """A family: its module and classes, what all its models have, and what each has besides."""

    module: str
    config: str
    model: str
    common: Mapping[str, Any]
    variants: Mapping[str, Mapping[str, Any]]
    more_modules: tuple[str, ...] = field(default=())


def rope(parameters: Mapping[str, Any], **entries: Any) -> dict[str, Any]:
    """Entries with rotary settings."""
    return {"rope_parameters": dict(parameters)} | entries


_PLAIN = rope(DEFAULT)
_SLIDES = {"sliding_window": SLIDING}
_QWEN = {
    "plain": _PLAIN,
    "yarn": rope(YARN),
    "tied head": rope(DEFAULT, tie_word_embeddings=True),
    "window": rope(DEFAULT, use_sliding_window=True, max_window_layers=1, **_SLIDES),
    "window in some layers": rope(
        DEFAULT,
        use_sliding_window=True,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        **_SLIDES,
    ),
}
_NEOX = _HEADS | {"hidden_size": 60, "intermediate_size": D_FF, "layer_norm_eps": 1e-3}
_FALCON = _HEADS | {"hidden_size": 60, "ffn_hidden_size": D_FF, "layer_norm_epsilon": 1e-3}
_NEW = {"new_decoder_architecture": True, "num_kv_heads": 2}
_GEMMA3 = {
    "full_attention": {"rope_type": "default", "rope_theta": 1000.0},
    "sliding_attention": DEFAULT,
}

PEERS: dict[str, PeerFamily] = {
    "llama": PeerFamily(
        "llama", "LlamaConfig", "LlamaForCausalLM", _OWN_WIDTH, {"llama3": rope(LLAMA3)}
    ),
    "mistral": PeerFamily(
        "mistral",
        "MistralConfig",
        "MistralForCausalLM",
        _OWN_WIDTH,
        {
            "window": rope(DEFAULT, **_SLIDES),
            "no window": rope(DEFAULT, sliding_window=None),
            "yarn": rope(YARN, sliding_window=None),
        },
    ),
    "qwen2": PeerFamily("qwen2", "Qwen2Config", "Qwen2ForCausalLM", _LIKE_LLAMA, _QWEN),
    "qwen3": PeerFamily(
        "qwen3",
        "Qwen3Config",
        "Qwen3ForCausalLM",
        _OWN_WIDTH,
        _QWEN | {"biases": rope(DEFAULT, attention_bias=True)},
    ),
    "gemma": PeerFamily(
        "gemma",
        "GemmaConfig",
        "GemmaForCausalLM",
        _OWN_WIDTH,
        {
            "plain": _PLAIN,
            "own head": rope(DEFAULT, tie_word_embeddings=False),
            "biases": rope(DEFAULT, attention_bias=True),
        },
    ),
    "gemma2": PeerFamily(
        "gemma2",
        "Gemma2Config",
        "Gemma2ForCausalLM",
        _OWN_WIDTH | _SLIDES | {"query_pre_attn_scalar": D_HEAD},
        {
            "plain": rope(DEFAULT, attn_logit_softcapping=2.0, final_logit_softcapping=3.0),
            "own scale": rope(DEFAULT, query_pre_attn_scalar=14),
            "no caps": rope(DEFAULT, attn_logit_softcapping=None, final_logit_softcapping=None),
            "other windows": rope(
                DEFAULT, layer_types=["full_attention", *["sliding_attention"] * 2]
            ),
        },
    ),
    "gemma3": PeerFamily(
        "gemma3",
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        _OWN_WIDTH | _SLIDES | {"query_pre_attn_scalar": D_HEAD, "num_hidden_layers": 7},
        {
            "plain": rope(_GEMMA3),
            "linear": rope(
                _GEMMA3
                | {"full_attention": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0}}
            ),
            "other windows": rope(
                _GEMMA3,
                num_hidden_layers=3,
                layer_types=["full_attention", "sliding_attention", "full_attention"],
            ),
            "own scale": rope(_GEMMA3, query_pre_attn_scalar=14),
            "cap": rope(_GEMMA3, final_logit_softcapping=3.0),
        },
    ),
    "phi3": PeerFamily(
        "phi3",
        "Phi3Config",
        "Phi3ForCausalLM",
        _LIKE_LLAMA | {"original_max_position_embeddings": WINDOW},
        {
            "plain": rope(DEFAULT, original_max_position_embeddings=48),
            "window": rope(DEFAULT, original_max_position_embeddings=48, **_SLIDES),
            "longrope": rope(longrope(5)),
            "partial longrope": rope(longrope(4) | {"partial_rotary_factor": 0.8}),
            "tied head": rope(longrope(5), tie_word_embeddings=True),
        },
    ),
    "olmo2": PeerFamily(
        "olmo2",
        "Olmo2Config",
        "Olmo2ForCausalLM",
        _LIKE_LLAMA,
        {
            "plain": _PLAIN,
            "yarn": rope(YARN),
            "biases": rope(DEFAULT, attention_bias=True),
            "tied head": rope(DEFAULT, tie_word_embeddings=True),
        },
    ),
    "smollm3": PeerFamily(
        "smollm3",
        "SmolLM3Config",
        "SmolLM3ForCausalLM",
        _LIKE_LLAMA | {"num_hidden_layers": 5},
        {
            "plain": _PLAIN,
            "yarn": rope(YARN, tie_word_embeddings=False),
            "biases": rope(DEFAULT, attention_bias=True, mlp_bias=True),
            "other layers": rope(DEFAULT, no_rope_layers=[0, 1, 1, 0, 1]),
            "windows": rope(DEFAULT, use_sliding_window=True, **_SLIDES),
        },
    ),
    "granite": PeerFamily(
        "granite",
        "GraniteConfig",
        "GraniteForCausalLM",
        _LIKE_LLAMA
        | {
            "embedding_multiplier": 2.5,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.4,
            "logits_scaling": 3.0,
        },
        {
            "plain": _PLAIN,
            "yarn": rope(YARN),
            "biases": rope(DEFAULT, attention_bias=True, mlp_bias=True),
            "tied head": rope(DEFAULT, tie_word_embeddings=True),
        },
    ),
    "stablelm": PeerFamily(
        "stablelm",
        "StableLmConfig",
        "StableLmForCausalLM",
        {key: value for key, value in _LIKE_LLAMA.items() if key != "rms_norm_eps"}
        | {"layer_norm_eps": 1e-3},
        {
            "plain": rope(DEFAULT | {"partial_rotary_factor": 0.4}),
            "biases": rope(DEFAULT | {"partial_rotary_factor": 0.2}, use_qkv_bias=True),
            "parallel": rope(
                DEFAULT | {"partial_rotary_factor": 0.4},
                use_parallel_residual=True,
                qk_layernorm=True,
            ),
            "tied head": rope(LINEAR | {"partial_rotary_factor": 0.4}, tie_word_embeddings=True),
        },
    ),
    "gpt_neox": PeerFamily(
        "gpt_neox",
        "GPTNeoXConfig",
        "GPTNeoXForCausalLM",
        _NEOX,
        {
            "plain": rope(DEFAULT | {"partial_rotary_factor": 0.4}),
            "sequential": rope(
                DEFAULT | {"partial_rotary_factor": 1.0}, use_parallel_residual=False
            ),
            "no biases": rope(DEFAULT | {"partial_rotary_factor": 0.2}, attention_bias=False),
            "tied head": rope(
                LINEAR | {"partial_rotary_factor": 0.4},
                tie_word_embeddings=True,
                hidden_act="gelu_pytorch_tanh",
            ),
        },
    ),
    "gpt2": PeerFamily(
        "gpt2",
        "GPT2Config",
        "GPT2LMHeadModel",
        {
            "vocab_size": VOCABULARY,
            "n_embd": 60,
            "n_layer": LAYERS,
            "n_head": 6,
            "n_positions": 48,
            "layer_norm_epsilon": 1e-3,
            "bos_token_id": None,
            "eos_token_id": None,
        },
        {
            "plain": {},
            "width of its own": {"n_inner": D_FF, "activation_function": "relu"},
            "own head": {"tie_word_embeddings": False},
        },
        ("transformers.activations", "transformers.pytorch_utils"),
    ),
    "falcon": PeerFamily(
        "falcon",
        "FalconConfig",
        "FalconForCausalLM",
        _FALCON,
        {
            "one kv head, one norm": _PLAIN,
            "groups, two norms": rope(DEFAULT, **_NEW),
            "groups, one norm": rope(DEFAULT, num_ln_in_parallel_attn=1, **_NEW),
            "all kv heads": rope(DEFAULT, multi_query=False),
            "sequential": rope(DEFAULT, parallel_attn=False, multi_query=False, bias=True),
            "own head": rope(LINEAR, tie_word_embeddings=False, **_NEW),
        },
    ),
}

_EXPERTS = {"num_experts_per_tok": 2, "output_router_logits": False}
PEERS |= {
    "mixtral": PeerFamily(
        "mixtral",
        "MixtralConfig",
        "MixtralForCausalLM",
        _OWN_WIDTH | _EXPERTS | {"num_local_experts": 5},
        {"plain": _PLAIN, "window": rope(DEFAULT, **_SLIDES), "yarn": rope(YARN)},
    ),
    "qwen3-moe": PeerFamily(
        "qwen3_moe",
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        _OWN_WIDTH | _EXPERTS | {"num_local_experts": 6, "moe_intermediate_size": 14},
        {
            "plain": _PLAIN,
            "normalised": rope(YARN, norm_topk_prob=True, attention_bias=True),
            "as published": rope(DEFAULT, norm_topk_prob=True),
            "as published, yarn": rope(YARN, norm_topk_prob=True, tie_word_embeddings=True),
            "some layers dense": rope(DEFAULT, decoder_sparse_step=2),
            "one layer dense, window": rope(
                DEFAULT, mlp_only_layers=[1], use_sliding_window=True, **_SLIDES
            ),
        },
    ),
    "olmoe": PeerFamily(
        "olmoe",
        "OlmoeConfig",
        "OlmoeForCausalLM",
        _LIKE_LLAMA | _EXPERTS | {"num_experts": 6},
        {
            "plain": _PLAIN,
            "normalised": rope(YARN, norm_topk_prob=True, attention_bias=True),
            "as many kv heads": rope(DEFAULT, num_key_value_heads=6),
            "as many kv heads, yarn": rope(YARN, num_key_value_heads=6),
            "as many kv heads, normalised": rope(
                DEFAULT, num_key_value_heads=6, norm_topk_prob=True
            ),
        },
    ),
}

PEERS["gpt-oss"] = PeerFamily(
    "gpt_oss",
    "GptOssConfig",
    "GptOssForCausalLM",
    _OWN_WIDTH | _EXPERTS | _SLIDES | {"num_local_experts": 5},
    {
        "plain": rope(YARN | {"truncate": False}, swiglu_limit=1.5),
        "rounded": rope(YARN, num_experts_per_tok=3),
        "bounds within": rope(BOUNDS_WITHIN),
        "no biases, other windows": rope(
            DEFAULT,
            attention_bias=False,
            layer_types=["full_attention", *["sliding_attention"] * 2],
        ),
    },
)

PEERS["deepseek-v3"] = PeerFamily(
    "deepseek_v3",
    "DeepseekV3Config",
    "DeepseekV3ForCausalLM",
    _LIKE_LLAMA
    | _EXPERTS
    | {"num_key_value_heads": 6, "first_k_dense_replace": 1, "num_nextn_predict_layers": 0}
    | {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 14}
    | {"n_group": 4, "topk_group": 2, "kv_lora_rank": 12, "q_lora_rank": 14}
    | {"qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 8},
    {
        "plain": _PLAIN,
        "scaled softmax": rope(YARN | {"mscale": 1.3, "mscale_all_dim": 0.8}, n_shared_experts=2),
        "queries direct, biases": rope(
            YARN, q_lora_rank=None, attention_bias=True, norm_topk_prob=False
        ),
        "halves": rope(DEFAULT, rope_interleave=False, first_k_dense_replace=0),
    },
)

CASES = [(name, variant) for name, peer in PEERS.items() for variant in peer.variants]
"""All families with all their variants."""

# Numbers in llama.cpp's source, or one that it takes in the place of two.
GGUF_ONLY: Mapping[str, Mapping[str, Any]] = {
    "gpt-oss": {"swiglu_limit": 7.0},
    "deepseek-v3": {"rms_norm_eps": 1e-6},
}


def as_gguf_can_say(name: str, variant: str) -> dict[str, Any]:
    """Entries of a peer in place of those that no GGUF file says, YaRN's beta among them."""
    rope = PEERS[name].variants[variant].get("rope_parameters", {})
    beta = {"rope_parameters": {**rope, "beta_fast": 32.0}} if "beta_fast" in rope else {}
    return {**GGUF_ONLY.get(name, {}), **beta}


def build_peer(name: str, variant: str, *, seed: int = 0, **entries: Any) -> Any:
    """A model in float64 with every parameter random and large; to be built in `in_float64`."""
    import transformers

    family = PEERS[name]
    given = dict(family.common) | dict(family.variants[variant]) | entries
    config = getattr(transformers, family.config)(**given)
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    peer = getattr(transformers, family.model)(config).double().eval()
    generator = torch.Generator().manual_seed(seed)
    biases = [pair for pair in peer.named_buffers() if pair[0].endswith("correction_bias")]
    with torch.no_grad():
        for label, parameter in (*peer.named_parameters(), *biases):
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            is_norm = parameter.dim() == 1 and label.endswith("weight")
            parameter.copy_(0.3 * noise + is_norm)
            if ".mlp.gate." in label:  # which transformers loads in float32 whatever the type
                parameter.copy_(parameter.to(torch.float32))
    return peer


@contextlib.contextmanager
def in_float64(*names: str) -> Iterator[None]:
    """Let transformers compute these families in float64 throughout; build and run them inside.

    See `support.peer_llama`: rotary angles, norms and the softmax are in float32 otherwise.
    """
    from transformers import modeling_rope_utils

    modules = [modeling_rope_utils]
    for name in names:
        family = PEERS[name]
        path = f"transformers.models.{family.module}.modeling_{family.module}"
        modules += [importlib.import_module(each) for each in (path, *family.more_modules)]
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with contextlib.ExitStack() as stack:
            for module in modules:
                stack.enter_context(mock.patch.object(module, "torch", _Float64Torch()))
            stack.enter_context(mock.patch.object(Tensor, "float", Tensor.double))
            yield
    finally:
        torch.set_default_dtype(before)
