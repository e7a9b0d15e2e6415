"""The families of models that are known. To add one, add its file and its line here."""

from armillary.checkpoints.families.family import Family
from armillary.checkpoints.families.llama import LLAMA
from armillary.checkpoints.families.mixtral import MIXTRAL
from armillary.checkpoints.families.olmoe import OLMOE
from armillary.checkpoints.families.qwen3_moe import QWEN3_MOE

FAMILIES: tuple[Family, ...] = (LLAMA, MIXTRAL, QWEN3_MOE, OLMOE)

__all__ = ["FAMILIES", "Family"]
