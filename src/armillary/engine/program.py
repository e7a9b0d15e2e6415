"""A list of kernel calls that threads go through together: memory that compiled code reads."""

import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from armillary.engine.gate import LINE
from armillary.engine.kernel import Kind
from armillary.engine.library import Library


def aligned(nbytes: int) -> NDArray[np.uint8]:
    """Zeros that begin on a cache line."""
    whole = np.zeros(nbytes + LINE, dtype=np.uint8)
    skip = -whole.ctypes.data % LINE
    return whole[skip : skip + nbytes]


class Program:
    """Kernel calls, one after another. What they work on is kept as long as the program is."""

    def __init__(self, code: Library) -> None:
        self._code = code
        self._steps: list[tuple[int, int, int]] = []
        self._kept: list[Any] = []
        self._table = np.zeros((0, 3), dtype=np.int64)

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def address(self) -> int:
        """Where the steps lie. Raises ValueError unless all threads wait at the end."""
        if not self._steps or not self._steps[-1][2]:
            raise ValueError("a program ends with a step that waits, or its end is not known")
        if len(self._table) != len(self._steps):
            self._table = np.array(self._steps, dtype=np.int64)
        return int(self._table.ctypes.data)

    def add(self, name: str, *, wait: bool, **arguments: Any) -> None:
        """Call a kernel; with `wait`, no thread goes on before all are done with it.

        Arrays stand for their addresses, None for 0. Raises KeyError for an unknown kernel and
        TypeError for arguments that are not the kernel's.
        """
        kernel = self._code.kernel(name)
        kinds = kernel.arguments
        if arguments.keys() != kinds.keys():
            odd = sorted(arguments.keys() ^ kinds.keys())
            raise TypeError(f"{name}: {', '.join(odd)} missing or not known")
        words = [self._word(each, kind, arguments[each]) for each, kind in kinds.items()]
        memory = np.array(words, dtype=np.int64)
        self._kept.append(memory)
        self._steps.append((kernel.address, int(memory.ctypes.data), int(wait)))

    def _word(self, name: str, kind: Kind, value: Any) -> int:
        if kind in {"address", "live"}:
            return self._place(name, kind, value)
        if kind == "number" and isinstance(value, int | float):
            return int(struct.unpack("<I", struct.pack("<f", value))[0])
        if kind == "size" and isinstance(value, int):
            return value
        raise TypeError(f"{name}: a {kind} is given as {value!r}")

    def _place(self, name: str, kind: Kind, value: Any) -> int:
        if value is None and kind == "address":
            return 0
        if not isinstance(value, np.ndarray) or not value.flags.c_contiguous:
            raise TypeError(f"{name}: what has an address is a contiguous array, not {value!r}")
        if kind == "live" and (value.dtype != np.int64 or value.size != 1):
            raise TypeError(f"{name}: a live count is an array of one int64, not {value!r}")
        self._kept.append(value)
        return int(value.ctypes.data)
