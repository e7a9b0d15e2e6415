"""A sampler's weights, by a kernel."""

import ctypes
import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from armillary.engine.library import Library

_COLDEST = 1e-30
"""Below it nothing changes: all but the greatest of float32 logits are impossible already."""
_ARGUMENTS = struct.Struct("<qqf4xf4xq")
"""The kernel's, as a program would hold them."""


class Weigher:
    """Weighs tokens at a temperature above 0: probabilities times what gives the likeliest 1.

    The step that `generation.sampling.temperature` takes, in float32, to 1e-5 of each; what is
    below 1e-37 is 0. One thread computes it: that takes less time than two take to meet.
    """

    def __init__(self, code: Library) -> None:
        kind = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_int64, ctypes.c_int64)
        self._weigh = kind(code.kernel("weigh").address)

    def __call__(
        self, logits: NDArray[np.floating[Any]], temperature: float
    ) -> NDArray[np.float32]:
        """Shapes: logits (n,), the greatest of them finite → (n,)."""
        given = np.ascontiguousarray(logits, dtype=np.float32)
        weights = np.empty(given.shape, dtype=np.float32)
        arguments = _ARGUMENTS.pack(
            given.ctypes.data,
            given.size,
            given.max(),
            max(temperature, _COLDEST),
            weights.ctypes.data,
        )
        self._weigh(arguments, 0, 1)
        return weights
