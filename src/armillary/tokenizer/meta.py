"""tokenizer.model files → a definition: SentencePiece's (Llama 1 and 2) and tiktoken's (Llama 3).

Both are brought to the metadata that a GGUF file has of them, which gguf.py reads. Source:
sentencepiece_model.proto; tiktoken's load.py; llama3's tokenizer.py and the published
tokenizer_config.json of Llama 3 and 3.1, for the names of the special tokens.
"""

import base64
import binascii
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from armillary.errors import CheckpointError
from armillary.tokenizer import gguf
from armillary.tokenizer.definition import Definition
from armillary.tokenizer.encoder import byte_alphabet
from armillary.tokenizer.gguf import CONTROL, NORMAL

_LIMIT = 64 << 20
_RANK = re.compile(rb"([A-Za-z0-9+/]+=*) (\d+)")
_BPE = 2

Metadata = dict[str, Any]


def read(path: Path, *, newer: bool = False) -> Definition:
    """Read a tokenizer.model of either kind.

    `newer`: the special tokens of tiktoken's are those of Llama 3.1, else of Llama 3, where they
    stand at the same ids. Raises CheckpointError for a file that is neither, or a vocabulary that
    is not byte-pair encoding.
    """
    try:
        if path.stat().st_size > _LIMIT:
            raise CheckpointError(f"{path}: has more than {_LIMIT} bytes")
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    first_line = data.partition(b"\n")[0]
    if _RANK.fullmatch(first_line):
        metadata = _tiktoken(data, str(path), newer)
    else:
        metadata = _sentencepiece(data, str(path))
    return gguf.read({f"tokenizer.ggml.{key}": value for key, value in metadata.items()}, str(path))


def _tiktoken(data: bytes, where: str, newer: bool) -> Metadata:
    """Lines of a token's bytes in base64 and its rank."""
    tokens: list[bytes] = []
    for number, line in enumerate(data.splitlines()):
        match = _RANK.fullmatch(line)
        if match is None or int(match.group(2)) != number:
            raise CheckpointError(f"{where}: line {number + 1} is not the token of rank {number}")
        try:
            tokens.append(base64.b64decode(match.group(1), validate=True))
        except binascii.Error as error:
            raise CheckpointError(f"{where}: line {number + 1} is no base64") from error
    ranks = {token: rank for rank, token in enumerate(tokens)}
    if len(ranks) < len(tokens) or not all(bytes([byte]) in ranks for byte in range(256)):
        raise CheckpointError(f"{where}: must have each token once, and all 256 bytes")
    letters = {byte: letter for letter, byte in byte_alphabet().items()}

    def spelt(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    merges = [
        f"{spelt(left)} {spelt(right)}" for token in tokens for left, right in _cuts(token, ranks)
    ]
    special = _special_tokens(newer)
    return {
        "model": "gpt2",
        "pre": "llama-bpe",
        "tokens": [*map(spelt, tokens), *special],
        "token_type": [NORMAL] * len(tokens) + [CONTROL] * len(special),
        "merges": merges,
        "bos_token_id": len(tokens),
        "eos_token_id": len(tokens) + 1,
        "add_bos_token": True,
    }


def _cuts(token: bytes, ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """The ways to make a token of two others, in the order in which they are tried."""
    cuts = [(token[:at], token[at:]) for at in range(1, len(token))]
    return sorted(
        (cut for cut in cuts if cut[0] in ranks and cut[1] in ranks),
        key=lambda cut: (ranks[cut[0]], ranks[cut[1]]),
    )


def _special_tokens(newer: bool) -> list[str]:
    """Llama 3's 256, in the order of their ids."""
    reserved = (f"<|reserved_special_token_{n}|>" for n in range(256))
    named = {
        0: "<|begin_of_text|>",
        1: "<|end_of_text|>",
        6: "<|start_header_id|>",
        7: "<|end_header_id|>",
        9: "<|eot_id|>",
    }
    if newer:
        named |= {4: "<|finetune_right_pad_id|>", 8: "<|eom_id|>", 10: "<|python_tag|>"}
    return [named.get(n) or next(reserved) for n in range(256)]


def _sentencepiece(data: bytes, where: str) -> Metadata:
    """A ModelProto: pieces, the trainer's choices, the normaliser's."""
    pieces: list[tuple[str, float, int]] = []
    trainer: dict[int, Any] = {}
    normalizer: dict[int, Any] = {}
    try:
        for field, value in _fields(data):
            if field == 1:
                entry = dict(_fields(value))
                score = struct.unpack("<f", entry.get(2, b"\0\0\0\0"))[0]
                pieces.append((entry[1].decode(), score, entry.get(3, NORMAL)))
            elif field in {2, 3}:
                (trainer if field == 2 else normalizer).update(_fields(value))
    except (IndexError, KeyError, TypeError, ValueError, struct.error) as error:
        raise CheckpointError(f"{where}: is neither SentencePiece's nor tiktoken's") from error
    if not pieces:
        raise CheckpointError(f"{where}: is neither SentencePiece's nor tiktoken's")
    if trainer.get(3, 1) != _BPE:
        raise CheckpointError(
            f"{where}: holds a SentencePiece model that is not BPE; take the model's tokenizer.json"
        )
    tokens, scores, types = (list(column) for column in zip(*pieces, strict=True))
    named = {"unknown_token_id": (40, 0), "bos_token_id": (41, 1), "eos_token_id": (42, 2)}
    ids = {key: _signed(trainer.get(field, default)) for key, (field, default) in named.items()}
    return {
        "model": "llama",
        "tokens": tokens,
        "scores": scores,
        "token_type": types,
        "add_space_prefix": bool(normalizer.get(3, 1)),
        "add_bos_token": ids["bos_token_id"] >= 0,
        **{key: index for key, index in ids.items() if index >= 0},
    }


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """The numbers and values of a protobuf message: bytes, or whole numbers."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(message, at)
            yield key >> 3, value
            continue
        size = {1: 8, 5: 4}.get(kind)
        if kind == 2:
            size, at = _varint(message, at)
        if size is None or at + size > len(message):
            raise ValueError("no protobuf message")
        yield key >> 3, message[at : at + size]
        at += size


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """A number of seven bits a byte, and where it ends."""
    value = shift = 0
    while shift < 70:
        byte = message[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if not byte & 0x80:
            return value, at
    raise ValueError("no protobuf message")
