"""GGUF models: metadata and tensors of a file, read as a decoder by the families' tables.

Every key under the architecture's prefix is used or refused, by name. Keys under `general.` and
`tokenizer.` describe the file and the tokenizer. Source: ggml's `docs/gguf.md`; llama.cpp.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from armillary.checkpoints.checkpoint import Checkpoint
from armillary.checkpoints.families import FAMILIES, Facts, Family
from armillary.checkpoints.families.family import MAX_LAYERS, GGUFTable, head_width
from armillary.checkpoints.gguf_file import GGUFFile, read_gguf_file
from armillary.checkpoints.parameters import Shape, assign, names_in_file, template_of
from armillary.checkpoints.rotary_keys import read_gguf_rotary, shortest_float
from armillary.checkpoints.tensors import StoredTensor
from armillary.config import AttentionConfig, DecoderConfig
from armillary.errors import CheckpointError, ConfigError
from armillary.rope_layout import half_split_from_interleaved
from armillary.strict_dict import StrictDict

if TYPE_CHECKING:
    from armillary.tokenizer import Tokenizer


# Tensors of divisors, which belong to the rotary settings.
_FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
# The suggestions that newer files carry, under `general.sampling.`.
SAMPLING: Mapping[str, tuple[str, type]] = {
    "temperature": ("temp", float),
    "top_k": ("top_k", int),
    "top_p": ("top_p", float),
    "min_p": ("min_p", float),
    "repetition_penalty": ("penalty_repeat", float),
}


def read_gguf(
    path: Path, *, ignore_keys: Iterable[str] = (), allow_missing: bool = False
) -> Checkpoint:
    """Read a file. Raises CheckpointError and ConfigError for what cannot be honoured.

    `ignore_keys` are names under the architecture's prefix, with or without it.
    """
    file = read_gguf_file(path)
    family = _family(file)
    notices: list[str] = []
    tensors = dict(file.tensors)
    factors = {name: tensors.pop(name).to_float32() for name in _FACTORS if name in tensors}
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    where = str(path)
    config = read_config(file.metadata, family, shapes, factors, where, notices, ignore_keys)
    names = names_in_file(config, family.gguf.tensors, where)
    assigned = assign(config, tensors, names, where, allow_missing)
    tokenizer = _read_tokenizer(file, notices)
    return Checkpoint(
        config=config,
        tensors=_to_half_split(config, family.gguf, assigned),
        tokenizer=tokenizer,
        generation=_read_generation(file, tokenizer),
        source=path,
        format="gguf",
        notices=notices,
    )


def _family(file: GGUFFile) -> Family:
    kind = file.metadata.get("general.type", "model")
    if kind != "model":
        raise CheckpointError(f"{file.path}: general.type is {kind!r:.80}; only models are read")
    parts = file.metadata.get("split.count", 1)
    if parts not in (0, 1):
        raise CheckpointError(
            f"{file.path}: is one of {parts!r:.40} parts; join them first: llama-gguf-split --merge"
        )
    name = file.metadata.get("general.architecture")
    for family in FAMILIES:
        if family.gguf.architecture == name:
            return family
    supported = ", ".join(family.gguf.architecture for family in FAMILIES)
    raise CheckpointError(
        f"{file.path}: general.architecture {name!r:.80} is not supported; supported: {supported}"
    )


def _rounded(value: object) -> object:
    """Bring a float32 to the decimal that was meant: 1e-05, not 9.999999747378752e-06."""
    if isinstance(value, float) and float(np.float32(value)) == value:
        return shortest_float(value)
    return value


def read_config(
    metadata: Mapping[str, object],
    family: Family,
    shapes: Mapping[str, Shape],
    factors: Mapping[str, NDArray[np.float32]],
    where: str,
    notices: list[str],
    ignore_keys: Iterable[str] = (),
) -> DecoderConfig:
    """The decoder that the keys under the architecture mean, with the tensors of these shapes.

    `factors` are the divisors of rotary frequencies, which are tensors in the file.
    Raises ConfigError for what cannot be honoured, and for keys that nothing has read.
    """
    prefix = f"{family.gguf.architecture}."
    entries = StrictDict(
        {
            key.removeprefix(prefix): _rounded(value)
            for key, value in metadata.items()
            if key.startswith(prefix)
        },
        f"{where}: {prefix}*",
    )
    config = _read_entries(entries, family, shapes, factors, notices)
    entries.ignore(*(key.removeprefix(prefix) for key in ignore_keys))
    entries.finish(
        remedy="a key without bearing on the model can be passed over: --ignore-key NAME"
    )
    return config


def _read_entries(
    entries: StrictDict,
    family: Family,
    shapes: Mapping[str, Shape],
    factors: Mapping[str, NDArray[np.float32]],
    notices: list[str],
) -> DecoderConfig:
    table, where = family.gguf, entries.where
    for key, only in table.fixed.items():
        value = entries.take(key, type(only), only)
        if value != only:
            raise ConfigError(f"{where}: {key} is {value!r}; only {only!r} is supported")
    entries.ignore(*table.ignored)
    n_layers = entries.take("block_count", int)
    if not 1 <= n_layers <= MAX_LAYERS:
        raise ConfigError(f"{where}: block_count {n_layers} must be between 1 and {MAX_LAYERS}")
    d_model = entries.take("embedding_length", int)
    max_positions = entries.take("context_length", int)
    n_heads = _per_layer(entries, "attention.head_count", n_layers, None)
    n_kv_heads = _per_layer(entries, "attention.head_count_kv", n_layers, n_heads)
    d_head = _head_width(entries, d_model, n_heads[0])
    embedding = shapes.get(table.tensors["embedding.weight"])
    facts = Facts(
        vocab_size=entries.take("vocab_size", int, embedding[0] if embedding else 0),
        d_model=d_model,
        max_positions=max_positions,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        d_head=d_head,
        d_ff=_per_layer(entries, "feed_forward_length", n_layers, None),
        rotary=read_gguf_rotary(
            entries,
            d_head=d_head,
            max_positions=max_positions,
            factors=factors,
            notices=notices,
        ),
        eps=entries.take("attention.layer_norm_rms_epsilon", float),
        tie_head=table.tensors["head.weight"] not in shapes,
        qkv_bias=_has(shapes, table, "layers.{i}.attention.q.bias"),
        out_bias=_has(shapes, table, "layers.{i}.attention.out.bias"),
        mlp_bias=_has(shapes, table, "layers.{i}.feedforward.down.bias"),
    )
    return DecoderConfig.from_dict(family.decoder(facts), where)


def _per_layer(
    entries: StrictDict, key: str, n_layers: int, default: tuple[int, ...] | None
) -> tuple[int, ...]:
    """Read a number for all layers, or a list with one for each."""
    if default is not None and key not in entries:
        return default
    value = entries.take(key, (int, list))
    if not isinstance(value, list):
        return (value,) * n_layers
    if len(value) != n_layers:
        raise ConfigError(f"{entries.where}: {key} has {len(value)} entries for {n_layers} layers")
    return tuple(entries.take_list(key, int))


def _head_width(entries: StrictDict, d_model: int, n_heads: int) -> int:
    d_head, d_value = (
        entries.take_optional(f"attention.{name}_length", int) for name in ("key", "value")
    )
    d_head = head_width(d_head, d_model, n_heads, entries.where)
    if d_value is not None and d_value != d_head:
        raise ConfigError(
            f"{entries.where}: attention.value_length is {d_value}, but keys are {d_head} wide; "
            "only equal widths are supported"
        )
    return d_head


def _has(shapes: Mapping[str, Shape], table: GGUFTable, template: str) -> bool:
    """Whether the first layer has a tensor; the format says so in no other way."""
    return table.tensors[template].replace("{i}", "0") in shapes


def rotated_rows(
    config: DecoderConfig, table: GGUFTable, name: str
) -> tuple[int, AttentionConfig] | None:
    """The heads in the rows of a parameter that the format stores interleaved, and its attention.

    None for every other parameter. Keys have fewer heads than queries: each matrix is permuted by
    its own count.
    """
    template = template_of(name)
    if template not in table.interleaved:
        return None
    attention = config.layers[int(name.split(".")[1])].attention
    if attention.rotary is None:
        return None
    of_queries = template.startswith("layers.{i}.attention.q.")
    return (attention.n_heads if of_queries else attention.n_kv_heads), attention


def _to_half_split(
    config: DecoderConfig, table: GGUFTable, tensors: dict[str, StoredTensor]
) -> dict[str, StoredTensor]:
    """Give the rows that are stored interleaved the half-split order of the configuration."""
    result = dict(tensors)
    for name, tensor in tensors.items():
        rotated = rotated_rows(config, table, name)
        if rotated is None:
            continue
        n_heads, attention = rotated
        assert attention.rotary is not None
        order = half_split_from_interleaved(n_heads, attention.d_head, attention.rotary.d_rotary)
        result[name] = tensor.reordered(order)
    return result


def _read_generation(file: GGUFFile, tokenizer: "Tokenizer | None") -> dict[str, Any]:
    entries = StrictDict(file.metadata, str(file.path))
    generation: dict[str, Any] = {}
    for name, (key, kind) in SAMPLING.items():
        value = entries.take_optional(f"general.sampling.{key}", kind)
        if value is not None:
            generation[name] = _rounded(value)
    if tokenizer is not None:
        ids = {
            "bos_token_id": tokenizer.bos_id,
            "eos_token_id": tokenizer.eos_ids or None,
            "pad_token_id": tokenizer.pad_id,
        }
        generation |= {key: value for key, value in ids.items() if value is not None}
    return generation


def _read_tokenizer(file: GGUFFile, notices: list[str]) -> "Tokenizer | None":
    if "tokenizer.ggml.model" not in file.metadata:
        notices.append("there is no tokenizer in the file; only token ids can be given")
        return None
    from armillary.tokenizer import Tokenizer

    return Tokenizer.from_gguf(file.metadata, where=str(file.path))
