"""Numbers that stand alone: float32, float16, bfloat16. Products are of float32 numbers."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from itertools import chain

from llvmlite import ir

from armillary.engine.emit import F32 as FLOAT
from armillary.engine.emit import FLOATS, Emit, Variable, vector
from armillary.engine.formats.format import Format
from armillary.engine.machine import Machine


class _Plain(Format):
    block = 1
    activations = "float32"
    stretch: int | None = 8
    """Vectors with a sum of their own, since one over a long row would lose digits. None: all."""

    def together(self, machine: Machine, *, alone: bool) -> int:
        """See Format."""
        del machine, alone
        return 2

    @abstractmethod
    def read(self, e: Emit, address: ir.Value, lanes: int) -> ir.Value:
        """Numbers as a float32 vector."""

    def dots(
        self,
        e: Emit,
        machine: Machine,
        weights: Sequence[ir.Value],
        ahead: ir.Value,
        x: ir.Value,
        stride: ir.Value,
        k: ir.Value,
        rows: ir.Value,
        totals: ir.Value,
    ) -> None:
        """See Format."""
        del machine
        alone = e.builder.icmp_unsigned("==", rows, e.int(1))
        with e.builder.if_else(alone) as (one, several):
            with one:
                # One behind the other is how memory is read fastest, without being asked.
                for number, begin in enumerate(weights):
                    [[product]] = self._products(e, [begin], None, [x], k)
                    e.store(product, totals, 4 * number)
            with several:
                self._several(e, weights, ahead, x, stride, k, rows, totals)

    def _several(
        self,
        e: Emit,
        weights: Sequence[ir.Value],
        ahead: ir.Value,
        x: ir.Value,
        stride: ir.Value,
        k: ir.Value,
        rows: ir.Value,
        totals: ir.Value,
    ) -> None:
        done = e.variable(e.int(0))
        # As many rows as leave their sums in registers.
        for count in (8, 4, 2, 1):
            with e.loop(e.div(e.sub(rows, done.get()), count)):
                first = done.get()
                starts = [e.add(x, e.mul(stride, e.add(first, row))) for row in range(count)]
                for row, products in enumerate(self._products(e, weights, ahead, starts, k)):
                    place = e.add(totals, e.mul(e.add(first, row), 4 * len(weights)))
                    for number, product in enumerate(products):
                        e.store(product, place, 4 * number)
                done.set(e.add(first, count))

    def _products(
        self,
        e: Emit,
        weights: Sequence[ir.Value],
        ahead: ir.Value | None,
        starts: Sequence[ir.Value],
        k: ir.Value,
    ) -> list[list[ir.Value]]:
        """Each row of activations times each row of weights."""
        whole, ends = (
            [[e.variable(e.constant(0.0, vector(FLOAT, lanes))) for _ in weights] for _ in starts]
            for lanes in (FLOATS, 1)
        )

        def add(into: list[list[Variable]], first: ir.Value, lanes: int) -> None:
            places = [e.add(begin, e.mul(first, self.nbytes)) for begin in weights]
            ws = [self.read(e, place, lanes) for place in places]
            for start, row in zip(starts, into, strict=True):
                number = e.floats(e.add(start, e.mul(first, 4)), lanes)
                for w, total in zip(ws, row, strict=True):
                    total.set(e.fma(w, number, total.get()))

        vectors = e.div(k, FLOATS)
        step = len(weights) * FLOATS * self.nbytes

        def add_vector(into: list[list[Variable]], index: ir.Value) -> None:
            if ahead is not None:
                e.prefetch(e.add(ahead, e.mul(index, step)), step)
            add(into, e.mul(index, FLOATS), FLOATS)

        if self.stretch is None:
            with e.loop(vectors) as index:
                add_vector(whole, index)
        else:
            self._in_stretches(e, whole, vectors, self.stretch, add_vector)
        done = e.mul(vectors, FLOATS)
        with e.loop(e.sub(k, done)) as index:
            add(ends, e.add(done, index), 1)
        return [
            [e.fadd(e.sum(a.get()), e.sum(b.get())) for a, b in zip(*each, strict=True)]
            for each in zip(whole, ends, strict=True)
        ]

    @staticmethod
    def _in_stretches(
        e: Emit,
        totals: list[list[Variable]],
        vectors: ir.Value,
        stretch: int,
        add: Callable[[list[list[Variable]], ir.Value], None],
    ) -> None:
        b, zero = e.builder, e.constant(0.0, vector(FLOAT, FLOATS))
        sums = [[e.variable(zero) for _ in row] for row in totals]
        with e.loop(e.div(e.add(vectors, stretch - 1), stretch)) as part:
            for total in chain.from_iterable(sums):
                total.set(zero)
            first, most = e.mul(part, stretch), e.int(stretch)
            left = e.sub(vectors, first)
            with e.loop(b.select(b.icmp_signed("<", left, most), left, most)) as index:
                add(sums, e.add(first, index))
            both = zip(chain.from_iterable(totals), chain.from_iterable(sums), strict=True)
            for total, more in both:
                total.set(e.fadd(total.get(), more.get()))

    def decode(self, e: Emit, weights: ir.Value, k: ir.Value, out: ir.Value) -> None:
        """See Format."""

        def copy(first: ir.Value, lanes: int) -> None:
            numbers = self.read(e, e.add(weights, e.mul(first, self.nbytes)), lanes)
            e.store(numbers, e.add(out, e.mul(first, 4)))

        vectors = e.div(k, FLOATS)
        with e.loop(vectors) as index:
            copy(e.mul(index, FLOATS), FLOATS)
        done = e.mul(vectors, FLOATS)
        with e.loop(e.sub(k, done)) as index:
            copy(e.add(done, index), 1)


class F32(_Plain):
    """IEEE float32."""

    name = "F32"
    nbytes = 4

    def read(self, e: Emit, address: ir.Value, lanes: int) -> ir.Value:
        """See _Plain."""
        return e.floats(address, lanes)


class F16(_Plain):
    """IEEE float16."""

    name = "F16"
    nbytes = 2

    def read(self, e: Emit, address: ir.Value, lanes: int) -> ir.Value:
        """See _Plain."""
        return e.halves(address, lanes)


class BF16(_Plain):
    """Bfloat16."""

    name = "BF16"
    stretch = None
    nbytes = 2

    def read(self, e: Emit, address: ir.Value, lanes: int) -> ir.Value:
        """See _Plain."""
        return e.bfloats(address, lanes)
