"""How fast this machine multiplies matrices: what a run's speed is a share of."""

import time

import torch

_ENOUGH = 0.02  # seconds that a product should take to be timed well
_LARGEST = 8192


def measured_flops(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a square matrix product in a type, the best of three.

    The matrices grow until a product takes long enough to be timed, which a slow type does soon.
    """
    size, seconds = 256, 0.0
    while True:
        seconds = _seconds(size, device, dtype)
        if seconds >= _ENOUGH or size == _LARGEST:
            break
        size *= 2
    best = min(seconds, *(_seconds(size, device, dtype) for _ in range(2)))
    return 2 * size**3 / best


def _seconds(size: int, device: torch.device, dtype: torch.dtype) -> float:
    a = torch.zeros(size, size, dtype=dtype, device=device)
    a @ a
    _wait(device)
    start = time.perf_counter()
    a @ a
    _wait(device)
    return max(time.perf_counter() - start, 1e-9)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
