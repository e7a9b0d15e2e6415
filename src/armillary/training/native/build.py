"""Compile kernels.c for the machine at hand, once a process.

It takes two seconds, so that nothing is kept on disk that could be stale or another user's.
"""

import ctypes
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_SOURCE = Path(__file__).with_name("kernels.c")
_FLAGS = ("-std=gnu11", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC")
_COMPILERS = ("cc", "gcc", "clang")


class NotBuiltError(Exception):
    """No compiler, or one that cannot compile the kernels for this processor; says which."""


@cache
def kernels() -> "Kernels":
    """The kernels, ready to be called.

    Raises NotBuiltError with a reason of one line.
    """
    if os.name != "posix":
        raise NotBuiltError("kernels are made on Linux and its kin alone")
    chosen = os.environ.get("CC")
    compilers = [chosen] if chosen else _COMPILERS
    compiler = next((path for name in compilers if (path := shutil.which(name))), None)
    if compiler is None:
        raise NotBuiltError(f"no C compiler is installed ({', '.join(compilers)})")
    with tempfile.TemporaryDirectory() as scratch:
        target = Path(scratch) / "kernels.so"
        command = [compiler, *_FLAGS, "-o", str(target), str(_SOURCE), "-lm"]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        if ran.returncode:
            lines = [line for line in ran.stderr.splitlines() if "error" in line]
            raise NotBuiltError(f"{compiler} fails: {lines[0] if lines else ran.returncode}")
        try:
            return Kernels(ctypes.CDLL(str(target)))
        except OSError as error:
            raise NotBuiltError(f"what {compiler} made cannot be loaded: {error}") from error


class Kernels:
    """Calls the functions of kernels.c with tensors (or None) and numbers in their order.

        kernels().swiglu(gate_up, out, n, f)

    Tensors must be contiguous, on the CPU and of the type that kernels.c names; nothing checks it.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._library, name)
        function.restype = None

        def call(*arguments: Tensor | int | float | None) -> None:
            function(*(_plain(argument) for argument in arguments))

        self.__dict__[name] = call
        return call


def _plain(argument: Tensor | int | float | None) -> Any:
    if argument is None:
        return ctypes.c_void_p(None)
    if isinstance(argument, torch.Tensor):
        return ctypes.c_void_p(argument.data_ptr())
    return ctypes.c_float(argument) if isinstance(argument, float) else ctypes.c_int64(argument)
