"""`parallelise`: an objective made ready for training, on one process or on many.

The order is fixed: the tensor plan replaces weights and hooks into projections; a checkpointed
layer computes those hooks again; a compiled layer holds both; and FSDP2, outermost, gathers a
layer's weights before it runs.
"""

import logging
from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from armillary.training.checkpointing import checkpoint_layers
from armillary.training.compilation import compile_objective
from armillary.training.objective import Objective
from armillary.training.parallel.context import ContextPart
from armillary.training.parallel.ranks import Ranks
from armillary.training.parallel.tensor import split_tensors


def parallelise(
    objective: Objective,
    ranks: Ranks,
    *,
    checkpoint: bool = False,
    compile: bool = False,
    reshard: bool = True,
    weights: Callable[[str], Tensor] | None = None,
    compute: torch.dtype | None = None,
) -> str | None:
    """Split an objective's weights, and each pass, over the ranks, in place.

    Every rank gives the same weights, or for an objective on the meta device `weights`. Afterwards
    each parameter is a DTensor that holds this rank's share, and `backward` leaves in its gradient
    the sum over all ranks, so that losses are to be divided by the token count of the whole step.
    On one process only `checkpoint`, `compile` and `weights` do something. Build the optimiser
    afterwards. What was compiled, and how, is returned in a line.

    checkpoint  compute each layer again in the backward pass (see `checkpoint_layers`)
    compile     compile each layer by itself (see `compile_objective`)
    reshard     give a layer's gathered weights back after its forward pass and gather them again
                for its backward pass: less memory, a half more communication
    weights     gives each of the decoder's parameters whole, by its name and in their order; what
                is not this rank's share is dropped, so that no rank ever holds the model
    compute     the type that autocast multiplies in, if it does: layers are gathered in it. Else
                autocast's own copies of all layers would stay until the backward pass
    """
    decoder = objective.decoder
    if ranks.mesh is not None and ranks.sizes.tensor > 1:
        # It warns that one number, the gradients' norm, is summed over two dimensions of the mesh.
        logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
        split_tensors(objective, ranks.mesh["tensor"])
    if ranks.context is not None:
        objective.part = ContextPart(ranks.context)
    if checkpoint:
        checkpoint_layers(decoder)
    how = None
    if compile:
        how = compile_objective(objective, compute or torch.float32, ranks.device)
    if ranks.mesh is not None:
        _shard(objective, ranks, ranks.mesh, reshard, compute)
    if weights is not None:
        _fill(objective, ranks, weights)
    return how


def _shard(
    objective: Objective,
    ranks: Ranks,
    whole: DeviceMesh,
    reshard: bool,
    compute: torch.dtype | None,
) -> None:
    """FSDP2 around each layer and around what is outside of them."""
    mesh = whole["replicate", "shard"] if ranks.sizes.replicate > 1 else whole["shard"]
    # Gradients are summed in the weights' own type. What is outside the layers is used in it too.
    narrow = MixedPrecisionPolicy(compute, torch.float32, cast_forward_inputs=False)
    policy = MixedPrecisionPolicy() if compute in (None, torch.float32) else narrow
    for layer in objective.decoder.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
    fully_shard(objective, mesh=mesh)
    for module in objective.modules():
        if isinstance(module, FSDPModule):
            # The loop divides by the tokens of all ranks; a mean over ranks would do so twice.
            module.set_gradient_divide_factor(1.0)
            # Otherwise dividing by 1 asks for a scaled sum, which only NCCL has.
            module.set_force_sum_reduction_for_comms(True)


def _fill(objective: Objective, ranks: Ranks, weights: Callable[[str], Tensor]) -> None:
    """Give an objective on the meta device memory for its shares, and the weights."""
    objective.to_empty(device=ranks.device)
    for name, parameter in objective.decoder.named_parameters():
        whole = weights(name)
        if whole.shape != parameter.shape:
            raise ValueError(f"{name}: {tuple(whole.shape)} given, {tuple(parameter.shape)} needed")
        if isinstance(parameter, DTensor):
            parameter.to_local().detach().copy_(_share(whole, parameter))
        else:
            parameter.detach().copy_(whole)


def _share(whole: Tensor, of: DTensor) -> Tensor:
    """This rank's part of a tensor: first by the tensor plan, then FSDP2's rows of that."""
    mesh = of.device_mesh
    assert mesh.mesh_dim_names is not None
    placements = dict(zip(mesh.mesh_dim_names, of.placements, strict=True))
    by_plan = placements.get("tensor")
    if isinstance(by_plan, Shard):
        whole = whole.chunk(mesh["tensor"].size(), by_plan.dim)[mesh.get_local_rank("tensor")]
    rows = whole.chunk(mesh["shard"].size())
    number = mesh.get_local_rank("shard")
    return rows[number] if number < len(rows) else whole[:0]


def synchronise(objective: Objective, last: bool) -> None:
    """Say before a backward pass whether it is the step's last; between copies only it sums.

    Within a copy every pass does: gradients that wait for the last are whole ones, in the memory
    that sharding is there to save.
    """
    if isinstance(objective, FSDPModule):
        objective.set_requires_all_reduce(last)
