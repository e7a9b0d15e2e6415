"""What of a configuration the plans compute, told before a kernel is compiled or a weight read.

The lists name what is computed, never what is not. So a setting that a configuration learns after
them is missing here as long as it says anything: at its default it means what a file without it
means, and with any other value there is no kernel for it until `plan.py` and these lists say so.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from enum import Enum
from itertools import groupby

from pydantic import BaseModel

from armillary.config import (
    AttentionConfig,
    DecoderConfig,
    FeedForwardConfig,
    LatentConfig,
    LayerConfig,
    MixtureConfig,
    NormConfig,
    RotaryConfig,
    RouterConfig,
)
from armillary.errors import UserError


class Every(Enum):
    """Settings of which every value is computed, by what stands in them."""

    NUMBER = "a number, a truth value or None"
    PART = "configurations, which have lists of their own, or None"
    RULE = "a rule of rotary scaling: it owns its mathematics, of which the engine asks the results"


Computed = Every | Collection[str | None]

COMPUTED: Mapping[type[BaseModel], Mapping[str, Computed]] = {
    DecoderConfig: {
        "vocab_size": Every.NUMBER,
        "d_model": Every.NUMBER,
        "max_positions": Every.NUMBER,
        "layers": Every.PART,
        "final_norm": Every.PART,
        "position_table": (None, "sinusoidal", "learned"),
        "tie_head": Every.NUMBER,
        "head_bias": Every.NUMBER,
        "embedding_scale": Every.NUMBER,
        "logit_scale": Every.NUMBER,
        "final_soft_cap": Every.NUMBER,
        "input_dropout": Every.NUMBER,
    },
    LayerConfig: {
        "attention": Every.PART,
        "feedforward": Every.PART,
        "norm": Every.PART,
        "norm_placement": ("pre", "post", "sandwich"),
        "residual": ("sequential", "parallel", "parallel_shared_norm"),
        "residual_scale": Every.NUMBER,
        "dropout": Every.NUMBER,
    },
    AttentionConfig: {
        "n_heads": Every.NUMBER,
        "n_kv_heads": Every.NUMBER,
        "d_head": Every.NUMBER,
        "rotary": Every.PART,
        "qkv_bias": Every.NUMBER,
        "out_bias": Every.NUMBER,
        "qk_norm": Every.PART,
        "qk_norm_over": ("head", "head_own_weights", "all_heads"),
        "window": Every.NUMBER,
        "soft_cap": Every.NUMBER,
        "sinks": Every.NUMBER,
        "scale": Every.NUMBER,
        "latent": Every.PART,
        "dropout": Every.NUMBER,
    },
    LatentConfig: {
        "kv_rank": Every.NUMBER,
        "q_rank": Every.NUMBER,
        "d_rope": Every.NUMBER,
        "d_value": Every.NUMBER,
        "norm": Every.PART,
    },
    FeedForwardConfig: {
        "kind": ("glu", "mlp"),
        "d_ff": Every.NUMBER,
        "activation": (
            "silu",
            "gelu",
            "gelu_tanh",
            "quick_gelu",
            "relu",
            "sigmoid",
            "identity",
        ),
        "bias": Every.NUMBER,
        "fused": Every.NUMBER,
        "limit": Every.NUMBER,
        "up_offset": Every.NUMBER,
        "dropout": Every.NUMBER,
    },
    MixtureConfig: {
        "kind": ("moe",),
        "n_experts": Every.NUMBER,
        "top_k": Every.NUMBER,
        "expert": Every.PART,
        "router": Every.PART,
        "shared": Every.PART,
        "shared_gate": Every.NUMBER,
    },
    RouterConfig: {
        "score": ("softmax", "sigmoid"),
        "normalise": Every.NUMBER,
        "scale": Every.NUMBER,
        "n_groups": Every.NUMBER,
        "top_groups": Every.NUMBER,
        "bias": Every.NUMBER,
        "selection_bias": Every.NUMBER,
    },
    NormConfig: {
        "kind": ("rms", "layer"),
        "eps": Every.NUMBER,
        "offset": Every.NUMBER,
        "bias": Every.NUMBER,
        "cast_before_weight": Every.NUMBER,
    },
    RotaryConfig: {
        "d_rotary": Every.NUMBER,
        "base": Every.NUMBER,
        "layout": ("half_split", "interleaved"),
        "scaling": Every.RULE,
    },
}


class NoKernelError(UserError):
    """A decoder has parts that the engine cannot compute; the text names them, with no remedy."""


def check_computed(config: DecoderConfig) -> None:
    """Raise NoKernelError, naming every setting and its layers, for what no plan computes."""
    missing = list(_missing(config))
    if missing:
        verb = "has" if len(missing) == 1 else "have"
        raise NoKernelError(f"{'; '.join(missing)} {verb} no kernel in the numba engine")


def _missing(part: BaseModel, path: str = "") -> Iterator[str]:
    """The paths of settings that are not computed."""
    # A class that derives from a listed one may mean anything by the settings that it inherits.
    computed = COMPUTED.get(type(part))
    if computed is None:
        yield f"{path or 'the decoder'} ({type(part).__name__})"
        return
    for name, about in type(part).model_fields.items():
        value, here = getattr(part, name), f"{path}.{name}" if path else name
        if name not in computed:
            if about.is_required() or value != about.get_default(call_default_factory=True):
                yield here
        elif computed[name] is Every.PART and isinstance(value, tuple):
            yield from _of_layers(value)
        elif computed[name] is Every.PART and isinstance(value, BaseModel):
            yield from _missing(value, here)
        elif not _is_among(value, computed[name]):
            yield f"{here} {value}"


def _of_layers(layers: Sequence[BaseModel]) -> Iterator[str]:
    """What layers miss; those that follow each other and miss the same are told together."""
    missing = [(number, tuple(_missing(layer))) for number, layer in enumerate(layers)]
    for what, run in groupby(missing, key=lambda entry: entry[1]):
        numbers = [number for number, _ in run]
        where = f"layer {numbers[0]}" if len(numbers) == 1 else f"layers {numbers[0]}-{numbers[-1]}"
        if what:
            yield f"{where}: {', '.join(what)}"


def _is_among(value: object, computed: Computed) -> bool:
    if computed is Every.RULE:
        return True
    if isinstance(computed, Every):
        return value is None or (computed is Every.NUMBER and isinstance(value, bool | int | float))
    return value in computed
