"""GGUF metadata → a definition, in the form of a tokenizer.json.

Source: the GGUF specification and llama.cpp's src/llama-vocab.cpp.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from armillary.errors import CheckpointError
from armillary.tokenizer.definition import SPACE, Definition, is_marker
from armillary.tokenizer.pretokenizers import PRE_TOKENIZERS, PreTokenizer

# Types of tokens.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

# A file names one end token; a chat ends with others too, which are known by their texts alone.
END_TEXTS = frozenset(
    (
        *(
            "<|eot_id|>",
            "<|im_end|>",
            "<|end|>",
            "<|return|>",
            "<|call|>",
            "<|calls|>",
            "<|flush|>",
        ),
        *("<|eom_id|>", "<|endoftext|>", "<|end_of_text|>", "<end_of_turn>", "<end_of_utterance>"),
        *("<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<eos>", "<turn|>", "<|tool_response>", "[e~["),
        "<｜end▁of▁sentence｜>",
    )
)
NAMED = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
T = TypeVar("T")


def read(metadata: Mapping[str, object], where: str) -> Definition:
    """Build the definition. Raises CheckpointError naming the key and what is wrong."""
    return _Reader(metadata, where).definition()


class _Reader:
    """One reading of one file's metadata: the tokens, their types, and the named ids."""

    def __init__(self, metadata: Mapping[str, object], where: str) -> None:
        self.metadata = metadata
        self.where = where
        self.model = self.require("tokenizer.ggml.model", str)
        if self.model not in ("gpt2", "llama", "gemma4"):
            raise self.error(
                "tokenizer.ggml.model",
                f"{self.model[:40]!r} is not supported; gpt2 (byte-level BPE), llama "
                "(SentencePiece) and gemma4 are",
            )
        self.tokens = self.read_tokens()
        self.types = self.read_types()
        self.named = self.read_named()
        self.eos_ids = self.read_eos_ids()
        for index in [self.named.get("bos_token"), *self.eos_ids]:
            if index is not None:
                self.types[index] = CONTROL

    def error(self, key: str, problem: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: {key}: {problem}")

    def get(self, key: str, kind: type[T]) -> T | None:
        value = self.metadata.get(key)
        if value is None or (isinstance(value, kind) and (kind is bool or type(value) is not bool)):
            return value
        raise self.error(key, f"must be of type {kind.__name__}, not {type(value).__name__}")

    def require(self, key: str, kind: type[T]) -> T:
        value = self.get(key, kind)
        if value is None:
            raise self.error(key, "is missing; convert the model again with a current converter")
        return value

    def read_tokens(self) -> list[str]:
        tokens = [
            text or f"[EMPTY_{n}]" if isinstance(text, str) else self._refuse_token(n)
            for n, text in enumerate(self.require("tokenizer.ggml.tokens", list))
        ]
        if not tokens:
            raise self.error("tokenizer.ggml.tokens", "is empty")
        if len(set(tokens)) < len(tokens):
            seen: dict[str, int] = {}
            for n, text in enumerate(tokens):
                if seen.setdefault(text, n) != n:
                    raise self.error(
                        "tokenizer.ggml.tokens", f"{text!r} stands at {seen[text]} and at {n}"
                    )
        return tokens

    def _refuse_token(self, index: int) -> str:
        raise self.error("tokenizer.ggml.tokens", f"entry {index} is no text")

    def per_token(self, key: str, default: T | None = None) -> list[T]:
        values = self.get(key, list)
        if values is None:
            if default is None:
                raise self.error(key, "is missing; convert the model again")
            return [default] * len(self.tokens)
        if len(values) != len(self.tokens):
            raise self.error(
                key, f"has {len(values)} entries, but there are {len(self.tokens)} tokens"
            )
        return list(values)

    def read_types(self) -> list[int]:
        """Return a type for each token; what is written like a control token is one."""
        types: list[int] = self.per_token("tokenizer.ggml.token_type", NORMAL)
        return [
            CONTROL if (kind == USER_DEFINED and is_marker(text)) or text in END_TEXTS else kind
            for text, kind in zip(self.tokens, types, strict=True)
        ]

    def read_named(self) -> dict[str, int]:
        # The format's own defaults hold for SentencePiece. Those for BPE are one model's ids.
        named = {"unk_token": 0, "bos_token": 1, "eos_token": 2} if self.model == "llama" else {}
        for name, key in NAMED.items():
            index = self.token_id(key)
            if index is not None:
                named[name] = index
        return {name: index for name, index in named.items() if index < len(self.tokens)}

    def token_id(self, key: str) -> int | None:
        key = f"tokenizer.ggml.{key}"
        index = self.get(key, int)
        if index is not None and not 0 <= index < len(self.tokens):
            raise self.error(key, f"{index} is outside the {len(self.tokens)} tokens")
        return index

    def read_eos_ids(self) -> tuple[int, ...]:
        declared = [
            self.named.get("eos_token"),
            *map(self.token_id, ("eot_token_id", "eom_token_id")),
        ]
        texts = END_TEXTS.intersection(self.tokens)
        if {"<|return|>", "<|call|>"} <= texts or {"<|calls|>", "<|flush|>"} <= texts:
            texts -= {"<|end|>"}  # there it ends a part of the answer, not the answer
        found = sorted(n for n, text in enumerate(self.tokens) if text in texts)
        return tuple(dict.fromkeys(index for index in [*declared, *found] if index is not None))

    def definition(self) -> Definition:
        if self.model == "llama":
            body, add_bos = self.sentencepiece(), True
        elif self.model == "gemma4":
            body, add_bos = self.raw_bpe(), True
        else:
            cut = self.pre_tokenizer()
            body, add_bos = self.byte_level(cut), cut.add_bos
        prefix = self.prefix(add_bos)
        names = {name: self.tokens[index] for name, index in self.named.items()}
        return Definition(
            model={
                "version": "1.0",
                "truncation": None,
                "padding": None,
                "added_tokens": self.added_tokens(),
                "post_processor": self.post_processor(prefix),
                **body,
            },
            names=names,
            eos_ids=self.eos_ids,
            prefix=prefix,
            chat_templates=self.chat_templates(),
            where=self.where,
        )

    def pre_tokenizer(self) -> PreTokenizer:
        name = self.get("tokenizer.ggml.pre", str)
        if name in PRE_TOKENIZERS:
            return PRE_TOKENIZERS[name]
        found = "is missing" if name is None else f"pre-tokenizer {name[:60]!r} is not known"
        raise self.error(
            "tokenizer.ggml.pre",
            f"{found}, and a guess would give wrong tokens; use the model's tokenizer.json, or "
            "convert it again with a current converter",
        )

    def prefix(self, default: bool) -> tuple[int, ...]:
        said = self.get("tokenizer.ggml.add_bos_token", bool)
        bos = self.named.get("bos_token")
        if said and bos is None:
            raise self.error(
                "tokenizer.ggml.add_bos_token", "is true, but no bos_token_id is given"
            )
        add = default if said is None or self.model == "gemma4" else said
        return (bos,) if add and bos is not None else ()

    def vocabulary(self) -> dict[str, int]:
        return {text: index for index, text in enumerate(self.tokens)}

    def added_tokens(self) -> list[dict[str, Any]]:
        name = self.get("general.name", str) or ""
        phi3 = any(mark in name.lower() for mark in ("phi-3", "phi3"))
        return [
            {
                "id": index,
                "content": text,
                "single_word": False,
                "lstrip": False,
                # Not in the file: Phi-3's markers swallow the white space after them.
                "rstrip": phi3 and text not in ("<unk>", "<s>", "<|endoftext|>"),
                "normalized": False,
                "special": kind in (CONTROL, UNKNOWN),
            }
            for index, (text, kind) in enumerate(zip(self.tokens, self.types, strict=True))
            # Spaces written as ▁ are reached by merges, since the text has other spaces.
            if kind in (CONTROL, UNKNOWN) or (kind == USER_DEFINED and SPACE not in text)
        ]

    def post_processor(self, prefix: Sequence[int]) -> dict[str, Any] | None:
        """What puts the prefix before a text, for other readers of a saved tokenizer.json."""
        if not prefix:
            return None
        texts = [self.tokens[index] for index in prefix]
        before = [{"SpecialToken": {"id": text, "type_id": 0}} for text in texts]
        sequences = [{"Sequence": {"id": name, "type_id": n}} for n, name in enumerate("AB")]
        return {
            "type": "TemplateProcessing",
            "single": [*before, sequences[0]],
            "pair": [*before, *sequences],
            "special_tokens": {
                text: {"id": text, "ids": [index], "tokens": [text]}
                for text, index in zip(texts, prefix, strict=True)
            },
        }

    def merges(self) -> list[list[str]]:
        pairs = []
        known = set(self.tokens)
        for n, merge in enumerate(self.require("tokenizer.ggml.merges", list)):
            # A space inside the first part is none that parts them.
            cut = merge.find(" ", 1) if isinstance(merge, str) else -1
            left, right = (merge[:cut], merge[cut + 1 :]) if cut > 0 else ("", "")
            if not (left in known and right in known and left + right in known):
                raise self.error(
                    "tokenizer.ggml.merges",
                    f"entry {n}, {ascii(merge)[:80]}, joins no two known tokens",
                )
            pairs.append([left, right])
        return pairs

    def byte_level(self, cut: PreTokenizer) -> dict[str, Any]:
        byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
        splits = [
            {
                "type": "Split",
                "pattern": {"Regex": pattern},
                "behavior": "Isolated",
                "invert": False,
            }
            for pattern in cut.patterns
        ]
        return {
            "normalizer": None,
            "pre_tokenizer": {
                "type": "Sequence",
                "pretokenizers": [*splits, {**byte_level, "use_regex": False}],
            },
            "decoder": {**byte_level, "use_regex": True},
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "ignore_merges": cut.ignore_merges,
                "vocab": self.vocabulary(),
                "merges": self.merges(),
            },
        }

    def sentencepiece(self) -> dict[str, Any]:
        said = self.get("tokenizer.ggml.add_space_prefix", bool)
        prefix = said is None or said
        return self._spelt_with_spaces(self.merges_by_score(), prefix)

    def raw_bpe(self) -> dict[str, Any]:
        return self._spelt_with_spaces(self.merges(), prefix=False)

    def _spelt_with_spaces(self, merges: list[list[str]], prefix: bool) -> dict[str, Any]:
        escape = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
        prepend = {"type": "Prepend", "prepend": SPACE}
        unescape = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
        strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
        decoders = [unescape, {"type": "ByteFallback"}, {"type": "Fuse"}]
        unknown = self.named.get("unk_token")
        return {
            "normalizer": {"type": "Sequence", "normalizers": [prepend] * prefix + [escape]},
            "pre_tokenizer": None,
            "decoder": {"type": "Sequence", "decoders": decoders + [strip] * prefix},
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None if unknown is None else self.tokens[unknown],
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": True,
                "byte_fallback": BYTE in self.types,
                "ignore_merges": False,
                "vocab": self.vocabulary(),
                "merges": merges,
            },
        }

    def merges_by_score(self) -> list[list[str]]:
        """Return the merges that a SentencePiece BPE model implies.

        It joins the neighbours whose union is the token of the highest score, so every way to cut
        a token into two tokens is a merge, ranked by the score of the whole.
        """
        scores: list[float] = self.per_token("tokenizer.ggml.scores")
        if not all(isinstance(s, int | float) and not math.isnan(s) for s in scores):
            raise self.error("tokenizer.ggml.scores", "holds a value that is no number")
        spelt = {
            text: (-score, index)
            for index, (text, score) in enumerate(zip(self.tokens, scores, strict=True))
            if self.types[index] not in (CONTROL, UNKNOWN, BYTE)
        }
        ranked = [
            (spelt[text], text[:cut], text[cut:])
            for text in spelt
            for cut in range(1, len(text))
            if text[:cut] in spelt and text[cut:] in spelt
        ]
        ranked.sort(key=lambda merge: merge[0])
        return [[left, right] for _, left, right in ranked]

    def chat_templates(self) -> dict[str, str]:
        templates = {}
        default = self.get("tokenizer.chat_template", str)
        if default is not None:
            templates["default"] = default
        for name in self.get("tokenizer.chat_templates", list) or ():
            templates[str(name)] = self.require(f"tokenizer.chat_template.{name}", str)
        return templates
