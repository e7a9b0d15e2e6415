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
        """Where the steps lie."""
        if len(self._table) != len(self._steps):
            self._table = np.array(self._steps, dtype=np.int64)
        return int(self._table.ctypes.data)

    def add(self, name: str, *, wait: bool, **arguments: Any) -> None:
        """Call a kernel; with `wait`, no thread goes on before all are done with it.

        Arrays stand for their addresses, None for 0. Raises TypeError for arguments that are not
        the kernel's.
        """
        kinds = self._code.arguments[name]
        if arguments.keys() != kinds.keys():
            odd = sorted(arguments.keys() ^ kinds.keys())
            raise TypeError(f"{name}: {', '.join(odd)} missing or not known")
        words = [self._word(kind, arguments[argument]) for argument, kind in kinds.items()]
        memory = np.array(words, dtype=np.int64)
        self._kept.append(memory)
        self._steps.append((self._code.address(name), int(memory.ctypes.data), int(wait)))

    def _word(self, kind: Kind, value: Any) -> int:
        if isinstance(value, np.ndarray):
            self._kept.append(value)
            return int(value.ctypes.data)
        if value is None:
            return 0
        if kind == "number":
            return int(struct.unpack("<I", struct.pack("<f", value))[0])
        if kind == "live":
            raise TypeError(f"a live count is an array of one number, not {value!r}")
        return int(value)
