"""Compiling an objective: the elementwise work of a layer becomes a few fused passes.

Products of matrices are as fast either way; norms, rotations, activations and residual sums are
bound by memory, and a compiled layer reads and writes it once for many of them.
"""

import torch

from armillary.training.objective import Objective


def compile_objective(objective: Objective) -> str | None:
    """Compile each layer of the decoder, in place; return None, or in a line why it was not done.

    Layers of one kind share their code, so that compiling takes as long for two as for eighty;
    what is compiled is made in the first step. Names of parameters and state do not change, and
    each layer may be checkpointed or sharded by itself.
    Without a working compiler (torch needs a C++ compiler for processors) nothing changes: the
    objective computes the same, only slower.
    """
    reason = _why_not(next(objective.parameters()).device)
    if reason is None:
        for layer in objective.decoder.layers:
            layer.compile()
    return reason


def _why_not(device: torch.device) -> str | None:
    """Whether anything at all can be compiled for a device; trying is the one sure way."""
    try:
        torch.compile(lambda x: x + 1)(torch.zeros(2, device=device))
    except Exception as error:  # torch has no one type for it
        text = str(error).strip() or type(error).__name__
        return f"not compiled, which is slower: {text.splitlines()[0]}"
    return None
