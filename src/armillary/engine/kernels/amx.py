"""Products of matrices by AMX: 16 rows of 32 bfloat16 numbers meet 16 columns at once.

Rows lie some bytes apart; columns as all tiles read them, words of two numbers, 16 side by side.
Sums begin as what memory holds. Source: Intel, Software Developer's Manual, volume 1, chapter 18.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import register_jitable

from armillary.engine.emit import I8, Emit, emitted, vector
from armillary.engine.kernels.tile import SUMS, WORDS, transposed
from armillary.engine.tiling import LANES

ROWS = 16
"""Of a block, and words of a row that meet at once."""

_LINE = 64
# One for the kind of table, bytes of a row of each register in two bytes each, and its rows.
_SIZES = bytes([1, *[0] * 15, *[_LINE, 0] * 8, *[0] * 16, *[ROWS] * 8, *[0] * 8])


@emitted(types.void)
def begin(e: Emit, _nothing: ir.Value) -> None:
    """Give the thread's registers their sizes."""
    sizes = e.scratch(_LINE)
    e.store(ir.Constant(vector(I8, _LINE), list(_SIZES)), sizes)
    e.call("llvm.x86.ldtilecfg", ir.VoidType(), [_pointer(e, sizes)])


@emitted(types.void)
def end(e: Emit, _nothing: ir.Value) -> None:
    """Let the registers go, so that nobody has to save them."""
    e.call("llvm.x86.tilerelease", ir.VoidType(), [])


def around(used: bool) -> tuple[Any, Any]:
    """`begin` and `end`, or what does nothing where AMX is not used."""

    @register_jitable
    def nothing(_nothing: int) -> None:
        return

    return (begin, end) if used else (nothing, nothing)


At = tuple[int, int]
"""Which sums: of a block of rows and a vector of columns."""


@dataclass(frozen=True)
class Block:
    """16 rows for each of some blocks times some vectors of columns: what is in which register.

    A store of sums waits for their last product, and (as measured) the next sums in the same
    registers for the store. Where one set of sums follows another, each is stored where the next
    one begins (`begin`), while products of the others go on.
    """

    blocks: int
    vectors: int

    @property
    def sums(self) -> dict[At, int]:
        """Of each block and vector."""
        every = product(range(self.blocks), range(self.vectors))
        return {at: number for number, at in enumerate(every)}

    def _place(self, e: Emit, at: At, out: ir.Value, stride: ir.Value) -> ir.Value:
        """Where sums lie."""
        block, one = at
        return e.add(e.add(out, e.mul(stride, block * ROWS)), one * _LINE)

    def clear(self, e: Emit, at: At) -> None:
        """Let sums begin as zeros."""
        e.call("llvm.x86.tilezero", ir.VoidType(), [_number(self.sums[at])])

    def load(self, e: Emit, at: At, out: ir.Value, stride: ir.Value) -> None:
        """Let sums begin as what there is."""
        _load(e, self.sums[at], self._place(e, at, out, stride), stride)

    def load_row(self, e: Emit, at: At, numbers: ir.Value) -> None:
        """Let sums begin as numbers of columns, the same in each row."""
        # No bytes from one row to the next.
        _load(e, self.sums[at], e.add(numbers, at[1] * _LINE), 0)

    def store(self, e: Emit, at: At, out: ir.Value, stride: ir.Value) -> None:
        """Put sums where they belong."""
        given = [_number(self.sums[at]), _pointer(e, self._place(e, at, out, stride)), stride]
        e.call("llvm.x86.tilestored64", ir.VoidType(), given)

    def add(
        self,
        e: Emit,
        x: ir.Value,
        stride: ir.Value,
        columns: ir.Value,
        step: int,
        count: ir.Value,
        begin: Callable[[At], None],
    ) -> None:
        """Add the products of rows, `count` words of each, with columns `step` bytes apart.

        `begin` is called for each of the sums right before the first product that it takes.
        """
        first = len(self.sums)

        def meet(done: ir.Value, before: Callable[[At], None]) -> None:
            """A vector of words of each row; all are loaded where they are used first."""
            at_row, at_column = e.mul(done, _LINE), e.mul(done, LANES * step)
            rows, ones = {}, {}
            for (block, one), register in self.sums.items():
                before((block, one))
                if block not in rows:
                    rows[block] = first + block
                    near = e.add(e.add(x, e.mul(stride, block * ROWS)), at_row)
                    _load(e, rows[block], near, stride)
                if one not in ones:
                    ones[one] = first + self.blocks + one
                    _load(e, ones[one], e.add(e.add(columns, one * _LINE), at_column), step)
                used = (register, rows[block], ones[one])
                e.call("llvm.x86.tdpbf16ps", ir.VoidType(), [_number(each) for each in used])

        meet(e.int(0), begin)
        with e.loop(e.sub(e.div(e.add(count, LANES - 1), LANES), 1)) as index:
            meet(e.add(index, 1), lambda _: None)


def multiply(blocks: int, vectors: int) -> Any:
    """Rows times columns, plus `starts`, a number for each column, and perhaps what `out` holds."""
    all_ = Block(blocks, vectors)

    @emitted(types.void)
    def multiply(
        e: Emit,
        x: ir.Value,
        stride: ir.Value,
        columns: ir.Value,
        count: ir.Value,
        starts: ir.Value,
        out: ir.Value,
        out_stride: ir.Value,
        adds: ir.Value,
    ) -> None:
        b = e.builder
        add = partial(all_.add, e, x, stride, columns, vectors * _LINE, count)
        with b.if_else(b.icmp_signed("!=", adds, e.int(0))) as (more, fresh):
            with more:
                first = [e.load(SUMS, starts, one * _LINE) for one in range(vectors)]
                with e.loop(blocks * ROWS) as row:
                    line = e.add(out, e.mul(out_stride, row))
                    for one, start in enumerate(first):
                        before = e.load(SUMS, line, one * _LINE)
                        e.store(e.fadd(before, start), line, one * _LINE)
                add(lambda at: all_.load(e, at, out, out_stride))
            with fresh:
                add(lambda at: all_.load_row(e, at, starts))
        for at in all_.sums:
            all_.store(e, at, out, out_stride)

    return multiply


def turn() -> Any:
    """16 columns of up to 16 rows of words as rows, 0 for the rows that there are not."""

    @emitted(types.void)
    def turn(
        e: Emit,
        rows: ir.Value,
        stride: ir.Value,
        count: ir.Value,
        out: ir.Value,
        out_stride: ir.Value,
    ) -> None:
        b, nothing = e.builder, e.scratch(_LINE)
        e.store(e.constant(0, WORDS), nothing)
        found = []
        for row in range(LANES):
            there = b.icmp_signed("<", e.int(row), count)
            found.append(e.load(WORDS, b.select(there, e.add(rows, e.mul(stride, row)), nothing)))
        for row, words in enumerate(transposed(e, found)):
            e.store(words, e.add(out, e.mul(out_stride, row)))

    return turn


def _load(e: Emit, register: int, address: ir.Value, stride: Any) -> None:
    given = [_number(register), _pointer(e, address), e.int(stride)]
    e.call("llvm.x86.tileloadd64", ir.VoidType(), given)


def _number(number: int) -> ir.Constant:
    return ir.Constant(I8, number)


def _pointer(e: Emit, address: ir.Value) -> ir.Value:
    return e.builder.inttoptr(address, I8.as_pointer())
