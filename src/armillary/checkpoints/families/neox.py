"""GPT-NeoX and Pythia: LayerNorm and biases, a part of each head rotated, sub-layers in parallel.

q, k and v of each head stand together in one matrix; GGUF files have all q, all k, all v. Source:
transformers, `models/gpt_neox`; llama.cpp, `src/models/gptneox.cpp`, which approximates GELU.
"""

from armillary.checkpoints.families.common import (
    D_HEAD,
    DROPOUT,
    EPS,
    GGUF_KEYS,
    MLP,
    N_KV_HEADS,
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
    Family,
    GGUFTable,
    HuggingFaceTable,
    Key,
    RotaryKeys,
    choice,
)
from armillary.checkpoints.layouts import Groups, Rows

_RESIDUAL = choice({True: "parallel", False: "sequential"})
_LAYER = "gpt_neox.layers.{i}."

NEOX = Family(
    name="gpt_neox",
    template=pre_norm(
        norm={"kind": "layer", "bias": True}, feedforward={**MLP, "activation": "gelu"}
    ),
    huggingface=HuggingFaceTable(
        architecture="GPTNeoXForCausalLM",
        model_type="gpt_neox",
        keys=(
            Key("vocab_size", int, ("vocab_size",)),
            Key("hidden_size", int, ("d_model",)),
            Key("max_position_embeddings", int, ("max_positions",), default=2048, loud=True),
            Key("num_attention_heads", int, ("layers.*.attention.n_heads",)),
            Key("intermediate_size", int, ("layers.*.feedforward.d_ff",)),
            Key("layer_norm_eps", float, EPS, default=1e-5),
            Key("hidden_act", str, ("layers.*.feedforward.activation",), "gelu", ACTIVATION),
            Key("attention_bias", bool, (QKV_BIAS, OUT_BIAS), default=True),
            Key("attention_dropout", float, (DROPOUT,), default=0.0),
            Key("hidden_dropout", float, ("layers.*.dropout", "input_dropout"), default=0.0),
            Key(
                "use_parallel_residual", bool, ("layers.*.residual",), default=True, form=_RESIDUAL
            ),
            Key("tie_word_embeddings", bool, ("tie_head",), default=False),
        ),
        derived=(
            Derived((D_HEAD,), own_head_width("hidden_size", "num_attention_heads")),
            Derived((N_KV_HEADS,), lambda values: values["num_attention_heads"]),
        ),
        rotary=RotaryKeys(
            base="rotary_emb_base", portion="rotary_pct", default_portion=0.25, partial=True
        ),
        ignored=frozenset({"classifier_dropout"}),
        tensors={
            "embedding.weight": "gpt_neox.embed_in.weight",
            **names(
                "layers.{i}.",
                _LAYER,
                {
                    "norm1": "input_layernorm",
                    "norm2": "post_attention_layernorm",
                    "attention.out": "attention.dense",
                    "feedforward.up": "mlp.dense_h_to_4h",
                    "feedforward.down": "mlp.dense_4h_to_h",
                },
            ),
            "final_norm.weight": "gpt_neox.final_layer_norm.weight",
            "final_norm.bias": "gpt_neox.final_layer_norm.bias",
            "head.weight": "embed_out.weight",
        },
        layouts=(
            Groups(f"{_LAYER}attention.query_key_value.weight", QKV),
            Groups(f"{_LAYER}attention.query_key_value.bias", QKV_BIASES),
        ),
        aliases={"lm_head.weight": "embed_out.weight"},
        redundant=tuple(
            f"{_LAYER}attention.{name}" for name in ("bias", "masked_bias", "rotary_emb.inv_freq")
        ),
    ),
    gguf=GGUFTable(
        architecture="gptneox",
        keys=(
            *gguf_layer_norm(GGUF_KEYS),
            Key(
                "use_parallel_residual", bool, ("layers.*.residual",), default=True, form=_RESIDUAL
            ),
        ),
        derived=(Derived((QKV_BIAS, OUT_BIAS), lambda _: True),),
        needs_head=True,
        tensors=only(gguf_names(), "attention.q.", "attention.k.", "attention.v.", "gate."),
        layouts=(
            Rows("blk.{i}.attn_qkv.weight", QKV),
            Rows("blk.{i}.attn_qkv.bias", QKV_BIASES),
        ),
    ),
)
