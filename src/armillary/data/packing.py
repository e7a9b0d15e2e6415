"""Documents → rows of T tokens → batches, in an order that is a function of seed and step.

No row lets one document read another: each token carries the number of its document and its
position in it, and a label never lies in another document than its token. Which pieces make a row
is decided once, from the documents' lengths and the seed; the order of the rows is another
permutation in every epoch, of which each place is computed on its own. So any step can be made
again without the steps before it. How often which rows come, and whether positions skip, may be
said too (`mixture`, `skipping`).
"""

import hashlib
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from armillary.data.dataset import TokenDataset
from armillary.data.mixture import Draws, Mixture, groups, quotas, shares
from armillary.data.order import permuted
from armillary.data.skipping import Skip, skipped_positions
from armillary.files import MANIFEST, sha256

IGNORED = -100  # what torch's cross_entropy passes over
OPEN_ROWS = 256

Mode = Literal["packed", "cropped"]
Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class Batch:
    """Rows of tokens, each array (B, T) of int64.

    tokens      ids; the end token where a row is filled up
    labels      the next token of the same document; IGNORED (−100) after its last token, where that
                token is not learned (of a chat only the answers are) and where a row is filled up.
                It goes by the length, so that labels that are end tokens stay
    documents   0, 1, … within a row; −1 where it is filled up
    positions   counted from 0 in each piece of a document, or rising from 0 with skips
    """

    tokens: Numbers
    labels: Numbers
    documents: Numbers
    positions: Numbers

    @property
    def n_targets(self) -> int:
        """Labels that count; 0 is possible, and then the mean of a loss is not defined."""
        return int((self.labels != IGNORED).sum())

    def split(self, parts: int) -> list["Batch"]:
        """Return micro-batches, which put together are this one.

        Raises ValueError when the rows do not divide.
        """
        rows = len(self.tokens)
        if rows % parts:
            raise ValueError(f"{rows} rows do not divide into {parts} micro-batches")
        size = rows // parts
        return [self._rows(slice(start, start + size)) for start in range(0, rows, size)]

    def _rows(self, rows: slice) -> "Batch":
        return Batch(
            self.tokens[rows], self.labels[rows], self.documents[rows], self.positions[rows]
        )


@dataclass(frozen=True)
class Report:
    """What packing made of the documents.

    placed      tokens that stand in a row, each once
    padding     places of rows that hold no token
    dropped     tokens that stand in no row (those beyond T, when cropped)
    cut         documents longer than T
    targets     tokens that are predicted: all but the first of each document, when packed; of chats
                those that are learned
    unlabelled  rows in which nothing is predicted, such as a chat whose answers were cropped away.
                Their loss is 0
    """

    rows: int
    length: int
    documents: int
    placed: int
    padding: int
    dropped: int
    cut: int
    targets: int
    unlabelled: int

    @property
    def waste(self) -> float:
        """Share of the rows' places that hold no token."""
        return self.padding / (self.rows * self.length)


@dataclass(frozen=True)
class Plan:
    """Which pieces make which row: row r holds pieces rows[r] … rows[r + 1] − 1.

    Piece p is the tokens starts[p] … starts[p] + lengths[p] − 1 of documents[p].
    """

    documents: Numbers
    starts: Numbers
    lengths: Numbers
    rows: Numbers


def plan_packed(
    lengths: Numbers, length: int, order: Numbers, *, open_rows: int = OPEN_ROWS
) -> Plan:
    """Plan rows of several documents each, in which every token stands once.

    A document longer than a row is cut: its full pieces are rows of their own. Its rest, and each
    shorter document, goes where it leaves the least room, among at most `open_rows` rows that are
    not full (best fit; when there are more, the fullest is closed).
    Shapes: lengths (N,) tokens of each document, order (N,) the documents as they come.
    """
    ordered = lengths[order]
    full, rests = ordered // length, ordered % length
    documents = np.repeat(order, full)
    ends = np.cumsum(full)
    starts = (np.arange(len(documents)) - np.repeat(ends - full, full)) * length
    with_rest = np.flatnonzero(rests)
    rows = _best_fit(rests[with_rest].tolist(), length, open_rows)
    # Rests by their row, in the order in which they came to it.
    by_row = np.argsort(rows, kind="stable")
    pieces = with_rest[by_row]
    counts = np.bincount(rows) if len(rows) else np.zeros(0, np.int64)
    return Plan(
        documents=np.concatenate([documents, order[pieces]]),
        starts=np.concatenate([starts, full[pieces] * length]),
        lengths=np.concatenate([np.full(len(documents), length, np.int64), rests[pieces]]),
        rows=np.cumsum(np.concatenate([[0], np.ones(len(documents), np.int64), counts])),
    )


def _best_fit(sizes: list[int], length: int, open_rows: int) -> Numbers:
    """Return the row of each size, rows numbered as they are begun."""
    rows = np.empty(len(sizes), dtype=np.int64)
    room: list[tuple[int, int]] = []  # of each open row, the least first
    begun = 0
    for number, size in enumerate(sizes):
        place = bisect_left(room, (size, -1))
        if place < len(room):
            left, row = room.pop(place)
        else:
            left, row = length, begun
            begun += 1
        rows[number] = row
        if left > size:
            insort(room, (left - size, row))
            if len(room) > open_rows:
                room.pop(0)
    return rows


def plan_cropped(lengths: Numbers, length: int, order: Numbers) -> Plan:
    """Plan one row for each document, which holds its first tokens; what is beyond is dropped."""
    return Plan(
        documents=order,
        starts=np.zeros(len(order), np.int64),
        lengths=np.minimum(lengths[order], length),
        rows=np.arange(len(order) + 1),
    )


def plan_short(
    lengths: Numbers, length: int, order: Numbers, piece: int, *, open_rows: int = OPEN_ROWS
) -> Plan:
    """Plan rows of pieces of at most `piece` tokens, in which every token stands once.

    As `plan_packed`, but for longer documents being cut into such pieces.
    """
    counts = -(-lengths[order] // piece)
    documents = np.repeat(order, counts)
    firsts = np.cumsum(counts) - counts
    starts = (np.arange(len(documents)) - np.repeat(firsts, counts)) * piece
    sizes = np.minimum(piece, lengths[documents] - starts)
    rows = _best_fit(sizes.tolist(), length, open_rows)
    by_row = np.argsort(rows, kind="stable")
    return Plan(
        documents=documents[by_row],
        starts=starts[by_row],
        lengths=sizes[by_row],
        rows=np.cumsum(np.concatenate([[0], np.bincount(rows)])),
    )


def _joined(plans: Sequence[Plan]) -> Plan:
    """The rows of all, one plan's behind the other's."""
    pieces = np.cumsum([0, *(len(plan.documents) for plan in plans)])
    ends = [plan.rows[1:] + first for plan, first in zip(plans, pieces, strict=False)]
    return Plan(
        documents=np.concatenate([plan.documents for plan in plans]),
        starts=np.concatenate([plan.starts for plan in plans]),
        lengths=np.concatenate([plan.lengths for plan in plans]),
        rows=np.concatenate([[0], *ends]),
    )


@dataclass(frozen=True)
class _Stream:
    """Rows that every step has some of; only the `main` ones skip positions."""

    per_step: int
    draws: Draws
    main: bool


class PackedBatches:
    """Batches of a dataset: `batches.batch(step)` for training, `batches.once()` for measuring.

    length       T, tokens of a row
    batch_size   rows of a step, of all ranks together; each rank gets its equal share
    seed         decides which documents share rows, and the order of the rows
    mode         "packed" (several documents a row) or "cropped" (one, cut at T)
    shuffle      False leaves documents and rows in the order in which they were prepared
    mixture      how often long documents and short sequences are drawn; as they are when None
    skip         how positions skip; they are counted when None
    rank         which of the `ranks` shares of a step's rows this one is

    The rows of a step do not depend on the number of ranks. Raises ValueError for sizes that are
    not positive or do not divide, and for a mixture without `shuffle`.
    """

    def __init__(
        self,
        dataset: TokenDataset,
        *,
        length: int,
        batch_size: int,
        seed: int = 0,
        mode: Mode = "packed",
        shuffle: bool = True,
        mixture: Mixture | None = None,
        skip: Skip | None = None,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        if length < 2 or batch_size < 1:
            raise ValueError(f"length {length} must be at least 2, batch_size {batch_size} 1")
        if batch_size % ranks or not 0 <= rank < ranks:
            raise ValueError(f"batch_size {batch_size}: rank {rank} has no equal share of {ranks}")
        if mode not in ("packed", "cropped"):
            raise ValueError(f"mode {mode!r} is neither 'packed' nor 'cropped'")
        self.dataset, self.length, self.batch_size = dataset, length, batch_size
        self.seed, self.mode, self.shuffle = seed, mode, shuffle
        if mixture is not None and not shuffle:
            raise ValueError("a mixture draws rows in an order of its own; it needs shuffle")
        self.mixture, self.skip = mixture, skip
        self._share = batch_size // ranks
        self._shift = rank * self._share
        order = np.arange(len(dataset))
        if shuffle:
            order = permuted(order, len(dataset), "documents", seed)
        main, self._streams = self._planned(order)
        self.n_rows = len(main.rows) - 1
        self.report = self._reported(main)

    def _planned(self, order: Numbers) -> tuple[Plan, list[_Stream]]:
        """The plan of the rows that hold all documents, and what each step takes of which rows."""
        mixture = self.mixture or Mixture()
        short = mixture.short_rows(self.batch_size)
        main, draws = self._main_rows(order, mixture)
        self._plan = main
        streams = [_Stream(self.batch_size - short, draws, main=True)]
        if short:
            self._plan = _joined([main, self._short_rows(order, mixture)])
            first, end = len(main.rows) - 1, len(self._plan.rows) - 1
            streams.append(_Stream(short, self._all_of(first, end, "short rows"), main=False))
        return main, streams

    def _main_rows(self, order: Numbers, mixture: Mixture) -> tuple[Plan, Draws]:
        lengths = self.dataset.lengths
        plan = plan_packed if self.mode == "packed" else plan_cropped
        if mixture.long is None:
            main = plan(lengths, self.length, order)
            return main, self._all_of(0, len(main.rows) - 1, "rows")
        divided = groups(lengths, self.dataset.sources, order, mixture.long)
        plans = [plan(lengths, self.length, group.documents) for group in divided]
        tokens = np.array([each.lengths.sum() for each in plans])
        rows = np.array([len(each.rows) - 1 for each in plans])
        drawn = quotas(shares(tokens, divided, mixture), tokens, rows)
        return _joined(plans), Draws(np.cumsum(rows) - rows, rows, drawn, "rows", self.seed)

    def _short_rows(self, order: Numbers, mixture: Mixture) -> Plan:
        assert mixture.short is not None  # or there would be no such rows
        piece = min(mixture.short, self.length)
        if self.mode == "cropped":
            return plan_cropped(self.dataset.lengths, piece, order)
        return plan_short(self.dataset.lengths, self.length, order, piece)

    def _all_of(self, first: int, end: int, name: str) -> Draws:
        """Each of these rows once in an epoch."""
        rows = np.array([end - first])
        return Draws(np.array([first]), rows, rows, name, self.seed, self.shuffle)

    def _reported(self, plan: Plan) -> Report:
        lengths = self.dataset.lengths
        placed = int(plan.lengths.sum())
        # The label of a piece's last token is the first one beyond it.
        targets = self.dataset.count_learned(
            plan.documents, plan.starts + 1, plan.starts + plan.lengths + 1
        )
        return Report(
            rows=self.n_rows,
            length=self.length,
            documents=len(self.dataset),
            placed=placed,
            padding=self.n_rows * self.length - placed,
            dropped=int(lengths.sum()) - placed,
            cut=int((lengths > self.length).sum()),
            targets=int(targets.sum()),
            unlabelled=int((np.add.reduceat(targets, plan.rows[:-1]) == 0).sum()),
        )

    @property
    def fingerprint(self) -> str:
        """Return a checksum of what decides the rows; with the batch size, it decides each step.

        To be kept with a training state, so that another order is noticed.
        """
        own = (self.dataset.split, self.length, self.seed, self.mode, self.shuffle)
        drawn = [str(each) for each in (self.mixture, self.skip) if each is not None]
        said = " ".join([sha256(self.dataset.directory / MANIFEST), str(own), *drawn])
        return hashlib.sha256(said.encode()).hexdigest()

    def epoch(self, step: int) -> float:
        """How often the data has been gone through before a step; 1.5 is amid the second time."""
        return step / self.epoch_steps

    @property
    def epoch_steps(self) -> float:
        """Steps in which the data has been gone through once, short sequences aside."""
        main = self._streams[0]
        return main.draws.epoch / main.per_step

    def batch(self, step: int) -> Batch:
        """Return this rank's share of a step, steps counted from 0 and on through the epochs.

        A batch at the border of two epochs has rows of both, so no row is left out.
        """
        if step < 0:
            raise ValueError(f"step {step} is negative")
        numbers = range(self._shift, self._shift + self._share)
        batch = self._empty(len(numbers))
        for place, number in enumerate(numbers):
            row, is_main = self._row_of(step, number)
            self._fill(batch, place, row)
            if self.skip is not None and is_main:
                self._skip(batch, place, step * self.batch_size + number)
        return batch

    def _row_of(self, step: int, number: int) -> tuple[int, bool]:
        """Which row is a step's row of that number, and whether it is a main one."""
        main = self._streams[0]
        stream = main if number < main.per_step else self._streams[1]
        if stream is not main:
            number -= main.per_step
        return stream.draws.row(step * stream.per_step + number), stream.main

    def _skip(self, batch: Batch, place: int, drawn: int) -> None:
        """Let the positions of a row's pieces skip, as the number of the draw says."""
        assert self.skip is not None  # who calls has looked
        for number in range(int(batch.documents[place].max()) + 1):
            at = batch.documents[place] == number
            key = (self.seed, drawn, number)
            batch.positions[place, at] = skipped_positions(int(at.sum()), self.skip, *key)

    def once(self) -> Iterator[Batch]:
        """Yield every row once, as planned, this rank's share of each batch.

        All batches have the same shape: the last one is filled with rows that hold nothing.
        Positions are counted, and rows of short sequences alone do not come.
        """
        for first in range(self._shift, self.n_rows + self._shift, self.batch_size):
            batch = self._empty(self._share)
            for place, row in enumerate(range(first, min(first + self._share, self.n_rows))):
                self._fill(batch, place, row)
            yield batch

    def _empty(self, rows: int) -> Batch:
        shape = (rows, self.length)
        return Batch(
            tokens=np.full(shape, self.dataset.end_id, dtype=np.int64),
            labels=np.full(shape, IGNORED, dtype=np.int64),
            documents=np.full(shape, -1, dtype=np.int64),
            positions=np.zeros(shape, dtype=np.int64),
        )

    def _fill(self, batch: Batch, place: int, row: int) -> None:
        plan, begin = self._plan, 0
        first = int(plan.rows[row])
        for number in range(first, int(plan.rows[row + 1])):
            document, start = int(plan.documents[number]), int(plan.starts[number])
            size = int(plan.lengths[number])
            # One more than the piece: the label of its last token, unless the document ends there.
            read = self.dataset.read(document, start, start + size + 1)
            end = begin + size
            batch.tokens[place, begin:end] = read[:size]
            labels = batch.labels[place, begin : begin + len(read) - 1]
            labels[:] = read[1:]
            if self.dataset.masked:
                labels[~self.dataset.read_learned(document, start + 1, start + size + 1)] = IGNORED
            batch.documents[place, begin:end] = number - first
            batch.positions[place, begin:end] = np.arange(size)
            begin = end
