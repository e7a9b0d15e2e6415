"""Activations to int8, as `formats/int8.py` lays them out."""

from llvmlite import ir
from numba.core import types

from armillary.engine.emit import F32, FLOATS, I8, I32, Emit, emitted, vector
from armillary.engine.formats.int8 import GROUP
from armillary.engine.kernel import Address, Kernel, Live, Size, kernel
from armillary.engine.kernels.common import share_rows


@emitted(types.void)
def quantise_group(e: Emit, x: ir.Value, q: ir.Value, scale: ir.Value, groups: ir.Value) -> None:
    """32 float32 → 32 bytes, s = max|x| / 127, Σq, and Σq of the first half.

    `scale`: where s goes; the sums go as many groups behind each other.
    """
    b, kind = e.builder, vector(F32, FLOATS)
    parts = [e.load(kind, x, 4 * first) for first in range(0, GROUP, FLOATS)]
    sizes = [e.call(f"llvm.fabs.v{FLOATS}f32", kind, [part]) for part in parts]
    largest = e.call(f"llvm.maxnum.v{FLOATS}f32", kind, sizes)
    most = e.call(f"llvm.vector.reduce.fmax.v{FLOATS}f32", F32, [largest], fast=True)
    s = b.fmul(most, e.constant(1 / 127, F32))
    # The inverse of zero, or of what is near it, is no number: such a group is all zeros.
    empty = b.fcmp_ordered("<", most, e.constant(1e-36, F32))
    inverse = b.select(empty, e.constant(0.0, F32), b.fdiv(e.constant(127.0, F32), most))
    by = e.splat(inverse, FLOATS)
    sums = []
    for number, part in enumerate(parts):
        rounded = e.call(f"llvm.rint.v{FLOATS}f32", kind, [b.fmul(part, by)])
        whole = b.fptosi(rounded, vector(I32, FLOATS))
        e.store(b.trunc(whole, vector(I8, FLOATS)), q, FLOATS * number)
        sums.append(e.call(f"llvm.vector.reduce.add.v{FLOATS}i32", I32, [whole]))
    array = e.mul(groups, 4)
    e.store(s, scale)
    e.store(b.sitofp(b.add(*sums), F32), e.add(scale, array))
    e.store(b.sitofp(sums[0], F32), e.add(scale, e.mul(array, 2)))


def quantise() -> Kernel:
    """Rows of k float32, k a multiple of 32, as int8."""

    def quantise(
        thread: int,
        threads: int,
        x: Address,
        x_stride: Size,
        x_private: Size,
        k: Size,
        out: Address,
        out_stride: Size,
        private: Size,
        rows: Live,
    ) -> None:
        first, last = share_rows(rows, private, thread, threads)
        x += thread * x_private
        out += thread * private
        for row in range(first, last):
            q = out + row * out_stride
            scales, groups = q + k, k // GROUP
            for group in range(groups):
                quantise_group(
                    x + row * x_stride + group * GROUP * 4,
                    q + group * GROUP,
                    scales + 4 * group,
                    groups,
                )

    return kernel(quantise)
