"""Loss of the same tokens under growing context, by position, and on fixed short texts.

    tokens of a document   ├──────────────── reach ────────────────┤
    longest length         ╞═══════════════════════════════════════╡
    a shorter one                                  ╞═══════════════╡
    the shortest, twice                        ╞═════════╡
                                                   ╞═══════════════╡
    stretches of targets, scored under each          ╞═══╪═══╪═════╡

What a longer context is worth shows only on the same targets. Cropping to the window that the model
had before it was extended is the baseline: it is what could be done without extending. Knows
documents as ids; neither tokenizers nor files.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from armillary.errors import UserError
from armillary.evaluation.records import Cell, LossRow, Row, Setting, prompt_checksum
from armillary.evaluation.scoring import Continuation, Scorer

KEY_GAIN = 2.0  # nats by which the long context makes a key token likelier than the short one
KEY_LIKELY = -2.0  # and its log-probability at least under the long one
FEW_DOCUMENTS = 8  # below which intervals draw by window
POSITIONS = 32  # buckets of position, unless their width is given
MOST_STRETCHES = 8  # of a window, unless their number is given

Nats = NDArray[np.float64]


@dataclass(frozen=True)
class Document:
    """A text as ids, without BOS or EOS."""

    name: str
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Stretch:
    """The tokens ids[start : start + count] of a document; `instance` names them."""

    document: Document
    start: int
    count: int

    @property
    def stop(self) -> int:
        """Behind the last of them."""
        return self.start + self.count

    @property
    def instance(self) -> str:
        """Where they are, and their checksum: the same name, the same tokens."""
        checksum = prompt_checksum(self.document.ids[self.start : self.stop])[:8]
        return f"{self.document.name}:{self.start}+{self.count}:{checksum}"


@dataclass(frozen=True)
class Perplexity:
    """The loss of target tokens under each length of context, and by position in the longest.

    A cell is a window of some stretches of targets that follow each other. Under each length it is
    taken in as often as it takes to score one stretch at a time, or several that are no more than a
    quarter of what is read (a third, near the reach): most of the length is context to every
    target. The longest pass gives the losses by position too. Targets of different windows never
    overlap. Windows are drawn by `seed`, in turn from each document, so that fewer windows are the
    first of more.

    targets   tokens of a stretch, which is what a row is of
    stretches of a window: as many as a quarter of the reach holds, 8 at most, when None
    lengths   tokens that the model takes in, targets (and BOS) included
    crop      the original window, which is added to the lengths below the longest
    reach     how far back the text of a window goes: the longest of lengths, unless models with
              longer ones are to be compared on the same targets. Tokens by position are those from
              where the reach begins, so that they are the same tokens too
    bos       put before every cropped text, inside its length; None for none
    bucket    tokens of a step of position; reach / 32 when None
    keys      for each stretch's instance, which of its targets are key tokens (`chosen_keys` reads
              them from another model's rows). When None the model itself chooses: a key token is
              likelier by 2 nats under the longest length up to `crop` than under the shortest, and
              has more than −2 nats there. That exaggerates how far those two lengths are apart;
              rows of models that chose differently do not pair

    Raises ValueError for settings that do not fit each other, UserError when no document is long
    enough.
    Source: Fang et al. 2024 (LongPPL) for key tokens; there a stronger model chooses them.
    """

    documents: tuple[Document, ...]
    lengths: tuple[int, ...]
    targets: int = 256
    stretches: int | None = None
    windows: int = 16
    crop: int | None = None
    reach: int | None = None
    bos: int | None = None
    bucket: int | None = None
    keys: Mapping[str, tuple[int, ...]] | None = None
    seed: int = 0
    name: str = "perplexity"

    version = 1

    def __post_init__(self) -> None:
        _check_names(self.documents)
        if not self.lengths or self.windows < 1 or self.targets < 1:
            raise ValueError(
                f"{len(self.lengths)} lengths, {self.windows} windows and {self.targets} targets; "
                "each must be at least 1"
            )
        if self.stretches is not None and self.stretches < 1:
            raise ValueError(f"{self.stretches} stretches in a window; it must be at least 1")
        if min(self.all_lengths) <= self.targets + self._extra:
            raise ValueError(
                f"a length of {min(self.all_lengths)} has no room for context beside "
                f"{self.targets} targets" + (" and BOS" if self._extra else "")
            )
        if self.full_reach < max(self.all_lengths):
            raise ValueError(
                f"the reach of {self.reach} is below the longest length of {max(self.all_lengths)}"
            )
        if self._stretches > max(1, self.full_reach // 4 // self.targets):
            raise ValueError(
                f"{self.stretches} stretches of {self.targets} targets are more than a quarter of "
                f"the reach of {self.full_reach}"
            )
        if self.bucket is not None and self.bucket < 1:
            raise ValueError(f"a bucket of {self.bucket} positions; it must be at least 1")
        if not self.drawn:
            longest = max((len(document.ids) for document in self.documents), default=0)
            raise UserError(
                f"the longest of {len(self.documents)} documents has {longest:,} tokens, and "
                f"{self.full_reach - self._extra:,} are needed; give a longer text, or shorter "
                "lengths"
            )

    @property
    def all_lengths(self) -> tuple[int, ...]:
        """The lengths in order, with that of the crop baseline."""
        lengths = set(self.lengths)
        if self.crop is not None and self.crop < max(lengths):
            lengths.add(self.crop)
        return tuple(sorted(lengths))

    @property
    def full_reach(self) -> int:
        """How many tokens the text of a window has, BOS included."""
        return max(self.all_lengths) if self.reach is None else self.reach

    @property
    def by_document(self) -> bool:
        """Whether intervals draw by document; by stretch where there are few documents."""
        return len({window.document.name for window in self.drawn}) >= FEW_DOCUMENTS

    @cached_property
    def drawn(self) -> tuple[Stretch, ...]:
        """The windows in order: one of each document, then another of each, and so on."""
        rng = np.random.default_rng(self.seed)
        count = self._stretches * self.targets
        places = []
        for document in self.documents:
            first = self.full_reach - self._extra - count
            starts = rng.permutation(np.arange(first, len(document.ids) - count + 1, count))
            places.append([Stretch(document, int(start), count) for start in starts])
        order = rng.permutation(len(places))
        turns = max(map(len, places), default=0)
        in_turn = [
            places[which][turn]
            for turn in range(turns)
            for which in order
            if turn < len(places[which])
        ]
        return tuple(in_turn[: self.windows])

    @property
    def notices(self) -> tuple[str, ...]:
        """What is to be said of what was asked and is not measured; nothing is left out unsaid."""
        needed = self.full_reach - self._extra
        short = sum(len(document.ids) < needed for document in self.documents)
        notices = []
        if short:
            notices.append(
                f"{self.name}: {short:,} of {len(self.documents):,} documents have fewer than "
                f"{needed:,} tokens and are left out"
            )
        if len(self.drawn) < self.windows:
            notices.append(
                f"{self.name}: the documents hold {len(self.drawn):,} windows of the "
                f"{self.windows:,} asked for"
            )
        ours = (part.instance for window in self.drawn for part in self._parts(window))
        if self.keys is not None and self.keys.keys().isdisjoint(ours):
            notices.append(
                f"{self.name}: the key tokens that were given are of other text, so there are none"
            )
        return tuple(notices)

    @property
    def settings(self) -> dict[str, Setting]:
        """What determines the rows, for the record of a run."""
        return {
            "version": self.version,
            "documents": len(self.documents),
            "text": _checksum(self.documents),
            "lengths": ", ".join(map(str, self.all_lengths)),
            "targets": self.targets,
            "stretches": self._stretches,
            "windows": len(self.drawn),
            "crop": self.crop,
            "reach": self.full_reach,
            "bos": self.bos,
            "bucket": self._bucket,
            "keys": "chosen by the model itself" if self.keys is None else "given",
            "intervals": "by document" if self.by_document else "by stretch",
            "seed": self.seed,
        }

    def cells(self) -> tuple[Cell, ...]:
        """A cell for each window."""
        work = [(0, length) for length in self.all_lengths for _ in self._passes(length)]
        longest = max(self.all_lengths)
        if longest < self.full_reach:
            work.append((0, longest))
        return tuple(
            Cell(
                f"{self.name}/{number:04d}",
                {"window": number, "document": window.document.name, "start": window.start},
                tuple(work),
            )
            for number, window in enumerate(self.drawn)
        )

    def run(self, cell: Cell, scorer: Scorer) -> list[Row]:
        """Measure one window under every length."""
        scorer.begin()
        window = self.drawn[int(cell.settings["window"] or 0)]
        by_length: dict[int, Nats] = {}
        by_position: list[Row] = []
        for length in self.all_lengths:
            parts = []
            for first, last in self._passes(length):
                ids = self._ids(window, length, last)
                # In the pass over all of the reach everything is scored: by position too.
                whole = length == self.full_reach
                losses = _losses(
                    scorer, ids, length - 1 if whole else (last - first) * self.targets
                )
                if whole:
                    by_position += self._by_position(window, losses)
                parts.append(losses[-(last - first) * self.targets :])
            by_length[length] = np.concatenate(parts)
        longest = max(by_length)
        if longest < self.full_reach:
            begin = self._ids(window, self.full_reach, self._stretches)[:longest]
            by_position += self._by_position(window, _losses(scorer, begin, longest - 1))
        return [*self._by_context(window, by_length), *by_position]

    @property
    def _extra(self) -> int:
        return 0 if self.bos is None else 1

    @property
    def _bucket(self) -> int:
        return self.bucket or max(1, self.full_reach // POSITIONS)

    @property
    def _stretches(self) -> int:
        if self.stretches is not None:
            return self.stretches
        return min(MOST_STRETCHES, max(1, self.full_reach // 4 // self.targets))

    def _passes(self, length: int) -> list[tuple[int, int]]:
        """Which stretches, from the first to before the last, each pass of a length scores.

        Near the reach it is all of them, since an earlier pass would begin before it.
        """
        at_once = self._stretches
        if 4 * length < 3 * self.full_reach:
            at_once = max(1, length // 4 // self.targets)
        return [
            (first, min(first + at_once, self._stretches))
            for first in range(0, self._stretches, at_once)
        ]

    def _ids(self, window: Stretch, length: int, stretches: int) -> tuple[int, ...]:
        """What is read, BOS included, up to behind some of a window's stretches."""
        stop = window.start + stretches * self.targets
        return _with_bos(window.document.ids[stop - (length - self._extra) : stop], self.bos)

    def _parts(self, window: Stretch) -> list[Stretch]:
        """The stretches of a window."""
        return [
            Stretch(window.document, window.start + number * self.targets, self.targets)
            for number in range(self._stretches)
        ]

    def _by_context(self, window: Stretch, by_length: Mapping[int, Nats]) -> list[LossRow]:
        """Rows of every stretch under every length, and of its key tokens."""
        rows = []
        for number, stretch in enumerate(self._parts(window)):
            begin = number * self.targets
            nats = {
                length: losses[begin : begin + self.targets] for length, losses in by_length.items()
            }
            groups = {"all": tuple(range(self.targets)), "key": self._keys(stretch, nats)}
            for group, which in groups.items():
                if which:
                    rows += [
                        self._row(window, stretch, number, length, group, nats[length], which)
                        for length in nats
                    ]
        return rows

    def _keys(self, stretch: Stretch, nats: Mapping[int, Nats]) -> tuple[int, ...]:
        if self.keys is not None:
            return self.keys.get(stretch.instance, ())
        within = [length for length in nats if self.crop is None or length <= self.crop]
        if len(within) < 2:
            return ()
        short, long = nats[min(within)], nats[max(within)]
        return tuple(np.flatnonzero((short - long > KEY_GAIN) & (-long > KEY_LIKELY)).tolist())

    def _row(
        self,
        window: Stretch,
        stretch: Stretch,
        number: int,
        length: int,
        group: str,
        nats: Nats,
        which: tuple[int, ...],
    ) -> LossRow:
        (last,) = (last for first, last in self._passes(length) if first <= number < last)
        position = length - (last - number) * self.targets
        ids = self._ids(window, length, last)[: position + self.targets]
        return LossRow(
            task=self.name,
            instance=stretch.instance + ("#" + ",".join(map(str, which)) if group == "key" else ""),
            prompt=prompt_checksum(ids[:position], ids[position:]),
            document=self._unit(stretch),
            length=length,
            position=position,
            group=group,
            tokens=len(which),
            nats=float(nats[list(which)].sum()),
        )

    def _by_position(self, window: Stretch, losses: Nats) -> list[LossRow]:
        """A row for each whole bucket of what was read from where the reach begins."""
        ids = self._ids(window, self.full_reach, self._stretches)
        zero = window.stop - self.full_reach  # position 0, counted in the document
        rows = []
        for start in range(0, len(losses) + 2 - self._bucket, self._bucket):
            stop = start + self._bucket
            begin = max(start, 1)  # nothing comes before position 0
            if begin == stop:
                continue
            stretch = Stretch(window.document, zero + begin, stop - begin)
            rows.append(
                LossRow(
                    task=self.name,
                    instance=stretch.instance,
                    prompt=prompt_checksum(ids[:begin], ids[begin:stop]),
                    document=self._unit(stretch),
                    length=stop,
                    position=begin,
                    group="position",
                    tokens=stretch.count,
                    nats=float(losses[begin - 1 : stop - 1].sum()),
                )
            )
        return rows

    def _unit(self, stretch: Stretch) -> str:
        name = stretch.document.name
        return name if self.by_document else f"{name}:{stretch.start}"


@dataclass(frozen=True)
class ShortLoss:
    """The loss of fixed short texts, each from its start: what a model must not lose.

    Takes the first `length` tokens of each text, BOS included, and scores all but the first of
    them. A text without two tokens is left out and counted in `notices`.
    Raises ValueError for a length without a target, UserError when no text has one.
    """

    texts: tuple[Document, ...]
    length: int = 512
    bos: int | None = None
    name: str = "short-loss"

    version = 1

    def __post_init__(self) -> None:
        _check_names(self.texts)
        if self.length < 2:
            raise ValueError(f"a length of {self.length}; two tokens are needed to score one")
        if not self._used:
            raise UserError(f"none of {len(self.texts)} short texts has two tokens")

    @property
    def notices(self) -> tuple[str, ...]:
        """What is to be said of texts that are not measured."""
        count = len(self.texts) - len(self._used)
        if not count:
            return ()
        return (f"{self.name}: {count:,} of {len(self.texts):,} texts are too short to score",)

    @property
    def settings(self) -> dict[str, Setting]:
        """What determines the rows, for the record of a run."""
        return {
            "version": self.version,
            "documents": len(self.texts),
            "text": _checksum(self.texts),
            "length": self.length,
            "bos": self.bos,
        }

    def cells(self) -> tuple[Cell, ...]:
        """A cell for each text."""
        return tuple(
            Cell(
                f"{self.name}/{number:04d}",
                {"text": number, "document": text.name},
                ((0, len(self._ids(text))),),
            )
            for number, text in enumerate(self._used)
        )

    def run(self, cell: Cell, scorer: Scorer) -> list[Row]:
        """Measure one text."""
        scorer.begin()
        text = self._used[int(cell.settings["text"] or 0)]
        ids = self._ids(text)
        start = 1 if self.bos is None else 0
        return [
            LossRow(
                task=self.name,
                instance=Stretch(text, start, len(ids) - 1).instance,
                prompt=prompt_checksum(ids[:1], ids[1:]),
                document=text.name,
                length=len(ids),
                position=1,
                group="short",
                tokens=len(ids) - 1,
                nats=float(_losses(scorer, ids, len(ids) - 1).sum()),
            )
        ]

    @property
    def _used(self) -> tuple[Document, ...]:
        return tuple(text for text in self.texts if len(self._ids(text)) >= 2)

    def _ids(self, text: Document) -> tuple[int, ...]:
        return _with_bos(text.ids[: self.length], self.bos)[: self.length]


def chosen_keys(rows: Iterable[Row]) -> dict[str, tuple[int, ...]]:
    """Which targets a model chose as key tokens, by stretch: `keys` for measuring others alike."""
    chosen: dict[str, tuple[int, ...]] = {}
    for row in rows:
        if isinstance(row, LossRow) and row.group == "key":
            stretch, _, indices = row.instance.partition("#")
            chosen[stretch] = tuple(map(int, indices.split(",")))
    return chosen


def _with_bos(ids: tuple[int, ...], bos: int | None) -> tuple[int, ...]:
    return ids if bos is None else (bos, *ids)


def _losses(scorer: Scorer, ids: tuple[int, ...], count: int) -> Nats:
    """Nats of the last `count` of ids."""
    cut = len(ids) - count
    (result,) = scorer.score(ids[:cut], [Continuation(ids[cut:], count)])
    return -result.logprobs


def _checksum(documents: Sequence[Document]) -> str:
    digest = hashlib.sha256()
    for document in documents:
        digest.update(f"{document.name}:{prompt_checksum(document.ids)}\n".encode())
    return digest.hexdigest()[:16]


def _check_names(documents: Sequence[Document]) -> None:
    names = [document.name for document in documents]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"two documents are named {twice}; rows go by the name")
