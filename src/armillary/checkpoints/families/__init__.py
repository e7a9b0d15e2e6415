"""The families of models that are known. To add one, add its file and its line here."""

from armillary.checkpoints.families.family import Family
from armillary.checkpoints.families.llama import LLAMA

FAMILIES: tuple[Family, ...] = (LLAMA,)

__all__ = ["FAMILIES", "Family"]
