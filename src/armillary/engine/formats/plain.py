"""Numbers that stand alone: float32, float16, bfloat16. Products are of float32 numbers."""

from abc import abstractmethod
from collections.abc import Sequence

from llvmlite import ir

from armillary.engine.emit import F32 as FLOAT
from armillary.engine.emit import FLOATS, Emit, Variable, vector
from armillary.engine.formats.format import Format
from armillary.engine.machine import Machine


class _Plain(Format):
    block = 1
    activations = "float32"

    @abstractmethod
    def read(self, e: Emit, address: ir.Value, lanes: int) -> ir.Value:
        """Numbers as a float32 vector."""

    def dots(
        self,
        e: Emit,
        machine: Machine,
        weights: Sequence[ir.Value],
        x: ir.Value,
        stride: ir.Value,
        k: ir.Value,
        rows: int,
    ) -> list[list[ir.Value]]:
        """See Format."""
        del machine
        starts = [e.add(x, e.mul(stride, row)) for row in range(rows)]
        whole, ends = (
            [[e.variable(e.constant(0.0, vector(FLOAT, lanes))) for _ in starts] for _ in weights]
            for lanes in (FLOATS, 1)
        )

        def add(into: list[list[Variable]], first: ir.Value, lanes: int) -> None:
            xs = [e.floats(e.add(start, e.mul(first, 4)), lanes) for start in starts]
            for begin, totals in zip(weights, into, strict=True):
                w = self.read(e, e.add(begin, e.mul(first, self.nbytes)), lanes)
                for number, total in zip(xs, totals, strict=True):
                    total.set(e.fma(w, number, total.get()))

        vectors = e.div(k, FLOATS)
        with e.loop(vectors) as index:
            add(whole, e.mul(index, FLOATS), FLOATS)
        done = e.mul(vectors, FLOATS)
        with e.loop(e.sub(k, done)) as index:
            add(ends, e.add(done, index), 1)
        return [
            [e.fadd(e.sum(a.get()), e.sum(b.get())) for a, b in zip(*each, strict=True)]
            for each in zip(whole, ends, strict=True)
        ]

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
    nbytes = 2

    def read(self, e: Emit, address: ir.Value, lanes: int) -> ir.Value:
        """See _Plain."""
        return e.bfloats(address, lanes)
