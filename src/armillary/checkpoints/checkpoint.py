"""What a checkpoint of any format is read into."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from armillary.checkpoints.tensors import StoredTensor
from armillary.config import DecoderConfig

if TYPE_CHECKING:
    from armillary.tokenizer import Tokenizer


@dataclass(frozen=True)
class Checkpoint:
    """A decoder's configuration and its weights where they lie.

    tensors     our parameter name → stored tensor, laid out as the configuration says
    generation  what the file suggests, where it does: `bos_token_id`, `eos_token_id` (a tuple),
                `pad_token_id`, `temperature`, `top_k`, `top_p`, `min_p`, `repetition_penalty`
    format      "huggingface", "gguf", "meta" or "armillary"
    family      the name of the family whose table the files were read by, None for our own format
    notices     one line each for what a person may want to know: defaults used, files passed over
    """

    config: DecoderConfig
    tensors: dict[str, StoredTensor]
    tokenizer: "Tokenizer | None"
    generation: dict[str, Any]
    source: Path
    format: str
    notices: list[str] = field(default_factory=list)
    family: str | None = None
