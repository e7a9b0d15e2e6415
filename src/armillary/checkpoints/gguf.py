"""GGUF models: metadata and tensors of a file, read as a decoder by the families' tables.

Every key under the architecture's prefix is used or refused, by name. Keys under `general.` and
`tokenizer.` describe the file and the tokenizer. Source: ggml's `docs/gguf.md`; llama.cpp.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from armillary.checkpoints.checkpoint import Checkpoint
from armillary.checkpoints.families import FAMILIES, Family
from armillary.checkpoints.families.family import (
    FULL,
    SLIDING,
    Entries,
    GGUFTable,
    Patch,
    Values,
    from_template,
    put,
)
from armillary.checkpoints.families.reading import (
    apply_patches,
    check_fixed,
    derive,
    layer_count,
    read_keys,
)
from armillary.checkpoints.gguf_file import GGUFFile, read_gguf_file
from armillary.checkpoints.layouts import name_of, read_tensors
from armillary.checkpoints.parameters import Shape
from armillary.checkpoints.rotary_keys import (
    LOCAL_BASE,
    read_gguf_rotary,
    shortest_float,
)
from armillary.config import DecoderConfig
from armillary.errors import CheckpointError, ConfigError
from armillary.rope_scaling import YaRN
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
    layouts = table_of(family).all_layouts()
    tokenizer = _read_tokenizer(file, notices)
    return Checkpoint(
        config=config,
        tensors=read_tensors(config, layouts, tensors, where, allow_missing),
        tokenizer=tokenizer,
        generation=_read_generation(file, tokenizer),
        source=path,
        format="gguf",
        notices=notices,
        family=family.name,
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
    found = [family for family in FAMILIES if family.gguf and family.gguf.architecture == name]
    for family in sorted(found, key=lambda family: table_of(family).told_by is None):
        key = table_of(family).told_by
        if key is None or file.metadata.get(f"{name}.{key}"):
            return family
    known = dict.fromkeys(each.gguf.architecture for each in FAMILIES if each.gguf is not None)
    supported = ", ".join(known)
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
    prefix = f"{table_of(family).architecture}."
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
    table, where = table_of(family), entries.where
    check_fixed(entries, table.fixed)
    entries.ignore(*table.ignored)
    n_layers = layer_count(entries, "block_count")
    values = Values(where, shapes)
    values["block_count"] = n_layers
    decoder = from_template(family.template, n_layers)
    read_keys(decoder, entries, table.keys, values, notices)
    derive(decoder, table.derived, values)
    named = {ours: name_of(table.all_layouts(), ours) for ours in ("head.weight", *table.present)}
    for template, path in table.present.items():
        # The first layer stands for all; the format says so in no other way.
        put(decoder, (path,), (named[template] or "").replace("{i}", "0") in shapes)
    decoder["tie_head"] = named["head.weight"] not in shapes
    patches: Sequence[Patch] = [{}] * n_layers
    if table.layers is not None:
        patches = table.layers.read(entries, values, n_layers)
    by_type = _rotary(entries, table, decoder, factors, notices)
    apply_patches(decoder, patches, by_type, where)
    return DecoderConfig.from_dict(decoder, where)


def _rotary(
    entries: StrictDict,
    table: GGUFTable,
    decoder: Entries,
    factors: Mapping[str, NDArray[np.float32]],
    notices: list[str],
) -> dict[str | None, dict[str, Any] | None]:
    """The rotary settings of each kind of layer, or of all under None."""
    if not table.rotates:
        return {None: None}
    rotary = read_gguf_rotary(
        entries,
        d_head=decoder["layers"][0]["attention"]["d_head"],
        max_positions=decoder["max_positions"],
        factors=factors,
        notices=notices,
        rounds_yarn=table.rounds_yarn,
        yarn_scales_scores=table.yarn_scales_scores,
    )
    scaling = rotary["scaling"]
    if table.yarn_scales_scores and scaling["kind"] == "yarn" and scaling["mscale_all_dim"]:
        d_head, factor = decoder["layers"][0]["attention"]["d_head"], YaRN(**scaling).score_factor()
        put(decoder, ("layers.*.attention.scale",), d_head**-0.5 * factor)
    if table.local_base is None:
        return {None: rotary}
    base = entries.take(LOCAL_BASE, float, table.local_base)
    return {FULL: rotary, SLIDING: rotary | {"base": base, "scaling": {"kind": "default"}}}


def table_of(family: Family) -> GGUFTable:
    """The family's table. Raises ConfigError when GGUF has none of it."""
    if family.gguf is None:
        raise ConfigError(
            f"the {family.name} family is not read from or written to GGUF; write a directory"
        )
    return family.gguf


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
