"""Parts of a text → ids, where plain text can never become a control token.

The `tokenizers` library runs underneath, on a vocabulary in which the control tokens bear names
that no text holds. Where a control token is wanted, a stand-in is put into the text: an added
token of the same white-space habits, whose name is drawn at random for each tokenizer. The whole
goes through the library in one call, so that rules for the first word, or for the words around
a control token, work as they do on the whole text.
"""

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray

from armillary.errors import CheckpointError, UserError
from armillary.tokenizer.definition import is_byte_level, pieces

_BPE_OPTIONS = (
    *("vocab", "merges", "dropout", "unk_token", "continuing_subword_prefix"),
    *("end_of_word_suffix", "fuse_unk", "byte_fallback", "ignore_merges"),
)
Places = NDArray[np.int64]

_PRIVATE = 0x10F000  # a private plane of Unicode: no case, no normal form, never in a vocabulary


def byte_alphabet() -> dict[str, int]:
    """Return GPT-2's visible character of each byte (Radford et al. 2019, encoder.py)."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in kept]
    return {chr(byte): byte for byte in kept} | {
        chr(256 + n): byte for n, byte in enumerate(others)
    }


class Encoder:
    """Encodes parts, each a plain text or a control token's id.

    `controls` gives the added token's entry of each control id. Raises CheckpointError when the
    library cannot build the tokenizer.
    """

    def __init__(
        self, model: dict[str, Any], controls: Mapping[int, Mapping[str, Any]], where: str
    ) -> None:
        nonce = "".join(chr(_PRIVATE + byte) for byte in secrets.token_bytes(12))
        texts = pieces(model)
        hidden = {index: f"{nonce}{index}" for index in controls}
        habits = {index: _habits(token) for index, token in controls.items()}
        first = max(texts) + 1
        stand_ins = {
            habit: (first + n, f"{nonce}+{n}") for n, habit in enumerate(sorted({*habits.values()}))
        }
        self._stand_ins = {index: stand_ins[habit][1] for index, habit in habits.items()}
        self._stand_in_ids = {index for index, _ in stand_ins.values()}
        self._first_stand_in = first
        working = {
            **model,
            "truncation": None,  # a file may ask for either, and would cut the text in silence
            "padding": None,
            "post_processor": None,
            "added_tokens": [
                *(_entry(token) for token in model["added_tokens"] if token["id"] not in controls),
                *(
                    _entry({"id": index, "content": name, "lstrip": left, "rstrip": right})
                    for (left, right), (index, name) in stand_ins.items()
                ),
            ],
            "model": _hide(model["model"], texts | hidden | dict(stand_ins.values()), controls),
        }
        self._missing = _missing_bytes(texts) if is_byte_level(model) else frozenset()
        try:
            self._library = _library(working)
        except Exception as error:  # the library raises nothing narrower
            message = str(error).splitlines()[0]
            raise CheckpointError(f"{where}: cannot be built: {message}") from error

    def encode(self, parts: Sequence[str | int]) -> list[int]:
        """Return the ids of the parts put together. Raises UserError for invalid Unicode."""
        ids = self._encoding("".join(self._texts(parts))).ids
        wanted = iter([part for part in parts if isinstance(part, int)])
        return [next(wanted) if index >= self._first_stand_in else index for index in ids]

    def encode_located(self, parts: Sequence[str | int]) -> tuple[list[int], Places]:
        """Return the ids as `encode` does, and the first and the last part each lies in, (n, 2)."""
        texts = self._texts(parts)
        found = self._encoding("".join(texts))
        ids = np.array(found.ids, dtype=np.int64)
        offsets = np.array(found.offsets, dtype=np.int64).reshape(-1, 2)
        starts = np.cumsum([0, *map(len, texts)])
        first = np.minimum(np.searchsorted(starts, offsets[:, 0], side="right"), len(parts)) - 1
        last = np.maximum(np.searchsorted(starts, offsets[:, 1], side="left") - 1, first)
        # A control token by its own part: the library counts the white space it swallows to it.
        controls = [place for place, part in enumerate(parts) if isinstance(part, int)]
        at = ids >= self._first_stand_in
        first[at] = last[at] = controls
        ids[at] = [part for part in parts if isinstance(part, int)]
        return ids.tolist(), np.stack([first, last], axis=1)

    def _texts(self, parts: Sequence[str | int]) -> list[str]:
        return [
            self._stand_ins[part] if isinstance(part, int) else self._checked(part)
            for part in parts
        ]

    def _encoding(self, text: str) -> tokenizers.Encoding:
        return self._library.encode(text, add_special_tokens=False)

    def _checked(self, text: str) -> str:
        try:
            data = text.encode()
        except UnicodeEncodeError as error:
            code = ord(text[error.start])
            raise UserError(
                f"the text is not valid Unicode: a lone surrogate U+{code:04X} at character "
                f"{error.start}; give text decoded from valid UTF-8"
            ) from error
        if self._missing and (absent := self._missing.intersection(data)):
            raise UserError(
                f"the tokenizer has no token for byte 0x{min(absent):02X}, which the text holds"
            )
        return text


def _library(working: dict[str, Any]) -> tokenizers.Tokenizer:
    """The library's tokenizer of a tokenizer.json; a BPE vocabulary is handed over as it is.

    Writing it as text and reading it again would take most of the time.
    """
    inner = working["model"]
    if inner.get("type", "BPE") != "BPE":
        return tokenizers.Tokenizer.from_str(json.dumps(working))
    empty = {"type": "BPE", "vocab": {}, "merges": []}
    library = tokenizers.Tokenizer.from_str(
        json.dumps({**working, "model": empty, "added_tokens": []})
    )
    library.model = tokenizers.models.BPE(
        **{name: inner[name] for name in _BPE_OPTIONS if inner.get(name) is not None}
    )
    library.add_tokens(
        [
            tokenizers.AddedToken(**{name: v for name, v in token.items() if name != "id"})
            for token in working["added_tokens"]
        ]
    )
    return library


def _habits(token: Mapping[str, Any]) -> tuple[bool, bool]:
    return bool(token.get("lstrip")), bool(token.get("rstrip"))


def _entry(token: Mapping[str, Any]) -> dict[str, Any]:
    """Complete an added token's entry. None is special to the library: all are texts here."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return flags | dict(token) | {"special": False}


def _hide(
    inner: dict[str, Any], names: Mapping[int, str], controls: Mapping[int, Mapping[str, Any]]
) -> dict[str, Any]:
    """The model over a vocabulary of `names`, in which no control token can be spelt."""
    unknown = inner.get("unk_token")
    if isinstance(inner["vocab"], list):
        scores = [score for _, score in inner["vocab"]]
        # Tokens beyond the vocabulary are only reached as added tokens, never by their score.
        scores += [min(scores, default=0.0)] * (max(names) + 1 - len(scores))
        return {**inner, "vocab": [[names[n], score] for n, score in enumerate(scores)]}
    forbidden = {token["content"] for token in controls.values()}
    if inner.get("byte_fallback"):
        forbidden |= {f"<0x{byte:02X}>" for byte in range(256)}
    hidden_unknown = inner["vocab"].get(unknown) if unknown is not None else None
    return {
        **inner,
        "type": "BPE",
        "dropout": None,
        "vocab": {name: index for index, name in names.items()},
        "merges": [
            (left, right)
            for left, right in map(_pair, inner["merges"])
            if left + right not in forbidden and left not in forbidden and right not in forbidden
        ],
        "unk_token": names[hidden_unknown] if hidden_unknown is not None else None,
    }


def _pair(merge: Any) -> tuple[str, str]:
    left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
    return left, right


def _missing_bytes(texts: Mapping[int, str]) -> frozenset[int]:
    known = set(texts.values())
    return frozenset(byte for char, byte in byte_alphabet().items() if char not in known)
