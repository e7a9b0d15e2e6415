"""Files ↔ a configuration and named arrays.

`open_checkpoint` tells the formats apart by what is there and reads any of them into a
`Checkpoint`. Nothing here imports torch, and nothing is ever unpickled.
"""

from collections.abc import Iterable
from pathlib import Path

from armillary.checkpoints.checkpoint import Checkpoint
from armillary.checkpoints.gguf import read_gguf
from armillary.checkpoints.huggingface import read_huggingface, write_huggingface
from armillary.checkpoints.meta import is_meta, read_meta
from armillary.checkpoints.own_format import MARKER, read_armillary, save_armillary
from armillary.errors import CheckpointError
from armillary.files import read_json, set_aside

__all__ = ["Checkpoint", "open_checkpoint", "save_armillary", "write_huggingface"]

_PICKLES = frozenset({".bin", ".ckpt", ".pickle", ".pkl", ".pt", ".pth"})


def open_checkpoint(
    path: str | Path,
    *,
    ignore_keys: Iterable[str] = (),
    allow_missing: bool = False,
    verify: bool = False,
) -> Checkpoint:
    """Read a GGUF file, a Hugging Face directory, one of Meta's or one of our own.

    ignore_keys    configuration keys to pass over although they are not known
    allow_missing  read what is there; parameters without a tensor are then absent
    verify         compare checksums too, where the format has them (ours)
    Raises CheckpointError or ConfigError in one line.
    """
    checkpoint = _open(Path(path), ignore_keys, allow_missing, verify)
    _notice_unknown_tokens(checkpoint)
    return checkpoint


def _notice_unknown_tokens(checkpoint: Checkpoint) -> None:
    """Files have such tokens, added and never trained; a prompt that holds one is refused."""
    known, tokenizer = checkpoint.config.vocab_size, checkpoint.tokenizer
    if tokenizer is not None and tokenizer.vocab_size > known:
        checkpoint.notices.append(
            f"the tokenizer has tokens up to {tokenizer.vocab_size - 1}, the model knows those up "
            f"to {known - 1}; a prompt with another one is refused"
        )


def _open(path: Path, ignore_keys: Iterable[str], allow_missing: bool, verify: bool) -> Checkpoint:
    if path.is_dir():
        return _open_directory(path, ignore_keys, allow_missing, verify)
    if not path.exists():
        old = set_aside(path)
        hint = f"; an interrupted save left the one before at {old}" if old.exists() else ""
        raise CheckpointError(f"{path}: does not exist{hint}")
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    if path.suffix in _PICKLES or magic[:1] == b"\x80" or magic == b"PK\3\4":
        raise CheckpointError(
            f"{path}: looks like a pickle, and nothing is unpickled, since that can run any code; "
            "convert it to safetensors or GGUF (of Meta's files name the directory)"
        )
    if path.suffix in {".json", ".yaml", ".yml"}:
        raise CheckpointError(
            f"{path}: holds a configuration but no weights; give a checkpoint's directory"
        )
    if path.suffix == ".safetensors":
        raise CheckpointError(
            f"{path}: holds weights but no configuration; give the directory with its config.json"
        )
    return read_gguf(path, ignore_keys=ignore_keys, allow_missing=allow_missing)


def _open_directory(
    path: Path, ignore_keys: Iterable[str], allow_missing: bool, verify: bool
) -> Checkpoint:
    if not (path / "config.json").is_file():
        if is_meta(path):
            return read_meta(path, ignore_keys=ignore_keys, allow_missing=allow_missing)
        files = sorted(file.name for file in path.glob("*.gguf"))
        hint = f"; to read {files[0]}, name the file itself" if files else ""
        raise CheckpointError(f"{path}: holds no config.json{hint}")
    if read_json(path / "config.json").get("format") == MARKER:
        return read_armillary(path, allow_missing=allow_missing, verify=verify)
    return read_huggingface(path, ignore_keys=ignore_keys, allow_missing=allow_missing)
