"""Qwen3-MoE: Qwen3 with many small experts, in all layers or in some.

llama.cpp has them in all, and weighs experts by the softmax of those that are picked. Sources:
transformers, `models/qwen3_moe`; llama.cpp, `src/models/qwen3moe.cpp`.
"""

from armillary.checkpoints.families.common import (
    as_many_as,
    gguf_names,
    huggingface_names,
    only,
    pre_norm,
)
from armillary.checkpoints.families.experts import (
    GGUF_EXPERTS,
    NORMALISE,
    TRAINING_ONLY,
    expert_keys,
    gguf_expert_keys,
    number,
    numbered_experts,
    with_experts,
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
from armillary.checkpoints.families.qwen import QWEN3_GGUF_NORMS, QWEN3_NORMS
from armillary.config import DecoderConfig, FeedForwardConfig
from armillary.errors import ConfigError
from armillary.strict_dict import StrictDict


def _read_layers(entries: StrictDict, values: Values, count: int) -> list[Patch]:
    """Every `decoder_sparse_step`-th layer has experts, those of `mlp_only_layers` aside."""
    step = entries.take("decoder_sparse_step", int, 1)
    if step < 1:
        raise ConfigError(f"{entries.where}: decoder_sparse_step is {step}; it must be 1 or more")
    plain = entries.take_list("mlp_only_layers", int, [])
    window = entries.take_optional("sliding_window", int)
    slides = entries.take("use_sliding_window", bool, False)
    dense = {
        "kind": "glu",
        "d_ff": values["intermediate_size"],
        "activation": ACTIVATION.read(values["hidden_act"]),
    }
    return [
        {"attention.window": window if slides else None}
        | ({"feedforward": dense} if number in plain or (number + 1) % step else {})
        for number in range(count)
    ]


def _write_layers(config: DecoderConfig) -> Entries:
    wide = [layer.feedforward for layer in config.layers]
    plain = {n: w for n, w in enumerate(wide) if isinstance(w, FeedForwardConfig)}
    window = config.layers[0].attention.window
    return {
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(plain),
        # Of no layer, where all have experts; readers want it all the same.
        "intermediate_size": next((w.d_ff for w in plain.values()), config.d_model),
        "sliding_window": window,
        "use_sliding_window": window is not None,
    }


QWEN3_MOE = Family(
    name="qwen3-moe",
    template=with_experts(pre_norm(attention={"qk_norm": {"kind": "rms"}})),
    huggingface=HuggingFaceTable(
        architecture="Qwen3MoeForCausalLM",
        model_type="qwen3_moe",
        keys=(
            # What newer files have in the place of num_experts.
            Key("num_local_experts", int, default=None),
            *expert_keys(
                d_ff="moe_intermediate_size",
                n_experts=number("num_experts", default=as_many_as("num_local_experts")),
                more=(
                    Key("intermediate_size", int, default=6144),
                    Key("norm_topk_prob", bool, (NORMALISE,), default=False),
                ),
                max_position_embeddings=32768,
                num_key_value_heads=4,
            ),
        ),
        layers=LayerTable(_read_layers, _write_layers),
        ignored=TRAINING_ONLY | {"max_window_layers"},
        tensors=only(huggingface_names(), "gate.bias", "up.bias", "down.bias")
        | {"layers.{i}.feedforward.router.weight": "model.layers.{i}.mlp.gate.weight"}
        | QWEN3_NORMS,
        layouts=numbered_experts("mlp.experts", gate="gate_proj", up="up_proj", down="down_proj"),
    ),
    gguf=GGUFTable(
        architecture="qwen3moe",
        keys=gguf_expert_keys(),
        derived=(Derived((NORMALISE,), lambda _: True),),
        # Of dense layers, which no file has.
        ignored=frozenset({"feed_forward_length"}),
        tensors=only(gguf_names(), ".bias", "feedforward.")
        | only(GGUF_EXPERTS, "shared", "bias")
        | QWEN3_GGUF_NORMS,
    ),
)
