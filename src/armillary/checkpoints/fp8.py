"""Weights of 8 bits with scales in Hugging Face directories: one for a matrix, or one for a block.

What DeepSeek, Qwen and others publish: `weight` in F8_E4M3 and beside it `weight_scale_inv` or
`weight_scale`, by which it is multiplied. Source: transformers, FineGrainedFP8Config.
"""

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from armillary.checkpoints.tensors import StoredTensor
from armillary.checkpoints.views import ScaledTensor
from armillary.errors import CheckpointError
from armillary.strict_dict import StrictDict

_SCALES = ("_scale_inv", "_scale")
_OF_ACTIVATIONS = (".input_scale", ".activation_scale", ".k_scale", ".v_scale")
# About activations, or about which weights are stored so, which their types say.
_IGNORED = (
    "activation_scheme",
    "modules_to_not_convert",
    "modules_to_convert",
    "ignored_layers",
    "dequantize",
    "scale_fmt",
)


@dataclass(frozen=True)
class FP8:
    """The blocks that have a scale of their own, rows × columns; None for whole matrices."""

    block: tuple[int, int] | None

    @classmethod
    def from_entries(cls, section: StrictDict) -> Self:
        """What `quantization_config` says of them. Raises CheckpointError."""
        section.ignore(*_IGNORED)
        kind = section.take("fmt", str, "e4m3")
        block = section.take_list("weight_block_size", int, None)
        if kind != "e4m3" or (block is not None and (len(block) != 2 or min(block) < 1)):
            raise CheckpointError(
                f"{section.where}: fmt {kind!r:.40} and weight_block_size {block}; e4m3 is read, "
                "in blocks of two sizes or with one scale for a matrix"
            )
        return cls(None if block is None else (block[0], block[1]))

    def apply(self, kept: MutableMapping[str, StoredTensor]) -> Sequence[str]:
        """Put each weight with its scales in its place; drop the scales of activations.

        Raises CheckpointError for weights without scales, and for scales of another shape.
        """
        eight_bits = [tensor for tensor in kept.values() if tensor.encoding == "F8_E4M3"]
        for tensor in eight_bits:
            name = tensor.name
            scales = [kept.pop(f"{name}{end}") for end in _SCALES if f"{name}{end}" in kept]
            if len(scales) != 1:
                raise CheckpointError(
                    f"{tensor.where}: {name} is F8_E4M3 and has {len(scales)} tensors of scales; "
                    f"one of {name}_scale_inv and {name}_scale must be there"
                )
            scale, block = scales[0].to_float32(), self.block
            if block is None or scale.size == 1:
                block, scale = (tensor.shape[0], tensor.shape[-1]), scale.reshape(1, -1)
            if not np.isfinite(scale).all():
                raise CheckpointError(f"{scales[0].where}: {scales[0].name} is not finite")
            kept[name] = ScaledTensor.of(tensor, scale, block)
        dropped = [name for name in kept if name.endswith(_OF_ACTIVATIONS)]
        for name in dropped:
            del kept[name]
        told = f"{len(eight_bits)} matrices are stored in 8 bits with scales, and read as float32"
        if dropped:
            told += f"; {len(dropped)} scales of activations are left out"
        return [told]
