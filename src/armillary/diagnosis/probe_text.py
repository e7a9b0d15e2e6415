"""The text that a model is tried on, cut into rows of tokens of equal length."""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from armillary.checkpoints.checkpoint import Checkpoint
from armillary.diagnosis.prose import PROSE
from armillary.errors import UserError
from armillary.tokenizer import Tokenizer

_MODULES = ("textwrap", "bisect", "heapq", "shlex", "statistics")
BRIEF, SHORT, LONG, FAR = 48, 96, 192, 192
_SHORT_TOKENS, _LONG_TOKENS, _FAR_ROWS = 192, 576, 2
_LEAST = 24
"""Tokens of a row below which nothing can be told."""


@dataclass(frozen=True)
class ProbeText:
    """Rows of tokens, without what begins a text.

    Shapes: brief (1, t), short (R, T), long (R', T'). `far` has the rows of which a part is put
    far from the rest. `prefix` is what the tokenizer puts before a text by its own rule.
    `bytes_per_token` is of all of the text.
    """

    brief: Tensor
    short: Tensor
    long: Tensor
    far: Tensor
    prefix: tuple[int, ...]
    bytes_per_token: float


def built_in_texts() -> list[str]:
    """Prose of our own, and code of Python's library where its source is there."""
    texts = [PROSE]
    for name in _MODULES:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None and spec.origin.endswith(".py"):
            texts.append(Path(spec.origin).read_text("utf-8"))
    return texts


def read_texts(file: Path | None) -> list[str]:
    """The text of a file, else the built-in ones. Raises UserError when it cannot be read."""
    if file is None:
        return built_in_texts()
    try:
        return [file.read_text("utf-8")]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file}: cannot be read as UTF-8 text: {error}") from error


def probe_text(tokenizer: Tokenizer, texts: Sequence[str], window: int) -> ProbeText:
    """Cut texts into rows that fit the window.

    Raises UserError for texts that are too short to tell anything.
    """
    encoded = [tokenizer.encode_parts([text]) for text in texts]
    size = sum(len(text.encode()) for text in texts)
    prefix = tuple(tokenizer.begin([]))
    room = window - len(prefix)

    def rows(length: int, tokens: int) -> Tensor:
        length = min(length, room, max(map(len, encoded)))
        return torch.tensor(_rows(encoded, length, -(-tokens // length)))

    short = rows(SHORT, _SHORT_TOKENS)
    if short.shape[1] < min(_LEAST, room):
        raise UserError(
            f"the text comes to {max(map(len, encoded))} tokens; give at least {_LEAST}"
        )
    return ProbeText(
        brief=short[:1, :BRIEF],
        short=short,
        long=rows(LONG, _LONG_TOKENS),
        far=rows(FAR, _FAR_ROWS * FAR)[:_FAR_ROWS],
        prefix=prefix,
        bytes_per_token=size / max(1, sum(map(len, encoded))),
    )


def _rows(encoded: Sequence[list[int]], length: int, count: int) -> list[list[int]]:
    """Rows from all texts in turn, each text read from its beginning on."""
    rows: list[list[int]] = []
    start = 0
    while len(rows) < count:
        found = [tokens[start : start + length] for tokens in encoded]
        found = [row for row in found if len(row) == length]
        if not found:
            break
        rows += found
        start += length
    return rows[:count]


def with_prefix(rows: Tensor, prefix: Sequence[int]) -> Tensor:
    """Rows (R, T) with the same tokens before each, (R, P + T)."""
    before = torch.tensor(prefix, dtype=rows.dtype).expand(rows.shape[0], len(prefix))
    return torch.cat([before, rows], dim=1)


def first_tokens(checkpoint: Checkpoint, text: str, count: int) -> list[int]:
    """The first tokens of a text, with what begins one.

    Raises UserError where there is no tokenizer, and for a text without tokens.
    """
    if checkpoint.tokenizer is None:
        raise UserError(f"{checkpoint.source}: has no tokenizer; put tokenizer.json beside it")
    ids = checkpoint.tokenizer.encode(text)[: min(count, checkpoint.config.max_positions)]
    if not ids:
        raise UserError("the text has no tokens; give some")
    return ids
