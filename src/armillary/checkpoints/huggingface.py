"""Hugging Face directories: config.json, safetensors, generation_config.json, tokenizer.json.

Works from the families' tables. Every key of config.json is used or refused, by name.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from armillary.checkpoints.checkpoint import Checkpoint
from armillary.checkpoints.families import FAMILIES, Family
from armillary.checkpoints.families.family import (
    Entries,
    HuggingFaceTable,
    Patch,
    Values,
    entries_of,
    first,
    from_template,
)
from armillary.checkpoints.families.reading import (
    apply_patches,
    check_fixed,
    derive,
    layer_count,
    read_keys,
)
from armillary.checkpoints.layouts import places, read_tensors, write_tensors
from armillary.checkpoints.parameters import check_parameters
from armillary.checkpoints.quantization import put_together, read_method
from armillary.checkpoints.rotary_keys import (
    check_frequencies,
    read_huggingface_rotary,
    write_huggingface_rotary,
)
from armillary.checkpoints.safetensors import INDEX, SINGLE, read_sharded, write_sharded
from armillary.checkpoints.tensors import StoredTensor, TensorToWrite
from armillary.config import DecoderConfig, RotaryConfig
from armillary.errors import CheckpointError, ConfigError, UserError
from armillary.files import ALONE, Writer, read_json, read_json_if_there, write_json
from armillary.rope_scaling import DynamicNTK
from armillary.strict_dict import StrictDict

if TYPE_CHECKING:
    from armillary.tokenizer import Tokenizer

CONFIG = "config.json"
GENERATION = "generation_config.json"

# Keys that any family's config.json may have and that say nothing about what is computed.
_IGNORED = frozenset(
    {
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_name_or_path",
        # Remote code is never run: the architecture that is named is.
        "auto_map",
        "attn_implementation",
        "dtype",
        "id2label",
        "initializer_range",
        "label2id",
        "max_sequence_length",
        "output_attentions",
        "output_hidden_states",
        "problem_type",
        "return_dict",
        "tokenizer_class",
        "torch_dtype",
        "transformers.js_config",
        "transformers_version",
        "use_cache",
    }
)
_FIXED: Mapping[str, object] = {
    "add_cross_attention": False,
    "chunk_size_feed_forward": 0,
    "is_decoder": False,
    "is_encoder_decoder": False,
}


def read_huggingface(
    directory: Path, *, ignore_keys: Iterable[str] = (), allow_missing: bool = False
) -> Checkpoint:
    """Read a directory. Raises CheckpointError and ConfigError for what cannot be honoured."""
    entries = StrictDict(read_json(directory / CONFIG), str(directory / CONFIG))
    notices: list[str] = []
    family = _family(entries)
    method = read_method(entries)
    config = _read_config(entries, family, notices, ignore_keys)
    generation = _read_generation(directory, entries)
    entries.finish(
        remedy="a key without bearing on the model can be passed over: --ignore-key NAME"
    )
    _refuse_pickles(directory)
    found, more = read_sharded(directory, allow_missing, raw=True)
    notices += more
    found = put_together(found, method, str(directory), notices)
    tensors = _assign(config, family.huggingface, found, directory, allow_missing)
    tokenizer = read_tokenizer(directory, notices)
    return Checkpoint(
        config, tensors, tokenizer, generation, directory, "huggingface", notices, family.name
    )


def _family(entries: StrictDict) -> Family:
    named = entries.take_list("architectures", str, [])
    model_type = entries.take("model_type", str, None)
    for family in FAMILIES:
        table = family.huggingface
        if named == [table.architecture] or (not named and model_type == table.model_type):
            return family
    supported = ", ".join(family.huggingface.architecture for family in FAMILIES)
    if not named and model_type is None:
        raise CheckpointError(
            f"{entries.where}: names neither architectures nor model_type; supported: {supported}"
        )
    found = ", ".join(named) or f"model_type {model_type!r}"
    raise CheckpointError(
        f"{entries.where}: architecture {found} is not supported; supported: {supported}"
    )


def _read_config(
    entries: StrictDict, family: Family, notices: list[str], ignore_keys: Iterable[str]
) -> DecoderConfig:
    table = family.huggingface
    where = entries.where
    entries.ignore(*_IGNORED, *table.ignored, *ignore_keys)
    check_fixed(entries, {**_FIXED, **table.fixed})
    n_layers = layer_count(entries, table.n_layers)
    values = Values(where)
    decoder = from_template(family.template, n_layers)
    read_keys(decoder, entries, table.keys, values, notices)
    derive(decoder, table.derived, values)
    patches: Sequence[Patch] = [{}] * n_layers
    if table.layers is not None:
        patches = table.layers.read(entries, values, n_layers)
    by_type = _rotary(entries, table, decoder, notices)
    apply_patches(decoder, patches, by_type, where)
    return DecoderConfig.from_dict(decoder, where)


def _rotary(
    entries: StrictDict, table: HuggingFaceTable, decoder: Entries, notices: list[str]
) -> dict[str | None, dict[str, Any] | None]:
    """The rotary settings of each kind of layer, or of all under None."""
    keys = table.rotary
    if keys is None:
        return {None: None}
    attention = decoder["layers"][0]["attention"]
    latent = attention.get("latent")
    d_head = attention["d_head"] if latent is None else latent["d_rope"]
    by_type = read_huggingface_rotary(
        entries,
        d_head=d_head,
        max_positions=decoder["max_positions"],
        keys=keys,
        notices=notices,
    )
    if set(by_type) != {None} and table.layers is None:
        raise ConfigError(
            f"{entries.where}: rope_parameters by layer type ({', '.join(map(str, by_type))}) are "
            f"not known in {table.architecture}, whose layers are all of one type"
        )
    for rotary in by_type.values():
        width = rotary["d_rotary"]
        if width != d_head and not keys.partial:
            raise ConfigError(
                f"{entries.where}: rotation of {width} channels of a head of {d_head} is not known "
                f"in {table.architecture}, which rotates whole heads"
            )
    return dict(by_type)


def _read_generation(directory: Path, config: StrictDict) -> dict[str, Any]:
    """The suggestions of generation_config.json, with the ids of config.json where it has none.

    Its sampling values hold only under `do_sample`, as in transformers; unknown keys are no error,
    since they change nothing in the model.
    """
    path = directory / GENERATION
    entries = StrictDict(read_json_if_there(path), str(path))
    generation: dict[str, Any] = {}
    for key in ("bos_token_id", "pad_token_id"):
        own, other = entries.take_optional(key, int), config.take_optional(key, int)
        value = other if own is None else own
        if value is not None and value >= 0:
            generation[key] = value
    own, other = (part.take_optional("eos_token_id", (int, list)) for part in (entries, config))
    eos = other if own is None else own
    if eos is not None:
        ids = eos if isinstance(eos, list) else [eos]
        if not all(type(token) is int and token >= 0 for token in ids):
            raise ConfigError(f"{path}: eos_token_id must be token ids, not {eos!r:.80}")
        generation["eos_token_id"] = tuple(ids)
    sample = entries.take_optional("do_sample", bool)
    for key, kind in _SAMPLING.items():
        value = entries.take_optional(key, kind)
        if value is not None and (sample or key == "repetition_penalty"):
            generation[key] = value
    if sample is False:
        generation["temperature"] = 0.0
    return generation


_SAMPLING: Mapping[str, type] = {
    "temperature": float,
    "top_k": int,
    "top_p": float,
    "min_p": float,
    "repetition_penalty": float,
}


def _refuse_pickles(directory: Path) -> None:
    if (directory / SINGLE).is_file() or (directory / INDEX).is_file():
        return
    pickles = sorted(path.name for path in directory.glob("pytorch_model*.bin"))
    if pickles:
        raise CheckpointError(
            f"{directory}: the weights are in {pickles[0]}, a pickle, and nothing is unpickled; "
            f"take the repository's {SINGLE} or convert them to it"
        )


def _assign(
    config: DecoderConfig,
    table: HuggingFaceTable,
    found: dict[str, StoredTensor],
    directory: Path,
    allow_missing: bool,
) -> dict[str, StoredTensor]:
    where = str(directory)
    found = _with_known_names(table, found)
    found = _without_redundant(config, table, found)
    layouts = table.all_layouts()
    head, embedding = table.tensors["head.weight"], table.tensors["embedding.weight"]
    tied = table.key("tie_head")
    if config.tie_head and head in found:
        if embedding not in found or not _equal(found[head], found[embedding]):
            raise CheckpointError(
                f"{where}: {tied} is true, but {head} differs from {embedding}; "
                f"set it to false if the head is its own"
            )
        del found[head]
    # Where the embedding is missing too, the names are other ones; that is said below.
    if not config.tie_head and head not in found and embedding in found and not allow_missing:
        raise CheckpointError(
            f"{where}: {tied} is false, but there is no {head}; "
            f"set it to true if the head is the embedding"
        )
    return read_tensors(config, layouts, found, where, allow_missing)


def _with_known_names(
    table: HuggingFaceTable, found: Mapping[str, StoredTensor]
) -> dict[str, StoredTensor]:
    """The tensors by the table's names, where files have others for the same."""
    prefix = table.prefix
    if prefix and any(name.startswith(prefix) for name in found):
        prefix = ""
    named = {}
    for name, tensor in found.items():
        known = table.aliases.get(name, name)
        whole = known if known == table.tensors["head.weight"] else prefix + known
        named[whole if whole not in found else name] = tensor.renamed(whole)
    return named


def _without_redundant(
    config: DecoderConfig, table: HuggingFaceTable, found: Mapping[str, StoredTensor]
) -> dict[str, StoredTensor]:
    """Drop what old files carry, frequencies after holding them against the configuration."""
    kept = dict(found)
    if table.passes_over_later_layers:
        later = re.compile(r"model\.layers\.(\d+)\.")
        for name in found:
            layer_of = later.match(name)
            if layer_of is not None and int(layer_of[1]) >= config.n_layers:
                del kept[name]
    for i, layer in enumerate(config.layers):
        for template in table.redundant:
            tensor = kept.pop(template.replace("{i}", str(i)), None)
            rotary = layer.attention.rotary
            if tensor is not None and rotary is not None and template.endswith("inv_freq"):
                check_frequencies(tensor, rotary)
    return kept


def _equal(a: StoredTensor, b: StoredTensor) -> bool:
    if a.shape != b.shape:
        return False
    same = all(
        np.array_equal(a.rows(start, stop), b.rows(start, stop), equal_nan=True)
        for start, stop in a.row_blocks()
    )
    a.release()
    b.release()
    return same


def read_tokenizer(directory: Path, notices: list[str]) -> "Tokenizer | None":
    """Read tokenizer.json and what stands beside it; None and a notice when it is not there."""
    path = directory / "tokenizer.json"
    if not path.is_file():
        notices.append("there is no tokenizer.json; only token ids can be given")
        return None
    from armillary.tokenizer import Tokenizer

    return Tokenizer.from_file(path)


def write_huggingface(
    directory: Path,
    config: DecoderConfig,
    tensors: Iterable[TensorToWrite],
    tokenizer: "Tokenizer | None" = None,
    generation: Mapping[str, Any] | None = None,
    *,
    family: Family | None = None,
    max_shard_bytes: int | None = None,
    writer: Writer = ALONE,
) -> None:
    """Write a directory that transformers reads, atomically and one tensor of it at a time.

    As of `family`, or of the first that can express the configuration.

    `tensors` come under our names, one for each parameter, in F32, F16, BF16 or F64. Several
    processes may write together, each a part of the tensors (see `write_sharded`).
    Raises ConfigError naming what the family cannot express, ValueError for tensors that are not
    the configuration's parameters.
    """
    tensors = list(tensors)
    family = family_for(config) if family is None else family
    entries = _config_entries(config, family, tensors, generation or {})
    check_parameters(config, tensors)
    theirs = write_tensors(config, family.huggingface.all_layouts(), tensors, str(directory))
    with writer.directory(directory) as partial:
        if writer.number == 0:
            write_json(partial / CONFIG, entries)
            if generation:
                write_json(partial / GENERATION, _generation_entries(generation))
            if tokenizer is not None:
                tokenizer.save(partial)
        write_sharded(partial, theirs, max_shard_bytes, writer)


def family_for(config: DecoderConfig, preferred: str | None = None) -> Family:
    """The family called `preferred` where it can express a configuration, else the first that can.

    Raises UserError naming what the nearest lacks: the preferred one, or the first.
    """
    order = sorted(FAMILIES, key=lambda family: family.name != preferred)
    refusal: UserError | None = None
    for family in order:
        try:
            check_expressible(config, family)
        except UserError as error:
            refusal = refusal or error
        else:
            return family
    assert refusal is not None
    raise refusal


def check_expressible(config: DecoderConfig, family: Family) -> None:
    """Raise UserError naming what the family cannot express, before anything is written."""
    _config_entries(config, family, (), {})
    places(config, family.huggingface.all_layouts(), f"the {family.name} family")


def _config_entries(
    config: DecoderConfig,
    family: Family,
    tensors: Sequence[TensorToWrite],
    generation: Mapping[str, Any],
) -> dict[str, Any]:
    table = family.huggingface
    decoder = entries_of(config)
    values = _values_of(decoder, table)
    rotaries = [layer.attention.rotary for layer in config.layers]
    if table.rotary is None and any(rotaries):
        raise ConfigError(f"the {family.name} family cannot express layers with rotation")
    if table.rotary is not None and not any(rotaries):
        raise ConfigError(f"the {family.name} family cannot express layers without rotation")
    for rotary in rotaries:
        if rotary is not None and isinstance(rotary.scaling, DynamicNTK):
            # Readers of this rule take the original window from here; no other key has it.
            values[table.key("max_positions")] = rotary.scaling.original_window
    rotary_entries = {}
    if table.rotary is not None:
        where = f"the {family.name} family"
        rotary_entries = write_huggingface_rotary(config, table.rotary, where)
    encodings = {tensor.encoding for tensor in tensors}
    entries: dict[str, Any] = {
        "architectures": [table.architecture],
        "model_type": table.model_type,
        table.n_layers: config.n_layers,
        **values,
        **({} if table.layers is None else table.layers.write(config)),
        **rotary_entries,
        "torch_dtype": _TORCH_TYPES[encodings.pop()] if len(encodings) == 1 else "float32",
        "use_cache": True,
        # Left out, they would mean the family's own.
        **dict.fromkeys(_TOKEN_IDS),
        **_token_ids(generation),
    }
    _check_read_back(entries, config, family)
    return entries


def _values_of(decoder: Mapping[str, Any], table: HuggingFaceTable) -> Values:
    """What each key says."""
    values = Values("")
    elided = []
    for key in table.keys:
        if key.to:
            values[key.name] = key.form.write(first(decoder, key.to[0]))
            if key.elided and values[key.name] == key.default(values):
                elided.append(key.name)
    values.update(dict.fromkeys(elided))
    return values


def check_window(config: DecoderConfig) -> None:
    """Raise ConfigError where readers would not learn of the window: that of the dynamic rule."""
    for layer in config.layers:
        rule = None if layer.attention.rotary is None else layer.attention.rotary.scaling
        if isinstance(rule, DynamicNTK) and rule.original_window != config.max_positions:
            raise ConfigError(
                f"Hugging Face's files state the original window {rule.original_window:,} for the "
                f"dynamic rule, and nothing of {config.max_positions:,}"
            )


_TORCH_TYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def _check_read_back(entries: Mapping[str, Any], config: DecoderConfig, family: Family) -> None:
    """Read the keys again, all, in the old schema and in the new, and compare the decoders.

    Frequencies are compared as numbers, since a file may say them in another way.
    """
    without: list[tuple[str, ...]] = [()]
    if family.huggingface.rotary is not None:
        keys = family.huggingface.rotary
        without = [(), ("rope_parameters",), (keys.base, "rope_scaling", keys.local_base or "")]
    for left_out in without:
        kept = {key: value for key, value in entries.items() if key not in left_out}
        read = StrictDict(kept, f"the {family.name} family")
        again = _read_config(read, family, [], ("architectures", "model_type"))
        if _without_rotary(again) != _without_rotary(config):
            key = first_difference(_without_rotary(config), _without_rotary(again))
            raise ConfigError(f"{read.where} cannot express this decoder's {key}")
        for i, (ours, theirs) in enumerate(zip(config.layers, again.layers, strict=True)):
            if not _same_rotation(ours.attention.rotary, theirs.attention.rotary, config):
                raise ConfigError(f"{read.where} cannot express this decoder's rotation, layer {i}")


def _without_rotary(config: DecoderConfig) -> dict[str, Any]:
    entries = entries_of(config)
    # The window is not compared: the dynamic rule's files say the original one.
    del entries["max_positions"]
    for layer in entries["layers"]:
        del layer["attention"]["rotary"]
    return entries


def _same_rotation(
    ours: RotaryConfig | None, theirs: RotaryConfig | None, config: DecoderConfig
) -> bool:
    if ours is None or theirs is None or ours.layout != theirs.layout:
        return ours is theirs
    return ours.scaling.attention_factor() == theirs.scaling.attention_factor() and all(
        np.array_equal(
            ours.scaling.frequencies(ours.base, ours.d_rotary, length),
            theirs.scaling.frequencies(theirs.base, theirs.d_rotary, length),
        )
        for length in (1, config.max_positions // 2, config.max_positions, 2 * config.max_positions)
    )


def first_difference(ours: Any, theirs: Any, path: str = "") -> str:
    """The path of the first entry in which two differ, and its value in the first."""
    pairs: Iterable[tuple[Any, Any, Any]] = ()
    if isinstance(ours, dict) and isinstance(theirs, dict):
        pairs = [(key, ours[key], theirs.get(key)) for key in ours]
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        pairs = [(i, *both) for i, both in enumerate(zip(ours, theirs, strict=True))]
    for key, one, other in pairs:
        if one != other:
            return first_difference(one, other, f"{path}.{key}" if path else str(key))
    return f"{path} {json.dumps(ours):.80}"


_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def _token_ids(generation: Mapping[str, Any]) -> dict[str, Any]:
    ids = {key: generation[key] for key in _TOKEN_IDS if key in generation}
    if "eos_token_id" in ids:
        eos = list(ids["eos_token_id"])
        ids["eos_token_id"] = eos[0] if len(eos) == 1 else eos
    return ids


def _generation_entries(generation: Mapping[str, Any]) -> dict[str, Any]:
    sampling = {key: generation[key] for key in _SAMPLING if key in generation}
    entries = _token_ids(generation) | sampling
    if sampling.get("temperature") == 0.0:
        del entries["temperature"]
        return {**entries, "do_sample": False}
    return {**entries, "do_sample": True} if set(sampling) - {"repetition_penalty"} else entries
