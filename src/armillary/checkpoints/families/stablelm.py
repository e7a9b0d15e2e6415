"""StableLM: LayerNorm, a quarter of each head rotated; 2 12B also in parallel, each head normed.

Source: transformers, `models/stablelm`; llama.cpp, `src/models/stablelm.cpp`.
"""

from armillary.checkpoints.families.common import (
    EPS,
    GGUF_KEYS,
    HEAD_WIDTH,
    HUGGINGFACE_KEYS,
    QKV_BIAS,
    changed,
    gguf_layer_norm,
    gguf_names,
    huggingface_names,
    only,
    pre_norm,
)
from armillary.checkpoints.families.family import (
    Entries,
    Family,
    GGUFTable,
    HuggingFaceTable,
    Key,
    LayerTable,
    Patch,
    RotaryKeys,
    Values,
)
from armillary.checkpoints.layouts import HeadRows, Numbered
from armillary.config import DecoderConfig
from armillary.strict_dict import StrictDict

_HEADS = {"q": "attention.n_heads", "k": "attention.n_kv_heads"}
_NO_BIASES = ("attention.out.bias", "gate.bias", "up.bias", "down.bias")


def _patch(normed: bool, parallel: bool, eps: float) -> Patch:
    norm = {"kind": "layer", "eps": eps, "bias": False} if normed else None
    return {
        "residual": "parallel_shared_norm" if parallel else "sequential",
        "attention.qk_norm": norm,
        "attention.qk_norm_over": "head_own_weights" if normed else "head",
    }


def _read(entries: StrictDict, values: Values, count: int) -> list[Patch]:
    normed = entries.take("qk_layernorm", bool, False)
    parallel = entries.take("use_parallel_residual", bool, False)
    return [_patch(normed, parallel, values["layer_norm_eps"])] * count


def _write(config: DecoderConfig) -> Entries:
    layer = config.layers[0]
    return {
        "qk_layernorm": layer.attention.qk_norm is not None,
        "use_parallel_residual": layer.residual != "sequential",
    }


def _read_gguf(entries: StrictDict, values: Values, count: int) -> list[Patch]:
    # As llama.cpp does: it asks which tensors there are, whatever the file says.
    parallel = "blk.0.ffn_norm.weight" not in values.shapes
    entries.take("use_parallel_residual", bool, parallel)
    normed = "blk.0.attn_q_norm.weight" in values.shapes
    return [_patch(normed, parallel, values["attention.layer_norm_epsilon"])] * count


def _write_gguf(config: DecoderConfig) -> Entries:
    return {"use_parallel_residual": config.layers[0].residual != "sequential"}


STABLELM = Family(
    name="stablelm",
    template=pre_norm(norm={"kind": "layer", "bias": True}),
    huggingface=HuggingFaceTable(
        architecture="StableLmForCausalLM",
        model_type="stablelm",
        keys=changed(
            HUGGINGFACE_KEYS,
            without={"attention_bias", "mlp_bias", "head_dim", "rms_norm_eps"},
            more=(
                Key("layer_norm_eps", float, EPS, default=1e-5),
                Key("use_qkv_bias", bool, (QKV_BIAS,), default=False),
            ),
            max_position_embeddings=4096,
            num_key_value_heads=32,
        ),
        derived=(HEAD_WIDTH,),
        layers=LayerTable(_read, _write),
        rotary=RotaryKeys(partial=True, default_portion=0.25),
        fixed={"hidden_dropout": 0.0},
        tensors=only(huggingface_names(), *_NO_BIASES),
        layouts=tuple(
            Numbered(
                f"model.layers.{{i}}.self_attn.{name}_layernorm.norms.{{n}}.weight",
                (f"layers.{{i}}.attention.{name}_norm.weight",),
                count,
            )
            for name, count in _HEADS.items()
        ),
    ),
    gguf=GGUFTable(
        architecture="stablelm",
        keys=gguf_layer_norm(GGUF_KEYS),
        present={"layers.{i}.attention.q.bias": QKV_BIAS},
        layers=LayerTable(_read_gguf, _write_gguf),
        needs_head=True,
        tensors=only(gguf_names(), *_NO_BIASES),
        layouts=tuple(
            HeadRows(
                f"blk.{{i}}.attn_{name}_norm.weight",
                (f"layers.{{i}}.attention.{name}_norm.weight",),
            )
            for name in _HEADS
        ),
    ),
)
