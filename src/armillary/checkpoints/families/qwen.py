"""Qwen2 and Qwen2.5 (biases on q, k and v), Qwen3 (a norm of each query and key head).

Both may have a window in the layers from `max_window_layers` on, which the released models do not
use. Source: transformers, `models/qwen2` and `models/qwen3`; llama.cpp, `LLM_ARCH_QWEN2`.
"""

from armillary.checkpoints.families.common import (
    GGUF_KEYS,
    HEAD_WIDTH,
    HUGGINGFACE_KEYS,
    changed,
    gguf_names,
    huggingface_names,
    only,
    pre_norm,
    windows,
    written_types,
)
from armillary.checkpoints.families.family import (
    FULL,
    SLIDING,
    Entries,
    Family,
    GGUFTable,
    HuggingFaceTable,
    LayerTable,
    Patch,
    Values,
)
from armillary.config import DecoderConfig
from armillary.strict_dict import StrictDict

_MAX_WINDOW_LAYERS = 28


def _read(entries: StrictDict, values: Values, count: int) -> list[Patch]:
    used = entries.take("use_sliding_window", bool, False)
    width = entries.take("sliding_window", int, 4096) if used else None
    entries.ignore("sliding_window")
    first = entries.take("max_window_layers", int, _MAX_WINDOW_LAYERS)
    types = entries.take_list("layer_types", str, None)
    if types is None:
        types = [SLIDING if used and i >= first else FULL for i in range(count)]
    return windows(types, width, count, values.where)


def _write(config: DecoderConfig) -> Entries:
    entries = written_types(config)
    types = entries["layer_types"]
    first = types.index(SLIDING) if SLIDING in types else len(types)
    from_there_on = SLIDING in types and FULL not in types[first:]
    return {
        **entries,
        "use_sliding_window": SLIDING in types,
        "max_window_layers": first if from_there_on else _MAX_WINDOW_LAYERS,
    }


QWEN_LAYERS = LayerTable(_read, _write)
_BIASES = {
    f"layers.{{i}}.attention.{name}.bias": f"model.layers.{{i}}.self_attn.{name}_proj.bias"
    for name in "qkv"
}
_GGUF_BIASES = {ours: f"blk.{{i}}.attn_{ours.split('.')[3]}.bias" for ours in _BIASES}

QWEN2 = Family(
    name="qwen2",
    template=pre_norm(attention={"qkv_bias": True}),
    huggingface=HuggingFaceTable(
        architecture="Qwen2ForCausalLM",
        model_type="qwen2",
        keys=changed(
            HUGGINGFACE_KEYS,
            without={"attention_bias", "mlp_bias", "head_dim"},
            max_position_embeddings=32768,
            num_key_value_heads=32,
        ),
        derived=(HEAD_WIDTH,),
        layers=QWEN_LAYERS,
        fixed={"use_mrope": False},
        tensors=only(huggingface_names(), ".bias") | _BIASES,
    ),
    gguf=GGUFTable(
        architecture="qwen2",
        keys=GGUF_KEYS,
        tensors=only(gguf_names(), ".bias") | _GGUF_BIASES,
    ),
)

QWEN3_NORMS = {
    f"layers.{{i}}.attention.{name}_norm.weight": f"model.layers.{{i}}.self_attn.{name}_norm.weight"
    for name in "qk"
}
QWEN3_GGUF_NORMS = {
    f"layers.{{i}}.attention.{name}_norm.weight": f"blk.{{i}}.attn_{name}_norm.weight"
    for name in "qk"
}

QWEN3 = Family(
    name="qwen3",
    template=pre_norm(attention={"qk_norm": {"kind": "rms"}}),
    huggingface=HuggingFaceTable(
        architecture="Qwen3ForCausalLM",
        model_type="qwen3",
        keys=changed(
            HUGGINGFACE_KEYS,
            without={"mlp_bias"},
            max_position_embeddings=32768,
            num_key_value_heads=32,
            head_dim=128,
        ),
        layers=QWEN_LAYERS,
        tensors=only(huggingface_names(), "feedforward.gate.bias", "up.bias", "down.bias")
        | QWEN3_NORMS,
    ),
    gguf=GGUFTable(
        architecture="qwen3",
        keys=GGUF_KEYS,
        tensors=only(gguf_names(), ".bias") | QWEN3_GGUF_NORMS,
    ),
)
