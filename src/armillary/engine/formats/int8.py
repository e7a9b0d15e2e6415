"""Activations as int8 in groups of 32, and products of bytes, by what the machine has for them.

A row of k activations is k bytes q, then k / 32 float32 each of: scales s, sums Σq of a group, sums
Σq of its first half. x ≈ s·q with s = max|x| / 127 of the group. The sums are for weights that have
an offset.

Weights come in lanes: a vector holds the same four weights of several rows, so that what a group
gives is a whole number in each row's own lane. It is exact, whatever instruction adds it up.
"""

from collections.abc import Sequence
from typing import Literal

from llvmlite import ir

from armillary.engine.emit import F16, F32, I8, I16, I32, Emit, vector
from armillary.engine.machine import Machine

GROUP = 32
LANES = 8
"""Rows of weights that are multiplied at once."""

_QUADS, _BYTES, _FLOATS = vector(I32, LANES), vector(I8, 4 * LANES), vector(F32, LANES)
_HALF_QUADS = GROUP // 8

Part = Literal["whole", "first", "second"]


def row_bytes(k: int) -> int:
    """Bytes of a row of k activations."""
    return k + k // GROUP * 12


class Group:
    """A group of a row of activations."""

    def __init__(self, e: Emit, x: ir.Value, k: ir.Value, group: ir.Value) -> None:
        self.e = e
        self._q = e.add(x, e.mul(group, GROUP))
        self._scale = e.add(e.add(x, k), e.mul(group, 4))
        self._array = e.mul(e.div(k, GROUP), 4)

    def quad(self, number: int) -> ir.Value:
        """Four q, in every lane."""
        return self.e.splat(self.e.load(I32, self._q, 4 * number), LANES)

    def scale(self) -> ir.Value:
        """s, in every lane."""
        return self.e.splat(self.e.load(F32, self._scale), LANES)

    def sum(self, part: Part = "whole") -> ir.Value:
        """Σq of the group or of half of it, in every lane."""
        whole = self.e.add(self._scale, self._array)
        if part == "whole":
            return self.e.splat(self.e.load(F32, whole), LANES)
        first = self.e.splat(self.e.load(F32, self.e.add(whole, self._array)), LANES)
        return first if part == "first" else self.e.builder.fsub(self.sum(), first)


class Weights:
    """The weights of a group in lanes, made ready to be multiplied by several rows of activations.

    `quads`: eight vectors, each with four weights of every row; from 0 to 127 unless `signed`.
    `offset` is added to each.
    """

    def __init__(
        self,
        e: Emit,
        machine: Machine,
        quads: Sequence[ir.Value],
        *,
        signed: bool = False,
        offset: int = 0,
    ) -> None:
        self.e, self.machine, self.quads, self.offset = e, machine, list(quads), offset
        self.signs: list[ir.Value] | None = None
        # These machines multiply unsigned bytes by signed ones.
        if signed and machine.int8_dot == "vnni":
            flip = e.constant(-0x7F7F7F80, _QUADS)
            self.quads = [e.builder.xor(quad, flip) for quad in quads]
            self.offset -= 128
        elif signed and machine.int8_dot == "avx2":
            self.signs = [e.builder.bitcast(quad, _BYTES) for quad in quads]
            no = ir.Constant(ir.IntType(1), 0)
            sizes = [e.call("llvm.abs.v32i8", _BYTES, [sign, no]) for sign in self.signs]
            self.quads = [e.builder.bitcast(size, _QUADS) for size in sizes]

    def dot(self, x: Group, part: Part = "whole") -> ir.Value:
        """Σ w·q over the group or half of it, as a float32 without rounding, for every row."""
        first = _HALF_QUADS if part == "second" else 0
        end = _HALF_QUADS if part == "first" else 2 * _HALF_QUADS
        # Two sums, since each addition waits for the one before it.
        totals = [self.e.constant(0, _QUADS)] * 2
        for number in range(first, end):
            side = number % 2
            totals[side] = self._add_products(totals[side], number, x.quad(number))
        total = self.e.builder.add(*totals)
        products = self.e.builder.sitofp(total, _FLOATS)
        if self.offset:
            by = self.e.constant(float(self.offset), _FLOATS)
            products = self.e.fma(by, x.sum(part), products)
        return products

    def _add_products(self, total: ir.Value, number: int, x: ir.Value) -> ir.Value:
        """Add the products of four weights of every row."""
        e, b, weights = self.e, self.e.builder, self.quads[number]
        if self.machine.int8_dot == "vnni":
            # Newer LLVMs have the factors as bytes, and still read it with words, as it was before.
            return e.call("llvm.x86.avx512.vpdpbusd.256", _QUADS, [total, weights, x])
        w, q = (b.bitcast(each, _BYTES) for each in (weights, x))
        if self.machine.int8_dot == "avx2":
            if self.signs is not None:
                q = e.call("llvm.x86.avx2.psign.b", _BYTES, [q, self.signs[number]])
            shorts = vector(I16, 16)
            pairs = e.call("llvm.x86.avx2.pmadd.ub.sw", shorts, [w, q])
            fours = e.call("llvm.x86.avx2.pmadd.wd", _QUADS, [pairs, e.constant(1, shorts)])
            return b.add(total, fours)
        if self.machine.int8_dot == "neon":
            halves = [
                e.call(
                    "llvm.aarch64.neon.sdot.v4i32.v16i8",
                    vector(I32, 4),
                    [e.part(total, lane, 4), e.part(w, 4 * lane, 16), e.part(q, 4 * lane, 16)],
                )
                for lane in (0, 4)
            ]
            return e.shuffle(halves[0], halves[1], range(LANES))
        wide = vector(I16, 4 * LANES)
        products = b.sext(b.mul(b.sext(w, wide), b.sext(q, wide)), vector(I32, 4 * LANES))
        for first in range(4):
            total = b.add(total, e.shuffle(products, products, range(first, 4 * LANES, 4)))
        return total


def in_lanes(e: Emit, rows: Sequence[ir.Value], offset: int) -> list[ir.Value]:
    """16 bytes of each row, at an offset from its address → four vectors of four bytes of each."""
    four = vector(I32, 4)
    # Lanes 0 to 3 are the first four rows and 4 to 7 the others, as registers are cut.
    pairs = [
        e.shuffle(e.load(four, rows[i], offset), e.load(four, rows[i + 4], offset), range(LANES))
        for i in range(4)
    ]
    low, high = (0, 8, 1, 9, 4, 12, 5, 13), (2, 10, 3, 11, 6, 14, 7, 15)
    a, b = (e.shuffle(pairs[0], pairs[1], lanes) for lanes in (low, high))
    c, d = (e.shuffle(pairs[2], pairs[3], lanes) for lanes in (low, high))
    low, high = (0, 1, 8, 9, 4, 5, 12, 13), (2, 3, 10, 11, 6, 7, 14, 15)
    return [
        e.shuffle(first, second, lanes)
        for first, second in ((a, c), (b, d))
        for lanes in (low, high)
    ]


def numbers(e: Emit, rows: Sequence[ir.Value], kind: ir.Type, offset: int = 0) -> ir.Value:
    """A number of each row, at an offset from its address, in a lane for each."""
    found = ir.Constant(vector(kind, len(rows)), ir.Undefined)
    for lane, row in enumerate(rows):
        number = e.load(kind, row, offset)
        found = e.builder.insert_element(found, number, ir.Constant(I32, lane))
    return found


def as_halves(e: Emit, bits: ir.Value) -> ir.Value:
    """16 bits in each lane, as float16 brought to float32."""
    lanes = bits.type.count
    return e.builder.fpext(e.builder.bitcast(bits, vector(F16, lanes)), vector(F32, lanes))
