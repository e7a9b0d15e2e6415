"""What a prepared directory says of itself: dataset.json, read strictly.

manifest.json        every file with its size and SHA-256
dataset.json         settings, counts, lengths, what was skipped and why
tokenizer/           the tokenizer that the ids are of
train/ validation/   00000.tokens.npy and 00000.offsets.npy, of chats 00000.learned.npy, and so on
"""

import hashlib
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError

from armillary.errors import UserError
from armillary.files import read_json, verify_manifest
from armillary.tokenizer import Tokenizer

FACTS = "dataset.json"
TOKENIZER = "tokenizer"
TRAIN, VALIDATION = "train", "validation"
SPLITS = (TRAIN, VALIDATION)
EXAMPLES = 5


class _Model(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")


class Settings(_Model):
    """What decides a prepared directory's content, beside the content of its sources.

    tokenizer_sha256       of the tokenizer's file and of what it puts before a text
    chat_template_sha256   of the template that chats were written by; null where there are none
    end_id                 the token after each document
    validation             share of the documents that is held out
    """

    sources: list[str]
    field: str
    format: str
    seed: int
    validation: float
    part_bytes: int
    shard_tokens: int
    tokenizer_sha256: str
    chat_template_sha256: str | None = None
    end_id: int

    @property
    def masked(self) -> bool:
        """Whether only some tokens are learned: those that the assistant says in a chat."""
        return self.chat_template_sha256 is not None

    def differences(self, others: Mapping[str, object]) -> list[str]:
        """Return a phrase for each of the others' entries that is not what this one has."""
        own = self.model_dump()
        return [
            f"{name} is {_short(own.get(name))}, not {_short(value)}"
            for name, value in others.items()
            if own.get(name) != value
        ]


class Shard(_Model):
    """Counts of one shard; `index` is the number in its files' names."""

    index: int
    documents: int
    tokens: int


class Split(_Model):
    """Counts of one split.

    bytes     of its documents' texts in UTF-8
    learned   tokens that are learned, of chats; null of texts, which are learned as a whole
    sources   how many documents are of each of the settings' sources; documents stand in the order
              of their sources. Null in data that was prepared before this was counted
    """

    documents: int
    tokens: int
    bytes: int
    learned: int | None = None
    sources: list[int] | None = None
    shards: list[Shard]


class Example(_Model):
    """One thing that was skipped, and what was wrong with it."""

    id: str
    detail: str


class SkippedFacts(_Model):
    """How often something was skipped for one reason, with the first examples."""

    count: int
    examples: list[Example]


class Facts(_Model):
    """The content of dataset.json.

    lengths   documents by tokens: "8" counts those of 8 to 15, and so on by powers of two
    """

    format: Literal["armillary-dataset"] = "armillary-dataset"
    format_version: Literal[1] = 1
    settings: Settings
    vocab_size: int
    dtype: Literal["uint8", "uint16", "uint32"]
    source_files: int
    source_bytes: int
    splits: dict[str, Split]
    lengths: dict[str, int]
    skipped: dict[str, SkippedFacts]


def read_prepared(directory: Path, *, checksums: bool = False) -> Facts:
    """Read a prepared directory's facts, its files held against the manifest.

    `checksums` compares their sums too, which reads all of them. Raises UserError in one line.
    """
    path = directory / FACTS
    if not path.is_file():
        hint = "; armillary prepare makes one" if not directory.exists() else ""
        raise UserError(f"{directory}: is no prepared data, {FACTS} is not there{hint}")
    verify_manifest(directory, checksums=checksums)
    try:
        return Facts.model_validate(read_json(path))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise UserError(f"{path}: {place}: {first['msg']}") from error


def tokenizer_checksum(tokenizer: Tokenizer) -> str:
    """Return the SHA-256 of what turns text into ids: tokenizer.json, and what begins a text.

    It is the same for a tokenizer that was saved and read again.
    """
    with tempfile.TemporaryDirectory() as directory:
        tokenizer.save(directory)
        digest = hashlib.sha256((Path(directory) / "tokenizer.json").read_bytes())
    digest.update(repr(tokenizer.begin([])).encode())
    return digest.hexdigest()


def chat_template_checksum(tokenizer: Tokenizer) -> str | None:
    """Return the SHA-256 of the template that chats are written by; None where there is none."""
    template = tokenizer.chat_template
    return None if template is None else hashlib.sha256(template.encode()).hexdigest()


def token_sizes(tokenizer: Tokenizer) -> NDArray[np.int64]:
    """Return the bytes of text that each id stands for, (V,); none for control tokens."""
    counts = (
        0 if tokenizer.is_special(index) else len(tokenizer.token_bytes(index))
        for index in range(tokenizer.vocab_size)
    )
    return np.fromiter(counts, dtype=np.int64, count=tokenizer.vocab_size)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"
