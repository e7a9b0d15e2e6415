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
from armillary.checkpoints.families import Family
from armillary.checkpoints.huggingface import family_for
from armillary.checkpoints.tensors import StoredTensor, to_write
from armillary.diagnosis.frequencies import frequencies_at, rotary_groups
from armillary.errors import CheckpointError, UserError
from armillary.extension.rules import Extension, RuleName, RuleOptions, extend, kept_notices
from armillary.rope_scaling import NTK, DynamicNTK

Format = Literal["auto", "huggingface", "armillary"]

_TOLERANCE = 1e-12  # the rounding of a base or a factor that is written as a decimal
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
    lengths = (checkpoint.config.max_positions, to)
    return write_extended(checkpoint, extension, out, lengths=lengths, format=format, dtype=dtype)


def write_extended(
    checkpoint: Checkpoint,
    extension: Extension,
    out: Path,
    *,
    lengths: tuple[int, ...],
    format: Format = "auto",
    dtype: str | None = None,
) -> Applied:
    """Write a checkpoint's weights with the configuration of an extension, and compare as `apply`.

    Frequencies are compared for texts of the `lengths`. Raises as `apply`.
    """
    tensors = [to_write(tensor, _encoding(tensor, dtype)) for tensor in checkpoint.tensors.values()]
    chosen, notices = _family_or_own(extension, format, checkpoint.family)
    parts = (out, extension.config, tensors, checkpoint.tokenizer, checkpoint.generation)
    if chosen is None:
        save_armillary(*parts)
    else:
        write_huggingface(*parts, family=chosen)
    verified = verify(out, extension, lengths=lengths)
    return Applied(
        path=out,
        format="armillary" if chosen is None else "huggingface",
        extension=extension,
        verified=verified,
        notices=(
            *checkpoint.notices,
            *kept_notices(extension.kept),
            *extension.notices,
            *notices,
        ),
    )


def verify(out: Path, extension: Extension, lengths: tuple[int, ...]) -> tuple[Verified, ...]:
    """Read a written model's settings again and compare the frequencies of every layer as numbers.

    They are compared for texts of each of the `lengths`. Raises CheckpointError naming the layer
    whose frequencies, attention factor or window are not the planned ones.
    """
    read = open_checkpoint(out)
    planned = extension.config
    stated = planned.max_positions
    if read.format == "huggingface" and isinstance(extension.rule, DynamicNTK):
        stated = extension.rule.original_window
    if read.config.max_positions != stated:
        raise _not_as_planned(out, f"its window is {read.config.max_positions:,}, not {stated:,}")
    verified = []
    for group in rotary_groups(planned):
        largest = 0.0
        for number in group.layers:
            found = read.config.layers[number].attention
            rotary, factor = found.rotary, group.rotary.scaling.attention_factor()
            if rotary is None or rotary.d_rotary != group.rotary.d_rotary:
                raise _not_as_planned(out, f"layer {number} rotates other channels")
            if rotary.scaling.attention_factor() != factor:
                raise _not_as_planned(
                    out,
                    f"layer {number} has the attention factor "
                    f"{rotary.scaling.attention_factor():g}, not {factor:g}",
                )
            if found.window != group.window:
                raise _not_as_planned(
                    out, f"layer {number} has the window {found.window}, not {group.window}"
                )
            for length in lengths:
                wanted = frequencies_at(group.rotary, length)
                off = np.abs(frequencies_at(rotary, length) / wanted - 1).max()
                largest = max(largest, float(off))
            if largest > _TOLERANCE:
                raise _not_as_planned(
                    out,
                    f"frequencies of layer {number} are off by up to {largest:.2g} of their own",
                )
        verified.append(Verified(group.layers, group.rotary.d_rotary // 2, lengths, largest))
    return tuple(verified)


def _not_as_planned(out: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{out}: was written, but {what}; do not use it, and report this fault")


def _encoding(tensor: StoredTensor, dtype: str | None) -> str:
    if dtype is not None:
        return _ENCODINGS[dtype]
    return tensor.encoding if tensor.encoding in _ENCODINGS.values() else "F32"


def _family_or_own(
    extension: Extension, format: Format, preferred: str | None
) -> tuple[Family | None, list[str]]:
    """The family to write as, or None for our format, and what a person should hear of that."""
    if format == "armillary":
        return None, []
    if isinstance(extension.rule, DynamicNTK):
        window = extension.rule.original_window
        said = f"Hugging Face's files state the original window {window:,} for the dynamic rule"
        if format == "auto":
            return None, [f"{said}, so this is written in Armillary's format, which keeps both"]
        note = f"{said}: readers do not learn of {extension.config.max_positions:,}"
        return family_for(extension.config, preferred), [note]
    try:
        family = family_for(extension.config, preferred)
    except UserError as error:
        if format == "huggingface":
            raise
        return None, [f"written in Armillary's format: {error}"]
    if isinstance(extension.rule, NTK):
        return family, ["Hugging Face's files have no ntk: they say the larger base, and no rule"]
    return family, []
