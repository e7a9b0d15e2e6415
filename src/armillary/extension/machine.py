"""What this machine has to run a model with."""

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Machine:
    """Where a model would run.

    `memory` in bytes, all that the device has; `flops` of a matrix product in a second, in the
    number type that it was measured in.
    """

    device: str
    memory: int
    flops: float


def this_machine(dtype: str) -> Machine:
    """The GPU where torch finds one, else the CPU, with the speed measured now."""
    import torch

    from armillary.training.speed import measured_flops

    if torch.cuda.is_available():
        device = torch.device("cuda")
        memory = int(torch.cuda.get_device_properties(device).total_memory)
    else:
        device = torch.device("cpu")
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Machine(device.type, memory, measured_flops(device, getattr(torch, dtype)))
