"""How threads go through a program together, and wait for each other without the system's help.

A program is a list of (entry, arguments, wait): each thread calls every entry, and where `wait` is
set none goes on before all are done. Between programs a thread looks for the next one for about a
millisecond and then returns, to sleep (`engine/threads.py`).
"""

from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import register_jitable

from armillary.engine.emit import I64, Emit, emitted
from armillary.engine.gate import ARRIVED, COUNT, FIRST_THREAD, GO, LINE, PROGRAM, ROUND, YIELD
from armillary.engine.kernel import Address, Kernel, kernel
from armillary.engine.kernels.common import word
from armillary.engine.machine import Machine

_SPINS_IN_STEP = 2_000
_SPINS_BETWEEN = 50_000


def run(machine: Machine) -> Kernel:
    """A thread's part of the program at the gate."""
    wait = _wait(machine)

    def run(thread: int, threads: int, gate: Address) -> None:
        program, count = word(gate + PROGRAM), word(gate + COUNT)
        for step in range(count):
            entry = program + 24 * step
            call(word(entry), word(entry + 8), thread, threads)
            if word(entry + 16) and threads > 1:
                wait(gate, threads)

    return kernel(run)


def serve(machine: Machine) -> Kernel:
    """Run the programs that come, until none has come for a while."""
    wait, pause = _wait(machine), _pause(machine)

    def serve(thread: int, threads: int, gate: Address) -> None:
        mine = gate + FIRST_THREAD + LINE * thread
        while True:
            done = word(mine)
            spins = 0
            while read(gate + GO) == done:
                pause(0)
                spins += 1
                if spins > _SPINS_BETWEEN:
                    exchange(mine + 8, 1)
                    if read(gate + GO) == done or exchange(mine + 8, 0) == 0:
                        return
            write(mine, done + 1)
            program, count = word(gate + PROGRAM), word(gate + COUNT)
            for step in range(count):
                entry = program + 24 * step
                call(word(entry), word(entry + 8), thread, threads)
                if word(entry + 16):
                    wait(gate, threads)

    return kernel(serve)


def launch() -> Kernel:
    """Let the others begin; `asleep` gets a 1 for each that has to be woken."""

    def launch(thread: int, threads: int, gate: Address, asleep: Address) -> None:
        write(gate + GO, word(gate + GO) + 1)
        for other in range(1, threads):
            slept = exchange(gate + FIRST_THREAD + LINE * other + 8, 0)
            write(asleep + 8 * other, slept)

    return kernel(launch)


def _wait(machine: Machine) -> Any:
    pause = _pause(machine)

    @register_jitable
    def wait(gate: int, threads: int) -> None:
        now = read(gate + ROUND)
        if fetch_add(gate + ARRIVED, 1) == threads - 1:
            write(gate + ARRIVED, 0)
            write(gate + ROUND, now + 1)
            return
        spins = 0
        while read(gate + ROUND) == now:
            pause(0)
            spins += 1
            if spins > _SPINS_IN_STEP:
                # Perhaps another waits for this core.
                give_way(word(gate + YIELD))

    return wait


@emitted(types.int64)
def read(e: Emit, address: ir.Value) -> ir.Value:
    """A number that other threads write."""
    return e.builder.load_atomic(_place(e, address), "seq_cst", 8)


@emitted(types.void)
def write(e: Emit, address: ir.Value, value: ir.Value) -> None:
    """Write a number that other threads read."""
    e.builder.store_atomic(value, _place(e, address), "seq_cst", 8)


@emitted(types.int64)
def fetch_add(e: Emit, address: ir.Value, value: ir.Value) -> ir.Value:
    """Add to a number that others add to; what it was."""
    return e.builder.atomic_rmw("add", _place(e, address), value, "seq_cst")


@emitted(types.int64)
def exchange(e: Emit, address: ir.Value, value: ir.Value) -> ir.Value:
    """Write a number that others write; what it was."""
    return e.builder.atomic_rmw("xchg", _place(e, address), value, "seq_cst")


@emitted(types.void)
def call(
    e: Emit, entry: ir.Value, arguments: ir.Value, thread: ir.Value, threads: ir.Value
) -> None:
    """Call a kernel's entry."""
    kind = ir.FunctionType(ir.VoidType(), [I64, I64, I64])
    e.builder.call(e.builder.inttoptr(entry, kind.as_pointer()), [arguments, thread, threads])


@emitted(types.void)
def give_way(e: Emit, function: ir.Value) -> None:
    """Call the system's function that lets others have this core, where there is one."""
    with e.builder.if_then(e.builder.icmp_signed("!=", function, e.int(0))):
        kind = ir.FunctionType(ir.IntType(32), [])
        e.builder.call(e.builder.inttoptr(function, kind.as_pointer()), [])


def _pause(machine: Machine) -> Any:
    """Tell the core that it waits."""

    @emitted(types.void)
    def pause(e: Emit, _nothing: ir.Value) -> None:
        if machine.triple.startswith("x86"):
            e.call("llvm.x86.sse2.pause", ir.VoidType(), [])
        elif machine.triple.startswith(("aarch64", "arm64")):
            e.call("llvm.aarch64.hint", ir.VoidType(), [ir.Constant(ir.IntType(32), 1)])

    return pause


def _place(e: Emit, address: ir.Value) -> ir.Value:
    return e.builder.inttoptr(address, I64.as_pointer())
