"""The specification against seven families of transformers, whose parts differ where ours are data.

Same weights, same tokens; ours in one left-padded batch, theirs row by row. The peer counts angles
and norms in float32 whatever the model's type, which sets the tolerance; each part that a family
was chosen for is switched off once, to see that the comparison would notice.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from armillary import reference
from armillary.config import (
    AttentionConfig,
    DecoderConfig,
    FeedForwardConfig,
    LayerConfig,
    NormConfig,
    RotaryConfig,
)
from armillary.rope_scaling import Llama3
from support.random_weights import random_weights

try:
    import transformers
except (
    ImportError
):  # the file is collected all the same; its tests then fail, they do not pass over
    transformers = None

pytestmark = pytest.mark.peer

TOLERANCE = 2e-5
LENGTH = 13

Weights = dict[str, np.ndarray]
Renamed = Iterator[tuple[str, np.ndarray]]


@dataclass(frozen=True)
class Family:
    """One of our configurations, the peer's, and how the peer names the weights."""

    config: DecoderConfig
    peer: Callable[[], object]
    rename: Callable[[str, np.ndarray, Weights], Renamed]


def decoder(layer: LayerConfig, *more: LayerConfig, **entries: object) -> DecoderConfig:
    sizes = {"vocab_size": 61, "d_model": 40, "max_positions": 64}
    return DecoderConfig(layers=(layer, *(more or (layer,))), **(sizes | entries))


def by_table(table: dict[str, str]) -> Callable[[str, np.ndarray, Weights], Renamed]:
    """Rename by the part of a name after `layers.N.`; the number goes where {} stands."""

    def rename(name: str, value: np.ndarray, weights: Weights) -> Renamed:
        if name.startswith("layers."):
            _, number, part = name.split(".", 2)
            stem, _, leaf = part.rpartition(".")
            yield f"{table[stem].format(number)}.{leaf}", value
        else:
            stem, _, leaf = name.rpartition(".")
            yield f"{table[stem]}.{leaf}", value
            if stem == "embedding" and "head.weight" not in weights:
                yield f"{table['head']}.weight", value

    return rename


LLAMA_NAMES = {
    "embedding": "model.embed_tokens",
    "norm1": "model.layers.{}.input_layernorm",
    "norm2": "model.layers.{}.post_attention_layernorm",
    "attention.q": "model.layers.{}.self_attn.q_proj",
    "attention.k": "model.layers.{}.self_attn.k_proj",
    "attention.v": "model.layers.{}.self_attn.v_proj",
    "attention.out": "model.layers.{}.self_attn.o_proj",
    "attention.q_norm": "model.layers.{}.self_attn.q_norm",
    "attention.k_norm": "model.layers.{}.self_attn.k_norm",
    "feedforward.gate": "model.layers.{}.mlp.gate_proj",
    "feedforward.up": "model.layers.{}.mlp.up_proj",
    "feedforward.down": "model.layers.{}.mlp.down_proj",
    "final_norm": "model.norm",
    "head": "lm_head",
}
SIZES = {
    "vocab_size": 61,
    "hidden_size": 40,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "max_position_embeddings": 64,
    "attn_implementation": "eager",
}
# Some of the peer's configurations insist on d_model / n_heads; the head's width differs from it.
GROUPED = SIZES | {
    "hidden_size": 42,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
}


def grouped(rotary: RotaryConfig, **entries: object) -> AttentionConfig:
    return AttentionConfig(
        **({"n_heads": 6, "n_kv_heads": 2, "d_head": 10} | entries), rotary=rotary
    )


def llama() -> Family:
    """Grouped queries, a head width of its own, llama3 scaling, biases in attention."""
    layer = LayerConfig(
        attention=grouped(
            RotaryConfig(d_rotary=10, base=500.0, scaling=Llama3(4.0, 16)),
            qkv_bias=True,
            out_bias=True,
        ),
        feedforward=FeedForwardConfig(d_ff=24),
        norm=NormConfig(eps=1e-3),
    )
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    }
    return Family(
        decoder(layer, d_model=42, final_norm=NormConfig(eps=1e-3)),
        lambda: transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                **GROUPED, rope_parameters=rope, rms_norm_eps=1e-3, attention_bias=True
            )
        ),
        by_table(LLAMA_NAMES),
    )


def qwen3() -> Family:
    """Queries and keys normalised per head before the rotation; a tied head."""
    layer = LayerConfig(
        attention=grouped(RotaryConfig(d_rotary=10, base=500.0), qk_norm=NormConfig(eps=1e-3)),
        feedforward=FeedForwardConfig(d_ff=24),
        norm=NormConfig(eps=1e-3),
    )
    return Family(
        decoder(layer, d_model=42, final_norm=NormConfig(eps=1e-3), tie_head=True),
        lambda: transformers.Qwen3ForCausalLM(
            transformers.Qwen3Config(
                **GROUPED,
                rope_parameters={"rope_type": "default", "rope_theta": 500.0},
                rms_norm_eps=1e-3,
                tie_word_embeddings=True,
            )
        ),
        by_table(LLAMA_NAMES),
    )


def gemma2() -> Family:
    """Sandwich norms of 1 + weight, soft caps, a window in every other layer, scaled embeddings."""
    norm = NormConfig(eps=1e-3, offset=1.0, cast_before_weight=False)
    capped = {"soft_cap": 2.0, "scale": 12**-0.5}
    rotary = RotaryConfig(d_rotary=10, base=500.0)

    def layer(window: int | None) -> LayerConfig:
        return LayerConfig(
            attention=grouped(rotary, window=window, **capped),
            feedforward=FeedForwardConfig(d_ff=24, activation="gelu_tanh"),
            norm=norm,
            norm_placement="sandwich",
        )

    names = LLAMA_NAMES | {
        "post_norm1": "model.layers.{}.post_attention_layernorm",
        "norm2": "model.layers.{}.pre_feedforward_layernorm",
        "post_norm2": "model.layers.{}.post_feedforward_layernorm",
    }
    return Family(
        decoder(
            layer(4),
            layer(None),
            d_model=42,
            final_norm=norm,
            tie_head=True,
            embedding_scale=42**0.5,
            final_soft_cap=3.0,
        ),
        lambda: transformers.Gemma2ForCausalLM(
            transformers.Gemma2Config(
                **GROUPED,
                rope_parameters={"rope_type": "default", "rope_theta": 500.0},
                rms_norm_eps=1e-3,
                hidden_activation="gelu_pytorch_tanh",
                query_pre_attn_scalar=12,
                sliding_window=4,
                layer_types=["sliding_attention", "full_attention"],
                attn_logit_softcapping=2.0,
                final_logit_softcapping=3.0,
                tie_word_embeddings=True,
            )
        ),
        by_table(names),
    )


LAYER_NORM = NormConfig(kind="layer", eps=1e-3, bias=True)
EQUAL_HEADS = {"n_heads": 5, "n_kv_heads": 5, "d_head": 8}


def gpt_neox() -> Family:
    """Parallel sub-layers with a norm each, LayerNorm, biases, half a head rotated, exact GELU."""
    layer = LayerConfig(
        attention=AttentionConfig(
            **EQUAL_HEADS,
            rotary=RotaryConfig(d_rotary=4, base=500.0),
            qkv_bias=True,
            out_bias=True,
        ),
        feedforward=FeedForwardConfig(kind="mlp", d_ff=24, activation="gelu", bias=True),
        norm=LAYER_NORM,
        residual="parallel",
    )
    prefix = "gpt_neox.layers.{}"
    plain = by_table(
        {
            "embedding": "gpt_neox.embed_in",
            "norm1": f"{prefix}.input_layernorm",
            "norm2": f"{prefix}.post_attention_layernorm",
            "attention.out": f"{prefix}.attention.dense",
            "feedforward.up": f"{prefix}.mlp.dense_h_to_4h",
            "feedforward.down": f"{prefix}.mlp.dense_4h_to_h",
            "final_norm": "gpt_neox.final_layer_norm",
            "head": "lm_head",
        }
    )

    def rename(name: str, value: np.ndarray, weights: Weights) -> Renamed:
        """q, k and v of one head stand together in one matrix."""
        if ".attention." not in name or ".out." in name:
            yield from plain(name, value, weights)
        elif ".q." in name:
            qkv = [weights[name.replace(".q.", f".{which}.")] for which in "qkv"]
            per_head = np.stack([part.reshape(5, 8, *part.shape[1:]) for part in qkv], axis=1)
            number, leaf = name.split(".")[1], name.rpartition(".")[2]
            joined = per_head.reshape(120, *value.shape[1:])
            yield f"gpt_neox.layers.{number}.attention.query_key_value.{leaf}", joined

    return Family(
        decoder(layer, final_norm=LAYER_NORM),
        lambda: transformers.GPTNeoXForCausalLM(
            transformers.GPTNeoXConfig(
                **SIZES,
                num_attention_heads=5,
                rope_parameters={
                    "rope_type": "default",
                    "rope_theta": 500.0,
                    "partial_rotary_factor": 0.5,
                },
                hidden_act="gelu",
                layer_norm_eps=1e-3,
                use_parallel_residual=True,
                attention_bias=True,
                tie_word_embeddings=False,
            )
        ),
        rename,
    )


def phi() -> Family:
    """Parallel sub-layers that share one norm, and a head with a bias."""
    layer = LayerConfig(
        attention=AttentionConfig(
            **EQUAL_HEADS,
            rotary=RotaryConfig(d_rotary=4, base=500.0),
            qkv_bias=True,
            out_bias=True,
        ),
        feedforward=FeedForwardConfig(kind="mlp", d_ff=24, activation="gelu_tanh", bias=True),
        norm=LAYER_NORM,
        residual="parallel_shared_norm",
    )
    names = LLAMA_NAMES | {
        "attention.out": "model.layers.{}.self_attn.dense",
        "feedforward.up": "model.layers.{}.mlp.fc1",
        "feedforward.down": "model.layers.{}.mlp.fc2",
        "final_norm": "model.final_layernorm",
    }
    return Family(
        decoder(layer, final_norm=LAYER_NORM, head_bias=True),
        lambda: transformers.PhiForCausalLM(
            transformers.PhiConfig(
                **SIZES,
                num_attention_heads=5,
                rope_parameters={
                    "rope_type": "default",
                    "rope_theta": 500.0,
                    "partial_rotary_factor": 0.5,
                },
                hidden_act="gelu_new",
                layer_norm_eps=1e-3,
            )
        ),
        by_table(names),
    )


def cohere() -> Family:
    """Interleaved channel pairs, LayerNorm without a bias, a shared norm, a tied head."""
    norm = NormConfig(kind="layer", eps=1e-3)
    layer = LayerConfig(
        attention=AttentionConfig(
            n_heads=4,
            n_kv_heads=2,
            d_head=10,
            rotary=RotaryConfig(d_rotary=10, base=500.0, layout="interleaved"),
        ),
        feedforward=FeedForwardConfig(d_ff=24),
        norm=norm,
        residual="parallel_shared_norm",
    )
    return Family(
        decoder(layer, final_norm=norm, tie_head=True),
        lambda: transformers.CohereForCausalLM(
            transformers.CohereConfig(
                **SIZES,
                num_attention_heads=4,
                num_key_value_heads=2,
                rope_parameters={"rope_type": "default", "rope_theta": 500.0},
                layer_norm_eps=1e-3,
                logit_scale=1.0,
                tie_word_embeddings=True,
            )
        ),
        by_table(LLAMA_NAMES),
    )


def gpt2() -> Family:
    """A learned position table and no rotation."""
    layer = LayerConfig(
        attention=AttentionConfig(**EQUAL_HEADS, qkv_bias=True, out_bias=True),
        feedforward=FeedForwardConfig(kind="mlp", d_ff=24, activation="gelu_tanh", bias=True),
        norm=LAYER_NORM,
    )
    prefix = "transformer.h.{}"
    plain = by_table(
        {
            "embedding": "transformer.wte",
            "position_table": "transformer.wpe",
            "norm1": f"{prefix}.ln_1",
            "norm2": f"{prefix}.ln_2",
            "attention.out": f"{prefix}.attn.c_proj",
            "feedforward.up": f"{prefix}.mlp.c_fc",
            "feedforward.down": f"{prefix}.mlp.c_proj",
            "final_norm": "transformer.ln_f",
            "head": "lm_head",
        }
    )

    def rename(name: str, value: np.ndarray, weights: Weights) -> Renamed:
        """Linear weights are stored (in, out); q, k and v follow each other in one matrix."""
        linear = name.startswith("layers.") and name.endswith(".weight") and "norm" not in name
        if ".attention." not in name or ".out." in name:
            yield from plain(name, value.T if linear else value, weights)
        elif ".q." in name:
            qkv = [weights[name.replace(".q.", f".{which}.")].T for which in "qkv"]
            number, leaf = name.split(".")[1], name.rpartition(".")[2]
            yield f"transformer.h.{number}.attn.c_attn.{leaf}", np.concatenate(qkv, axis=-1)

    return Family(
        decoder(layer, final_norm=LAYER_NORM, position_table="learned", tie_head=True),
        lambda: transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=61,
                n_embd=40,
                n_inner=24,
                n_layer=2,
                n_head=5,
                n_positions=64,
                layer_norm_epsilon=1e-3,
                activation_function="gelu_new",
                attn_implementation="eager",
            )
        ),
        rename,
    )


FAMILIES = [llama, qwen3, gemma2, gpt_neox, phi, cohere, gpt2]


def peer_logits(
    family: Family, weights: Weights, tokens: np.ndarray, mask: np.ndarray
) -> np.ndarray:
    model = family.peer().double().eval()
    renamed = {
        key: torch.from_numpy(np.ascontiguousarray(array))
        for name, value in weights.items()
        for key, array in family.rename(name, value, weights)
    }
    model.load_state_dict(renamed, strict=True)
    logits = np.zeros((*tokens.shape, 61))
    for row, real in enumerate(mask == 1):
        with torch.no_grad():
            logits[row, real] = model(torch.from_numpy(tokens[row : row + 1, real])).logits[0]
    return logits


def gap(
    config: dict, weights: Weights, tokens: np.ndarray, mask: np.ndarray, peer: np.ndarray
) -> float:
    ours = reference.forward(config, weights, tokens, mask=mask)
    return float(np.abs(ours - peer)[mask == 1].max())


def inputs() -> tuple[np.ndarray, np.ndarray]:
    tokens = np.random.default_rng(1).integers(0, 61, (2, LENGTH))
    mask = np.ones((2, LENGTH), dtype=np.int64)
    mask[1, :3] = 0
    return tokens, mask


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.__name__)
def test_logits_are_those_of_transformers(family):
    family = family()
    config = family.config.to_dict()
    weights = random_weights(config)
    tokens, mask = inputs()
    assert (
        gap(config, weights, tokens, mask, peer_logits(family, weights, tokens, mask)) < TOLERANCE
    )


def in_layers(config: dict, part: str | None, **values: object) -> dict:
    """The plain dict with values replaced in every layer, or in one part of every layer."""
    layers = [
        layer | values if part is None else layer | {part: layer[part] | values}
        for layer in config["layers"]
    ]
    return config | {"layers": layers}


def in_rotary(config: dict, **values: object) -> dict:
    rotary = config["layers"][0]["attention"]["rotary"]
    return in_layers(config, "attention", rotary=rotary | values)


FAULTS = {
    "llama3 scaling dropped": (llama, lambda c: in_rotary(c, scaling={"kind": "default"})),
    "layout switched": (llama, lambda c: in_rotary(c, layout="interleaved")),
    "rotation dropped": (llama, lambda c: in_layers(c, "attention", rotary=None)),
    "q/k norm dropped": (qwen3, lambda c: in_layers(c, "attention", qk_norm=None)),
    "window one longer": (gemma2, lambda c: in_layers(c, "attention", window=5)),
    "scores uncapped": (gemma2, lambda c: in_layers(c, "attention", soft_cap=None)),
    "usual scale": (gemma2, lambda c: in_layers(c, "attention", scale=None)),
    "embeddings unscaled": (gemma2, lambda c: c | {"embedding_scale": 1.0}),
    "logits uncapped": (gemma2, lambda c: c | {"final_soft_cap": None}),
    "gelu exact": (gemma2, lambda c: in_layers(c, "feedforward", activation="gelu")),
    "residual in sequence": (gpt_neox, lambda c: in_layers(c, None, residual="sequential")),
    "frequencies of the head's width": (gpt_neox, lambda c: in_rotary(c, d_rotary=8)),
    "gelu by tanh": (gpt_neox, lambda c: in_layers(c, "feedforward", activation="gelu_tanh")),
    "head bias dropped": (phi, lambda c: c | {"head_bias": False}),
    "layout switched back": (cohere, lambda c: in_rotary(c, layout="half_split")),
    "position table dropped": (gpt2, lambda c: c | {"position_table": None}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_comparison_notices(fault):
    family, spoil = FAULTS[fault]
    family = family()
    config = family.config.to_dict()
    weights = random_weights(config)
    tokens, mask = inputs()
    peer = peer_logits(family, weights, tokens, mask)
    assert gap(spoil(config), weights, tokens, mask, peer) > 10 * TOLERANCE
