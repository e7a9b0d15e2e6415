"""What the processor can do, asked when the program runs.

Kernels are written once; where processors have instructions of their own for a step, it is chosen
by what a `Machine` says. One may also be described by hand, to compile for it elsewhere.
"""

import ctypes
import sys
from dataclasses import dataclass
from functools import cache
from typing import Literal, Self

import llvmlite.binding as llvm

Int8Dot = Literal["vnni", "avx2", "neon", "plain"]


@dataclass(frozen=True)
class Machine:
    """A processor as LLVM names it, and the instructions that kernels choose between.

    `int8_dot` multiplies bytes and adds them up in fours: "vnni" (AVX512-VNNI or AVX-VNNI), "avx2",
    "neon" (the dot product of Armv8.2), or "plain" loops. `bf16_dot`: AVX512-BF16; `bf16_tiles`:
    AMX, which the system has to allow.
    """

    triple: str
    cpu: str
    features: str
    int8_dot: Int8Dot
    bf16_dot: bool
    bf16_tiles: bool

    @classmethod
    def of(cls, triple: str, cpu: str, features: dict[str, bool]) -> Self:
        """A processor by its LLVM triple, name and features."""

        def has(*names: str) -> bool:
            return all(features.get(name, False) for name in names)

        dot: Int8Dot = "plain"
        if triple.startswith(("aarch64", "arm64")):
            dot = "neon" if has("dotprod") else "plain"
        elif has("avx512vnni", "avx512vl") or has("avxvnni"):
            dot = "vnni"
        elif has("avx2"):
            dot = "avx2"
        listed = ",".join(("+" if there else "-") + name for name, there in features.items())
        narrow = has("avx512bf16", "avx512bw")
        return cls(triple, cpu, listed, dot, narrow, narrow and has("amx-tile", "amx-bf16"))

    @property
    def wide(self) -> bool:
        """Whether 16 words are one register, and there are 32 of them."""
        return "+avx512f" in self.features.split(",")


@cache
def host() -> Machine:
    """The processor that this runs on."""
    features = dict(llvm.get_host_cpu_features())
    if features.get("amx-tile") and not _allowed_amx():
        features |= {name: False for name in features if name.startswith("amx-")}
    return Machine.of(llvm.get_process_triple(), llvm.get_host_cpu_name(), features)


def _allowed_amx() -> bool:
    """Whether this process may use AMX's registers, for which it has to ask.

    Source: the Linux kernel, Documentation/arch/x86/xstate.rst.
    """
    if not sys.platform.startswith("linux"):
        return False
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    try:
        return int(ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data)) == 0
    except (AttributeError, OSError):
        return False
