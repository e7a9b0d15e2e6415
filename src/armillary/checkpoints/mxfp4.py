"""Stacks of experts in MXFP4 in Hugging Face directories, as gpt-oss is published.

In the place of a stack NAME (E, in, out) there are `NAME_blocks` (E, out, in / 32, 16) and
`NAME_scales` (E, out, in / 32), bytes both: 4-bit numbers (E2M1), and an exponent (E8M0) for 32 of
them. Source: Open Compute Project, Microscaling Formats 1.0, §5; transformers, Mxfp4Config.
"""

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from typing import Self

from armillary.checkpoints.tensors import StoredTensor
from armillary.checkpoints.views import PackedStack
from armillary.errors import CheckpointError
from armillary.strict_dict import StrictDict

_BLOCKS, _SCALES = "_blocks", "_scales"


@dataclass(frozen=True)
class MXFP4:
    """Which stacks are stored so the names of their tensors say."""

    @classmethod
    def from_entries(cls, section: StrictDict) -> Self:
        """Nothing of `quantization_config` but the method's name has a bearing on how to read."""
        section.ignore("modules_to_not_convert", "dequantize")
        return cls()

    def apply(self, kept: MutableMapping[str, StoredTensor]) -> Sequence[str]:
        """Put each stack in the place of its two tensors; raise CheckpointError where one lacks."""
        packed = [name for name in kept if name.endswith(_BLOCKS)]
        for name in packed:
            stack = name.removesuffix(_BLOCKS)
            blocks, scales = kept.pop(name), kept.pop(stack + _SCALES, None)
            if scales is None or stack in kept:
                found = f"{stack} as well" if scales is not None else f"no {stack}{_SCALES}"
                raise CheckpointError(f"{blocks.where}: there is {name}, and {found}")
            kept[stack] = PackedStack.of(blocks, scales)
        return [f"{len(packed)} stacks of experts are stored in MXFP4; bfloat16 holds them exactly"]
