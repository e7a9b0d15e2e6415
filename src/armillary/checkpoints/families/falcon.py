"""Falcon: sub-layers in parallel, one key/value head or some, LayerNorm, no biases.

q, k and v stand together in one matrix, by key/value heads. 7B has one norm for both sub-layers,
40B two; the first models (RW) have sub-layers in sequence and ALiBi, which is not supported. GGUF
files have all q, all k, all v. Source: transformers, `models/falcon`; llama.cpp,
`src/models/falcon.cpp`, which approximates GELU.
"""

from armillary.checkpoints.families.common import (
    D_HEAD,
    DROPOUT,
    EPS,
    GGUF_KEYS,
    MLP_BIAS,
    OUT_BIAS,
    QKV,
    QKV_BIAS,
    QKV_BIASES,
    gguf_layer_norm,
    gguf_names,
    names,
    only,
    own_head_width,
    pre_norm,
)
from armillary.checkpoints.families.family import (
    ACTIVATION,
    Derived,
    Entries,
    Family,
    GGUFTable,
    HuggingFaceTable,
    Key,
    LayerTable,
    Patch,
    Values,
)
from armillary.checkpoints.layouts import Groups, Rows, Together
from armillary.config import DecoderConfig
from armillary.errors import ConfigError
from armillary.strict_dict import StrictDict

_LAYER = "transformer.h.{i}."
_PARALLEL = {"residual": "parallel"}
_NORMS = tuple(f"layers.{{i}}.{name}" for name in ("norm1.weight", "norm2.weight"))
_NORM_BIASES = tuple(f"layers.{{i}}.{name}" for name in ("norm1.bias", "norm2.bias"))


def _read(entries: StrictDict, values: Values, count: int) -> list[Patch]:
    new = entries.take("new_decoder_architecture", bool, False)
    one_head = entries.take("multi_query", bool, True)
    parallel = entries.take("parallel_attn", bool, True)
    norms = entries.take("num_ln_in_parallel_attn", int, 2 if new else 1)
    heads = values["num_attention_heads"]
    given = entries.take("num_kv_heads", int, heads)
    if norms not in (1, 2) or (new and not parallel) or (norms == 2 and not new and parallel):
        raise ConfigError(
            f"{entries.where}: num_ln_in_parallel_attn {norms} with new_decoder_architecture {new} "
            f"and parallel_attn {parallel} is not supported"
        )
    residual = "sequential"
    if parallel:
        residual = "parallel" if norms == 2 else "parallel_shared_norm"
    kv_heads = given if new else 1 if one_head else heads
    return [{"attention.n_kv_heads": kv_heads, "residual": residual}] * count


def _write(config: DecoderConfig) -> Entries:
    layer = config.layers[0]
    heads, kv_heads = layer.attention.n_heads, layer.attention.n_kv_heads
    new = layer.residual == "parallel" or 1 < kv_heads < heads
    return {
        "new_decoder_architecture": new,
        # Passed over by the newer architecture, whose files say true.
        "multi_query": new or kv_heads == 1,
        "parallel_attn": layer.residual != "sequential",
        "num_kv_heads": kv_heads if new else heads,
        "num_ln_in_parallel_attn": (1 + (layer.residual == "parallel")) if new else None,
    }


def _read_gguf(entries: StrictDict, values: Values, count: int) -> list[Patch]:
    del entries
    two = "blk.0.attn_norm_2.weight" in values.shapes
    return [{"residual": "parallel" if two else "parallel_shared_norm"}] * count


FALCON = Family(
    name="falcon",
    template=pre_norm(
        norm={"kind": "layer", "bias": True},
        feedforward={"kind": "mlp", "activation": "gelu", "bias": False},
    ),
    huggingface=HuggingFaceTable(
        architecture="FalconForCausalLM",
        model_type="falcon",
        keys=(
            Key("vocab_size", int, ("vocab_size",)),
            Key("hidden_size", int, ("d_model",)),
            Key("max_position_embeddings", int, ("max_positions",), default=2048, loud=True),
            Key("num_attention_heads", int, ("layers.*.attention.n_heads",)),
            Key(
                "ffn_hidden_size",
                int,
                ("layers.*.feedforward.d_ff",),
                default=lambda values: 4 * values["hidden_size"],
            ),
            Key("layer_norm_epsilon", float, EPS, default=1e-5),
            Key("activation", str, ("layers.*.feedforward.activation",), "gelu", ACTIVATION),
            Key("bias", bool, (QKV_BIAS, OUT_BIAS, MLP_BIAS), default=False),
            Key("attention_dropout", float, (DROPOUT,), default=0.0),
            Key("hidden_dropout", float, ("layers.*.dropout",), default=0.0),
            Key("tie_word_embeddings", bool, ("tie_head",), default=True),
        ),
        derived=(Derived((D_HEAD,), own_head_width("hidden_size", "num_attention_heads")),),
        layers=LayerTable(_read, _write),
        fixed={"alibi": False, "apply_residual_connection_post_layernorm": False},
        tensors={
            "embedding.weight": "transformer.word_embeddings.weight",
            **names(
                "layers.{i}.",
                _LAYER,
                {
                    "norm1": "input_layernorm",
                    "norm2": "post_attention_layernorm",
                    "attention.out": "self_attention.dense",
                    "feedforward.up": "mlp.dense_h_to_4h",
                    "feedforward.down": "mlp.dense_4h_to_h",
                },
            ),
            "final_norm.weight": "transformer.ln_f.weight",
            "final_norm.bias": "transformer.ln_f.bias",
            "head.weight": "lm_head.weight",
        },
        layouts=(
            Groups(f"{_LAYER}self_attention.query_key_value.weight", QKV),
            Groups(f"{_LAYER}self_attention.query_key_value.bias", QKV_BIASES),
            Together((f"{_LAYER}ln_attn.weight", f"{_LAYER}ln_mlp.weight"), _NORMS, _PARALLEL),
            Together((f"{_LAYER}ln_attn.bias", f"{_LAYER}ln_mlp.bias"), _NORM_BIASES, _PARALLEL),
        ),
    ),
    gguf=GGUFTable(
        architecture="falcon",
        keys=gguf_layer_norm(GGUF_KEYS),
        layers=LayerTable(_read_gguf, lambda _: {}),
        fixed={"tensor_data_layout": "jploski"},
        tensors=only(
            gguf_names({"norm1": "attn_norm"}),
            "attention.q.",
            "attention.k.",
            "attention.v.",
            "gate.",
            "out.bias",
            "up.bias",
            "down.bias",
        ),
        layouts=(
            Rows("blk.{i}.attn_qkv.weight", QKV),
            # The norm that both read in 7B is in 40B that of the feed-forward.
            *(
                Together((f"blk.{{i}}.attn_norm_2.{kind}", f"blk.{{i}}.attn_norm.{kind}"), ours)
                for kind, ours in (("weight", _NORMS), ("bias", _NORM_BIASES))
            ),
        ),
    ),
)
