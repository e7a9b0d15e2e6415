"""Single kernels called as programs call them, thread after thread, and machines to compile for."""

import ctypes
from functools import cache
from typing import Any

import numpy as np

from armillary.engine.library import Library, library
from armillary.engine.machine import Machine, host
from armillary.engine.program import Program

EPSILON = 2.0**-24
"""Half of the distance between 1 and the next float32: what one rounding may cost, relatively."""

_ENTRY = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)
_STEPS = ("avx", "avx2", "fma", "f16c")


def machines() -> dict[str, Machine]:
    """This machine, and poorer ones whose code it can run too."""
    here = host()
    known = {"this machine": here}
    if here.triple.startswith("x86_64"):
        features = here.features.split(",")
        if here.bf16_tiles:
            others = {each[1:]: each[0] == "+" for each in features if "amx" not in each}
            known["without AMX"] = Machine.of(here.triple, here.cpu, others)
        if all("+" + step in features for step in _STEPS):
            known["avx2"] = Machine.of(here.triple, "haswell", dict.fromkeys(_STEPS, True))
        known["plain"] = Machine.of(here.triple, "x86-64", {})
    return known


@cache
def library_for(name: str) -> Library:
    """The kernels for one of `machines`."""
    return library() if name == "this machine" else Library(machines()[name])


def call(name: str, *, threads: int = 1, code: Library | None = None, **arguments: Any) -> None:
    """Run one kernel, the part of each of `threads` threads after that of the one before."""
    program = Program(library() if code is None else code)
    program.add(name, wait=True, **arguments)
    entry, place, _ = (ctypes.c_int64 * 3).from_address(program.address)
    for thread in range(threads):
        _ENTRY(entry)(place, thread, threads)


def count(number: int) -> np.ndarray:
    """A count that may change between runs."""
    return np.array([number], dtype=np.int64)


def spaced(rows: np.ndarray, gap: int = 3) -> np.ndarray:
    """Rows with NaN behind each, where nothing may be read or written."""
    wide = np.full((len(rows), rows.shape[1] + gap), np.nan, np.float32)
    wide[:, : rows.shape[1]] = rows
    return wide


def drawn(*shape: int, seed: int = 0) -> np.ndarray:
    """Normal float32 numbers."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
