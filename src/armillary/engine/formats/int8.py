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
QUADS = GROUP // 4
"""Vectors of four weights of each row in a group."""

FEW_LANES, MOST_LANES = 8, 16
_HALF_QUADS = GROUP // 8

Part = Literal["whole", "first", "second"]


def lanes(machine: Machine) -> int:
    """Rows of weights that are multiplied at once at most."""
    return MOST_LANES if machine.wide and machine.int8_dot == "vnni" else FEW_LANES


def row_bytes(k: int) -> int:
    """Bytes of a row of k activations."""
    return k + k // GROUP * 12


class Group:
    """A group of a row of activations, for some lanes. What is asked for twice is loaded once."""

    def __init__(self, e: Emit, x: ir.Value, k: ir.Value, group: ir.Value, lanes: int) -> None:
        self.e, self._lanes = e, lanes
        self._q = e.add(x, e.mul(group, GROUP))
        self._scale = e.add(e.add(x, k), e.mul(group, 4))
        self._array = e.mul(e.div(k, GROUP), 4)
        self._known: dict[int | str, ir.Value] = {}

    def quad(self, number: int) -> ir.Value:
        """Four q, in every lane."""
        return self._everywhere(number, I32, self._q, 4 * number)

    def scale(self) -> ir.Value:
        """s, in every lane."""
        return self._everywhere("scale", F32, self._scale)

    def sum(self, part: Part = "whole") -> ir.Value:
        """Σq of the group or of half of it, in every lane."""
        whole = self.e.add(self._scale, self._array)
        if part == "whole":
            return self._everywhere("whole", F32, whole)
        first = self._everywhere("first", F32, self.e.add(whole, self._array))
        return first if part == "first" else self.e.builder.fsub(self.sum(), first)

    def _everywhere(
        self, name: int | str, kind: ir.Type, address: ir.Value, offset: int = 0
    ) -> ir.Value:
        if name not in self._known:
            number = self.e.load(kind, address, offset)
            self._known[name] = self.e.splat(number, self._lanes)
        return self._known[name]


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
        self._quads: ir.Type = quads[0].type
        self._lanes: int = self._quads.count
        self._bytes = vector(I8, 4 * self._lanes)
        # These machines multiply unsigned bytes by signed ones.
        if signed and machine.int8_dot == "vnni":
            flip = e.constant(-0x7F7F7F80, self._quads)
            self.quads = [e.builder.xor(quad, flip) for quad in quads]
            self.offset -= 128
        elif signed and machine.int8_dot == "avx2":
            self.signs = [e.builder.bitcast(quad, self._bytes) for quad in quads]
            no = ir.Constant(ir.IntType(1), 0)
            sizes = [e.call("llvm.abs.v32i8", self._bytes, [sign, no]) for sign in self.signs]
            self.quads = [e.builder.bitcast(size, self._quads) for size in sizes]

    def dot(self, x: Group, part: Part = "whole") -> ir.Value:
        """Σ w·q over the group or half of it, as a float32 without rounding, for every row."""
        first = _HALF_QUADS if part == "second" else 0
        end = _HALF_QUADS if part == "first" else 2 * _HALF_QUADS
        # Two sums, since each addition waits for the one before it.
        totals = [self.e.constant(0, self._quads)] * 2
        for number in range(first, end):
            side = number % 2
            totals[side] = self._add_products(totals[side], number, x.quad(number))
        total = self.e.builder.add(*totals)
        products = self.e.builder.sitofp(total, vector(F32, self._lanes))
        if self.offset:
            by = self.e.constant(float(self.offset), products.type)
            products = self.e.fma(by, x.sum(part), products)
        return products

    def _add_products(self, total: ir.Value, number: int, x: ir.Value) -> ir.Value:
        """Add the products of four weights of every row."""
        e, b, weights = self.e, self.e.builder, self.quads[number]
        if self.machine.int8_dot == "vnni":
            # Newer LLVMs have the factors as bytes, and still read it with words, as it was before.
            name = f"llvm.x86.avx512.vpdpbusd.{32 * self._lanes}"
            return e.call(name, self._quads, [total, weights, x])
        w, q = (b.bitcast(each, self._bytes) for each in (weights, x))
        if self.machine.int8_dot == "avx2":
            if self.signs is not None:
                q = e.call("llvm.x86.avx2.psign.b", self._bytes, [q, self.signs[number]])
            shorts = vector(I16, 16)
            pairs = e.call("llvm.x86.avx2.pmadd.ub.sw", shorts, [w, q])
            fours = e.call("llvm.x86.avx2.pmadd.wd", self._quads, [pairs, e.constant(1, shorts)])
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
            return e.shuffle(halves[0], halves[1], range(8))
        count = self._bytes.count
        wide = vector(I16, count)
        products = b.sext(b.mul(b.sext(w, wide), b.sext(q, wide)), vector(I32, count))
        for first in range(4):
            total = b.add(total, e.shuffle(products, products, range(first, count, 4)))
        return total


def in_lanes(e: Emit, rows: Sequence[ir.Value], offset: int) -> list[ir.Value]:
    """16 bytes of each row, at an offset from its address → four vectors of four bytes of each."""
    four, count = vector(I32, 4), len(rows)
    # Each four lanes are four rows one behind the other, as registers are cut.
    parts = [
        side_by_side(e, [e.load(four, row, offset) for row in rows[first::4]]) for first in range(4)
    ]

    def of_each_four(*places: int) -> list[int]:
        """Lanes of each four of the first vector, and behind 4 those of the second."""
        return [
            first + place % 4 + place // 4 * count
            for first in range(0, count, 4)
            for place in places
        ]

    low, high = of_each_four(0, 4, 1, 5), of_each_four(2, 6, 3, 7)
    a, b = (e.shuffle(parts[0], parts[1], lanes) for lanes in (low, high))
    c, d = (e.shuffle(parts[2], parts[3], lanes) for lanes in (low, high))
    low, high = of_each_four(0, 1, 4, 5), of_each_four(2, 3, 6, 7)
    return [
        e.shuffle(first, second, lanes)
        for first, second in ((a, c), (b, d))
        for lanes in (low, high)
    ]


def side_by_side(e: Emit, vectors: Sequence[ir.Value]) -> ir.Value:
    """Vectors, a power of two of them, as one."""
    while len(vectors) > 1:
        lanes = range(2 * vectors[0].type.count)
        vectors = [e.shuffle(a, b, lanes) for a, b in zip(vectors[::2], vectors[1::2], strict=True)]
    return vectors[0]


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
