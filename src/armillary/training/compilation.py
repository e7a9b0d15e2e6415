"""Compiling an objective: less work between the matrix products of its layers.

Products are as fast either way; norms, rotations, activations, residual sums and attention are
bound by memory, and compiled code reads and writes it once for many of them.
"""

import time
from collections.abc import Callable
from typing import Any

import torch

from armillary.decoder import DecoderLayer
from armillary.parts.norm import RMSNorm
from armillary.training.checkpointing import Again
from armillary.training.native.build import NotBuiltError, kernels
from armillary.training.native.layer import NativeForward, NativeNorm, Scratch, fits, loss_kernel
from armillary.training.objective import Objective


def compile_objective(objective: Objective, compute: torch.dtype, device: torch.device) -> str:
    """Compile each layer of the decoder, in place; return a line that says what was done.

    `compute` is the type of the products, `device` where the objective will be (it may be on the
    meta device until then). On a processor with AVX-512 BF16 that computes in bfloat16, layers of
    the usual kind (see `armillary.training.native.layer.fits`) get kernels in C, compiled in two
    seconds. All others are compiled by torch in the first step; layers of one kind share their
    code. Names of parameters and state do not change. Call it after adapters, `checkpoint_layers`
    and splitting of tensors, before `fully_shard`.
    Without a working compiler (gcc or clang; torch wants a C++ compiler for processors) nothing
    changes: the objective computes the same, only slower, and the line says so.
    """
    layers = [layer for layer in objective.decoder.layers if isinstance(layer, DecoderLayer)]
    if device.type == "cpu" and compute == torch.bfloat16:
        configs = objective.decoder.config.layers
        if all(fits(layer, config) for layer, config in zip(layers, configs, strict=True)):
            try:
                started = time.perf_counter()
                kernels()
            except NotBuiltError:
                pass  # torch's compiler may still work
            else:
                scratch = Scratch()
                for number, layer in enumerate(layers):
                    _replace_forward(layer, scratch, keeps_wide=number % 2 == 1)
                if isinstance(objective.decoder.final_norm, RMSNorm):
                    norm = objective.decoder.final_norm
                    norm.__dict__["forward"] = NativeNorm(norm)
                objective.kernel = loss_kernel
                seconds = time.perf_counter() - started
                return f"{len(layers)} layers run on kernels compiled in {seconds:.1f} s"
    reason = _why_not(device)
    if reason is not None:
        return f"not compiled, which is slower: {reason}"
    for layer in layers:
        layer.compile()
    return f"{len(layers)} layers are compiled by torch in the first step"


def _replace_forward(layer: DecoderLayer, scratch: Scratch, keeps_wide: bool) -> None:
    """An instance's own forward stands before its class's; a checkpointed layer has one already."""
    native = NativeForward(layer, scratch, keeps_wide)
    own: Callable[..., Any] | None = layer.__dict__.get("forward")
    if isinstance(own, Again):
        native.plain = own.forward
        own.forward = native
    else:
        layer.__dict__["forward"] = native


def _why_not(device: torch.device) -> str | None:
    """Why nothing at all can be compiled by torch for a device; trying is the one sure way."""
    try:
        torch.compile(lambda x: x + 1)(torch.zeros(2, device=device))
    except Exception as error:  # torch has no one type for it
        return (str(error).strip() or type(error).__name__).splitlines()[0]
    return None
