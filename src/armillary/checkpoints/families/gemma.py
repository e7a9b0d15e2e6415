"""Gemma 1, 2 and 3 (text): norms of 1 + weight, embeddings times √d_model, GELU, tied heads.

Gemma 2 adds norms after each sub-layer, a window in every second layer, bounded scores and logits
and a scale of scores of its own; Gemma 3 has a norm of each query and key head instead of bounds,
a window in five layers of six and another rotary base in these. GGUF files hold 1 + weight.
Source: transformers, `models/gemma`, `gemma2`, `gemma3`; llama.cpp, `src/models/gemma*.cpp`.
"""

from armillary.checkpoints.families.common import (
    GGUF_KEYS,
    HUGGINGFACE_KEYS,
    alternating,
    changed,
    gguf_alternating,
    gguf_names,
    huggingface_names,
    layer_types,
    names,
    only,
    pre_norm,
    windows,
    written_types,
)
from armillary.checkpoints.families.family import (
    INVERSE_ROOT,
    Derived,
    Family,
    GGUFTable,
    HuggingFaceTable,
    Key,
    LayerTable,
    Patch,
    RotaryKeys,
    Values,
    choice,
)
from armillary.checkpoints.layouts import Plus
from armillary.strict_dict import StrictDict

_NORM = {"offset": 1.0, "cast_before_weight": False}
# Files of the first release say gelu and mean its approximation.
_ACTIVATION = choice({"gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu_tanh"})
_ACTIVATES = ("layers.*.feedforward.activation",)
_HIDDEN_ACTIVATION = Key(
    "hidden_activation", str, _ACTIVATES, default="gelu_pytorch_tanh", form=_ACTIVATION
)
_SCALE = Key(
    "query_pre_attn_scalar", float, ("layers.*.attention.scale",), default=256, form=INVERSE_ROOT
)
_CAPS = (
    Key(
        "attn_logit_softcapping",
        float,
        ("layers.*.attention.soft_cap",),
        default=50.0,
        nullable=True,
    ),
    Key("final_logit_softcapping", float, ("final_soft_cap",), default=30.0, nullable=True),
)
_WINDOW = Key("sliding_window", int, default=4096, nullable=True)
_EMBEDDING_SCALE = Derived(("embedding_scale",), lambda values: values["hidden_size"] ** 0.5)
_GGUF_EMBEDDING_SCALE = Derived(
    ("embedding_scale",), lambda values: values["embedding_length"] ** 0.5
)
_IGNORED = frozenset({"cache_implementation"})
_NORMS = {
    "norm1": "input_layernorm",
    "post_norm1": "post_attention_layernorm",
    "norm2": "pre_feedforward_layernorm",
    "post_norm2": "post_feedforward_layernorm",
}
_GGUF_NORMS = {
    "norm1": "attn_norm",
    "post_norm1": "post_attention_norm",
    "norm2": "ffn_norm",
    "post_norm2": "post_ffw_norm",
}
_QK_NORMS = {"attention.q_norm": "attn_q_norm", "attention.k_norm": "attn_k_norm"}
_MLP_BIASES = ("feedforward.gate.bias", "up.bias", "down.bias", "norm1.bias", "norm2.bias",
               "final_norm.bias")  # fmt: skip


def _gguf(tensors: dict[str, str]) -> dict[str, str]:
    return {ours: theirs for ours, theirs in tensors.items() if "norm" not in ours}


def _plus_one(tensors: dict[str, str]) -> tuple[Plus, ...]:
    return tuple(Plus(theirs, (ours,)) for ours, theirs in tensors.items() if "norm" in ours)


def _gguf_scale(layers_of_27b: int) -> Derived:
    """llama.cpp knows the largest model by its layers, and takes the scale of its paper there."""

    def scale(values: Values) -> float | None:
        if values["block_count"] != layers_of_27b:
            return None
        heads = values["attention.head_count"]
        count = heads[0] if isinstance(heads, list) else heads
        return float((values["embedding_length"] / count) ** -0.5)

    return Derived(("layers.*.attention.scale",), scale)


_GEMMA_GGUF = only(gguf_names(), ".bias", "head.")
GEMMA = Family(
    name="gemma",
    template=pre_norm(norm=_NORM, feedforward={"activation": "gelu_tanh"}),
    huggingface=HuggingFaceTable(
        architecture="GemmaForCausalLM",
        model_type="gemma",
        keys=changed(
            HUGGINGFACE_KEYS,
            without={"mlp_bias", "hidden_act"},
            more=(
                Key("hidden_act", str, _ACTIVATES, default="gelu_pytorch_tanh", form=_ACTIVATION),
            ),
            max_position_embeddings=8192,
            num_key_value_heads=16,
            head_dim=256,
            tie_word_embeddings=True,
        ),
        derived=(_EMBEDDING_SCALE,),
        fixed={"hidden_activation": "gelu_pytorch_tanh", "use_bidirectional_attention": False},
        ignored=_IGNORED,
        tensors=only(huggingface_names(), *_MLP_BIASES),
    ),
    gguf=GGUFTable(
        architecture="gemma",
        keys=GGUF_KEYS,
        derived=(_GGUF_EMBEDDING_SCALE,),
        tensors=_gguf(_GEMMA_GGUF),
        layouts=_plus_one(_GEMMA_GGUF),
    ),
)

_GEMMA2_GGUF = only(gguf_names(_GGUF_NORMS), ".bias", "head.")
GEMMA2 = Family(
    name="gemma2",
    template=pre_norm(
        norm=_NORM,
        feedforward={"activation": "gelu_tanh"},
        layer={"norm_placement": "sandwich"},
    ),
    huggingface=HuggingFaceTable(
        architecture="Gemma2ForCausalLM",
        model_type="gemma2",
        keys=changed(
            HUGGINGFACE_KEYS,
            without={"mlp_bias", "hidden_act"},
            more=(_HIDDEN_ACTIVATION, _SCALE, *_CAPS, _WINDOW),
            max_position_embeddings=8192,
            num_key_value_heads=4,
            head_dim=256,
            tie_word_embeddings=True,
        ),
        derived=(_EMBEDDING_SCALE,),
        layers=layer_types(alternating(2)),
        fixed={"use_bidirectional_attention": False},
        ignored=_IGNORED | {"hidden_act", "sliding_window_size"},
        tensors=only(huggingface_names(_NORMS), *_MLP_BIASES),
    ),
    gguf=GGUFTable(
        architecture="gemma2",
        keys=(
            *GGUF_KEYS,
            Key("attn_logit_softcapping", float, ("layers.*.attention.soft_cap",), default=50.0),
            Key("final_logit_softcapping", float, ("final_soft_cap",), default=30.0),
        ),
        derived=(_GGUF_EMBEDDING_SCALE, _gguf_scale(46)),
        layers=gguf_alternating(2, default=4096),
        tensors=_gguf(_GEMMA2_GGUF),
        layouts=_plus_one(_GEMMA2_GGUF),
    ),
)


def _read_gemma3(entries: StrictDict, values: Values, count: int) -> list[Patch]:
    # The older key, which files keep; newer readers save it under a name of its own.
    keys = ("sliding_window_pattern", "_sliding_window_pattern")
    periods = [entries.take_optional(key, int) for key in keys]
    period = next((each for each in periods if each), 6)
    types = entries.take_list("layer_types", str, None) or alternating(period)(values, count)
    return windows(types, values["sliding_window"], count, entries.where)


_GEMMA3_GGUF = only(gguf_names(_GGUF_NORMS | _QK_NORMS), ".bias")
GEMMA3 = Family(
    name="gemma3",
    template=pre_norm(
        norm=_NORM,
        attention={"qk_norm": {"kind": "rms", **_NORM}},
        feedforward={"activation": "gelu_tanh"},
        layer={"norm_placement": "sandwich"},
    ),
    huggingface=HuggingFaceTable(
        architecture="Gemma3ForCausalLM",
        model_type="gemma3_text",
        keys=changed(
            HUGGINGFACE_KEYS,
            without={"mlp_bias", "hidden_act"},
            more=(
                _HIDDEN_ACTIVATION,
                _SCALE,
                # A bound of scores, which files have too, is null: transformers would pass over it.
                Key("final_logit_softcapping", float, ("final_soft_cap",), None),
                _WINDOW,
            ),
            max_position_embeddings=131072,
            num_key_value_heads=4,
            head_dim=256,
            tie_word_embeddings=True,
        ),
        derived=(_EMBEDDING_SCALE,),
        layers=LayerTable(_read_gemma3, written_types),
        rotary=RotaryKeys(default_base=1e6, local_base="rope_local_base_freq"),
        fixed={"use_bidirectional_attention": False},
        ignored=_IGNORED,
        tensors=only(huggingface_names(_NORMS), *_MLP_BIASES)
        | names(
            "layers.{i}.",
            "model.layers.{i}.self_attn.",
            {"attention.q_norm": "q_norm", "attention.k_norm": "k_norm"},
            ("weight",),
        ),
    ),
    gguf=GGUFTable(
        architecture="gemma3",
        keys=GGUF_KEYS,
        derived=(_GGUF_EMBEDDING_SCALE, _gguf_scale(62)),
        layers=gguf_alternating(6),
        local_base=10000.0,
        tensors=_gguf(_GEMMA3_GGUF),
        layouts=_plus_one(_GEMMA3_GGUF),
    ),
)
