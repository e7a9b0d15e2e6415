"""Products of matrices by AMX: 16 rows of 32 bfloat16 numbers meet 16 columns at once.

Rows lie some bytes apart; columns as all tiles read them, words of two numbers, 16 side by side.
Sums begin as what memory holds. Source: Intel, Software Developer's Manual, volume 1, chapter 18.
"""

from collections.abc import Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Block:
    """16 rows for each of some blocks times some vectors of columns: what is in which register."""

    blocks: int
    vectors: int

    @property
    def sums(self) -> dict[tuple[int, int], int]:
        """Of each block and vector."""
        every = product(range(self.blocks), range(self.vectors))
        return {at: number for number, at in enumerate(every)}

    @property
    def rows(self) -> list[int]:
        """Of each block."""
        first = self.blocks * self.vectors
        return [first + block for block in range(self.blocks)]

    @property
    def columns(self) -> list[int]:
        """Of each vector."""
        first = self.blocks * (self.vectors + 1)
        return [first + one for one in range(self.vectors)]

    def places(self, e: Emit, out: ir.Value, stride: ir.Value) -> dict[tuple[int, int], ir.Value]:
        """Where the sums of each block and vector lie."""
        return {
            (block, one): e.add(e.add(out, e.mul(stride, block * ROWS)), one * _LINE)
            for block, one in self.sums
        }

    def clear(self, e: Emit) -> None:
        """Let sums begin as zeros."""
        for register in self.sums.values():
            e.call("llvm.x86.tilezero", ir.VoidType(), [_number(register)])

    def begin_as(self, e: Emit, places: Mapping[tuple[int, int], ir.Value], stride: Any) -> None:
        """Let sums begin as what there is."""
        for at, register in self.sums.items():
            _load(e, register, places[at], stride)

    def add(
        self, e: Emit, x: ir.Value, stride: ir.Value, columns: ir.Value, count: ir.Value
    ) -> None:
        """Add the products of rows, `count` words of each, with columns."""
        step = self.vectors * _LINE
        with e.loop(e.div(e.add(count, LANES - 1), LANES)) as index:
            at_row, at_column = e.mul(index, _LINE), e.mul(index, LANES * step)
            for block, register in enumerate(self.rows):
                near = e.add(e.add(x, e.mul(stride, block * ROWS)), at_row)
                _load(e, register, near, stride)
            for one, register in enumerate(self.columns):
                _load(e, register, e.add(e.add(columns, at_column), one * _LINE), step)
            for (block, one), register in self.sums.items():
                used = (register, self.rows[block], self.columns[one])
                e.call("llvm.x86.tdpbf16ps", ir.VoidType(), [_number(each) for each in used])

    def store(self, e: Emit, places: Mapping[tuple[int, int], ir.Value], stride: ir.Value) -> None:
        """Put the sums where they belong."""
        for at, register in self.sums.items():
            given = [_number(register), _pointer(e, places[at]), stride]
            e.call("llvm.x86.tilestored64", ir.VoidType(), given)


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
        b, places = e.builder, all_.places(e, out, out_stride)
        with b.if_else(b.icmp_signed("!=", adds, e.int(0))) as (more, fresh):
            with more:
                first = [e.load(SUMS, starts, one * _LINE) for one in range(vectors)]
                with e.loop(blocks * ROWS) as row:
                    line = e.add(out, e.mul(out_stride, row))
                    for one, start in enumerate(first):
                        before = e.load(SUMS, line, one * _LINE)
                        e.store(e.fadd(before, start), line, one * _LINE)
                all_.begin_as(e, places, out_stride)
            with fresh:
                # No bytes from one row to the next: the same in each.
                all_.begin_as(e, {at: e.add(starts, at[1] * _LINE) for at in places}, 0)
        all_.add(e, x, stride, columns, count)
        all_.store(e, places, out_stride)

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
