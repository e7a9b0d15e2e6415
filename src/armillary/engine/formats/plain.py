"""Numbers that stand alone: float32, float16, bfloat16. Products are of float32 numbers."""

from abc import abstractmethod

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
        weights: ir.Value,
        x: ir.Value,
        stride: ir.Value,
        k: ir.Value,
        rows: int,
    ) -> list[ir.Value]:
        """See Format."""
        del machine
        totals = [e.variable(e.constant(0.0, vector(FLOAT, FLOATS))) for _ in range(rows)]
        ends = [e.variable(e.constant(0.0, vector(FLOAT, 1))) for _ in range(rows)]
        starts = [e.add(x, e.mul(stride, row)) for row in range(rows)]

        def add(into: list[Variable], first: ir.Value, lanes: int) -> None:
            w = self.read(e, e.add(weights, e.mul(first, self.nbytes)), lanes)
            for start, total in zip(starts, into, strict=True):
                xs = e.floats(e.add(start, e.mul(first, 4)), lanes)
                total.set(e.fma(w, xs, total.get()))

        whole = e.div(k, FLOATS)
        with e.loop(whole) as index:
            add(totals, e.mul(index, FLOATS), FLOATS)
        done = e.mul(whole, FLOATS)
        with e.loop(e.sub(k, done)) as index:
            add(ends, e.add(done, index), 1)
        return [
            e.fadd(e.sum(total.get()), e.sum(end.get()))
            for total, end in zip(totals, ends, strict=True)
        ]

    def decode(self, e: Emit, weights: ir.Value, k: ir.Value, out: ir.Value) -> None:
        """See Format."""
        with e.loop(k) as index:
            number = self.read(e, e.add(weights, e.mul(index, self.nbytes)), 1)
            e.store(number, e.add(out, e.mul(index, 4)))


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
