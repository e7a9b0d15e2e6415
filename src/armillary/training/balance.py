"""What keeps the experts of a mixture equally busy: a loss, or biases that move without one.

Both look at the tokens that have a label. The loss of one layer is

    E · Σ_e f_e · P_e        f_e: the share of all choices that went to expert e, Σ f_e = 1
                             P_e: the mean over tokens of its score, as a share of all scores

which is 1 when routing is even, whatever k (libraries that leave f_e undivided by k say k), and E
when all goes to one expert. Of several layers the mean is taken. The scores are those that routing
used: nothing is put through a softmax twice. Each micro-batch on each process is balanced by
itself. Source: Fedus et al. 2021 (Switch), §2.2; sigmoid scores as shares: DeepSeek-AI 2024 (V3),
§2.1.2.

The biases are those that a router adds to scores when it chooses (`selection_bias`): after a step,
each goes up by a fixed rate where an expert had less than the mean load, and down where it had
more. No gradient comes of it. Source: Wang et al. 2024 (Loss-Free Balancing), algorithm 1.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from armillary.decoder import Decoder
from armillary.parts.experts import MixtureOfExperts, Routing


def balance_loss(routing: Routing, counted: Tensor | None = None) -> Tensor:
    """The loss of one layer, a scalar; over the tokens where `counted` (N,) is true, or all.

    0 when there are none.
    """
    chosen, scores = routing.chosen, routing.scores
    if counted is not None:
        chosen, scores = chosen[counted], scores[counted]
    if not len(chosen):
        return scores.sum()
    shares = scores / scores.sum(-1, keepdim=True)
    return scores.shape[-1] * (_loads(chosen, scores) / chosen.numel() * shares.mean(0)).sum()


def _loads(chosen: Tensor, like: Tensor) -> Tensor:
    """How often each expert was chosen, (E,), in the type of the scores."""
    return chosen.flatten().bincount(minlength=like.shape[-1]).to(like.dtype)


class Balance:
    """The balance of a decoder's mixtures over a training run.

    with balance.watched():
        hidden = decoder.hidden(tokens)
    loss = balance.loss(counted)        # and the loads are added up
    balance.move_biases(total)          # after the step; does nothing at rate 0
    """

    def __init__(self, decoder: Decoder, rate: float = 0.0) -> None:
        self.mixtures = [m for m in decoder.modules() if isinstance(m, MixtureOfExperts)]
        self.rate = rate
        self._loads: list[Tensor] = []

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Let the mixtures keep where tokens go, in this block only: not when computed again."""
        for mixture in self.mixtures:
            mixture.keeps_routing = True
        try:
            yield
        finally:
            for mixture in self.mixtures:
                mixture.keeps_routing = False

    def loss(self, counted: Tensor) -> Tensor:
        """The mean of the layers' losses in the watched pass, whose routings are given up."""
        counted = counted.flatten()
        routings = []
        for mixture in self.mixtures:
            assert mixture.routing is not None
            routings.append(mixture.routing)
            mixture.routing = None
        if self.rate:
            new = [_loads(routing.chosen[counted], routing.scores) for routing in routings]
            before = self._loads or [torch.zeros_like(load) for load in new]
            self._loads = [a + b for a, b in zip(before, new, strict=True)]
        losses = [balance_loss(routing, counted) for routing in routings]
        return torch.stack(losses).mean()

    @torch.no_grad()
    def move_biases(self, total: Callable[[list[float]], list[float]]) -> None:
        """Move the routers' selection biases by the loads since the last time.

        `total` sums numbers over all processes.
        """
        if not self._loads:
            return
        for mixture, load in zip(self.mixtures, self._loads, strict=True):
            bias = mixture.router.selection_bias
            if bias is None:
                continue
            summed = torch.tensor(total(load.tolist()), device=load.device)
            change = (self.rate * (summed.mean() - summed).sign()).to(bias.dtype)
            if isinstance(bias, DTensor):
                change = distribute_tensor(
                    change, bias.device_mesh, bias.placements, src_data_rank=None
                )
            bias.add_(change)
        self._loads = []
