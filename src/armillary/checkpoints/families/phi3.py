"""Phi-3, Phi-3.5 and Phi-4: q, k and v in one matrix, gate and up in another, LongRoPE.

Phi-4-mini rotates three quarters of each head. llama.cpp reads the window of its files and passes
over it. Source: transformers, `models/phi3`; llama.cpp, `src/models/phi3.cpp`.
"""

from armillary.checkpoints.families.common import (
    EVERY_LAYER,
    GGUF_KEYS,
    HEAD_WIDTH,
    HUGGINGFACE_KEYS,
    LONGROPE_FACTORS,
    QKV,
    changed,
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
from armillary.checkpoints.layouts import Rows
from armillary.config import DecoderConfig
from armillary.strict_dict import StrictDict

_SPLIT = ("attention.q.", "attention.k.", "attention.v.", "feedforward.gate.", "feedforward.up.")
_FUSED = "layers.{i}.feedforward.gate_up.weight"


def _read_gguf(entries: StrictDict, values: Values, count: int) -> list[Patch]:
    del values
    width = entries.take("attention.sliding_window", int, 0)
    return [{"attention.window": width or None}] * count


def _write_gguf(config: DecoderConfig) -> Entries:
    return {"attention.sliding_window": config.layers[0].attention.window or 0}


PHI3 = Family(
    name="phi3",
    template=pre_norm(feedforward={"fused": True}),
    huggingface=HuggingFaceTable(
        architecture="Phi3ForCausalLM",
        model_type="phi3",
        keys=changed(
            HUGGINGFACE_KEYS,
            without={"attention_bias", "mlp_bias", "head_dim"},
            more=(
                Key("resid_pdrop", float, ("layers.*.dropout",), default=0.0),
                Key("embd_pdrop", float, ("input_dropout",), default=0.0),
                Key("sliding_window", int, default=None),
            ),
            max_position_embeddings=4096,
            rms_norm_eps=1e-5,
        ),
        derived=(HEAD_WIDTH,),
        layers=EVERY_LAYER,
        rotary=RotaryKeys(partial=True, window_beside=True),
        fixed={"attention_bias": False, "mlp_bias": False, "lm_head_bias": False},
        tensors=only(huggingface_names(), ".bias", *_SPLIT)
        | {_FUSED: "model.layers.{i}.mlp.gate_up_proj.weight"},
        layouts=(Rows("model.layers.{i}.self_attn.qkv_proj.weight", QKV),),
        redundant=("model.layers.{i}.self_attn.rotary_emb.inv_freq",),
    ),
    gguf=GGUFTable(
        architecture="phi3",
        keys=GGUF_KEYS,
        layers=LayerTable(_read_gguf, _write_gguf),
        passed_over=("layers.*.attention.window",),
        divisors=LONGROPE_FACTORS,
        tensors=only(gguf_names(), ".bias", *_SPLIT) | {_FUSED: "blk.{i}.ffn_up.weight"},
        layouts=(Rows("blk.{i}.attn_qkv.weight", QKV),),
    ),
)
