"""The families of models that are known. To add one, add its file and its line here."""

from armillary.checkpoints.families.falcon import FALCON
from armillary.checkpoints.families.family import Family
from armillary.checkpoints.families.gemma import GEMMA, GEMMA2, GEMMA3
from armillary.checkpoints.families.gpt2 import GPT2
from armillary.checkpoints.families.granite import GRANITE
from armillary.checkpoints.families.llama import LLAMA
from armillary.checkpoints.families.mistral import MISTRAL
from armillary.checkpoints.families.neox import NEOX
from armillary.checkpoints.families.olmo2 import OLMO2
from armillary.checkpoints.families.phi3 import PHI3
from armillary.checkpoints.families.qwen import QWEN2, QWEN3
from armillary.checkpoints.families.smollm3 import SMOLLM3
from armillary.checkpoints.families.stablelm import STABLELM

# A decoder that several can express is written as the first of them.
FAMILIES: tuple[Family, ...] = (
    LLAMA,
    MISTRAL,
    QWEN2,
    QWEN3,
    GEMMA,
    GEMMA2,
    GEMMA3,
    PHI3,
    OLMO2,
    SMOLLM3,
    GRANITE,
    STABLELM,
    NEOX,
    GPT2,
    FALCON,
)

__all__ = ["FAMILIES", "Family"]
