"""What a tokenizer is, as data: the content of a tokenizer.json and the facts that stand beside it.

Both readers (Hugging Face files, GGUF metadata) end here, so that everything after them knows
one form.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from armillary.errors import CheckpointError

# Role markers such as <|user|> or <｜User｜>, which some files declare as plain added tokens.
_MARKER = re.compile(r"<[|｜][^<>\s]+[|｜]>")

_LARGEST_ID = 1 << 24

SPACE = "▁"  # SentencePiece's visible space


@dataclass(frozen=True)
class Definition:
    """A tokenizer read from files.

    `model` is the content of a tokenizer.json, in which every control token is an added token
    with special = true. `names` are the texts of bos_token, eos_token and their like. `prefix`
    are the ids that begin a raw text. `where` names the file in messages.
    """

    model: dict[str, Any]
    names: dict[str, str]
    eos_ids: tuple[int, ...]
    prefix: tuple[int, ...]
    chat_templates: dict[str, str]
    where: str


def is_marker(text: str) -> bool:
    """Whether an added token is written like a control token, whatever its file says of it."""
    return _MARKER.fullmatch(text) is not None


def pieces(model: dict[str, Any]) -> dict[int, str]:
    """Every token's text as it is stored, by id, added tokens among them."""
    vocab = model["model"]["vocab"]
    if isinstance(vocab, dict):
        stored = {index: text for text, index in vocab.items()}
    else:
        stored = {index: text for index, (text, _) in enumerate(vocab)}
    return stored | {token["id"]: token["content"] for token in model["added_tokens"]}


def is_byte_level(model: dict[str, Any]) -> bool:
    """Whether the vocabulary spells bytes as GPT-2 does (else: as SentencePiece does)."""
    return any(part.get("type") == "ByteLevel" for part in _components(model))


def space_prefix(model: dict[str, Any]) -> str:
    """Return where encoding puts a space that the text has not: "never", "first" or "always".

    "first" is the start of the text, "always" the start of each run between added tokens.
    """
    for part in _components(model):
        if part.get("type") == "Prepend" and part.get("prepend") == SPACE:
            return "always"
        if part.get("type") == "Metaspace":
            old = "always" if part.get("add_prefix_space", True) else "never"
            return str(part.get("prepend_scheme", old))
    return "never"


def check(model: dict[str, Any], where: str) -> None:
    """Raise CheckpointError when this is no tokenizer.json of a kind that can be undone exactly."""
    inner = model.get("model")
    if not isinstance(inner, dict) or not isinstance(inner.get("vocab"), dict | list):
        raise CheckpointError(f"{where}: holds no model with a vocab; is it a tokenizer.json?")
    kind = inner.get("type", "BPE")
    if kind not in ("BPE", "Unigram"):
        raise CheckpointError(
            f"{where}: model type {kind!r} is not supported; byte-level BPE, SentencePiece BPE "
            "and Unigram are"
        )
    if inner.get("continuing_subword_prefix") or inner.get("end_of_word_suffix"):
        raise CheckpointError(
            f"{where}: a vocabulary with marks for the inside or the end of words is not supported"
        )
    _check_vocabulary(inner, kind, where)
    _check_added_tokens(model, where)
    if not is_byte_level(model) and not _is_sentencepiece(model):
        raise CheckpointError(
            f"{where}: is neither byte-level nor SentencePiece (no ByteLevel, Metaspace or "
            "ByteFallback in it), so its text cannot be restored exactly"
        )


def _check_vocabulary(inner: dict[str, Any], kind: str, where: str) -> None:
    vocab = inner["vocab"]
    if kind == "Unigram":
        if not isinstance(vocab, list) or not all(map(_is_scored, vocab)):
            raise CheckpointError(f"{where}: model.vocab must be a list of texts and scores")
        return
    if not isinstance(vocab, dict) or not all(map(_is_id, vocab.values())):
        raise CheckpointError(f"{where}: model.vocab must map texts to ids")
    if len(set(vocab.values())) < len(vocab):
        raise CheckpointError(f"{where}: model.vocab gives an id to two texts")
    merges = inner.get("merges")
    if not isinstance(merges, list) or not all(map(_is_merge, merges)):
        raise CheckpointError(f"{where}: model.merges must be a list of pairs of tokens")


def _is_id(value: object) -> bool:
    return type(value) is int and 0 <= value < _LARGEST_ID


def _is_scored(entry: object) -> bool:
    return (
        isinstance(entry, list)
        and len(entry) == 2
        and isinstance(entry[0], str)
        and isinstance(entry[1], int | float)
    )


def _is_merge(merge: object) -> bool:
    if isinstance(merge, str):
        return " " in merge
    return type(merge) is list and len(merge) == 2 and type(merge[0]) is type(merge[1]) is str


def _check_added_tokens(model: dict[str, Any], where: str) -> None:
    tokens = model.setdefault("added_tokens", [])
    if not isinstance(tokens, list):
        raise CheckpointError(f"{where}: added_tokens must be a list")
    for token in tokens:
        fine = isinstance(token, dict) and isinstance(token.get("content"), str)
        if not fine or not token["content"] or not _is_id(token.get("id")):
            raise CheckpointError(
                f"{where}: added_tokens: {ascii(token)[:80]} has no content or no id"
            )
    vocab = model["model"]["vocab"]
    texts = vocab if isinstance(vocab, dict) else {text: n for n, (text, _) in enumerate(vocab)}
    stored = {index: text for text, index in texts.items()}
    for token in tokens:
        index, text = token["id"], token["content"]
        if stored.setdefault(index, text) != text or texts.get(text, index) != index:
            raise CheckpointError(
                f"{where}: added_tokens: {ascii(text)[:80]} has the id {index}, but the vocabulary "
                "says otherwise"
            )
    if not stored:
        raise CheckpointError(f"{where}: the vocabulary is empty")
    if isinstance(vocab, list) and max(stored) >= len(stored):
        raise CheckpointError(f"{where}: added_tokens leave ids out after the vocabulary's")


def _is_sentencepiece(model: dict[str, Any]) -> bool:
    kinds = {part.get("type") for part in _components(model)}
    return bool(kinds & {"Metaspace", "ByteFallback"}) or any(
        part.get("type") == "Replace" and SPACE in (part.get("content"), _pattern(part))
        for part in _components(model)
    )


def _pattern(replace: dict[str, Any]) -> object:
    pattern = replace.get("pattern")
    return pattern.get("String") if isinstance(pattern, dict) else None


def _components(model: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Normalizers, pre-tokenizers and decoders, with those inside a Sequence one by one."""
    for role, members in (
        ("normalizer", "normalizers"),
        ("pre_tokenizer", "pretokenizers"),
        ("decoder", "decoders"),
    ):
        part = model.get(role)
        if isinstance(part, dict):
            inner = part.get(members) if part.get("type") == "Sequence" else [part]
            yield from (entry for entry in _list(inner) if isinstance(entry, dict))


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
