"""Keys and values as float32 or bfloat16 numbers, which are read in place."""

from abc import abstractmethod
from collections.abc import Sequence

from llvmlite import ir

from armillary.engine.cache_formats.format import VECTOR, CacheFormat
from armillary.engine.emit import F32 as FLOAT
from armillary.engine.emit import FLOATS, I16, I32, Emit, vector


class _Plain(CacheFormat):
    @abstractmethod
    def read(self, e: Emit, address: ir.Value) -> list[ir.Value]:
        """16 words as float32 vectors, one for each number of a word."""

    def scores(
        self,
        e: Emit,
        queries: Sequence[ir.Value],
        keys: ir.Value,
        d_head: ir.Value,
    ) -> list[ir.Value]:
        """See CacheFormat."""
        totals = [e.variable(e.constant(0.0, VECTOR)) for _ in queries]
        step = self.per_word
        with e.loop(e.div(d_head, step)) as index:
            for part, lane in enumerate(self.read(e, e.add(keys, e.mul(index, 64)))):
                for query, total in zip(queries, totals, strict=True):
                    number = e.load(FLOAT, e.add(query, e.mul(index, 4 * step)), 4 * part)
                    total.set(e.fma(e.splat(number, FLOATS), lane, total.get()))
        return [total.get() for total in totals]

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
        b, step = e.builder, self.per_word
        totals = [e.variable(each) for each in sums]
        row, near = e.mul(d_value, 4), e.add(values, e.mul(column, 64))

        def add(token: ir.Value, lane: ir.Value) -> None:
            for each, total in zip(weights, totals, strict=True):
                weight = e.load(FLOAT, e.add(each, e.mul(token, 4)))
                total.set(e.fma(e.splat(weight, FLOATS), lane, total.get()))

        with e.loop(e.div(count, step)) as index:
            for part, lane in enumerate(self.read(e, e.add(near, e.mul(index, row)))):
                add(e.add(e.mul(index, step), part), lane)
        if step == 2:
            # Beside the last of an odd count lies what no token has written yet.
            with b.if_then(b.trunc(count, ir.IntType(1))):
                last = e.sub(count, 1)
                add(last, self.read(e, e.add(near, e.mul(e.div(last, 2), row)))[0])
        return [total.get() for total in totals]


class F32(_Plain):
    """IEEE float32."""

    name = "F32"
    item = "<f4"
    size = 4
    per_word = 1
    tiles = "F32"

    def narrow(self, e: Emit, number: ir.Value, scale: ir.Value | None) -> ir.Value:
        """See CacheFormat."""
        del e, scale
        return number

    def read(self, e: Emit, address: ir.Value) -> list[ir.Value]:
        """See _Plain."""
        return [e.load(VECTOR, address)]


class BF16(_Plain):
    """Bfloat16."""

    name = "BF16"
    item = "<u2"
    size = 2
    per_word = 2
    tiles = "BF16"
    clears_beside = True

    def narrow(self, e: Emit, number: ir.Value, scale: ir.Value | None) -> ir.Value:
        """To nearest even."""
        del scale
        b = e.builder
        bits = b.bitcast(number, I32)
        even = b.and_(b.lshr(bits, ir.Constant(I32, 16)), ir.Constant(I32, 1))
        rounded = b.add(b.add(bits, ir.Constant(I32, 0x7FFF)), even)
        return b.trunc(b.lshr(rounded, ir.Constant(I32, 16)), I16)

    def read(self, e: Emit, address: ir.Value) -> list[ir.Value]:
        """See _Plain."""
        b = e.builder
        both = e.load(vector(I32, FLOATS), address)
        low = b.shl(both, e.constant(16, both.type))
        high = b.and_(both, e.constant(0xFFFF0000, both.type))
        return [b.bitcast(each, VECTOR) for each in (low, high)]
