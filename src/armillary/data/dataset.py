"""A prepared directory, opened: documents by number, mapped into memory."""

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from armillary.data import prepared
from armillary.data.prepared import Facts, read_prepared, tokenizer_checksum
from armillary.data.shards import Tokens, map_array, offsets_name, tokens_name
from armillary.errors import UserError
from armillary.tokenizer import Tokenizer


class TokenDataset:
    """The documents of one split: `dataset[i]` are the tokens (n_i,) of document i, read-only.

    Tokens stay in their files until they are read. The last one of each document is the end token
    (`end_id`), where the document was not taken from data that lacks it.

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
        offsets: list[NDArray[np.int64]] = []
        for shard in shards:
            tokens = map_array(folder / tokens_name(shard.index), self.facts.dtype)
            borders = np.asarray(map_array(folder / offsets_name(shard.index), "int64"))
            if not _fit(borders, tokens, shard.documents, shard.tokens):
                raise UserError(
                    f"{folder / offsets_name(shard.index)}: its borders do not fit the tokens"
                )
            self._shards.append(tokens)
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
        tokenizer = self.tokenizer
        counts = (
            0 if tokenizer.is_special(index) else len(tokenizer.token_bytes(index))
            for index in range(self.vocab_size)
        )
        return np.fromiter(counts, dtype=np.int64, count=self.vocab_size)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, document: int) -> Tokens:
        if not -len(self) <= document < len(self):
            raise IndexError(f"document {document} of {len(self)}")
        document %= len(self)
        return self.read(document, 0, int(self.lengths[document]))

    def read(self, document: int, start: int, stop: int) -> Tokens:
        """Return tokens start … stop − 1 of a document; fewer where it ends before."""
        shard = int(np.searchsorted(self._first, document, side="right")) - 1
        stop = min(stop, int(self.lengths[document]))
        first = int(self._starts[document])
        return self._shards[shard][first + start : first + stop]


def _fit(borders: NDArray[np.generic], tokens: Tokens, documents: int, count: int) -> bool:
    return (
        len(borders) == documents + 1
        and len(tokens) == count
        and borders[0] == 0
        and borders[-1] == count
        and bool((np.diff(borders) > 0).all())
    )
