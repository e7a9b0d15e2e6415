"""A checkpoint → another format: written aside, tensor by tensor, proved, and only then in place.

A run that is stopped, at any moment, is gone on from by the same call; what it then ends with is
the same, byte for byte.
"""

import contextlib
import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from armillary import __version__
from armillary.checkpoints import Checkpoint, open_checkpoint, save_armillary, write_huggingface
from armillary.checkpoints.gguf_write import write_gguf
from armillary.checkpoints.huggingface import check_window, family_for
from armillary.checkpoints.quantize import bytes_of, choose_encodings, stays_exact
from armillary.checkpoints.tensors import StoredTensor, plain_for, telling, to_write
from armillary.conversion.proof import Proof, prove
from armillary.errors import CheckpointError, ConfigError, UserError
from armillary.files import (
    MANIFEST,
    Segments,
    Writer,
    manifest_of,
    read_json,
    write_json,
    write_manifest,
)
from armillary.resumable import Workplace

Format = Literal["huggingface", "gguf", "armillary"]
FORMATS: tuple[Format, ...] = ("huggingface", "gguf", "armillary")
DTYPES: Mapping[str, str] = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "q8_0": "Q8_0",
    "q6_k": "Q6_K",
    "q5_k": "Q5_K",
    "q4_k": "Q4_K",
    "q5_1": "Q5_1",
    "q5_0": "Q5_0",
    "q4_1": "Q4_1",
    "q4_0": "Q4_0",
}
"""Number types by what they are asked for as."""

_DIRECTORY_TYPES = frozenset({"F64", "F32", "F16", "BF16"})
_FACTS = "conversion"
_OTHER_WAYS: Mapping[Format, str] = {
    "gguf": "--to huggingface may have a place for it, --to armillary has",
    "huggingface": "--to armillary has a place for it",
}


@dataclass(frozen=True)
class Converted:
    """What was written, and what reading it again has shown.

    tensors  how many are in each encoding
    notices  what a person should hear, about the format first
    """

    path: Path
    manifest: Path
    format: Format
    tensors: dict[str, int]
    proof: Proof
    notices: tuple[str, ...]


def convert(
    checkpoint: Checkpoint,
    target: Path,
    to: Format,
    *,
    dtype: str | None = None,
    max_shard_bytes: int | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> Converted:
    """Write a checkpoint as a Hugging Face directory, a GGUF file or a directory of ours.

    `dtype` is one of `DTYPES`; None keeps what the format can hold (blocks become plain numbers
    in Hugging Face's, vectors float32 in GGUF). `max_shard_bytes` cuts a directory's weights into
    files of at most as many. `progress` is called with bytes that are there, written or left by an
    earlier run. What the proof found goes into the directory's manifest, or into `NAME.json` beside
    a GGUF file.
    Raises ConfigError and CheckpointError for what the format cannot express, with another way, and
    for a proof that fails, when nothing is kept; UserError for a target that exists or cannot be
    written.
    """
    _check_target(target, to, max_shard_bytes)
    encodings, notices = choose(checkpoint, to, dtype)
    key = _key(checkpoint, to, encodings, max_shard_bytes)
    with Workplace(target, key, progress) as place:
        try:
            notices += _write(place, checkpoint, to, encodings, max_shard_bytes, progress)
            if to != "gguf":
                write_manifest(place.written)
            proof = prove(checkpoint, open_checkpoint(place.written), encodings)
            tensors = dict(Counter(encodings.values()).most_common())
            facts = {
                "from": {"format": checkpoint.format, "name": checkpoint.source.resolve().name},
                "by": f"armillary {__version__}",
                "tensors": tensors,
                "notices": notices,
                "proof": proof.facts(),
            }
            manifest = _note(place, target, to, facts)
        except (CheckpointError, ConfigError):
            place.clear()
            raise
        place.finish()
    return Converted(target, manifest, to, tensors, proof, tuple(notices))


def bytes_to_write(checkpoint: Checkpoint, to: Format, dtype: str | None) -> int:
    """Bytes of the weights in their new encodings. Raises as `choose`."""
    return bytes_of(checkpoint, choose(checkpoint, to, dtype)[0])


def choose(
    checkpoint: Checkpoint, to: Format, dtype: str | None
) -> tuple[dict[str, str], list[str]]:
    """The encoding of each parameter, and notices.

    Raises ConfigError for a type that the format does not hold.
    """
    wanted = None if dtype is None else DTYPES[dtype]
    in_blocks = wanted is not None and wanted not in _DIRECTORY_TYPES
    if to == "huggingface" and in_blocks:
        raise ConfigError(
            f"--dtype {dtype}: Hugging Face's files hold float64, float32, float16 and bfloat16; "
            "take one of these, or --to gguf or armillary, which hold blocks"
        )
    if to == "gguf" and wanted == "F64":
        raise ConfigError("--dtype float64: engines read no such GGUF files; take float32")
    if wanted is not None and (to == "gguf" or in_blocks):
        return choose_encodings(checkpoint, wanted)
    return {name: wanted or _kept(tensor, to) for name, tensor in checkpoint.tensors.items()}, []


def _kept(tensor: StoredTensor, to: Format) -> str:
    """What a tensor is written as where nothing is asked for."""
    if to == "gguf" and (stays_exact(tensor) or tensor.encoding == "F64"):
        return "F32"  # engines add and multiply by vectors in nothing else
    if to == "huggingface":
        return plain_for(tensor.encoding)
    return tensor.encoding


def _check_target(target: Path, to: Format, max_shard_bytes: int | None) -> None:
    if os.path.lexists(target):
        raise UserError(f"{target}: exists; remove it, or name another target")
    if not target.parent.is_dir():
        raise UserError(f"{target}: its folder is not there; make {target.parent} first")
    if (target.suffix == ".gguf") != (to == "gguf"):
        ending = "ends in .gguf" if to == "gguf" else "is a directory, so it does not end in .gguf"
        raise UserError(f"{target}: what is written --to {to} {ending}; name it so")
    if to == "gguf" and max_shard_bytes is not None:
        raise UserError("--shard-size cuts directories; a GGUF file is written whole")


def _key(
    checkpoint: Checkpoint, to: Format, encodings: Mapping[str, str], max_shard_bytes: int | None
) -> str:
    """A sum over all that the written files follow from; of the weights, their files' times."""
    source = checkpoint.source
    files = sorted(source.iterdir()) if source.is_dir() else [source]
    stats = [(path.name, path.stat()) for path in files]
    follows_from = {
        "version": __version__,
        "files": [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats],
        "config": checkpoint.config.to_dict(),
        "generation": checkpoint.generation,
        "to": to,
        "encodings": dict(encodings),
        "max_shard_bytes": max_shard_bytes,
    }
    return hashlib.sha256(json.dumps(follows_from, sort_keys=True).encode()).hexdigest()


def _write(
    place: Workplace,
    checkpoint: Checkpoint,
    to: Format,
    encodings: Mapping[str, str],
    max_shard_bytes: int | None,
    progress: Callable[[int], None],
) -> list[str]:
    """Write all but the manifest; return notices about what the format leaves out."""
    config, begun = checkpoint.config, False

    def file(path: Path) -> AbstractContextManager[Segments]:
        nonlocal begun
        begun = True
        return place.open(path)

    tensors = [
        telling(to_write(tensor, encodings[name]), progress)
        for name, tensor in checkpoint.tensors.items()
    ]
    parts = (place.written, config, tensors, checkpoint.tokenizer, checkpoint.generation)
    writer = Writer(directory=_directory, file=file)
    try:
        if to == "gguf":
            return write_gguf(place.written, checkpoint, encodings, progress=progress, file=file)
        if to == "armillary":
            save_armillary(*parts, max_shard_bytes=max_shard_bytes, writer=writer)
            return []
        check_window(config)
        family = family_for(config, checkpoint.family)
        write_huggingface(*parts, family=family, max_shard_bytes=max_shard_bytes, writer=writer)
        return []
    except (CheckpointError, ConfigError) as error:
        if begun or to == "armillary":
            raise
        # What is refused before a file is begun is what the format cannot express.
        raise type(error)(f"{error}; {_OTHER_WAYS[to]}") from error


@contextlib.contextmanager
def _directory(path: Path) -> Iterator[Path]:
    """A directory that may be there already, of a run that was stopped."""
    path.mkdir(exist_ok=True)
    yield path


def _note(place: Workplace, target: Path, to: Format, facts: dict[str, Any]) -> Path:
    """Put the facts into the manifest of what was written; return where that will stand."""
    if to == "gguf":
        manifest = target.with_name(f"{target.name}.json")
        write_json(manifest, manifest_of({target.name: place.written}) | {_FACTS: facts})
        return manifest
    path = place.written / MANIFEST
    write_json(path, read_json(path) | {_FACTS: facts})
    return target / MANIFEST
