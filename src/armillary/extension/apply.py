"""A model directory whose configuration carries a rule, written from a checkpoint and read back.

Weights go from the mapped file to the new one by blocks of rows; no model is built.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from armillary.checkpoints import (
    Checkpoint,
    open_checkpoint,
    save_armillary,
    write_huggingface,
)
from armillary.checkpoints.families import FAMILIES, Family
from armillary.checkpoints.tensors import TensorToWrite, to_write
from armillary.config import DecoderConfig
from armillary.diagnosis.frequencies import frequencies_at, rotary_groups
from armillary.errors import CheckpointError, UserError
from armillary.extension.rules import Extension, RuleName, RuleOptions, extend
from armillary.rope_scaling import NTK, DynamicNTK

Format = Literal["auto", "huggingface", "armillary"]

_ENCODINGS = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "float64": "F64"}


@dataclass(frozen=True)
class Verified:
    """What reading a written model again has shown of layers that rotate alike.

    `difference` is the largest by which a frequency is off, relative to the planned one, over
    texts of the `lengths`.
    """

    layers: tuple[int, ...]
    pairs: int
    lengths: tuple[int, ...]
    difference: float


@dataclass(frozen=True)
class Applied:
    """A model that was written and read back."""

    path: Path
    format: str
    extension: Extension
    verified: tuple[Verified, ...]
    notices: tuple[str, ...]


def apply(
    checkpoint: Checkpoint,
    out: Path,
    *,
    to: int,
    rule: RuleName,
    options: RuleOptions | None = None,
    format: Format = "auto",
    dtype: str | None = None,
) -> Applied:
    """Write the model with a window of `to` and a rule, and compare what is read back.

    `format` auto is Hugging Face's where a family can say all of it, else ours. `dtype` is the
    number type of all weights; None keeps plain numbers as they are, and writes what is stored in
    blocks (a quantised GGUF) as float32, which holds it exactly.
    Raises ConfigError as `extend` does and for a format that cannot say it; CheckpointError when
    what was written does not read back as planned; UserError when `out` cannot be written.
    """
    if out.exists() and checkpoint.source.exists() and out.samefile(checkpoint.source):
        raise UserError(f"{out}: is the model itself; name another directory")
    extension = extend(checkpoint.config, to, rule, options)
    tensors = [_stored_or(dtype, tensor) for tensor in checkpoint.tensors.values()]
    chosen, notices = _format(extension, format)
    if chosen is None:
        save_armillary(
            out, extension.config, tensors, checkpoint.tokenizer, checkpoint.generation
        )
    else:
        write_huggingface(
            out,
            extension.config,
            tensors,
            checkpoint.tokenizer,
            checkpoint.generation,
            family=chosen,
        )
    verified = verify(out, extension.config)
    return Applied(
        path=out,
        format="armillary" if chosen is None else "huggingface",
        extension=extension,
        verified=verified,
        notices=(*extension.notices, *notices),
    )
