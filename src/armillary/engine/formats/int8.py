"""Activations as int8 in groups of 32, and products of bytes, by what the machine has for them.

A row of k activations is k bytes q, then k / 32 float32 scales s, then k / 32 float32 sums s·Σq:
x ≈ s·q with s = max|x| / 127 of each group. The sums are for weights that have an offset.
"""

from llvmlite import ir

from armillary.engine.emit import F32, I8, I16, I32, Emit, vector
from armillary.engine.machine import Machine

GROUP = 32
LANES = 8
"""Lanes that the products of a group come in."""

_BYTES, _INTS, _FLOATS = vector(I8, GROUP), vector(I32, LANES), vector(F32, LANES)


def row_bytes(k: int) -> int:
    """Bytes of a row of k activations."""
    return k + k // GROUP * 8


class Rows:
    """Rows of activations, as a loop over their groups reads them."""

    def __init__(self, e: Emit, x: ir.Value, stride: ir.Value, k: ir.Value, rows: int) -> None:
        self.e, self.count = e, rows
        self.starts = [e.add(x, e.mul(stride, row)) for row in range(rows)]
        self.scales = [e.add(start, k) for start in self.starts]
        self.sums = [e.add(scale, e.mul(e.div(k, GROUP), 4)) for scale in self.scales]

    def bytes(self, row: int, group: ir.Value) -> ir.Value:
        """The q of a group."""
        return self.e.load(_BYTES, self.e.add(self.starts[row], self.e.mul(group, GROUP)))

    def scale(self, row: int, group: ir.Value) -> ir.Value:
        """The s of a group, in 8 lanes."""
        s = self.e.load(F32, self.e.add(self.scales[row], self.e.mul(group, 4)))
        return self.e.splat(s, LANES)

    def sum(self, row: int, group: ir.Value) -> ir.Value:
        """The s·Σq of a group: its product with weights that are all 1."""
        return self.e.load(F32, self.e.add(self.sums[row], self.e.mul(group, 4)))


class Totals:
    """What a row of weights has given with each of some rows of activations."""

    def __init__(self, e: Emit, rows: int) -> None:
        self.e = e
        self.totals = [e.variable(e.constant(0.0, _FLOATS)) for _ in range(rows)]
        self.offsets = [e.variable(e.constant(0.0, F32)) for _ in range(rows)]

    def add(self, row: int, products: ir.Value, scale: ir.Value, s: ir.Value) -> None:
        """Add scale · s · the sum of the products, all in 8 lanes."""
        e, total = self.e, self.totals[row]
        by = e.builder.fmul(scale, s)
        total.set(e.fma(e.builder.sitofp(products, _FLOATS), by, total.get()))

    def add_offset(self, row: int, offset: ir.Value, sum_: ir.Value) -> None:
        """Add offset · sum: what equal weights give."""
        total = self.offsets[row]
        total.set(self.e.fma(offset, sum_, total.get()))

    def results(self) -> list[ir.Value]:
        """The total of each row."""
        pairs = zip(self.totals, self.offsets, strict=True)
        return [self.e.fadd(self.e.sum(total.get()), offset.get()) for total, offset in pairs]


def small_dot(e: Emit, machine: Machine, small: ir.Value, x: ir.Value) -> ir.Value:
    """32 bytes from 0 to 127 times 32 signed ones: their products, added up into 8 lanes."""
    b = e.builder
    if machine.int8_dot == "vnni":
        # Newer LLVMs have the factors as bytes, and still read it with words, as it was before.
        name = "llvm.x86.avx512.vpdpbusd.256"
        words = [b.bitcast(each, _INTS) for each in (small, x)]
        return e.call(name, _INTS, [e.constant(0, _INTS), *words])
    if machine.int8_dot == "avx2":
        shorts = vector(I16, 16)
        pairs = e.call("llvm.x86.avx2.pmadd.ub.sw", shorts, [small, x])
        return e.call("llvm.x86.avx2.pmadd.wd", _INTS, [pairs, e.constant(1, shorts)])
    if machine.int8_dot == "neon":
        quarter = vector(I32, 4)
        halves = [
            e.call(
                "llvm.aarch64.neon.sdot.v4i32.v16i8",
                quarter,
                [e.constant(0, quarter), e.part(small, first, 16), e.part(x, first, 16)],
            )
            for first in (0, 16)
        ]
        return e.shuffle(halves[0], halves[1], range(8))
    wide = vector(I16, GROUP)
    products = b.sext(b.mul(b.sext(small, wide), b.sext(x, wide)), vector(I32, GROUP))
    fours = [range(first, GROUP, GROUP // LANES) for first in range(4)]
    quarters = [e.shuffle(products, products, lanes) for lanes in fours]
    return b.add(b.add(quarters[0], quarters[1]), b.add(quarters[2], quarters[3]))


class SignedBytes:
    """32 signed bytes, made ready to be multiplied by several rows of others."""

    def __init__(self, e: Emit, machine: Machine, weights: ir.Value) -> None:
        self.e, self.machine, self.weights = e, machine, weights
        if machine.int8_dot in {"vnni", "avx2"}:
            # The instructions take an unsigned and a signed factor: the weight's sign moves to x.
            self.negative = e.builder.icmp_signed("<", weights, e.constant(0, _BYTES))
            self.weights = e.call(
                "llvm.abs.v32i8", _BYTES, [weights, ir.Constant(ir.IntType(1), 0)]
            )

    def dot(self, x: ir.Value) -> ir.Value:
        """Their products with 32 signed bytes, added up into 8 lanes."""
        if self.machine.int8_dot in {"vnni", "avx2"}:
            b = self.e.builder
            x = b.select(self.negative, b.sub(self.e.constant(0, _BYTES), x), x)
        return small_dot(self.e, self.machine, self.weights, x)
