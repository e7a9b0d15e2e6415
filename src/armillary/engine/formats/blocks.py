"""What formats of 32 weights have in common, which meet activations of int8.

Such a format says what it reads of a block; the loops over blocks and rows stand here.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

from llvmlite import ir

from armillary.engine.emit import F32, FLOATS, I8, Emit, vector
from armillary.engine.formats.format import Format
from armillary.engine.formats.int8 import GROUP, LANES, Group, Weights, in_lanes
from armillary.engine.machine import Machine

Meet = Callable[[Group], ir.Value]
"""What a block of each of LANES rows gives with a group of activations, before its scale s."""


class Blocks(Format):
    """Blocks of 32 weights."""

    block = GROUP
    activations = "int8"
    together = LANES

    @abstractmethod
    def meet(self, e: Emit, machine: Machine, blocks: Sequence[ir.Value]) -> Meet:
        """Read a block of each of LANES rows, once for all rows that they meet."""

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
        groups, zero = e.div(k, self.block), e.constant(0.0, vector(F32, LANES))

        def read(group: ir.Value) -> Meet:
            at = e.mul(group, self.nbytes)
            e.prefetch(e.add(ahead, e.mul(at, LANES)), LANES * self.nbytes)
            return self.meet(e, machine, [e.add(begin, at) for begin in weights])

        def add(meet: Meet, start: ir.Value, group: ir.Value, before: ir.Value) -> ir.Value:
            of_group = Group(e, start, k, group)
            return e.fma(of_group.scale(), meet(of_group), before)

        alone = e.builder.icmp_unsigned("==", rows, e.int(1))
        with e.builder.if_else(alone) as (one, several):
            with one:
                total = e.variable(zero)
                with e.loop(groups) as group:
                    total.set(add(read(group), x, group, total.get()))
                e.store(total.get(), totals)
            with several:
                with e.loop(rows) as row:
                    e.store(zero, e.add(totals, e.mul(row, 4 * LANES)))
                with e.loop(groups) as group:
                    meet = read(group)
                    with e.loop(rows) as row:
                        place = e.add(totals, e.mul(row, 4 * LANES))
                        before = e.load(zero.type, place)
                        e.store(add(meet, e.add(x, e.mul(row, stride)), group, before), place)

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

    def meet(self, e: Emit, machine: Machine, blocks: Sequence[ir.Value]) -> Meet:
        """See Blocks."""
        b, (d, m) = e.builder, self.numbers(e, blocks)
        both = in_lanes(e, blocks, self.head)
        low = e.constant(0x0F0F0F0F, both[0].type)
        four = e.constant(4, both[0].type)
        quads = [b.and_(each, low) for each in both]
        quads += [b.and_(b.lshr(each, four), low) for each in both]
        weights = Weights(e, machine, quads, offset=self.offset)

        def meet(x: Group) -> ir.Value:
            products = weights.dot(x)
            return b.fmul(d, products) if m is None else e.fma(m, x.sum(), b.fmul(d, products))

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
