"""What many families share: the keys and names of Llama, which later ones took over."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from armillary.checkpoints.families.family import (
    ACTIVATION,
    FULL,
    SLIDING,
    WIDTH,
    Derived,
    Entries,
    Key,
    LayerTable,
    Patch,
    Values,
    head_width,
)
from armillary.checkpoints.layouts import Interleaved
from armillary.config import DecoderConfig
from armillary.errors import ConfigError
from armillary.strict_dict import StrictDict

EPS = ("layers.*.norm.eps", "final_norm.eps", "layers.*.attention.qk_norm.eps")
QKV = tuple(f"layers.{{i}}.attention.{name}.weight" for name in "qkv")
QKV_BIASES = tuple(f"layers.{{i}}.attention.{name}.bias" for name in "qkv")
MLP = {"kind": "mlp", "bias": True}
QKV_BIAS, OUT_BIAS = "layers.*.attention.qkv_bias", "layers.*.attention.out_bias"
MLP_BIAS = "layers.*.feedforward.bias"
D_HEAD, N_KV_HEADS = "layers.*.attention.d_head", "layers.*.attention.n_kv_heads"
DROPOUT = "layers.*.attention.dropout"


def pre_norm(
    *,
    norm: Mapping[str, Any] | None = None,
    attention: Mapping[str, Any] | None = None,
    feedforward: Mapping[str, Any] | None = None,
    layer: Mapping[str, Any] | None = None,
    decoder: Mapping[str, Any] | None = None,
) -> Entries:
    """A template: RMSNorm before each sub-layer, a gated feed-forward with SiLU; entries add."""
    norm = {"kind": "rms", **(norm or {})}
    return {
        "layers": {
            "attention": dict(attention or {}),
            "feedforward": {"kind": "glu", "activation": "silu", **(feedforward or {})},
            "norm": norm,
            **(layer or {}),
        },
        "final_norm": norm,
        **(decoder or {}),
    }


def own_head_width(d_model: str, n_heads: str) -> Callable[[Values], int]:
    """The width of a head out of the entries under these keys."""
    return lambda values: head_width(values[d_model], values[n_heads], values.where)


def as_many_as(key: str) -> Callable[[Values], Any]:
    """A default: what another key says."""
    return lambda values: values[key]


HUGGINGFACE_KEYS: tuple[Key, ...] = (
    Key("vocab_size", int, ("vocab_size",)),
    Key("hidden_size", int, ("d_model",)),
    Key("max_position_embeddings", int, ("max_positions",), default=2048, loud=True),
    Key("num_attention_heads", int, ("layers.*.attention.n_heads",)),
    Key("num_key_value_heads", int, (N_KV_HEADS,), default=as_many_as("num_attention_heads")),
    Key(
        "head_dim",
        int,
        (D_HEAD,),
        default=own_head_width("hidden_size", "num_attention_heads"),
        form=WIDTH,
    ),
    Key("intermediate_size", int, ("layers.*.feedforward.d_ff",)),
    Key("rms_norm_eps", float, EPS, default=1e-6, loud=True),
    Key("hidden_act", str, ("layers.*.feedforward.activation",), default="silu", form=ACTIVATION),
    Key("tie_word_embeddings", bool, ("tie_head",), default=False),
    Key("attention_bias", bool, (QKV_BIAS, OUT_BIAS), default=False),
    Key("mlp_bias", bool, (MLP_BIAS,), default=False),
    Key("attention_dropout", float, (DROPOUT,), default=0.0),
)
"""The keys of Llama's config.json."""


def changed(
    keys: tuple[Key, ...],
    without: frozenset[str] | set[str] = frozenset(),
    more: tuple[Key, ...] = (),
    **defaults: Any,
) -> tuple[Key, ...]:
    """Keys with some left out, others added, and other defaults: key=value."""
    kept = [key for key in keys if key.name not in without]
    unknown = (set(without) | set(defaults)) - {key.name for key in keys}
    if unknown:
        raise ValueError(f"no such keys: {', '.join(sorted(unknown))}")
    return (
        *(
            replace(key, default=defaults[key.name]) if key.name in defaults else key
            for key in kept
        ),
        *more,
    )


HEAD_WIDTH = Derived((D_HEAD,), own_head_width("hidden_size", "num_attention_heads"))
"""For families that have no key for it."""

_HUGGINGFACE_LINEAR = {
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.out": "self_attn.o_proj",
    "feedforward.gate": "mlp.gate_proj",
    "feedforward.up": "mlp.up_proj",
    "feedforward.down": "mlp.down_proj",
}


def names(
    ours: str, theirs: str, modules: Mapping[str, str], kinds: tuple[str, ...] = ("weight", "bias")
) -> dict[str, str]:
    """`ours`.NAME.KIND → `theirs`.NAME.KIND for each module of a mapping."""
    return {
        f"{ours}{name}.{kind}": f"{theirs}{their_name}.{kind}"
        for name, their_name in modules.items()
        for kind in kinds
    }


def huggingface_names(norms: Mapping[str, str] | None = None) -> dict[str, str]:
    """Our parameters → Llama's tensors, with a layer's norms as given (or Llama's)."""
    if norms is None:
        norms = {"norm1": "input_layernorm", "norm2": "post_attention_layernorm"}
    return {
        "embedding.weight": "model.embed_tokens.weight",
        **names("layers.{i}.", "model.layers.{i}.", {**norms, **_HUGGINGFACE_LINEAR}),
        "final_norm.weight": "model.norm.weight",
        "final_norm.bias": "model.norm.bias",
        "head.weight": "lm_head.weight",
    }


# --- GGUF ---------------------------------------------------------------------------------------


def _of_embedding(values: Values) -> int:
    shape = values.shapes.get("token_embd.weight")
    return shape[0] if shape else 0


def _gguf_head_width(values: Values) -> int:
    n_heads = values["attention.head_count"]
    if isinstance(n_heads, list):
        n_heads = n_heads[0]
    return head_width(values["embedding_length"], n_heads, values.where)


GGUF_KEYS: tuple[Key, ...] = (
    Key("vocab_size", int, ("vocab_size",), default=_of_embedding),
    Key("embedding_length", int, ("d_model",)),
    Key("context_length", int, ("max_positions",)),
    Key("attention.head_count", (int, list), ("layers.*.attention.n_heads",)),
    Key(
        "attention.head_count_kv",
        (int, list),
        (N_KV_HEADS,),
        default=as_many_as("attention.head_count"),
    ),
    Key("attention.key_length", int, (D_HEAD,), default=_gguf_head_width, form=WIDTH),
    Key("attention.value_length", int, (D_HEAD,), default=as_many_as("attention.key_length")),
    Key("feed_forward_length", (int, list), ("layers.*.feedforward.d_ff",)),
    Key("attention.layer_norm_rms_epsilon", float, EPS),
)
"""The keys of llama.cpp's files that most architectures have."""


def gguf_layer_norm(keys: tuple[Key, ...]) -> tuple[Key, ...]:
    """The keys of an architecture with LayerNorm."""
    name = "attention.layer_norm_rms_epsilon"
    return changed(keys, without={name}, more=(Key("attention.layer_norm_epsilon", float, EPS),))


GGUF_PRESENT: Mapping[str, str] = {
    "layers.{i}.attention.q.bias": QKV_BIAS,
    "layers.{i}.attention.out.bias": OUT_BIAS,
    "layers.{i}.feedforward.down.bias": MLP_BIAS,
}

_GGUF_LINEAR = {
    "attention.q": "attn_q",
    "attention.k": "attn_k",
    "attention.v": "attn_v",
    "attention.out": "attn_output",
    "feedforward.gate": "ffn_gate",
    "feedforward.up": "ffn_up",
    "feedforward.down": "ffn_down",
}


def gguf_names(norms: Mapping[str, str] | None = None) -> dict[str, str]:
    """Our parameters → llama.cpp's tensors, with a layer's norms as given (or Llama's)."""
    if norms is None:
        norms = {"norm1": "attn_norm", "norm2": "ffn_norm"}
    return {
        "embedding.weight": "token_embd.weight",
        **names("layers.{i}.", "blk.{i}.", {**norms, **_GGUF_LINEAR}),
        "final_norm.weight": "output_norm.weight",
        "final_norm.bias": "output_norm.bias",
        "head.weight": "output.weight",
    }


def only(tensors: Mapping[str, str], *without: str) -> dict[str, str]:
    """A table of names less those whose parameters contain one of some words."""
    return {
        ours: theirs
        for ours, theirs in tensors.items()
        if not any(word in ours for word in without)
    }


def gguf_interleaved(*without: str) -> dict[str, Any]:
    """`tensors` and `layouts` of an architecture that rotates interleaved, as Llama's does.

    Without the parameters whose names contain some words.
    """
    rotated = {
        f"layers.{{i}}.attention.{name}.{kind}": f"blk.{{i}}.attn_{name}.{kind}"
        for name in "qk"
        for kind in ("weight", "bias")
    }
    return {
        "tensors": only(gguf_names(), *rotated, *without),
        "layouts": tuple(
            Interleaved(theirs, (ours,)) for ours, theirs in only(rotated, *without).items()
        ),
    }


FREQUENCIES = frozenset({"rope_freqs.weight"})
LONGROPE_FACTORS = frozenset({"rope_factors_long.weight", "rope_factors_short.weight"})


# --- Windows ------------------------------------------------------------------------------------


def layer_types(default: Callable[[Values, int], Sequence[str]]) -> LayerTable:
    """Windows by `layer_types`, `default` where it is absent, of the width `sliding_window`.

    `sliding_window` is a key of the table that is read before; it is written here.
    """

    def read(entries: StrictDict, values: Values, count: int) -> list[Patch]:
        types = entries.take_list("layer_types", str, None)
        return windows(
            types or list(default(values, count)), values["sliding_window"], count, entries.where
        )

    return LayerTable(read, written_types)


def windows(types: Sequence[str], width: int | None, count: int, where: str) -> list[Patch]:
    """A patch for each layer of these types. Raises ConfigError for what they do not add up to."""
    if len(types) != count:
        raise ConfigError(f"{where}: layer_types has {len(types)} entries for {count} layers")
    for kind in types:
        if kind not in {FULL, SLIDING}:
            raise ConfigError(
                f"{where}: layer_types {kind!r} is not supported; supported: {FULL}, {SLIDING}"
            )
    if SLIDING in types and width is None:
        raise ConfigError(f"{where}: layers are {SLIDING}, but sliding_window is not given")
    return [
        {"attention.window": width, "attention.rotary": SLIDING} if kind == SLIDING else {}
        for kind in types
    ]


def written_types(config: DecoderConfig) -> Entries:
    """`layer_types` and `sliding_window`."""
    widths = [layer.attention.window for layer in config.layers]
    return {
        "layer_types": [FULL if width is None else SLIDING for width in widths],
        "sliding_window": next((width for width in widths if width is not None), None),
    }


def one_window(config: DecoderConfig) -> Entries:
    """`sliding_window` of all layers."""
    return {"sliding_window": config.layers[0].attention.window}


def every_layer(entries: StrictDict, values: Values, count: int) -> list[Patch]:
    """All layers with the window `sliding_window`, where it is given."""
    del entries
    return [{"attention.window": values["sliding_window"]}] * count


EVERY_LAYER = LayerTable(every_layer, one_window)


def alternating(period: int) -> Callable[[Values, int], list[str]]:
    """Of each `period` layers the last reads all, the others have a window."""
    return lambda _, count: [SLIDING if (i + 1) % period else FULL for i in range(count)]


def gguf_alternating(period: int, default: Any = None) -> LayerTable:
    """The same in GGUF, where files may say another period, or say it of each layer.

    `default` is the width that absence means, None for none, or REQUIRED.
    """

    def read(entries: StrictDict, values: Values, count: int) -> list[Patch]:
        width = entries.take(_GGUF_WINDOW, int, default)
        said = entries.take(f"{_GGUF_WINDOW}_pattern", (int, list), period)
        if isinstance(said, list):
            types = [
                SLIDING if each else FULL
                for each in entries.take_list(f"{_GGUF_WINDOW}_pattern", bool)
            ]
        else:
            types = alternating(max(1, said))(values, count)
        return windows(types if width else [FULL] * count, width, count, entries.where)

    def write(config: DecoderConfig) -> Entries:
        width = written_types(config)["sliding_window"]
        return {} if width is None else {_GGUF_WINDOW: width}

    return LayerTable(read, write)


_GGUF_WINDOW = "attention.sliding_window"
