"""Keys and values as int8: of each token and head x ≈ s·q, with s = max|x| / 127 in float32.

They meet queries and weights as whole numbers of 16 bits, whose products are added up exactly: what
a query or a weight loses by its own rounding, below 1/32,000 of the largest, is next to nothing
beside what the keys and values have lost, and the same on every machine.
"""

from collections.abc import Sequence

from llvmlite import ir

from armillary.engine.cache_formats.format import VECTOR, CacheFormat, pieces
from armillary.engine.emit import F32, FLOATS, I8, I16, I32, Emit, vector
from armillary.engine.kv_layout import BLOCK, CHUNK

_MOST = 127
_PAIRS = 2 * FLOATS
_BYTES, _SHORTS, _INTS = vector(I8, _PAIRS), vector(I16, _PAIRS), vector(I32, FLOATS)


class Int8(CacheFormat):
    """A byte for each number, and a float32 scale for each token."""

    name = "int8"
    item = "u1"
    size = 1
    per_word = 2
    scale_bytes = 4
    tiles = "BF16"
    staged = True

    def scale(self, e: Emit, numbers: ir.Value, count: ir.Value) -> ir.Value:
        """See CacheFormat."""
        return e.builder.fmul(_largest(e, numbers, count), e.constant(1 / _MOST, F32))

    def narrow(self, e: Emit, number: ir.Value, scale: ir.Value | None) -> ir.Value:
        """The nearest multiple of the scale."""
        assert scale is not None
        b = e.builder
        nearest = e.call("llvm.rint.f32", F32, [b.fmul(number, _inverse(e, scale, 1.0))])
        return b.fptosi(nearest, I8)

    def prepare(self, e: Emit, query: ir.Value, d_head: ir.Value, factor: ir.Value) -> None:
        """To d_h int16 and, behind them, the float32 that they are multiples of."""
        b = e.builder
        super().prepare(e, query, d_head, factor)
        largest = _largest(e, query, d_head)
        # So many that no sum of products with keys is beyond 32 bits.
        room = b.udiv(e.int(2**31 - 1), e.mul(d_head, _MOST))
        whole = b.select(b.icmp_unsigned("<", room, e.int(2**15 - 1)), room, e.int(2**15 - 1))
        most = b.uitofp(whole, F32)
        scale = b.fdiv(largest, most)
        by = _inverse(e, largest, most)

        def round_(at: ir.Value, lanes: int) -> None:
            # Numbers are written before those that are yet to be read.
            number = e.floats(e.add(query, e.mul(at, 4)), lanes)
            e.store(_shorts(e, b.fmul(number, e.splat(by, lanes))), e.add(query, e.mul(at, 2)))

        pieces(e, d_head, round_)
        e.store(scale, e.add(query, e.mul(d_head, 2)))

    def scores(
        self,
        e: Emit,
        queries: Sequence[ir.Value],
        keys: ir.Value,
        d_head: ir.Value,
    ) -> list[ir.Value]:
        """See CacheFormat."""
        b = e.builder
        totals = [e.variable(e.constant(0, _INTS)) for _ in queries]
        with e.loop(e.div(d_head, 2)) as index:
            pairs = b.sext(e.load(_BYTES, e.add(keys, e.mul(index, _PAIRS))), _SHORTS)
            for query, total in zip(queries, totals, strict=True):
                word = e.load(I32, e.add(query, e.mul(index, 4)))
                total.set(_add_products(e, total.get(), pairs, word))
        scales = e.load(VECTOR, e.add(keys, e.mul(d_head, BLOCK)))
        found = []
        for query, total in zip(queries, totals, strict=True):
            scale = e.splat(e.load(F32, e.add(query, e.mul(d_head, 2))), FLOATS)
            found.append(b.fmul(b.sitofp(total.get(), VECTOR), b.fmul(scales, scale)))
        return found

    def weigh(
        self, e: Emit, weights: ir.Value, values: ir.Value, count: ir.Value, d_value: ir.Value
    ) -> None:
        """Times the scales of the values, to int16 and, behind them, what those are multiples of.

        Tokens from `count` on get none.
        """
        b = e.builder
        scales = e.add(values, e.mul(d_value, BLOCK))
        apart = e.mul(e.add(d_value, self.scale_bytes), BLOCK)
        parts = []
        for block in range(CHUNK // BLOCK):
            weight = e.load(VECTOR, weights, 4 * BLOCK * block)
            scale = e.load(VECTOR, e.add(scales, e.mul(apart, block)))
            there = _before(e, block * BLOCK, count)
            parts.append(b.select(there, b.fmul(weight, scale), e.constant(0.0, VECTOR)))
        most = parts[0]
        for part in parts[1:]:
            most = _larger(e, most, part)
        largest = _reduced(e, most)
        top = e.constant(2.0**15 - 1, F32)
        by = e.splat(_inverse(e, largest, top), FLOATS)
        for block, part in enumerate(parts):
            e.store(_shorts(e, b.fmul(part, by)), weights, 2 * BLOCK * block)
        e.store(b.fdiv(largest, top), weights, 2 * CHUNK)

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
        """See CacheFormat."""
        b = e.builder
        totals = [e.variable(e.constant(0, _INTS)) for _ in sums]
        row, apart = e.mul(d_value, 2), e.mul(e.add(d_value, self.scale_bytes), BLOCK)
        near = e.add(values, e.mul(column, _PAIRS))
        with e.loop(e.div(e.add(count, BLOCK - 1), BLOCK)) as block:
            at = e.add(near, e.mul(apart, block))
            for pair in range(BLOCK // 2):
                numbers = e.load(_BYTES, e.add(at, e.mul(row, pair)))
                pairs = b.sext(numbers, _SHORTS)
                for each, total in zip(weights, totals, strict=True):
                    word = e.load(I32, e.add(each, e.mul(block, 2 * BLOCK)), 4 * pair)
                    total.set(_add_products(e, total.get(), pairs, word))
        found = []
        for each, total, before in zip(weights, totals, sums, strict=True):
            scale = e.splat(e.load(F32, each, 2 * CHUNK), FLOATS)
            found.append(e.fma(b.sitofp(total.get(), VECTOR), scale, before))
        return found

    def stage(
        self,
        e: Emit,
        numbers: ir.Value,
        written: ir.Value,
        width: ir.Value,
        to: ir.Value,
        scales_to: ir.Value,
    ) -> None:
        """See CacheFormat."""
        b = e.builder
        apart = e.mul(e.add(width, self.scale_bytes), BLOCK)
        with e.loop(e.div(e.add(written, BLOCK - 1), BLOCK)) as block:
            near = e.add(numbers, e.mul(apart, block))
            there = e.add(to, e.mul(e.mul(block, width), 2 * BLOCK))
            with e.loop(e.div(width, 2)) as index:
                words = e.load(_BYTES, e.add(near, e.mul(index, _PAIRS)))
                e.store(_as_bfloats(e, words), e.add(there, e.mul(index, 2 * _PAIRS)))
            scales = e.load(VECTOR, e.add(near, e.mul(width, BLOCK)))
            first = e.mul(block, BLOCK)
            # A token that nobody has written has no weight, but it must be a number.
            known = b.select(_before(e, 0, e.sub(written, first)), scales, e.constant(0.0, VECTOR))
            e.store(known, e.add(scales_to, e.mul(first, 4)))


def _larger(e: Emit, a: ir.Value, b: ir.Value) -> ir.Value:
    return e.builder.select(e.builder.fcmp_ordered(">", a, b), a, b)


def _reduced(e: Emit, numbers: ir.Value) -> ir.Value:
    """The largest of a vector."""
    name = f"llvm.vector.reduce.fmax.v{numbers.type.count}f32"
    return e.call(name, F32, [numbers], fast=True)


def _largest(e: Emit, numbers: ir.Value, count: ir.Value) -> ir.Value:
    """max|x| of a row of float32."""
    found = {lanes: e.variable(e.constant(0.0, vector(F32, lanes))) for lanes in (FLOATS, 1)}

    def compare(at: ir.Value, lanes: int) -> None:
        here = e.floats(e.add(numbers, e.mul(at, 4)), lanes)
        size = e.call(f"llvm.fabs.v{lanes}f32", here.type, [here])
        found[lanes].set(_larger(e, size, found[lanes].get()))

    pieces(e, count, compare)
    return _larger(e, _reduced(e, found[FLOATS].get()), e.number(found[1].get()))


def _inverse(e: Emit, number: ir.Value, top: ir.Value | float) -> ir.Value:
    """top / number; 0 where that would be no number."""
    b = e.builder
    above = e.constant(top, F32) if isinstance(top, float) else top
    empty = b.fcmp_ordered("<", number, e.constant(1e-32, F32))
    return b.select(empty, e.constant(0.0, F32), b.fdiv(above, number))


def _shorts(e: Emit, numbers: ir.Value) -> ir.Value:
    """Float32 → the nearest int16."""
    b, lanes = e.builder, numbers.type.count
    nearest = e.call(f"llvm.rint.v{lanes}f32", numbers.type, [numbers])
    return b.trunc(b.fptosi(nearest, vector(I32, lanes)), vector(I16, lanes))


def _before(e: Emit, first: int, count: ir.Value) -> ir.Value:
    """Which of 16 tokens, from the first on, are among `count`."""
    b = e.builder
    numbers = ir.Constant(_INTS, [first + lane for lane in range(FLOATS)])
    return b.icmp_signed("<", numbers, e.splat(b.trunc(count, I32), FLOATS))


def _add_products(e: Emit, total: ir.Value, pairs: ir.Value, word: ir.Value) -> ir.Value:
    """Add, in each of 16 lanes, two int16 times the two of a word."""
    b = e.builder
    others = b.bitcast(e.splat(word, FLOATS), _SHORTS)
    wide = vector(I32, _PAIRS)
    products = b.mul(b.sext(pairs, wide), b.sext(others, wide))
    odd, even = (e.shuffle(products, products, range(at, _PAIRS, 2)) for at in (1, 0))
    return b.add(total, b.add(even, odd))


def _as_bfloats(e: Emit, numbers: ir.Value) -> ir.Value:
    """32 int8 as bfloat16, which has them all."""
    b = e.builder
    halves = [
        b.bitcast(b.sitofp(e.part(numbers, first, FLOATS), VECTOR), _SHORTS)
        for first in (0, FLOATS)
    ]
    # The upper half of a float32 is the bfloat16 of the same value.
    return e.shuffle(halves[0], halves[1], range(1, 2 * _PAIRS, 2))
