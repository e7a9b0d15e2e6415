"""Which engine computes, by device and number type: found out without importing either."""

import os
from typing import Literal

from armillary.errors import UserError

EngineName = Literal["torch", "numba"]
ENGINES = ("auto", "torch", "numba")
WIDTHS: dict[str, Literal["stored", "float32", "bfloat16"]] = {
    "auto": "stored",
    "float32": "float32",
    "bfloat16": "bfloat16",
}
"""What the numba engine holds matrices in, by the name of a type."""
CACHES: dict[str, Literal["F32", "BF16", "int8"] | None] = {
    "auto": None,
    "float32": "F32",
    "bfloat16": "BF16",
    "int8": "int8",
}
"""What the numba engine keeps keys and values in, by the name of a type; None leaves it to it."""

_DRIVERS = (
    "/dev/nvidiactl",
    "/dev/dxg",
    "/dev/kfd",
    r"C:\Windows\System32\nvcuda.dll",
)


def choose_engine(engine: str, device: str, dtype: str, cache: str = "auto") -> EngineName:
    """The engine that a name means; auto is numba on the CPU, where it has the type, else torch.

    Raises UserError for an engine or a type of the cache that is not known, for a device or type
    that numba has not, and for a type of the cache where torch computes.
    """
    if cache not in CACHES:
        raise UserError(f"cache type {cache!r} is not known; known are {', '.join(CACHES)}")
    chosen = _choose(engine, device, dtype)
    if cache != "auto" and chosen == "torch":
        raise UserError(
            f"cache type {cache!r} is for the numba engine, and torch computes here, which keeps "
            "keys and values in the type of the weights; take --engine numba, or cache type auto"
        )
    return chosen


def _choose(engine: str, device: str, dtype: str) -> EngineName:
    if engine not in ENGINES:
        raise UserError(f"engine {engine!r} is not known; known are {', '.join(ENGINES)}")
    if engine == "auto":
        on_cpu = device == "cpu" or (device == "auto" and not gpu_expected())
        return "numba" if on_cpu and dtype in WIDTHS else "torch"
    if engine == "torch":
        return "torch"
    if device not in {"auto", "cpu"}:
        raise UserError(
            f"device {device!r} is none of the numba engine, which runs on the CPU; "
            "take --engine torch"
        )
    if dtype not in WIDTHS:
        raise UserError(
            f"dtype {dtype!r} is none of the numba engine, which has {', '.join(WIDTHS)}; "
            "take --engine torch"
        )
    return "numba"


def gpu_expected() -> bool:
    """Whether torch would find a GPU, as far as the drivers' files tell."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in {"", "-1"}:
        return False
    return any(map(os.path.exists, _DRIVERS))
