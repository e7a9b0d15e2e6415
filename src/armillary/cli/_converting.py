"""A conversion as the command line asks for it: from a name to files and what proves them."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from armillary.cli._evaluation import say
from armillary.cli._model import read_checkpoint
from armillary.cli._options import Interrupted, print_json
from armillary.cli._progress import BarOrLines
from armillary.conversion.convert import bytes_to_write, convert
from armillary.errors import UserError
from armillary.wording import bytes_text

if TYPE_CHECKING:
    from armillary.conversion.convert import Converted

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B", re.IGNORECASE)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


@dataclass(frozen=True)
class Wish:
    """What was asked on the command line."""

    model: str
    target: Path
    to: Literal["huggingface", "gguf", "armillary"]
    dtype: str | None
    shard_size: str | None
    ignore_keys: tuple[str, ...]


def run(wish: Wish, *, json: bool) -> None:
    """Convert and print what was found. Raises UserError, and Interrupted when interrupted."""
    shard_bytes = None if wish.shard_size is None else size_of(wish.shard_size)
    checkpoint = read_checkpoint(wish.model, wish.ignore_keys)
    say(checkpoint.notices)
    total = bytes_to_write(checkpoint, wish.to, wish.dtype)
    done = 0
    try:
        with BarOrLines(patient=True) as bar:

            def progress(more: int) -> None:
                nonlocal done
                done += more
                bar.show(f"writing: {bytes_text(done)} of {bytes_text(total)}", done, total)

            converted = convert(
                checkpoint,
                wish.target,
                wish.to,
                dtype=wish.dtype,
                max_shard_bytes=shard_bytes,
                progress=progress,
            )
    except KeyboardInterrupt:
        raise Interrupted(
            "what was written so far is kept; the same command goes on from it"
        ) from None
    say(converted.notices)
    _show(converted, json)


def size_of(text: str) -> int:
    """The bytes that 5GB, 500MB or 2GiB means. Raises UserError for what is no size."""
    match = _SIZE.fullmatch(text.strip())
    if match is None or float(match.group(1)) <= 0:
        raise UserError(f"--shard-size {text}: is no size; say it as 5GB or 500MB")
    number, power, binary = match.groups()
    return int(float(number) * (1024 if binary else 1000) ** _POWERS[power.upper()])


def _show(converted: "Converted", json: bool) -> None:
    if json:
        print_json(
            {
                "out": str(converted.path),
                "format": converted.format,
                "manifest": str(converted.manifest),
                "tensors": converted.tensors,
                "proof": converted.proof.facts(),
            }
        )
        return
    counts = ", ".join(f"{count} {name}" for name, count in converted.tensors.items())
    print(f"{converted.path}: {counts}; {converted.proof.line()}")
