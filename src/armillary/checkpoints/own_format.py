"""Our own directories: config.json, safetensors, tokenizer.json, generation.json, a manifest.

config.json is the `DecoderConfig` with a `format` marker; tensors go by our parameter names.
Version 2 may hold quantised blocks (safetensors.py says how); it is written where there are any.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from armillary.checkpoints.checkpoint import Checkpoint
from armillary.checkpoints.huggingface import read_tokenizer
from armillary.checkpoints.parameters import assign, check_parameters
from armillary.checkpoints.safetensors import read_sharded, write_sharded
from armillary.checkpoints.tensors import TensorToWrite, block_size
from armillary.config import DecoderConfig
from armillary.errors import CheckpointError, ConfigError
from armillary.files import ALONE, Writer, read_json, verify_manifest, write_json

if TYPE_CHECKING:
    from armillary.tokenizer import Tokenizer

CONFIG = "config.json"
GENERATION = "generation.json"
MARKER = "armillary"
_PLAIN, _WITH_BLOCKS = 1, 2


def save_armillary(
    directory: Path,
    config: DecoderConfig,
    tensors: Iterable[TensorToWrite],
    tokenizer: "Tokenizer | None" = None,
    generation: Mapping[str, Any] | None = None,
    *,
    max_shard_bytes: int | None = None,
    writer: Writer = ALONE,
) -> None:
    """Write a directory, atomically and one chunk at a time.

    `tensors` come under our names, one for each parameter, in any encoding that can be read;
    `generation` has the entries of `Checkpoint.generation`. An older save of that name is
    replaced. Several processes may write together, each a part of the tensors (see
    `write_sharded`).
    Raises ValueError for tensors that are not the configuration's parameters, UserError when the
    directory cannot be written or is not ours.
    """
    tensors = list(tensors)
    check_parameters(config, tensors)
    with writer.directory(directory) as partial:
        if writer.number == 0:
            blocks = any(block_size(tensor.encoding)[0] > 1 for tensor in tensors)
            version = _WITH_BLOCKS if blocks else _PLAIN
            marker = {"format": MARKER, "format_version": version}
            write_json(partial / CONFIG, marker | config.to_dict())
            write_json(partial / GENERATION, dict(generation or {}))
            if tokenizer is not None:
                tokenizer.save(partial)
        write_sharded(partial, tensors, max_shard_bytes, writer, blocks=True)


def read_armillary(
    directory: Path, *, allow_missing: bool = False, verify: bool = False
) -> Checkpoint:
    """Read a directory that `save_armillary` wrote, its sizes held against the manifest.

    `verify` reads every file once more and compares the checksums too.
    """
    verify_manifest(directory, checksums=verify)
    path = directory / CONFIG
    entries = read_json(path)
    version = entries.pop("format_version", None)
    if entries.pop("format", None) != MARKER or version not in (_PLAIN, _WITH_BLOCKS):
        raise CheckpointError(f"{path}: is of format version {version!r}; 1 and 2 are read")
    config = DecoderConfig.from_dict(entries, str(path))
    found, notices = read_sharded(directory, blocks=version == _WITH_BLOCKS)
    return Checkpoint(
        config=config,
        tensors=assign(config, found, str(directory), allow_missing),
        tokenizer=read_tokenizer(directory, notices),
        generation=_read_generation(directory / GENERATION),
        source=directory,
        format="armillary",
        notices=notices,
    )


def _read_generation(path: Path) -> dict[str, Any]:
    generation = read_json(path)
    if "eos_token_id" in generation:
        ids = generation["eos_token_id"]
        if not isinstance(ids, list) or not all(type(token) is int for token in ids):
            raise ConfigError(f"{path}: eos_token_id must be a list of token ids, not {ids!r:.80}")
        generation["eos_token_id"] = tuple(ids)
    return generation
