"""A checkpoint → a GGUF file: the other way of gguf.py, by the same tables.

What is written is read again before any weight is, and compared with what was meant.
"""

import functools
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from armillary.checkpoints.checkpoint import Checkpoint
from armillary.checkpoints.families import FAMILIES, Family
from armillary.checkpoints.families.family import GGUFTable, Key, entries_of, first, taken
from armillary.checkpoints.gguf import SAMPLING, read_config, table_of
from armillary.checkpoints.gguf_file import Encoded, Value, read_gguf_file, write_gguf_file
from armillary.checkpoints.huggingface import first_difference
from armillary.checkpoints.layouts import places, write_tensors
from armillary.checkpoints.rotary_keys import LOCAL_BASE, shortest_float, write_gguf_rotary
from armillary.checkpoints.tensors import TensorToWrite, telling, to_write
from armillary.config import DecoderConfig, RotaryConfig
from armillary.errors import ConfigError, UserError
from armillary.files import Opener, write_whole
from armillary.rope_scaling import YaRN

Metadata = dict[str, Value | Encoded]
Factors = dict[str, NDArray[np.float32]]

# What llama.cpp calls a file by the encoding of most of its matrices (`llama_ftype`).
_FILE_TYPES = {
    encoding: number
    for encodings, numbers in (
        (("F32", "F16", "BF16"), (0, 1, 32)),
        (("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"), (2, 3, 8, 9, 7)),
        (("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "MXFP4"), (10, 12, 15, 17, 18, 38)),
    )
    for encoding, number in zip(encodings, numbers, strict=True)
}
_OTHER_TYPE = 1024  # "guessed"
_QUANTIZATION_VERSION = 2
_OURS = frozenset(
    f"general.{key}"
    for key in ("architecture", "type", "file_type", "quantization_version", "alignment")
)
# float32, in which the format holds a base, a factor or a divisor.
_TOLERANCE = 1e-6


def write_gguf(
    path: Path,
    checkpoint: Checkpoint,
    encodings: Mapping[str, str],
    *,
    family: Family | None = None,
    progress: Callable[[int], None] = lambda _: None,
    file: Opener = write_whole,
) -> list[str]:
    """Write a file that llama.cpp reads, atomically and by blocks of rows.

    `encodings` has one for each parameter. Written as of `family`, else of the checkpoint's own, or
    of the first that can express the configuration. Of a checkpoint that is a GGUF file all that
    describes the file and the tokenizer is carried over as it is. `progress` is called with the
    bytes of each block that was written; `file` opens it. Returns notices about what the format
    leaves out.
    Raises ConfigError and CheckpointError for what it has no place for, before the file is begun;
    UserError when it cannot be written.
    """
    notices: list[str] = []
    config = checkpoint.config
    family = gguf_family_for(config, checkpoint.family) if family is None else family
    entries, factors = _architecture(config, family, notices)
    _check_read_back(entries, factors, config, family)
    carried = read_gguf_file(checkpoint.source).encoded if checkpoint.format == "gguf" else None
    metadata = {
        **_general(checkpoint, encodings, family, carried),
        **entries,
        **_tokenizer(checkpoint, carried, notices),
    }
    ours = [to_write(tensor, encodings[name]) for name, tensor in checkpoint.tensors.items()]
    where = f"GGUF's {family.name} family"
    theirs = write_tensors(config, table_of(family).all_layouts(), ours, where)
    divisors = [TensorToWrite(name, "F32", x.shape, [x]) for name, x in factors.items()]
    told = [telling(each, progress) for each in theirs]
    write_gguf_file(path, metadata, divisors + told, file=file)
    return notices


def gguf_family_for(config: DecoderConfig, preferred: str | None = None) -> Family:
    """The family called `preferred` where GGUF can express it so, else the first that can.

    Raises UserError naming what the nearest lacks: the preferred one, or the first.
    """
    refusal: UserError | None = None
    for family in sorted(FAMILIES, key=lambda family: family.name != preferred):
        try:
            _check_read_back(*_architecture(config, family, []), config, family)
        except UserError as error:
            refusal = refusal or error
        else:
            return family
    assert refusal is not None
    raise refusal


def _architecture(
    config: DecoderConfig, family: Family, notices: list[str]
) -> tuple[Metadata, Factors]:
    """The keys under the architecture, and the tensors that belong to the rotary settings."""
    table = table_of(family)
    entries: dict[str, Value] = {"block_count": config.n_layers}
    decoder = entries_of(config)
    for key in table.keys:
        value = _written(key, decoder)
        if value is not None:
            entries[key.name] = value
    for path in table.passed_over:
        value = first(decoder, path)
        if value is not None:
            what = f"{path.rpartition('.')[2]} {value}"
            notices.append(f"llama.cpp passes over the {what} of {table.architecture}")
    if table.layers is not None:
        entries |= table.layers.write(config)
    keys, factors = _rotary(config, table, family.name, notices)
    prefix = f"{table.architecture}."
    # What the table writes of rotation says more than the rule by itself.
    return {prefix + key: value for key, value in (keys | entries).items()}, factors


def _written(key: Key, decoder: Mapping[str, Any]) -> Value | None:
    """What a key says: one value, or one for each layer where they differ and it may."""
    found = taken(decoder, key.to[0]) if key.to else []
    if isinstance(key.kind, tuple) and list in key.kind and len(set(found)) > 1:
        return [key.form.write(value) for value in found]
    value = next((value for value in found if value is not None), None)
    written: Value | None = None if value is None else key.form.write(value)
    # The format tells whole numbers from others, and its readers refuse one for the other.
    return float(written) if key.kind is float and isinstance(written, int) else written


def _rotary(
    config: DecoderConfig, table: GGUFTable, name: str, notices: list[str]
) -> tuple[dict[str, Value], Factors]:
    rotaries = {
        (table.local_base is not None and layer.attention.window is not None): rotary
        for layer in reversed(config.layers)
        if (rotary := layer.attention.rotary) is not None
    }
    if bool(rotaries) != table.rotates:
        without = "without" if table.rotates else "with"
        raise ConfigError(f"the {name} family cannot express layers {without} rotation")
    if table.needs_head and config.tie_head:
        raise ConfigError(
            f"llama.cpp reads no {table.architecture} without a head of its own, and here it is "
            "the embedding; write a directory"
        )
    if not rotaries:
        return {}, {}
    rotary = rotaries.get(False) or rotaries[True]
    if isinstance(rotary.scaling, YaRN) and (
        (rotary.scaling.beta_fast, rotary.scaling.beta_slow) != (32.0, 1.0)
    ):
        notices.append(
            f"llama.cpp takes yarn's beta_fast and beta_slow to be 32 and 1 in the {name} "
            "family, whatever the file says"
        )
    notices += _rounding(rotary, table)
    keys, factors = write_gguf_rotary(rotary, config.max_positions, rounds_yarn=table.rounds_yarn)
    if not factors.keys() <= table.divisors:
        raise ConfigError(
            f"llama.cpp reads no {', '.join(factors)} in {table.architecture}, which the rule "
            f"{rotary.scaling.kind} needs; write a directory"
        )
    if table.local_base is not None and isinstance(rotary.scaling, YaRN):
        raise ConfigError(
            f"llama.cpp scales all layers of {table.architecture} under yarn, and only some of "
            "this decoder's are; write a directory"
        )
    entries: dict[str, Value] = {**keys}
    if True in rotaries:
        entries[LOCAL_BASE] = rotaries[True].base
    return entries, factors


def _rounding(rotary: RotaryConfig, table: GGUFTable) -> list[str]:
    """A notice where llama.cpp (`ggml_rope_yarn_corr_dims`) rounds what the model does not."""
    rule = rotary.scaling
    if not isinstance(rule, YaRN) or rule.truncate or table.rounds_yarn:
        return []
    exact, rounded = (
        each.frequencies(rotary.base, rotary.d_rotary, rule.original_window)
        for each in (rule, replace(rule, truncate=True))
    )
    off = float(np.abs(rounded / exact - 1).max())
    if off < _TOLERANCE:
        return []
    return [
        f"llama.cpp rounds yarn's bounds to whole pairs of channels, this model does not: there "
        f"its frequencies are off by up to {off:.0%}"
    ]


def _check_read_back(
    entries: Metadata, factors: Factors, config: DecoderConfig, family: Family
) -> None:
    """Read the keys again and compare the decoders.

    Numbers are compared as float32 holds them; interleaved rotation is stored as such and comes
    back in the other layout.
    """
    where = f"GGUF's {family.name} family"
    placed = places(config, table_of(family).all_layouts(), where)
    shapes = {name: shape for place in placed for name, shape in place.theirs.items()}
    as_read = {key: _in_float32(value) for key, value in entries.items()}
    again = read_config(as_read, family, shapes, factors, where, [])
    ours, theirs = _compared(config), _compared(again)
    if ours != theirs:
        what = first_difference(ours, theirs)
        raise ConfigError(f"{where} cannot express this decoder's {what}; write a directory")
    for i, (one, other) in enumerate(zip(config.layers, again.layers, strict=True)):
        scale = one.attention.score_scale
        if not math.isclose(scale, other.attention.score_scale, rel_tol=_TOLERANCE):
            raise ConfigError(
                f"{where} cannot express this decoder's layers.{i}.attention.scale {scale:g}; "
                "write a directory"
            )
        if not _same_rotation(one.attention.rotary, other.attention.rotary, config.max_positions):
            raise ConfigError(
                f"{where} cannot express this decoder's rotation, layer {i}; write a directory"
            )


def _compared(config: DecoderConfig) -> dict[str, Any]:
    """What must be the same: all but rotation and scale, compared as numbers, and dropout."""
    entries = entries_of(config) | {"input_dropout": 0.0}
    for layer in entries["layers"]:
        layer["dropout"] = layer["attention"]["dropout"] = layer["feedforward"]["dropout"] = 0.0
        for part in ("expert", "shared"):
            if layer["feedforward"].get(part) is not None:
                layer["feedforward"][part]["dropout"] = 0.0
        del layer["attention"]["rotary"], layer["attention"]["scale"]
    held: dict[str, Any] = _as_held(entries)
    return held


def _as_held(entries: Any) -> Any:
    """Entries with numbers as the format holds them, and as they are meant."""
    if isinstance(entries, dict):
        return {key: _as_held(value) for key, value in entries.items()}
    if isinstance(entries, list):
        return [_as_held(value) for value in entries]
    return shortest_float(entries) if isinstance(entries, float) else entries


def _in_float32(value: Value | Encoded) -> object:
    return float(np.float32(value)) if isinstance(value, float) else value


def _same_rotation(one: RotaryConfig | None, other: RotaryConfig | None, window: int) -> bool:
    if one is None or other is None or one.d_rotary != other.d_rotary:
        return one is other
    close = functools.partial(np.allclose, rtol=_TOLERANCE, atol=0.0)
    return close(one.scaling.attention_factor(), other.scaling.attention_factor()) and all(
        close(
            one.scaling.frequencies(one.base, one.d_rotary, length),
            other.scaling.frequencies(other.base, other.d_rotary, length),
        )
        for length in (1, window // 2, window)
    )


def _general(
    checkpoint: Checkpoint,
    encodings: Mapping[str, str],
    family: Family,
    carried: Mapping[str, Encoded] | None,
) -> Metadata:
    matrices = [encodings[name] for name, each in checkpoint.tensors.items() if len(each.shape) > 1]
    metadata: Metadata = {
        "general.architecture": table_of(family).architecture,
        "general.type": "model",
        "general.file_type": _FILE_TYPES.get(Counter(matrices).most_common(1)[0][0], _OTHER_TYPE),
        "general.quantization_version": _QUANTIZATION_VERSION,
    }
    if carried is not None:
        others = _under("general.", carried)
        return metadata | {key: others[key] for key in others if key not in _OURS}
    metadata["general.name"] = checkpoint.source.resolve().name
    for name, (key, _) in SAMPLING.items():
        if name in checkpoint.generation:
            metadata[f"general.sampling.{key}"] = checkpoint.generation[name]
    return metadata


def _tokenizer(
    checkpoint: Checkpoint, carried: Mapping[str, Encoded] | None, notices: list[str]
) -> Metadata:
    if carried is not None:
        return _under("tokenizer.", carried)
    if checkpoint.tokenizer is None:
        notices.append("there is no tokenizer in the model; engines need one")
        return {}
    tokenizer, size = checkpoint.tokenizer, checkpoint.config.vocab_size
    eos_ids = checkpoint.generation.get("eos_token_id", tokenizer.eos_ids)
    return tokenizer.to_gguf(size, notices, eos_ids=eos_ids)


def _under(prefix: str, carried: Mapping[str, Encoded]) -> Metadata:
    return {key: value for key, value in carried.items() if key.startswith(prefix)}
