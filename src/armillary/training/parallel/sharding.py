"""`parallelise`: an objective made ready for training, on one process or on many.

The order is fixed: the tensor plan replaces weights and hooks into projections; a checkpointed
layer computes those hooks again; a compiled layer holds both; and FSDP2, outermost, gathers a
layer's weights before it runs.
"""

import logging

from torch.distributed.fsdp import FSDPModule, fully_shard

from armillary.training.checkpointing import checkpoint_layers
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
) -> None:
    """Split an objective's weights, and each pass, over the ranks, in place.

    Every rank gives the same weights; afterwards each parameter is a DTensor that holds this
    rank's share, and `backward` leaves in its gradient the sum over all ranks, so that losses are
    to be divided by the token count of the whole step. On one process only `checkpoint` and
    `compile` do something. Build the optimiser afterwards.

    checkpoint  compute each layer again in the backward pass (see `checkpoint_layers`)
    compile     compile each layer by itself
    reshard     give a layer's gathered weights back after its forward pass and gather them again
                for its backward pass: less memory, a half more communication
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
    if compile:
        for layer in decoder.layers:
            layer.compile()
    if ranks.mesh is None:
        return
    mesh = ranks.mesh["replicate", "shard"] if ranks.sizes.replicate > 1 else ranks.mesh["shard"]
    for layer in decoder.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(objective, mesh=mesh)
    for module in objective.modules():
        if isinstance(module, FSDPModule):
            # The loop divides by the tokens of all ranks; a mean over ranks would do so twice.
            module.set_gradient_divide_factor(1.0)
            # Otherwise dividing by 1 asks for a scaled sum, which only NCCL has.
            module.set_force_sum_reduction_for_comms(True)


def synchronise(objective: Objective, last: bool) -> None:
    """Say before a backward pass whether it is the step's last; between copies only it sums.

    Within a copy every pass does: gradients that wait for the last are whole ones, in the memory
    that sharding is there to save.
    """
    if isinstance(objective, FSDPModule):
        objective.set_requires_all_reduce(last)
