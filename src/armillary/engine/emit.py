"""Vector operations for the inner loops of kernels, written into LLVM's language as Numba compiles.

A kernel is a Python function that Numba compiles; what its innermost loop does is an `emitted`
function. That is handed an `Emit`, whose methods each write one step: what Python does around them
(a loop over eight accumulators, an `if`) happens while compiling and costs nothing later.

Vectors have the lanes that they are asked for, on any processor; LLVM cuts them to its registers.
Numba is imported where something is emitted, since formats are asked their sizes without it.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from llvmlite import ir

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
F16, F32 = ir.HalfType(), ir.FloatType()

FLOATS = 16
"""Lanes of the float32 vectors that kernels work with."""

FAST = ("fast",)

_LINE = 64
"""Bytes that come from memory at once."""

Whole = int
"""A number that is known while compiling: `Emit` has a method by Python's name."""


def vector(element: ir.Type, lanes: int) -> ir.VectorType:
    """The type of a vector."""
    return ir.VectorType(element, lanes)


class Emit:
    """Writes operations on vectors, numbers and memory where the builder stands."""

    def __init__(self, builder: ir.IRBuilder) -> None:
        self.builder = builder

    # Whole numbers and addresses, 64 bits.

    def int(self, value: Whole | ir.Value) -> ir.Value:
        """A number that is known while compiling, as a value."""
        return ir.Constant(I64, value) if isinstance(value, Whole) else value

    def add(self, a: ir.Value, b: Whole | ir.Value) -> ir.Value:
        """a + b."""
        return self.builder.add(a, self.int(b))

    def sub(self, a: ir.Value, b: Whole | ir.Value) -> ir.Value:
        """a − b."""
        return self.builder.sub(a, self.int(b))

    def mul(self, a: ir.Value, b: Whole | ir.Value) -> ir.Value:
        """a · b."""
        return self.builder.mul(a, self.int(b))

    def div(self, a: ir.Value, b: Whole | ir.Value) -> ir.Value:
        """a / b, rounded down; neither is negative."""
        return self.builder.udiv(a, self.int(b))

    @contextmanager
    def loop(self, count: Whole | ir.Value) -> Iterator[ir.Value]:
        """What is emitted inside runs for 0 … count − 1."""
        from numba.core import cgutils

        with cgutils.for_range(self.builder, self.int(count)) as loop:
            yield loop.index

    def where(
        self, condition: ir.Value, there: Callable[[], ir.Value], otherwise: ir.Value
    ) -> ir.Value:
        """What `there` emits, where a whole number is not 0; it is not done elsewhere."""
        b = self.builder
        before = b.block
        with b.if_then(b.icmp_signed("!=", condition, self.int(0))):
            value = there()
            taken = b.block
        chosen = b.phi(otherwise.type)
        chosen.add_incoming(value, taken)
        chosen.add_incoming(otherwise, before)
        return chosen

    # Memory.

    def load(self, kind: ir.Type, address: ir.Value, offset: Whole = 0) -> ir.Value:
        """What lies at an address, of any alignment."""
        value = self.builder.load(self._pointer(kind, address, offset), typ=kind)
        value.align = 1
        return value

    def store(self, value: ir.Value, address: ir.Value, offset: Whole = 0) -> None:
        """Put a value at an address, of any alignment."""
        self.builder.store(value, self._pointer(value.type, address, offset)).align = 1

    def prefetch(self, address: ir.Value, nbytes: Whole) -> None:
        """Ask memory for bytes that will be read soon, whether or not they are there."""
        place = ir.IntType(8).as_pointer()
        hints = [ir.Constant(I32, each) for each in (0, 3, 1)]
        for line in range(0, nbytes, _LINE):
            pointer = self.builder.inttoptr(self.add(address, line), place)
            self.call("llvm.prefetch.p0", ir.VoidType(), [pointer, *hints])

    def variable(self, initial: ir.Value) -> "Variable":
        """A value that changes from one round of a loop to the next."""
        from numba.core import cgutils

        return Variable(self, cgutils.alloca_once_value(self.builder, initial))

    def scratch(self, nbytes: Whole) -> ir.Value:
        """The address of memory that is the function's own."""
        from numba.core import cgutils

        place = cgutils.alloca_once(self.builder, ir.ArrayType(I8, nbytes))
        place.align = 64
        return self.builder.ptrtoint(place, I64)

    def _pointer(self, kind: ir.Type, address: ir.Value, offset: Whole) -> ir.Value:
        return self.builder.inttoptr(self.add(address, offset), kind.as_pointer())

    # Vectors.

    def constant(self, value: float, kind: ir.Type) -> ir.Value:
        """The same number in every lane."""
        if isinstance(kind, ir.VectorType):
            return ir.Constant(kind, [value] * kind.count)
        return ir.Constant(kind, value)

    def splat(self, scalar: ir.Value, lanes: Whole) -> ir.Value:
        """A number in every lane."""
        kind = vector(scalar.type, lanes)
        empty = ir.Constant(kind, ir.Undefined)
        first = self.builder.insert_element(empty, scalar, ir.Constant(I32, 0))
        return self.shuffle(first, empty, [0] * lanes)

    def shuffle(self, a: ir.Value, b: ir.Value, lanes: Sequence[Whole]) -> ir.Value:
        """The lanes of a and then of b that are named."""
        return self.builder.shuffle_vector(a, b, ir.Constant(vector(I32, len(lanes)), list(lanes)))

    def part(self, a: ir.Value, first: Whole, lanes: Whole) -> ir.Value:
        """Some lanes of a that lie together."""
        return self.shuffle(a, ir.Constant(a.type, ir.Undefined), range(first, first + lanes))

    def number(self, a: ir.Value, lane: Whole = 0) -> ir.Value:
        """One lane of a vector."""
        return self.builder.extract_element(a, ir.Constant(I32, lane))

    def fadd(self, a: ir.Value, b: ir.Value) -> ir.Value:
        """a + b."""
        return self.builder.fadd(a, b)

    def fma(self, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
        """a · b + c, rounded once where the machine has an instruction for that."""
        return self.call(f"llvm.fmuladd.{_suffix(c.type)}", c.type, [a, b, c])

    def sum(self, a: ir.Value) -> ir.Value:
        """All lanes of a float vector, added by halves."""
        lanes = a.type.count
        while lanes > 1:
            lanes //= 2
            a = self.fadd(self.part(a, 0, lanes), self.part(a, lanes, lanes))
        return self.number(a)

    def call(
        self, name: str, result: ir.Type, arguments: Sequence[ir.Value], *, fast: bool = False
    ) -> ir.Value:
        """One of LLVM's own functions."""
        from numba.core import cgutils

        kind = ir.FunctionType(result, [each.type for each in arguments])
        function = cgutils.get_or_insert_function(self.builder.module, kind, name)
        return self.builder.call(function, arguments, fastmath=FAST if fast else ())

    # Number types.

    def half(self, address: ir.Value, lanes: Whole, offset: Whole = 0) -> ir.Value:
        """The float16 at an address, in every lane of a float32 vector."""
        number = self.load(F16, address, offset)
        return self.builder.fpext(self.splat(number, lanes), vector(F32, lanes))

    def bfloats(self, address: ir.Value, lanes: Whole) -> ir.Value:
        """Bfloat16 numbers as float32."""
        # A bfloat16 is the upper half of the float32 of the same value.
        wide = self.builder.zext(self.load(vector(I16, lanes), address), vector(I32, lanes))
        high = self.builder.shl(wide, self.constant(16, wide.type))
        return self.builder.bitcast(high, vector(F32, lanes))

    def halves(self, address: ir.Value, lanes: Whole) -> ir.Value:
        """Float16 numbers as float32."""
        return self.builder.fpext(self.load(vector(F16, lanes), address), vector(F32, lanes))

    def floats(self, address: ir.Value, lanes: Whole) -> ir.Value:
        """Float32 numbers."""
        return self.load(vector(F32, lanes), address)


class Variable:
    """A value in a register that loops change."""

    def __init__(self, emit: Emit, slot: ir.Value) -> None:
        self._emit, self._slot = emit, slot

    def get(self) -> ir.Value:
        """What it is now."""
        return self._emit.builder.load(self._slot)

    def set(self, value: ir.Value) -> None:
        """Change it."""
        self._emit.builder.store(value, self._slot)


def emitted(result: Any) -> Callable[[Callable[..., Any]], Any]:
    """A function for kernels whose body `define(emit, *arguments)` writes when they compile."""
    from numba.extending import intrinsic

    def decorate(define: Callable[..., Any]) -> Any:
        def declared(_typing: Any, *arguments: Any) -> Any:
            def lower(
                context: Any, builder: ir.IRBuilder, _signature: Any, values: Any
            ) -> ir.Value:
                made = define(Emit(builder), *values)
                return context.get_dummy_value() if made is None else made

            return result(*arguments), lower

        # Numba looks up what the arguments are called.
        declared.__name__ = define.__name__
        declared.__signature__ = inspect.signature(define)  # type: ignore[attr-defined]
        return intrinsic(declared)

    return decorate


def _suffix(kind: ir.Type) -> str:
    """How LLVM's functions for a type end."""
    if isinstance(kind, ir.VectorType):
        return f"v{kind.count}{_suffix(kind.element)}"
    return {F32: "f32", F16: "f16", I32: "i32"}[kind]
