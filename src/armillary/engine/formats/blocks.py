"""What formats of 32 weights have in common, which meet activations of int8.

Such a format says what it reads of a block; the loops over blocks and rows stand here.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

from llvmlite import ir

from armillary.engine.emit import F32, FLOATS, I8, I32, Emit, vector
from armillary.engine.formats.format import Format
from armillary.engine.formats.int8 import FEW_LANES, GROUP, QUADS, Group, Weights, in_lanes, lanes
from armillary.engine.machine import Machine

Vectors = list[ir.Value]
Meet = Callable[[Group], ir.Value]
"""What a block of each of some rows gives with a group of activations, before its scale s."""


class Blocks(Format):
    """Blocks of 32 weights."""

    block = GROUP
    activations = "int8"
    parts: ClassVar[int]
    """How many numbers, as d, belong to a block."""

    def together(self, machine: Machine, *, alone: bool) -> int:
        """See Format.

        A row alone waits for memory, which fewer streams read faster. Several are loaded and spread
        once for two vectors of rows, where there are registers for both.
        """
        if alone or lanes(machine) == FEW_LANES:
            return FEW_LANES
        return 2 * lanes(machine)

    @abstractmethod
    def read(self, e: Emit, blocks: Sequence[ir.Value]) -> tuple[Vectors, Vectors]:
        """Of a block of each of some rows: QUADS vectors of q, and `parts` of float32 numbers."""

    @abstractmethod
    def meet(self, e: Emit, machine: Machine, quads: Vectors, numbers: Vectors) -> Meet:
        """Make ready what was read, once for all rows that it meets."""

    @abstractmethod
    def halves(self, e: Emit, block: ir.Value) -> Sequence[ir.Value]:
        """The 32 weights of a block as two float32 vectors."""

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
        """See Format. The groups are added up in their order, whatever the number of rows."""
        many, most = len(weights), min(len(weights), lanes(machine))
        parts = [weights[first : first + most] for first in range(0, many, most)]

        def read(group: ir.Value) -> list[Meet]:
            at = e.mul(group, self.nbytes)
            e.prefetch(e.add(ahead, e.mul(at, many)), many * self.nbytes)
            return [
                self.meet(e, machine, *self.read(e, [e.add(begin, at) for begin in part]))
                for part in parts
            ]

        if len(parts) > 1:
            self._several(e, most, len(parts), read, x, stride, k, rows, totals)
            return
        alone = e.builder.icmp_unsigned("==", rows, e.int(1))
        with e.builder.if_else(alone) as (one, several):
            with one:
                total = e.variable(e.constant(0.0, vector(F32, many)))
                with e.loop(e.div(k, self.block)) as group:
                    of_group = Group(e, x, k, group, many)
                    total.set(e.fma(of_group.scale(), read(group)[0](of_group), total.get()))
                e.store(total.get(), totals)
            with several:
                self._several(e, most, 1, read, x, stride, k, rows, totals)

    def together_laid(self, machine: Machine) -> int:
        """See Format."""
        return lanes(machine)

    def lay(self, e: Emit, weights: Sequence[ir.Value], k: ir.Value, panel: ir.Value) -> None:
        """See Format."""
        step = 4 * len(weights)
        with e.loop(e.div(k, self.block)) as group:
            at = e.mul(group, self.nbytes)
            quads, numbers = self.read(e, [e.add(begin, at) for begin in weights])
            place = e.add(panel, e.mul(group, step * (QUADS + self.parts)))
            for number, each in enumerate([*quads, *numbers]):
                e.store(each, place, step * number)

    def dots_laid(
        self,
        e: Emit,
        machine: Machine,
        panel: ir.Value,
        x: ir.Value,
        stride: ir.Value,
        k: ir.Value,
        rows: ir.Value,
        totals: ir.Value,
    ) -> None:
        """See Format."""
        many = lanes(machine)

        def read(group: ir.Value) -> list[Meet]:
            place = e.add(panel, e.mul(group, 4 * many * (QUADS + self.parts)))
            kinds = [vector(I32, many)] * QUADS + [vector(F32, many)] * self.parts
            found = [e.load(kind, place, 4 * many * at) for at, kind in enumerate(kinds)]
            return [self.meet(e, machine, found[:QUADS], found[QUADS:])]

        self._several(e, many, 1, read, x, stride, k, rows, totals)

    def _several(
        self,
        e: Emit,
        lanes: int,
        parts: int,
        read: Callable[[ir.Value], list[Meet]],
        x: ir.Value,
        stride: ir.Value,
        k: ir.Value,
        rows: ir.Value,
        totals: ir.Value,
    ) -> None:
        """Rows of weights, `lanes` in each part, times rows of activations.

        Their sums are in memory meanwhile.
        """
        zero, nbytes = e.constant(0.0, vector(F32, lanes)), 4 * lanes
        with e.loop(rows) as row:
            for part in range(parts):
                e.store(zero, e.add(totals, e.mul(row, parts * nbytes)), part * nbytes)
        with e.loop(e.div(k, self.block)) as group:
            meets = read(group)
            with e.loop(rows) as row:
                place = e.add(totals, e.mul(row, parts * nbytes))
                of_group = Group(e, e.add(x, e.mul(row, stride)), k, group, lanes)
                for part, meet in enumerate(meets):
                    before = e.load(zero.type, place, part * nbytes)
                    e.store(e.fma(of_group.scale(), meet(of_group), before), place, part * nbytes)

    def decode(self, e: Emit, weights: ir.Value, k: ir.Value, out: ir.Value) -> None:
        """See Format."""
        with e.loop(e.div(k, self.block)) as group:
            place = e.add(out, e.mul(group, 4 * self.block))
            block = e.add(weights, e.mul(group, self.nbytes))
            for number, half in enumerate(self.halves(e, block)):
                e.store(half, place, 4 * FLOATS * number)


class Nibbles(Blocks):
    """w = d·(q + o) + m with q of 4 bits: behind a head, 16 bytes, whose low halves come first.

    `offset` is o, the same for all.
    """

    head: ClassVar[int]
    """Bytes before the q."""
    offset: ClassVar[int] = 0

    @abstractmethod
    def numbers(self, e: Emit, blocks: Sequence[ir.Value]) -> tuple[ir.Value, ir.Value | None]:
        """d and, where there is one, m of some blocks, in a lane for each."""

    def read(self, e: Emit, blocks: Sequence[ir.Value]) -> tuple[Vectors, Vectors]:
        """See Blocks."""
        b, (d, m) = e.builder, self.numbers(e, blocks)
        both = in_lanes(e, blocks, self.head)
        low = e.constant(0x0F0F0F0F, both[0].type)
        four = e.constant(4, both[0].type)
        quads = [b.and_(each, low) for each in both]
        quads += [b.and_(b.lshr(each, four), low) for each in both]
        return quads, [d] if m is None else [d, m]

    def meet(self, e: Emit, machine: Machine, quads: Vectors, numbers: Vectors) -> Meet:
        """See Blocks."""
        weights, d = Weights(e, machine, quads, offset=self.offset), numbers[0]

        def meet(x: Group) -> ir.Value:
            products = e.builder.fmul(d, weights.dot(x))
            return products if len(numbers) == 1 else e.fma(numbers[1], x.sum(), products)

        return meet

    def halves(self, e: Emit, block: ir.Value) -> Sequence[ir.Value]:
        """See Blocks."""
        b, (scale, offset) = e.builder, self.numbers(e, [block])
        d = e.splat(e.number(scale), FLOATS)
        m = None if offset is None else e.splat(e.number(offset), FLOATS)
        both = e.load(vector(I8, 16), block, self.head)
        halves = b.and_(both, e.constant(15, both.type)), b.lshr(both, e.constant(4, both.type))
        found = []
        for q in halves:
            whole = b.uitofp(q, d.type)
            if self.offset:
                whole = e.fadd(whole, e.constant(float(self.offset), d.type))
            w = b.fmul(whole, d)
            found.append(w if m is None else e.fadd(w, m))
        return found
