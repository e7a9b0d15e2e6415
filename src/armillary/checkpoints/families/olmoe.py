"""OLMoE: 64 small experts, of which 8 are picked, and norms over all heads of queries and keys.

Experts count by their probabilities as they are. llama.cpp has no fewer heads of keys than
of queries in it. Sources: transformers, `models/olmoe`; llama.cpp, `src/models/olmoe.cpp`.
"""

from armillary.checkpoints.families.common import (
    HEAD_WIDTH,
    gguf_names,
    huggingface_names,
    names,
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
from armillary.checkpoints.families.qwen import QWEN3_GGUF_NORMS
from armillary.config import DecoderConfig
from armillary.errors import ConfigError
from armillary.strict_dict import StrictDict

_WITHOUT = ("norm1.bias", "norm2.bias", "norm.bias", "feedforward.")


def _check_gguf(entries: StrictDict, values: Values, count: int) -> list[Patch]:
    """llama.cpp reads the norm of keys as wide as the model."""
    heads, shared = values["attention.head_count"], values["attention.head_count_kv"]
    if shared != heads:
        raise ConfigError(
            f"{entries.where}: attention.head_count_kv {shared} of {heads} heads: llama.cpp reads "
            "olmoe with as many heads of keys as of queries; write a directory"
        )
    if heads * values["attention.key_length"] != values["embedding_length"]:
        raise ConfigError(
            f"{entries.where}: attention.key_length {values['attention.key_length']}: llama.cpp "
            "reads olmoe with heads that are as wide as the model together; write a directory"
        )
    return [{}] * count


def _no_entries(config: DecoderConfig) -> Entries:
    del config
    return {}


OLMOE = Family(
    name="olmoe",
    template=with_experts(
        pre_norm(attention={"qk_norm": {"kind": "rms"}, "qk_norm_over": "all_heads"})
    ),
    huggingface=HuggingFaceTable(
        architecture="OlmoeForCausalLM",
        model_type="olmoe",
        keys=expert_keys(
            d_ff="intermediate_size",
            n_experts=number("num_experts"),
            without={"head_dim"},
            more=(Key("norm_topk_prob", bool, (NORMALISE,), default=False),),
            max_position_embeddings=4096,
            rms_norm_eps=1e-5,
        ),
        derived=(HEAD_WIDTH,),
        ignored=TRAINING_ONLY,
        tensors=only(huggingface_names(), *_WITHOUT)
        | {"layers.{i}.feedforward.router.weight": "model.layers.{i}.mlp.gate.weight"}
        | names(
            "layers.{i}.",
            "model.layers.{i}.self_attn.",
            {"attention.q_norm": "q_norm", "attention.k_norm": "k_norm"},
            ("weight",),
        ),
        layouts=numbered_experts("mlp.experts", gate="gate_proj", up="up_proj", down="down_proj"),
    ),
    gguf=GGUFTable(
        architecture="olmoe",
        keys=gguf_expert_keys(d_ff="feed_forward_length"),
        derived=(Derived((NORMALISE,), lambda _: False),),
        layers=LayerTable(_check_gguf, _no_entries),
        needs_head=True,
        tensors=only(gguf_names(), ".bias", "feedforward.")
        | only(GGUF_EXPERTS, "shared", "bias")
        | QWEN3_GGUF_NORMS,
    ),
)
