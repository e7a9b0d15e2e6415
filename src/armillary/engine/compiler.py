"""Kernels → machine code, through Numba and LLVM, for the processor at hand or another.

Compiled without what Numba's functions for Python need (reference counts, exceptions, wrappers),
so that the result is an object file that needs neither Numba nor Python, and runs where it is
loaded.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba.core import codegen, compiler, types
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import cpu_target

from armillary.engine.kernel import Kernel
from armillary.engine.machine import Machine

PREFIX = "armillary_"
# What LLVM calls where an x86 has no instruction for it; no library that is surely there has it.
# A float16's exponent and fraction, moved to a float32's places, are the number times 2^-112.
_HALF_TO_FLOAT = """
define float @__extendhfsf2(half %number) {
  %bits = bitcast half %number to i16
  %wide = zext i16 %bits to i32
  %rest = and i32 %wide, 32767
  %moved = shl i32 %rest, 13
  %small = bitcast i32 %moved to float
  %large = fmul float %small, 0x46F0000000000000
  %as_bits = bitcast float %large to i32
  %sign = and i32 %wide, 32768
  %high = shl i32 %sign, 16
  %both = or i32 %as_bits, %high
  %result = bitcast i32 %both to float
  ret float %result
}
"""
_I8P, _I32, _I64 = ir.IntType(8).as_pointer(), ir.IntType(32), ir.IntType(64)


def object_code(kernels: Sequence[Kernel], machine: Machine) -> bytes:
    """An object file with a function `armillary_NAME(arguments, thread, threads)` for each kernel.

    `arguments` is the address of 8 bytes for each of the kernel's.
    """
    code: bytes = _target(machine).emit_object(_module(kernels, machine))
    return code


def assembly(kernels: Sequence[Kernel], machine: Machine) -> str:
    """The same as text, for tests of which instructions are in it."""
    text: str = _target(machine).emit_assembly(_module(kernels, machine))
    return text


def _target(machine: Machine) -> llvm.TargetMachine:
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    return llvm.Target.from_triple(machine.triple).create_target_machine(
        cpu=machine.cpu,
        features=machine.features,
        opt=3,
        reloc="pic",
        codemodel="jitdefault",
        jit=True,
    )


def _module(kernels: Sequence[Kernel], machine: Machine) -> llvm.ModuleRef:
    target = _target(machine)
    whole = llvm.parse_assembly("")
    for each in kernels:
        name, text = _lowered(each)
        module = llvm.parse_assembly(text)
        module.link_in(llvm.parse_assembly(str(_entry(each, name))))
        # Nobody else calls what a kernel does, and one copy of it is enough.
        for function in module.functions:
            if not function.is_declaration and function.name != PREFIX + each.name:
                function.linkage = llvm.Linkage.internal
        whole.link_in(module)
    if machine.triple.startswith("x86") and "+f16c" not in machine.features.split(","):
        whole.link_in(llvm.parse_assembly(_HALF_TO_FLOAT))
    whole.triple = machine.triple
    whole.data_layout = str(target.target_data)
    _optimise(whole, target)
    return whole


def _optimise(module: llvm.ModuleRef, target: llvm.TargetMachine) -> None:
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    options.loop_vectorization = True
    builder = llvm.create_pass_builder(target, options)
    builder.getModulePassManager().run(module, builder)


class _Lowered(codegen.JITCodeLibrary):  # type: ignore[misc]
    """What Numba writes in LLVM's language, neither optimised nor made into code by it."""

    def _optimize_functions(self, module: Any) -> None:
        module.data_layout = self._codegen._data_layout

    def _optimize_final_module(self) -> None:
        return

    def _finalize_final_module(self) -> None:
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        """Nowhere."""
        del name
        return 0


class _Lowering(codegen.JITCPUCodegen):  # type: ignore[misc]
    """Stops Numba where LLVM would begin.

    It would optimise and compile every function that a kernel calls, and then once more in the
    kernel, and all for the processor at hand.
    """

    _library_class = _Lowered

    def set_env(self, env_name: str, env: Any) -> None:
        """Code that is nowhere needs none."""


@contextmanager
def _lowering() -> Iterator[None]:
    context = cpu_target.target_context
    usual = context._internal_codegen
    context._internal_codegen = _lowering_codegen()
    try:
        yield
    finally:
        context._internal_codegen = usual


@cache
def _lowering_codegen() -> _Lowering:
    return _Lowering("armillary")


def _lowered(each: Kernel) -> tuple[str, str]:
    """The name and the LLVM text of a kernel in Numba's calling convention."""
    flags = compiler.Flags()
    flags.no_compile = True
    flags.no_cpython_wrapper = True
    flags.no_cfunc_wrapper = True
    flags.nrt = False
    flags.error_model = "numpy"
    flags.fastmath = not each.exact
    kinds = [types.float32 if kind == "number" else types.int64 for kind in each.arguments.values()]
    with global_compiler_lock, _lowering():
        result = compiler.compile_extra(
            cpu_target.typing_context,
            cpu_target.target_context,
            each.function,
            args=(types.int64, types.int64, *kinds),
            return_type=types.void,
            flags=flags,
            locals={},
        )
        result.library.finalize()
    return result.fndesc.mangled_name, result.library.get_llvm_str()


def _entry(each: Kernel, compiled: str) -> ir.Module:
    """What a program calls: it takes a kernel's arguments from memory and calls it."""
    module = ir.Module()
    kinds = [ir.FloatType() if kind == "number" else _I64 for kind in each.arguments.values()]
    numba_kind = ir.FunctionType(_I32, [_I8P.as_pointer(), _I8P.as_pointer(), _I64, _I64, *kinds])
    inner = ir.Function(module, numba_kind, compiled)
    outer = ir.Function(
        module, ir.FunctionType(ir.VoidType(), [_I64, _I64, _I64]), PREFIX + each.name
    )
    builder = ir.IRBuilder(outer.append_basic_block())
    address, thread, threads = outer.args
    values = []
    for number, (kind, type_) in enumerate(zip(each.arguments.values(), kinds, strict=True)):
        place = builder.add(address, ir.Constant(_I64, 8 * number))
        value = builder.load(builder.inttoptr(place, type_.as_pointer()))
        if kind == "live":
            value = builder.load(builder.inttoptr(value, _I64.as_pointer()))
        values.append(value)
    scratch = builder.alloca(_I8P)
    builder.call(inner, [scratch, scratch, thread, threads, *values])
    builder.ret_void()
    return module
