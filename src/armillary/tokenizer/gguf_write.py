"""A definition → GGUF metadata: the other way of gguf.py, by the same tables.

What the format has no keys for is refused, or noticed where it concerns few texts only.
Source: the GGUF specification; llama.cpp's src/llama-vocab.cpp and conversion/base.py.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from armillary.errors import CheckpointError
from armillary.tokenizer.definition import (
    Definition,
    is_byte_level,
    pieces,
    space_prefix,
)
from armillary.tokenizer.gguf import (
    BYTE,
    CONTROL,
    END_TEXTS,
    NAMED,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
)
from armillary.tokenizer.pretokenizers import GPT2_PATTERN, PRE_TOKENIZERS

Metadata = dict[str, Any]

_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")


def metadata(definition: Definition, vocab_size: int, notices: list[str]) -> Metadata:
    """The keys under `tokenizer.`, for a model of `vocab_size` embeddings.

    Ids that no token has are filled up, since engines count the embeddings by the tokens.
    Raises CheckpointError for what GGUF cannot say; `notices` gets what it leaves out.
    """
    writer = _Writer(definition, notices)
    entries = writer.vocabulary(vocab_size) | writer.special_ids()
    return {f"tokenizer.ggml.{key}": value for key, value in entries.items()} | _templates(
        definition.chat_templates
    )


class _Writer:
    """One definition on its way to metadata."""

    def __init__(self, definition: Definition, notices: list[str]) -> None:
        self.definition = definition
        self.notices = notices
        self.model: dict[str, Any] = definition.model
        self.inner: dict[str, Any] = definition.model["model"]
        self.texts = pieces(definition.model)
        self.ids = {text: index for index, text in self.texts.items()}
        self.added = {token["id"]: token for token in definition.model["added_tokens"]}
        if self.inner.get("type", "BPE") != "BPE":
            raise self.error("a Unigram vocabulary")

    def error(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self.definition.where}: GGUF has no place for {what}; write a directory instead"
        )

    def vocabulary(self, vocab_size: int) -> Metadata:
        if max(self.texts) >= vocab_size:
            raise self.error(
                f"token {max(self.texts)} of a tokenizer whose model has {vocab_size} embeddings"
            )
        filled = {n: f"[PAD{n}]" for n in range(vocab_size) if n not in self.texts}
        tokens = [filled.get(n) or self.texts[n] for n in range(vocab_size)]
        if len(set(tokens)) < vocab_size:
            raise self.error("two tokens of one text")
        byte_level = is_byte_level(self.model)
        entries = self.byte_level() if byte_level else self.sentencepiece(tokens)
        return {
            **entries,
            "tokens": tokens,
            "token_type": [UNUSED if n in filled else self.type_of(n) for n in range(vocab_size)],
        }

    def type_of(self, index: int) -> int:
        text = self.texts[index]
        if text == self.inner.get("unk_token"):
            return UNKNOWN
        if index in self.added:
            return CONTROL if self.added[index].get("special") else USER_DEFINED
        if self.inner.get("byte_fallback") and _BYTE_TOKEN.fullmatch(text):
            return BYTE
        return NORMAL

    def normalizers(self) -> list[str]:
        """The types of the steps that a text goes through before it is cut."""
        whole = self.model.get("normalizer") or {}
        return [str(part.get("type")) for part in whole.get("normalizers", [whole]) if part]

    def notice_normalizers(self, *told: str) -> None:
        if set(self.normalizers()) - set(told):
            self.notices.append(
                "the tokenizer's normaliser is not told in GGUF: text that it would change gets "
                "other tokens there"
            )

    def byte_level(self) -> Metadata:
        self.notice_normalizers()
        merges = [f"{left} {right}" for left, right in self.pairs()]
        return {"model": "gpt2", "pre": self.pre_tokenizer(), "merges": merges}

    def pairs(self) -> list[tuple[str, str]]:
        merges = (
            merge.split(" ", 1) if isinstance(merge, str) else merge
            for merge in self.inner["merges"]
        )
        return [(left, right) for left, right in merges]

    def pre_tokenizer(self) -> str:
        """The first name in the table that stands for this cut."""
        patterns = tuple(_patterns(self.model.get("pre_tokenizer")))
        ignore = bool(self.inner.get("ignore_merges"))
        for name, cut in PRE_TOKENIZERS.items():
            if cut.patterns == patterns and cut.ignore_merges == ignore:
                return name
        raise self.error("the way in which this tokenizer cuts a text (its pre_tokenizer)")

    def sentencepiece(self, tokens: Sequence[str]) -> Metadata:
        prefix = space_prefix(self.model)
        self.notice_normalizers("Prepend", "Replace")
        # SentencePiece itself puts a space before every run of text, as this step does.
        if prefix != "never" and "Prepend" not in self.normalizers():
            self.notices.append(
                "in GGUF a space is put before a text that begins with one too, and behind every "
                "control token"
            )
        ranks = self.ranks()
        lowest = -float(len(ranks))
        scores = [-float(ranks[text]) if text in ranks else lowest for text in tokens]
        return {"model": "llama", "scores": scores, "add_space_prefix": prefix != "never"}

    def ranks(self) -> dict[str, int]:
        """The rank of each token that merges make, which SentencePiece has as its score.

        There a token is made of any two that spell it, all of one rank. Added tokens are not made:
        they are found in the text before.
        """
        normal = {text for n, text in self.texts.items() if self.type_of(n) == NORMAL}
        ranks: dict[str, int] = {}
        made: Counter[str] = Counter()
        before = None
        for left, right in self.pairs():
            whole = left + right
            if not {left, right, whole} <= normal:
                continue
            if whole != before and whole in ranks:
                raise self.error("merges that make a token at two ranks")
            ranks.setdefault(whole, len(ranks))
            made[whole] += 1
            before = whole
        for text in normal:
            cuts = range(1, len(text))
            if made[text] != sum(text[:at] in normal and text[at:] in normal for at in cuts):
                raise self.error(
                    f"merges that leave out a way to make {ascii(text)[:80]} (only scores are)"
                )
        return ranks

    def special_ids(self) -> Metadata:
        names, eos = self.definition.names, self.definition.eos_ids
        entries: Metadata = {
            key: self.ids[names[name]] for name, key in NAMED.items() if name in names
        }
        if eos:
            entries.setdefault("eos_token_id", eos[0])
            # Readers know most other ends by their texts.
            known = {entries["eos_token_id"], *(self.ids.get(text) for text in END_TEXTS)}
            others = [index for index in eos if index not in known]
            entries |= zip(("eot_token_id", "eom_token_id"), others, strict=False)
            if len(others) > 2:
                self.notices.append(f"GGUF has no key for the end tokens {others[2:]}")
        return {**entries, "add_bos_token": self.adds_bos(), "add_eos_token": False}

    def adds_bos(self) -> bool:
        prefix = self.definition.prefix
        if prefix and prefix != (self.ids.get(self.definition.names.get("bos_token", "")),):
            raise self.error(f"a text's beginning with the tokens {list(prefix)}")
        return bool(prefix)


def _patterns(part: object) -> Iterator[str]:
    """The patterns of a byte-level pre-tokenizer; one that no file has for what is not known."""
    if not isinstance(part, Mapping):
        yield "(?!)"
        return
    kind = part.get("type")
    if kind == "Sequence":
        for inner in part.get("pretokenizers", ()):
            yield from _patterns(inner)
    elif kind == "Digits":
        yield r"\p{N}" if part.get("individual_digits") else r"\p{N}+"
    elif kind == "ByteLevel" and not part.get("add_prefix_space", True):
        if part.get("use_regex", True):
            yield GPT2_PATTERN
    elif kind == "Split" and (part.get("behavior"), bool(part.get("invert"))) in (
        ("Isolated", False),
        ("Removed", True),  # what does not match is nothing, in patterns that match everything
    ):
        yield str(dict(part.get("pattern") or {}).get("Regex", "(?!)"))
    else:
        yield "(?!)"


def _templates(templates: Mapping[str, str]) -> Metadata:
    named = {name: text for name, text in templates.items() if name != "default"}
    entries: Metadata = {f"tokenizer.chat_template.{name}": text for name, text in named.items()}
    if "default" in templates:
        entries["tokenizer.chat_template"] = templates["default"]
    if named:
        entries["tokenizer.chat_templates"] = list(named)
    return entries
