"""The tokenizer that the rest of the library sees."""

import functools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from armillary.errors import CheckpointError, UserError
from armillary.files import write_atomically, write_json
from armillary.tokenizer import gguf, gguf_write, huggingface, meta
from armillary.tokenizer.definition import (
    SPACE,
    Definition,
    check,
    is_byte_level,
    pieces,
    space_prefix,
)
from armillary.tokenizer.encoder import Encoder, Places, byte_alphabet

# What a tokenizer that was written must make the same tokens of as the one before. None begins with
# a space: what is written of it is noticed where it differs.
_PROBES = (
    "",
    "Hello world, it's 1234567 o'clock!  Don't you'LL WE'VE",
    "def f(x):\n\treturn [x**2 for _ in range(10)]\r\n\n\n    # done   ",
    "Grüße, naïve façade — “quoted” … ½ ² Ⅷ, Привет мир, Ελληνικά, עברית, हिन्दी",
    "今天天气很好。東京タワー 한국어 ไทย 🤗👍🏽 a\u00a0b\u3000c",
)
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Tokenizer:
    """Text ↔ token ids, made by `from_file`, `from_gguf` or `from_meta`.

    Control tokens (end of text, role markers) and plain text are kept apart: text becomes a
    control token only where `specials=True` says so. One rule for the beginning of a text holds on
    every path: what the file wants before a raw text (most often BOS) stands there once. An end
    token is never added, since a prompt is to be continued. Safe to use from several threads.
    """

    def __init__(self, definition: Definition) -> None:
        model = definition.model
        check(model, definition.where)
        self._pieces = pieces(model)
        self._added = {token["id"]: token for token in model["added_tokens"]}
        self._controls = {n: token for n, token in self._added.items() if token.get("special")}
        self._alphabet = byte_alphabet() if is_byte_level(model) else None
        self._byte_fallback = bool(model["model"].get("byte_fallback"))
        self._space_prefix = space_prefix(model)
        self._encoder = Encoder(model, self._controls, definition.where)
        self._prefix = definition.prefix
        self._model = model
        self._where = definition.where

        ids = {text: index for index, text in self._pieces.items()}
        self.named_tokens: dict[str, str] = dict(definition.names)
        self.bos_id: int | None = ids.get(definition.names.get("bos_token", ""))
        self.pad_id: int | None = ids.get(definition.names.get("pad_token", ""))
        self.eos_ids: tuple[int, ...] = definition.eos_ids
        self.vocab_size: int = max(self._pieces) + 1
        self.special_tokens: dict[str, int] = {
            token["content"]: index for index, token in sorted(self._controls.items())
        }
        self.chat_templates: dict[str, str] = dict(definition.chat_templates)
        longest_first = sorted(self.special_tokens, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    @classmethod
    def from_file(cls, path: str | Path, *, config: Mapping[str, object] | None = None) -> Self:
        """Read a tokenizer.json and what stands beside it.

        `config` takes the place of the tokenizer_config.json beside it. Also read, when there:
        special_tokens_map.json, chat_template.jinja and additional_chat_templates/*.jinja.
        Raises CheckpointError naming the file and key.
        """
        return cls(huggingface.read(Path(path), config))

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, object], *, where: str = "GGUF metadata") -> Self:
        """Build it from GGUF metadata (keys `tokenizer.*`); `where` names the file in messages.

        Raises CheckpointError for a vocabulary or a pre-tokenizer that is not known, by its name.
        """
        return cls(gguf.read(metadata, where))

    @classmethod
    def from_meta(cls, path: str | Path, *, newer: bool = False) -> Self:
        """Read a tokenizer.model of Llama: SentencePiece's BPE, or tiktoken's ranks (Llama 3).

        `newer` takes the names of special tokens from Llama 3.1, else from 3.
        Raises CheckpointError naming the file and what is wrong in it.
        """
        return cls(meta.read(Path(path), newer=newer))

    @property
    def chat_template(self) -> str | None:
        """The template used when none is named: "default", or the only one."""
        if len(self.chat_templates) == 1:
            return next(iter(self.chat_templates.values()))
        return self.chat_templates.get("default")

    def encode(self, text: str, *, bos: bool | None = None, specials: bool = False) -> list[int]:
        """Return the ids of a text.

        `bos=None` follows the tokenizer's own rule for raw text; True and False override it. With
        `specials=True` control tokens written in the text become what they say, and a beginning
        that the text brings itself is not doubled. Raises UserError for invalid Unicode, and for
        `bos=True` where the tokenizer has none.
        """
        parts = self.split_specials(text) if specials else [text]
        return self.begin(self.encode_parts(parts), bos=bos)

    def encode_parts(self, parts: Sequence[str | int]) -> list[int]:
        """Return the ids of parts put together: plain texts, and ids of control tokens between.

        Nothing is put before them. Raises UserError for invalid Unicode.
        """
        return self._encoder.encode(parts)

    def encode_located(self, parts: Sequence[str | int]) -> tuple[list[int], Places]:
        """Return the ids of parts put together, and the first and the last part each lies in.

        Shapes: n ids, (n, 2) numbers of parts. A token of text may reach over several parts, since
        texts next to each other are one text. Raises UserError for invalid Unicode.
        """
        return self._encoder.encode_located(parts)

    def split_specials(self, text: str) -> list[str | int]:
        """Cut a text at the control tokens written in it, the longest where several fit."""
        parts: list[str | int] = []
        start = 0
        for match in self._special.finditer(text):
            if match.start() > start:
                parts.append(text[start : match.start()])
            parts.append(self.special_tokens[match.group()])
            start = match.end()
        if start < len(text):
            parts.append(text[start:])
        return parts

    def begin(self, ids: list[int], *, bos: bool | None = None) -> list[int]:
        """Put before the ids what begins a text, unless they begin with it."""
        prefix = self._prefix
        if bos is not None:
            if bos and self.bos_id is None:
                raise UserError("bos=True: the tokenizer has no BOS token; leave it to bos=None")
            prefix = (self.bos_id,) if bos and self.bos_id is not None else ()
        return ids if tuple(ids[: len(prefix)]) == prefix else [*prefix, *ids]

    def decode(self, ids: Iterable[int], *, skip_specials: bool = False) -> str:
        """Return the text of a whole sequence of ids; it undoes `encode`.

        The space that encoding put before the text is taken off again; bytes that are no UTF-8
        become U+FFFD. To continue a text, join `token_bytes`. Raises UserError for a negative id.
        """
        data = bytearray()
        at_start = self._space_prefix != "never"
        for index in ids:
            piece = self.token_bytes(index)
            if index in self._added:
                at_start = self._space_prefix == "always" or (at_start and self.is_special(index))
                if skip_specials and self.is_special(index):
                    continue
            elif at_start:
                piece = piece.removeprefix(b" ")
                at_start = False
            data += piece
        return data.decode(errors="replace")

    def token_bytes(self, index: int) -> bytes:
        """Return the bytes that a token stands for; a control token's are its name.

        An id beyond the vocabulary, where models pad their embedding, has none. Raises UserError
        for a negative id.
        """
        if index < 0:
            raise UserError(f"token id {index} is negative; ids start at 0")
        piece = self._pieces.get(index, "")
        if self._alphabet is not None:
            if index in self._added or any(char not in self._alphabet for char in piece):
                return piece.encode()
            return bytes(self._alphabet[char] for char in piece)
        if index in self._controls:
            return piece.encode()
        if self._byte_fallback and (match := _BYTE_TOKEN.fullmatch(piece)):
            return bytes.fromhex(match.group(1))
        return piece.replace(SPACE, " ").encode()

    def is_special(self, index: int) -> bool:
        """Whether the id is a control token's."""
        return index in self._controls

    def save(self, directory: str | Path) -> None:
        """Write tokenizer.json and tokenizer_config.json, from which `from_file` makes the same.

        Raises UserError when they cannot be written.
        """
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        with write_atomically(directory / "tokenizer.json") as file:
            file.write(self._json.encode())
        write_json(directory / "tokenizer_config.json", self._config())

    @functools.cached_property
    def _json(self) -> str:
        """The content of a tokenizer.json."""
        return json.dumps(self._model, ensure_ascii=False)

    def to_gguf(
        self, vocab_size: int, notices: list[str], *, eos_ids: Sequence[int] | None = None
    ) -> dict[str, Any]:
        """GGUF metadata for a model of `vocab_size` embeddings, from which the same is read.

        `eos_ids` are a model's own, where it has more than the tokenizer. `notices` gets what the
        format leaves out. Raises CheckpointError for what it cannot say, found beforehand or by
        the tokens of some texts.
        """
        definition = Definition(
            model=json.loads(self._json),
            names=self.named_tokens,
            eos_ids=self.eos_ids if eos_ids is None else tuple(eos_ids),
            prefix=self._prefix,
            chat_templates=self.chat_templates,
            where=self._where,
        )
        metadata = gguf_write.metadata(definition, vocab_size, notices)
        again = Tokenizer.from_gguf(metadata, where=self._where)
        for probe in _PROBES:
            try:
                wanted = self.encode(probe)
            except UserError:  # a byte that the vocabulary has no token for
                continue
            if again.encode(probe) != wanted:
                raise CheckpointError(
                    f"{self._where}: written as GGUF, it makes other tokens of {probe!r:.60}; "
                    "write a directory instead"
                )
        return metadata

    def _config(self) -> dict[str, Any]:
        config: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            **dict(sorted(self.named_tokens.items())),
            "eos_tokens": [self._pieces[index] for index in self.eos_ids],
        }
        if self._prefix in ((), (self.bos_id,)):  # any other one is in tokenizer.json alone
            config["add_bos_token"] = bool(self._prefix)
        if set(self.chat_templates) == {"default"}:
            config["chat_template"] = self.chat_templates["default"]
        elif self.chat_templates:
            config["chat_template"] = [
                {"name": name, "template": text} for name, text in self.chat_templates.items()
            ]
        return config
