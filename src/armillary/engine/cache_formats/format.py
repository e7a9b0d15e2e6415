"""What the cache and its kernels ask of a format for keys and values."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

from llvmlite import ir

from armillary.engine.emit import F32, FLOATS, Emit, vector
from armillary.engine.kv_layout import BLOCK
from armillary.engine.tiling import Number

VECTOR = vector(F32, FLOATS)


class CacheFormat(ABC):
    """How keys and values lie in the blocks of `engine/kv_layout.py`, and how queries meet them.

    `size` bytes are a number, `per_word` numbers lie side by side, `scale_bytes` are kept of each
    token behind the numbers of its block. Many queries together meet the numbers as `tiles`.
    """

    name: ClassVar[str]
    item: ClassVar[str]
    """NumPy's name for what an array of the cache is made of."""
    size: ClassVar[int]
    per_word: ClassVar[int]
    scale_bytes: ClassVar[int] = 0
    clears_beside: ClassVar[bool] = False
    """Whether what shares words with the last token must be made a number, since any bits may not
    be one."""
    tiles: ClassVar[Number]
    staged: ClassVar[bool] = False
    """Whether tiles read numbers that `stage` makes, instead of those in the cache."""

    def block_bytes(self, width: int) -> int:
        """Bytes of a block: d_h numbers of each token for keys, d_v for values."""
        return BLOCK * (width * self.size + self.scale_bytes)

    # Writing.

    def scale(self, e: Emit, numbers: ir.Value, count: ir.Value) -> ir.Value | None:
        """What a token's float32 numbers are multiples of, where the format keeps that."""
        del e, numbers, count
        return None

    @abstractmethod
    def narrow(self, e: Emit, number: ir.Value, scale: ir.Value | None) -> ir.Value:
        """A float32 as it is kept."""

    def put(
        self,
        e: Emit,
        numbers: ir.Value,
        count: ir.Value,
        block: ir.Value,
        width: ir.Value,
        lane: ir.Value,
        place: Callable[[ir.Value], ir.Value],
    ) -> None:
        """A token's numbers into its block, `width` wide; number i is at place(i) of the block."""
        scale = self.scale(e, numbers, count)
        with e.loop(count) as index:
            number = e.load(F32, e.add(numbers, e.mul(index, 4)))
            e.store(self.narrow(e, number, scale), e.add(block, e.mul(place(index), self.size)))
        if scale is not None:
            behind = e.add(block, e.mul(width, BLOCK * self.size))
            e.store(scale, e.add(behind, e.mul(lane, 4)))

    # A few queries.

    def prepare(self, e: Emit, query: ir.Value, d_head: ir.Value, factor: ir.Value) -> None:
        """A query of d_h float32 times a factor, in place, to what `scores` takes."""

        def multiply(at: ir.Value, lanes: int) -> None:
            place = e.add(query, e.mul(at, 4))
            by = e.splat(factor, lanes)
            e.store(e.builder.fmul(e.floats(place, lanes), by), place)

        pieces(e, d_head, multiply)

    @abstractmethod
    def scores(
        self,
        e: Emit,
        queries: Sequence[ir.Value],
        keys: ir.Value,
        d_head: ir.Value,
    ) -> list[ir.Value]:
        """Queries times the keys of a block: a vector of 16 scores for each."""

    def weigh(
        self, e: Emit, weights: ir.Value, values: ir.Value, count: ir.Value, d_value: ir.Value
    ) -> None:
        """The float32 weights of a chunk, for its first `count` tokens, to what `gather` takes."""
        del e, weights, values, count, d_value

    @abstractmethod
    def gather(
        self,
        e: Emit,
        weights: Sequence[ir.Value],
        values: ir.Value,
        count: ir.Value,
        d_value: ir.Value,
        column: ir.Value,
        sums: Sequence[ir.Value],
    ) -> list[ir.Value]:
        """Sums of 16 columns, and the first `count` values of a chunk times each of the weights."""

    # Many queries.

    def stage(
        self,
        e: Emit,
        numbers: ir.Value,
        written: ir.Value,
        width: ir.Value,
        to: ir.Value,
        scales_to: ir.Value,
    ) -> None:
        """The first `written` tokens of a chunk → numbers as tiles read them, and their scales.

        Scales of tokens that follow are 0.
        """
        del e, numbers, written, width, to, scales_to


def pieces(e: Emit, count: ir.Value, do: Callable[[ir.Value, int], None]) -> None:
    """Do something for whole vectors of a row, and then for the numbers that are left."""
    vectors = e.div(count, FLOATS)
    with e.loop(vectors) as index:
        do(e.mul(index, FLOATS), FLOATS)
    done = e.mul(vectors, FLOATS)
    with e.loop(e.sub(count, done)) as index:
        do(e.add(done, index), 1)
