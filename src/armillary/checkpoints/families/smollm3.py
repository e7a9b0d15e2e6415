"""SmolLM3: Llama in which every fourth layer does not rotate.

Source: transformers, `models/smollm3`; llama.cpp, `src/models/smollm3.cpp`.
"""

from armillary.checkpoints.families.common import (
    GGUF_KEYS,
    HEAD_WIDTH,
    HUGGINGFACE_KEYS,
    changed,
    gguf_interleaved,
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
    RotaryKeys,
    Values,
)
from armillary.config import DecoderConfig
from armillary.errors import ConfigError
from armillary.strict_dict import StrictDict

_PERIOD = 4


def _read(entries: StrictDict, values: Values, count: int) -> list[Patch]:
    period = entries.take("no_rope_layer_interval", int, _PERIOD)
    rotates = entries.take_list("no_rope_layers", int, None)
    if rotates is None:
        rotates = [int((i + 1) % max(1, period) != 0) for i in range(count)]
    if len(rotates) != count:
        raise ConfigError(
            f"{entries.where}: no_rope_layers has {len(rotates)} entries for {count} layers"
        )
    used = entries.take("use_sliding_window", bool, False)
    width = entries.take_optional("sliding_window", int) if used else None
    entries.ignore("sliding_window")
    types = entries.take_list("layer_types", str, None)
    if types is None:
        types = [FULL if width is None or turns else SLIDING for turns in rotates]
    patches = windows(types, width, count, values.where)
    return [
        {**patch, "attention.rotary": FULL if turns else None}
        for patch, turns in zip(patches, rotates, strict=True)
    ]


def _write(config: DecoderConfig) -> Entries:
    entries = written_types(config)
    return {
        **entries,
        "use_sliding_window": entries["sliding_window"] is not None,
        "no_rope_layers": [int(layer.attention.rotary is not None) for layer in config.layers],
        "no_rope_layer_interval": _PERIOD,
    }


def _read_gguf(entries: StrictDict, values: Values, count: int) -> list[Patch]:
    del entries, values
    return [{"attention.rotary": FULL if (i + 1) % _PERIOD else None} for i in range(count)]


SMOLLM3 = Family(
    name="smollm3",
    template=pre_norm(),
    huggingface=HuggingFaceTable(
        architecture="SmolLM3ForCausalLM",
        model_type="smollm3",
        keys=changed(
            HUGGINGFACE_KEYS,
            without={"head_dim"},
            max_position_embeddings=32768,
            num_key_value_heads=4,
            tie_word_embeddings=True,
        ),
        derived=(HEAD_WIDTH,),
        layers=LayerTable(_read, _write),
        rotary=RotaryKeys(default_base=2e6),
        # Of Llama's and Qwen's code, and without effect in this one.
        ignored=frozenset({"max_window_layers", "pretraining_tp"}),
        tensors=only(huggingface_names(), "norm1.bias", "norm2.bias", "final_norm.bias"),
    ),
    gguf=GGUFTable(
        architecture="smollm3",
        keys=GGUF_KEYS,
        layers=LayerTable(_read_gguf, lambda _: {}),
        **gguf_interleaved(".bias"),
    ),
)
