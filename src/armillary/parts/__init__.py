"""The layers' parts, in torch; each file stands alone and knows no files and no command line.

What can be used by itself is here by name: the parts, the rules that scale rotary frequencies, and
the configurations that parts are built from.
"""

from armillary.config import AttentionConfig, FeedForwardConfig, NormConfig, RotaryConfig
from armillary.parts.attention import Attention, KeyValueStore, attend
from armillary.parts.feedforward import GLU, MLP, build_feedforward
from armillary.parts.kv_cache import KVCache
from armillary.parts.layer_store import CacheError, LayerStore
from armillary.parts.mask import Visibility, counted_positions, split_mask
from armillary.parts.norm import LayerNorm, RMSNorm, build_norm
from armillary.parts.positions import LearnedPositions, SinusoidalPositions
from armillary.parts.rotary import (
    Rotation,
    convert_layout,
    frequencies,
    rotate,
    rotation,
    rotation_under,
)
from armillary.parts.slots import Slots
from armillary.rope_scaling import (
    NTK,
    DynamicNTK,
    Llama3,
    LongRoPE,
    PositionInterpolation,
    Unscaled,
    YaRN,
)

__all__ = [
    "GLU",
    "MLP",
    "NTK",
    "Attention",
    "AttentionConfig",
    "CacheError",
    "DynamicNTK",
    "FeedForwardConfig",
    "KVCache",
    "KeyValueStore",
    "LayerNorm",
    "LayerStore",
    "LearnedPositions",
    "Llama3",
    "LongRoPE",
    "NormConfig",
    "PositionInterpolation",
    "RMSNorm",
    "RotaryConfig",
    "Rotation",
    "SinusoidalPositions",
    "Slots",
    "Unscaled",
    "Visibility",
    "YaRN",
    "attend",
    "build_feedforward",
    "build_norm",
    "convert_layout",
    "counted_positions",
    "frequencies",
    "rotate",
    "rotation",
    "rotation_under",
    "split_mask",
]
