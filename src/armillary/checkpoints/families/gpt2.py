"""GPT-2: a learned table of positions, LayerNorm, biases; matrices stored with rows for columns.

GGUF files have them as others do. Source: transformers, `models/gpt2`; llama.cpp,
`src/models/gpt2.cpp`.
"""

from armillary.checkpoints.families.common import (
    D_HEAD,
    DROPOUT,
    EPS,
    GGUF_KEYS,
    MLP,
    N_KV_HEADS,
    QKV,
    QKV_BIASES,
    gguf_layer_norm,
    gguf_names,
    names,
    only,
    own_head_width,
    pre_norm,
)
from armillary.checkpoints.families.family import (
    Derived,
    Family,
    GGUFTable,
    HuggingFaceTable,
    Key,
    Values,
    choice,
)
from armillary.checkpoints.layouts import Rows, Same, Transposed

_LAYER = "transformer.h.{i}."
_ACTIVATION = choice(
    {
        "gelu_new": "gelu_tanh",
        "gelu_fast": "gelu_tanh",
        "gelu_pytorch_tanh": "gelu_tanh",
        "gelu": "gelu",
        "relu": "relu",
        "silu": "silu",
    }
)
_MATRICES = {
    "attention.out": "attn.c_proj",
    "feedforward.up": "mlp.c_fc",
    "feedforward.down": "mlp.c_proj",
}


def _four_times(values: Values) -> int:
    width: int = values["n_embd"]
    return 4 * width


GPT2 = Family(
    name="gpt2",
    template=pre_norm(
        norm={"kind": "layer", "bias": True},
        attention={"qkv_bias": True, "out_bias": True},
        feedforward={**MLP, "activation": "gelu_tanh"},
        decoder={"position_table": "learned"},
    ),
    huggingface=HuggingFaceTable(
        architecture="GPT2LMHeadModel",
        model_type="gpt2",
        n_layers="n_layer",
        keys=(
            Key("vocab_size", int, ("vocab_size",)),
            Key("n_embd", int, ("d_model",)),
            Key("n_positions", int, ("max_positions",), default=1024, loud=True),
            Key("n_head", int, ("layers.*.attention.n_heads",)),
            Key("n_inner", int, ("layers.*.feedforward.d_ff",), default=_four_times, elided=True),
            Key("layer_norm_epsilon", float, EPS, default=1e-5),
            Key(
                "activation_function",
                str,
                ("layers.*.feedforward.activation",),
                default="gelu_new",
                form=_ACTIVATION,
            ),
            Key("attn_pdrop", float, (DROPOUT,), default=0.1),
            Key("resid_pdrop", float, ("layers.*.dropout",), default=0.1),
            Key("embd_pdrop", float, ("input_dropout",), default=0.1),
            Key("tie_word_embeddings", bool, ("tie_head",), default=True),
        ),
        derived=(
            Derived((D_HEAD,), own_head_width("n_embd", "n_head")),
            Derived((N_KV_HEADS,), lambda values: values["n_head"]),
        ),
        rotary=None,
        fixed={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False},
        # How numbers are rounded, and heads of other tasks.
        ignored=frozenset(
            {
                "n_ctx",
                "reorder_and_upcast_attn",
                "summary_activation",
                "summary_first_dropout",
                "summary_proj_to_labels",
                "summary_type",
                "summary_use_proj",
                "task_specific_params",
            }
        ),
        tensors={
            "embedding.weight": "transformer.wte.weight",
            "position_table.weight": "transformer.wpe.weight",
            **names("layers.{i}.", _LAYER, {"norm1": "ln_1", "norm2": "ln_2"}),
            **names("layers.{i}.", _LAYER, _MATRICES, ("bias",)),
            "final_norm.weight": "transformer.ln_f.weight",
            "final_norm.bias": "transformer.ln_f.bias",
            "head.weight": "lm_head.weight",
        },
        layouts=(
            Transposed(Rows(f"{_LAYER}attn.c_attn.weight", QKV)),
            Rows(f"{_LAYER}attn.c_attn.bias", QKV_BIASES),
            *(
                Transposed(Same(theirs, (ours,)))
                for ours, theirs in names("layers.{i}.", _LAYER, _MATRICES, ("weight",)).items()
            ),
        ),
        prefix="transformer.",
        redundant=(f"{_LAYER}attn.bias", f"{_LAYER}attn.masked_bias"),
    ),
    gguf=GGUFTable(
        architecture="gpt2",
        keys=gguf_layer_norm(GGUF_KEYS),
        rotates=False,
        tensors={
            **only(gguf_names(), "attention.q.", "attention.k.", "attention.v.", "gate."),
            "position_table.weight": "position_embd.weight",
        },
        layouts=(
            Rows("blk.{i}.attn_qkv.weight", QKV),
            Rows("blk.{i}.attn_qkv.bias", QKV_BIASES),
        ),
    ),
)
