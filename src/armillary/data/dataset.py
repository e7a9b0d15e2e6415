"""A prepared directory, opened: documents by number, mapped into memory."""

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from armillary.data import prepared
from armillary.data.learned import LearnedRuns, Numbers
from armillary.data.prepared import (
    Facts,
    chat_template_checksum,
    read_prepared,
    token_sizes,
    tokenizer_checksum,
)
from armillary.data.shards import Tokens, learned_name, map_array, offsets_name, tokens_name
from armillary.errors import UserError
from armillary.tokenizer import Tokenizer


class TokenDataset:
    """The documents of one split: `dataset[i]` are the tokens (n_i,) of document i, read-only.

    Tokens stay in their files until they are read. The last one of each document is the end token
    (`end_id`), where the document was not taken from data that lacks it; a chat ends as its
    template ends it. All tokens of a text are learned, of a chat those that the assistant says.

    tokenizer   a tokenizer that the ids have to be of; another one is refused
    settings    entries of `Settings` that have to be as given, such as seed or validation
    verify      compare checksums too, which reads every file

    Raises UserError in one line where the directory is not whole or not what is wanted.
    """

    def __init__(
        self,
        directory: str | Path,
        split: str = prepared.TRAIN,
        *,
        tokenizer: Tokenizer | None = None,
        settings: Mapping[str, object] | None = None,
        verify: bool = False,
    ) -> None:
        self.directory = Path(directory)
        self.split = split
        self.facts: Facts = read_prepared(self.directory, checksums=verify)
        self._check(tokenizer, settings or {})
        folder = self.directory / split
        shards = self.facts.splits[split].shards
        self._shards: list[Tokens] = []
        self._runs: list[LearnedRuns] = []  # of chats
        offsets: list[NDArray[np.int64]] = []
        for shard in shards:
            tokens = map_array(folder / tokens_name(shard.index), self.facts.dtype)
            borders = np.asarray(map_array(folder / offsets_name(shard.index), "int64"))
            if not _fit(borders, tokens, shard.documents, shard.tokens):
                raise UserError(
                    f"{folder / offsets_name(shard.index)}: its borders do not fit the tokens"
                )
            self._shards.append(tokens)
            if self.masked:
                self._runs.append(_learned(folder / learned_name(shard.index), shard.tokens))
            offsets.append(borders.astype(np.int64, copy=False))
        self._first = np.cumsum([0, *(shard.documents for shard in shards)])
        self._starts = np.concatenate([borders[:-1] for borders in offsets])
        self.lengths: NDArray[np.int64] = np.concatenate([np.diff(borders) for borders in offsets])

    def _check(self, tokenizer: Tokenizer | None, settings: Mapping[str, object]) -> None:
        if self.split not in self.facts.splits:
            there = ", ".join(self.facts.splits)
            raise UserError(f"{self.directory}: has no documents in {self.split!r}, only: {there}")
        differences = self.facts.settings.differences(settings)
        if differences:
            raise UserError(
                f"{self.directory}: was prepared in another way ({'; '.join(differences)}); "
                "prepare it anew"
            )
        wanted = self.facts.settings.tokenizer_sha256
        if tokenizer is not None and tokenizer_checksum(tokenizer) != wanted:
            raise UserError(
                f"{self.directory}: was prepared with another tokenizer than the model's; prepare "
                "it anew with this one"
            )
        if tokenizer is not None and self.masked and tokenizer.chat_template is not None:
            template = chat_template_checksum(tokenizer)
            if template != self.facts.settings.chat_template_sha256:
                raise UserError(
                    f"{self.directory}: its chats were written by another chat template than the "
                    "model's; prepare them anew with this one, or take the tokenizer in "
                    f"{self.directory / prepared.TOKENIZER}"
                )

    @property
    def masked(self) -> bool:
        """Whether only some tokens are learned: those that the assistant says in a chat."""
        return self.facts.settings.masked

    @property
    def n_tokens(self) -> int:
        """Tokens of the split, end tokens among them."""
        return self.facts.splits[self.split].tokens

    @property
    def n_bytes(self) -> int:
        """Bytes of the split's texts in UTF-8."""
        return self.facts.splits[self.split].bytes

    @property
    def vocab_size(self) -> int:
        """One more than the largest id of the tokenizer."""
        return self.facts.vocab_size

    @property
    def end_id(self) -> int:
        """The token that ends a document."""
        return self.facts.settings.end_id

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that the ids are of."""
        return Tokenizer.from_file(self.directory / prepared.TOKENIZER / "tokenizer.json")

    @cached_property
    def token_bytes(self) -> NDArray[np.int64]:
        """Bytes of text that each id stands for, (V,); none for control tokens.

        Bits per byte of some predicted tokens is the sum of their losses, in bits, over the sum of
        `token_bytes[labels]`.
        """
        return token_sizes(self.tokenizer)

    @cached_property
    def sources(self) -> Numbers:
        """The number of each document's source, (N,), among `facts.settings.sources`.

        Raises UserError for data that was prepared before this was noted, from several sources.
        """
        counts, names = self.facts.splits[self.split].sources, self.facts.settings.sources
        if counts is None and len(names) == 1:
            return np.zeros(len(self), dtype=np.int64)
        if counts is None or len(counts) != len(names) or sum(counts) != len(self):
            raise UserError(
                f"{self.directory}: does not say which documents are of which source; prepare it "
                "anew"
            )
        return np.repeat(np.arange(len(counts)), counts)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, document: int) -> Tokens:
        if not -len(self) <= document < len(self):
            raise IndexError(f"document {document} of {len(self)}")
        document %= len(self)
        return self.read(document, 0, int(self.lengths[document]))

    def read(self, document: int, start: int, stop: int) -> Tokens:
        """Return tokens start … stop − 1 of a document; fewer where it ends before."""
        stop = min(stop, int(self.lengths[document]))
        first = int(self._starts[document])
        return self._shards[self._shard_of(document)][first + start : first + stop]

    def read_learned(self, document: int, start: int, stop: int) -> NDArray[np.bool_]:
        """Return which of the tokens that `read` gives are learned."""
        stop = min(stop, int(self.lengths[document]))
        if not self.masked:
            return np.ones(stop - start, dtype=np.bool_)
        first = int(self._starts[document])
        return self._runs[self._shard_of(document)].within(first + start, first + stop)

    def count_learned(self, documents: Numbers, starts: Numbers, stops: Numbers) -> Numbers:
        """Return how many of the tokens starts[i] … stops[i] − 1 of documents[i] are learned, (n,).

        A stretch may reach beyond its document's end, and counts up to there.
        """
        stops = np.minimum(stops, self.lengths[documents])
        if not self.masked:
            return stops - starts
        counts = np.zeros(len(documents), dtype=np.int64)
        first = self._starts[documents]
        shards = np.searchsorted(self._first, documents, side="right") - 1
        for shard in np.unique(shards):
            at = shards == shard
            counts[at] = self._runs[shard].count(first[at] + starts[at], first[at] + stops[at])
        return counts

    def _shard_of(self, document: int) -> int:
        return int(np.searchsorted(self._first, document, side="right")) - 1


def _learned(path: Path, tokens: int) -> LearnedRuns:
    try:
        return LearnedRuns(map_array(path, "int64"), tokens)
    except ValueError as error:
        raise UserError(f"{path}: {error}") from error


def _fit(borders: NDArray[np.generic], tokens: Tokens, documents: int, count: int) -> bool:
    return (
        len(borders) == documents + 1
        and len(tokens) == count
        and borders[0] == 0
        and borders[-1] == count
        and bool((np.diff(borders) > 0).all())
    )
