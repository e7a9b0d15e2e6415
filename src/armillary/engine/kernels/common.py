"""What kernels share: how threads divide work, and memory as Numba's loops see it."""

from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import register_jitable

from armillary.engine.emit import F32, FLOATS, I32, I64, Emit, emitted

Floats = Any
"""What `floats` gives: float32 numbers to be indexed."""


@register_jitable
def share(count: int, thread: int, threads: int) -> tuple[int, int]:
    """The part of `count` that is a thread's: whole vectors, so that no two write to one."""
    each = (count + threads * FLOATS - 1) // (threads * FLOATS) * FLOATS
    first = min(count, thread * each)
    return first, min(count, first + each)


@register_jitable
def share_items(count: int, thread: int, threads: int) -> tuple[int, int]:
    """The part of `count` large items that is a thread's."""
    return count * thread // threads, count * (thread + 1) // threads


@register_jitable
def share_rows(rows: int, private: int, thread: int, threads: int) -> tuple[int, int]:
    """The rows that a thread computes: a share, or all of them where it keeps them to itself."""
    if private:
        return 0, rows
    return rows * thread // threads, rows * (thread + 1) // threads


@emitted(types.int64)
def word(e: Emit, address: ir.Value) -> ir.Value:
    """The 64-bit whole number at an address."""
    return e.load(I64, address)


@emitted(types.void)
def set_word(e: Emit, address: ir.Value, value: ir.Value) -> None:
    """Write a 64-bit whole number at an address."""
    e.store(value, address)


@emitted(types.CPointer(types.float32))
def floats(e: Emit, address: ir.Value) -> ir.Value:
    """The float32 numbers from an address on, to be indexed."""
    return e.builder.inttoptr(address, F32.as_pointer())


@emitted(types.CPointer(types.uint16))
def shorts(e: Emit, address: ir.Value) -> ir.Value:
    """The unsigned 16-bit numbers from an address on, to be indexed."""
    return e.builder.inttoptr(address, ir.IntType(16).as_pointer())


@emitted(types.CPointer(types.int32))
def whole_numbers(e: Emit, address: ir.Value) -> ir.Value:
    """The signed 32-bit numbers from an address on, to be indexed."""
    return e.builder.inttoptr(address, I32.as_pointer())


@emitted(types.float32)
def as_float(e: Emit, bits: ir.Value) -> ir.Value:
    """32 bits as a float32."""
    return e.builder.bitcast(bits, F32)


@emitted(types.uint32)
def as_bits(e: Emit, number: ir.Value) -> ir.Value:
    """A float32 as its bits."""
    return e.builder.bitcast(number, I32)
