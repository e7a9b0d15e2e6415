"""Tiles of a product of matrices, and the layout that they read their columns in.

A tile is some rows times some vectors of 16 columns. Of each row one word at a time goes to all
lanes; of the columns, word by word, 16 lie side by side: (K', vectors, 16) for K' words.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import register_jitable

from armillary.engine.emit import F32, I16, I32, I64, Emit, Variable, emitted, vector
from armillary.engine.kernels.common import as_bits
from armillary.engine.machine import Machine
from armillary.engine.tiling import LANES, Number

WORDS, SUMS = vector(I32, LANES), vector(F32, LANES)
_PAIR = 2 * LANES


class _BFloat(ir.Type):  # type: ignore[misc]
    """LLVM's bfloat16, which llvmlite does not know."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


_BFLOATS = vector(_BFloat(), _PAIR)

Finish = Callable[[int, list[ir.Value]], None]
"""Takes a row's number and its sums, a vector for each 16 columns."""


def tile(
    e: Emit,
    machine: Machine,
    number: Number,
    rows: Sequence[ir.Value],
    row_step: "int | ir.Value",
    columns: ir.Value,
    column_step: "int | ir.Value",
    count: ir.Value,
    vectors: int,
    finish: Finish,
) -> None:
    """Rows that begin at addresses, times columns; `count` words of each lie the steps apart."""
    zero = e.constant(0.0, SUMS)
    sums = [[e.variable(zero) for _ in range(vectors)] for _ in rows]
    with e.loop(count) as index:
        near = e.add(columns, e.mul(index, column_step))
        there = [e.load(WORDS, near, 4 * LANES * one) for one in range(vectors)]
        at = e.mul(index, row_step)
        for row, totals in zip(rows, sums, strict=True):
            everywhere = e.splat(e.load(I32, e.add(row, at)), LANES)
            _accumulate(e, machine, number, everywhere, there, totals)
    for row, totals in enumerate(sums):
        finish(row, [total.get() for total in totals])


def _accumulate(
    e: Emit,
    machine: Machine,
    number: Number,
    word: ir.Value,
    columns: Sequence[ir.Value],
    totals: Sequence[Variable],
) -> None:
    """Add a word's products with vectors of columns to totals."""
    b = e.builder
    for column, total in zip(columns, totals, strict=True):
        if number == "F32":
            each = [(word, column)]
        elif machine.bf16_dot:
            both = [b.bitcast(one, _BFLOATS) for one in (word, column)]
            name = "llvm.x86.avx512bf16.dpbf16ps.512"
            total.set(e.call(name, SUMS, [total.get(), *both]))
            continue
        else:
            # A bfloat16 is the upper half of the float32 of the same value.
            high, up = e.constant(0xFFFF0000, WORDS), e.constant(16, WORDS)
            each = [
                (b.shl(word, up), b.shl(column, up)),
                (b.and_(word, high), b.and_(column, high)),
            ]
        for one, other in each:
            total.set(e.fma(b.bitcast(one, SUMS), b.bitcast(other, SUMS), total.get()))


def pack(e: Emit, machine: Machine, first: ir.Value, second: ir.Value) -> ir.Value:
    """Two float32 vectors → the words of bfloat16 in the order given, to nearest even."""
    b = e.builder
    if machine.bf16_dot:
        name = "llvm.x86.avx512bf16.cvtne2ps2bf16.512"
        return b.bitcast(e.call(name, _BFLOATS, [second, first]), vector(I16, _PAIR))
    low, high = (b.trunc(_rounded(e, each), vector(I16, LANES)) for each in (first, second))
    return e.shuffle(low, high, range(_PAIR))


def _rounded(e: Emit, numbers: ir.Value) -> ir.Value:
    """Float32 → the bits of the nearest bfloat16."""
    b = e.builder
    bits = b.bitcast(numbers, WORDS)
    half, one, up = (e.constant(each, WORDS) for each in (0x7FFF, 1, 16))
    even = b.and_(b.lshr(bits, up), one)
    return b.lshr(b.add(b.add(bits, half), even), up)


@register_jitable
def nearest(number: float) -> Any:
    """A float32 as bfloat16, to nearest even."""
    bits = as_bits(number)
    even = (bits >> np.uint32(16)) & np.uint32(1)
    return np.uint16((bits + np.uint32(0x7FFF) + even) >> np.uint32(16))


def interleave(e: Emit, machine: Machine, first: ir.Value, second: ir.Value) -> ir.Value:
    """Two float32 vectors → words with a bfloat16 of each."""
    turns = [lane + LANES * which for lane in range(LANES) for which in (0, 1)]
    both = pack(e, machine, first, second)
    apart = e.shuffle(both, ir.Constant(both.type, ir.Undefined), turns)
    return e.builder.bitcast(apart, WORDS)


def cut_together(e: Emit, first: ir.Value, second: ir.Value) -> ir.Value:
    """Two float32 vectors → words with a bfloat16 of each, nearer to 0."""
    b = e.builder
    low = b.lshr(b.bitcast(first, WORDS), e.constant(16, WORDS))
    high = b.and_(b.bitcast(second, WORDS), e.constant(0xFFFF0000, WORDS))
    return b.or_(low, high)


def add_halves(e: Emit, machine: Machine, words: ir.Value, total: Variable) -> None:
    """Add both bfloat16 numbers of words to a total of each lane."""
    _accumulate(e, machine, "BF16", e.constant(0x3F803F80, WORDS), [words], [total])


def some_lane(e: Emit, each: Sequence[ir.Value]) -> ir.Value:
    """1 where some lane of some vector of truths is true, else 0."""
    b = e.builder
    bits = b.bitcast(functools.reduce(b.or_, each), I16)
    return b.zext(b.icmp_signed("!=", bits, ir.Constant(I16, 0)), I64)


def transposed(e: Emit, rows: Sequence[ir.Value]) -> list[ir.Value]:
    """16 vectors of 16 words, with rows and columns exchanged."""
    now, width = list(rows), 1
    while width < LANES:
        # Blocks of `width` × `width` change places across the diagonal.
        new = list(now)
        for one in range(LANES):
            if one & width:
                continue
            other = one + width
            low = [i if not i & width else i - width + LANES for i in range(LANES)]
            high = [i + width if not i & width else i + LANES for i in range(LANES)]
            new[one] = e.shuffle(now[one], now[other], low)
            new[other] = e.shuffle(now[one], now[other], high)
        now, width = new, 2 * width
    return now


def lay(machine: Machine, number: Number) -> Any:
    """Rows of float32 → columns as tiles read them."""

    @emitted(types.void)
    def lay(
        e: Emit, rows: ir.Value, stride: ir.Value, pairs: ir.Value, out: ir.Value, step: ir.Value
    ) -> None:
        """16 rows of 32 · `pairs` numbers; their words go to `out`, `step` bytes apart."""
        starts = [e.add(rows, e.mul(stride, row)) for row in range(LANES)]
        with e.loop(pairs) as index:
            at = e.mul(index, 8 * LANES)
            both = [
                [e.load(SUMS, e.add(start, at), 4 * LANES * half) for half in (0, 1)]
                for start in starts
            ]
            if number == "F32":
                parts = [[e.builder.bitcast(each[half], WORDS) for each in both] for half in (0, 1)]
            else:
                parts = [[e.builder.bitcast(pack(e, machine, *each), WORDS) for each in both]]
            first = e.mul(index, len(parts) * LANES)
            for part, of_rows in enumerate(parts):
                for word, column in enumerate(transposed(e, of_rows)):
                    place = e.mul(e.add(first, part * LANES + word), step)
                    e.store(column, e.add(out, place))

    return lay


def transpose() -> Any:
    """Blocks of 16 × 16 words, in rows some bytes apart, with rows and columns exchanged."""

    @emitted(types.void)
    def transpose(
        e: Emit, from_: ir.Value, from_stride: ir.Value, to: ir.Value, to_stride: ir.Value
    ) -> None:
        rows = [e.load(WORDS, e.add(from_, e.mul(from_stride, row))) for row in range(LANES)]
        for row, words in enumerate(transposed(e, rows)):
            e.store(words, e.add(to, e.mul(to_stride, row)))

    return transpose
