"""A checkpoint → a GGUF file: the other way of gguf.py, by the same tables.

What is written is read again before any weight is, and compared with what was meant.
"""

import functools
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from armillary.checkpoints.checkpoint import Checkpoint
from armillary.checkpoints.families import FAMILIES, Facts, Family
from armillary.checkpoints.gguf import SAMPLING, read_config, rotated_rows
from armillary.checkpoints.gguf_file import Encoded, Value, read_gguf_file, write_gguf_file
from armillary.checkpoints.huggingface import first_difference
from armillary.checkpoints.parameters import names_in_file
from armillary.checkpoints.rotary_keys import write_gguf_rotary
from armillary.checkpoints.tensors import StoredTensor, TensorToWrite, telling, to_write
from armillary.config import DecoderConfig, RotaryConfig
from armillary.errors import ConfigError
from armillary.files import Opener, write_whole
from armillary.rope_layout import interleaved_from_half_split
from armillary.rope_scaling import YaRN

Metadata = dict[str, Value | Encoded]
Factors = dict[str, NDArray[np.float32]]

# What llama.cpp calls a file by the encoding of most of its matrices (`llama_ftype`).
_FILE_TYPES = {"F32": 0, "F16": 1, "BF16": 32} | {
    "Q4_0": 2,
    "Q4_1": 3,
    "Q8_0": 7,
    "Q5_0": 8,
    "Q5_1": 9,
    "Q2_K": 10,
    "Q3_K": 12,
    "Q4_K": 15,
    "Q5_K": 17,
    "Q6_K": 18,
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
    family: Family = FAMILIES[0],
    progress: Callable[[int], None] = lambda _: None,
    file: Opener = write_whole,
) -> list[str]:
    """Write a file that llama.cpp reads, atomically and by blocks of rows.

    `encodings` has one for each parameter. Of a checkpoint that is a GGUF file all that describes
    the file and the tokenizer is carried over as it is. `progress` is called with the bytes of
    each block that was written; `file` opens it. Returns notices about what the format leaves out.
    Raises ConfigError and CheckpointError for what it has no place for, before the file is begun;
    UserError when it cannot be written.
    """
    notices: list[str] = []
    config = checkpoint.config
    names = names_in_file(config, family.gguf.tensors, f"GGUF's {family.name} family")
    entries, factors = _architecture(config, family, notices)
    _check_read_back(entries, factors, checkpoint, names, family)
    carried = read_gguf_file(checkpoint.source).encoded if checkpoint.format == "gguf" else None
    metadata = {
        **_general(checkpoint, encodings, family, carried),
        **entries,
        **_tokenizer(checkpoint, carried, notices),
    }
    tensors = [
        to_write(_as_stored(config, family, tensor), encodings[name])._replace(name=names[name])
        for name, tensor in checkpoint.tensors.items()
    ]
    divisors = [TensorToWrite(name, "F32", x.shape, [x]) for name, x in factors.items()]
    told = [telling(each, progress) for each in tensors]
    write_gguf_file(path, metadata, divisors + told, file=file)
    return notices


def _as_stored(config: DecoderConfig, family: Family, tensor: StoredTensor) -> StoredTensor:
    """The tensor with its rows in the order of the file."""
    rotated = rotated_rows(config, family.gguf, tensor.name)
    if rotated is None:
        return tensor
    n_heads, attention = rotated
    rotary = attention.rotary
    assert rotary is not None
    if rotary.layout == "interleaved":
        return tensor
    return tensor.reordered(interleaved_from_half_split(n_heads, attention.d_head, rotary.d_rotary))


def _architecture(
    config: DecoderConfig, family: Family, notices: list[str]
) -> tuple[Metadata, Factors]:
    """The keys under the architecture, and the tensors that belong to the rotary settings."""
    facts = Facts.of(config)
    rotary = config.layers[0].attention.rotary
    if rotary is None:
        raise ConfigError(f"the {family.name} family cannot express layers without rotation")
    if isinstance(rotary.scaling, YaRN) and (
        (rotary.scaling.beta_fast, rotary.scaling.beta_slow) != (32.0, 1.0)
    ):
        notices.append(
            f"llama.cpp takes yarn's beta_fast and beta_slow to be 32 and 1 in the {family.name} "
            "family, whatever the file says"
        )
    keys, factors = write_gguf_rotary(rotary, config.max_positions)
    entries: dict[str, Value] = {
        "vocab_size": facts.vocab_size,
        "context_length": facts.max_positions,
        "embedding_length": facts.d_model,
        "block_count": config.n_layers,
        "feed_forward_length": _one_or_all(facts.d_ff),
        "attention.head_count": _one_or_all(facts.n_heads),
        "attention.head_count_kv": _one_or_all(facts.n_kv_heads),
        "attention.key_length": facts.d_head,
        "attention.value_length": facts.d_head,
        "attention.layer_norm_rms_epsilon": facts.eps,
        **keys,
    }
    prefix = f"{family.gguf.architecture}."
    return {prefix + key: value for key, value in entries.items()}, factors


def _one_or_all(numbers: tuple[int, ...]) -> int | list[int]:
    return numbers[0] if len(set(numbers)) == 1 else list(numbers)


def _check_read_back(
    entries: Metadata,
    factors: Factors,
    checkpoint: Checkpoint,
    names: Mapping[str, str],
    family: Family,
) -> None:
    """Read the keys again and compare the decoders.

    Numbers are compared as float32 holds them; interleaved rotation is stored as such and comes
    back in the other layout.
    """
    config, where = checkpoint.config, f"GGUF's {family.name} family"
    shapes = {names[name]: tensor.shape for name, tensor in checkpoint.tensors.items()}
    as_read = {key: _in_float32(value) for key, value in entries.items()}
    again = read_config(as_read, family, shapes, factors, where, [])
    ours, theirs = _compared(config), _compared(again)
    if ours != theirs:
        what = first_difference(ours, theirs)
        raise ConfigError(f"{where} cannot express this decoder's {what}; write a directory")
    for i, (one, other) in enumerate(zip(config.layers, again.layers, strict=True)):
        if not _same_rotation(one.attention.rotary, other.attention.rotary, config.max_positions):
            raise ConfigError(
                f"{where} cannot express this decoder's rotation, layer {i}; write a directory"
            )


def _compared(config: DecoderConfig) -> dict[str, Any]:
    """What must be the same: all but rotation, which is compared as numbers, and dropout."""
    entries = config.model_dump(mode="json") | {"input_dropout": 0.0}
    for layer in entries["layers"]:
        layer["dropout"] = layer["attention"]["dropout"] = 0.0
        del layer["attention"]["rotary"]
    return entries


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
        "general.architecture": family.gguf.architecture,
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
