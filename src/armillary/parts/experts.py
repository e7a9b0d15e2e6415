"""A mixture of experts: a router picks a few of many feed-forward networks for each token.

Only what is picked is computed: tokens are sorted by expert, each expert multiplies its own in one
product, and the results go back to their tokens. Works on one feature vector at a time and knows
nothing of positions, losses or how the load is kept even: `MixtureOfExperts.routing` says where
tokens went, for who asks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from armillary.config import FeedForwardConfig, MixtureConfig
from armillary.parts.feedforward import ACTIVATIONS, build_feedforward, gated

# Rows of experts that have some, by the expert's number.
Own = dict[int, Tensor]


@dataclass(frozen=True)
class Routing:
    """Where N tokens go, in float32 at least.

    Shapes: chosen (N, k) int64, the experts, highest score first; weights (N, k), what each
    counts; scores (N, E) of all experts, as the gradient reaches them.
    """

    chosen: Tensor
    weights: Tensor
    scores: Tensor


class Router(nn.Module):
    """Scores each expert for a token and picks k of them (see `RouterConfig`).

    Shapes: x (N, d) → `Routing`. Parameters: weight (E, d), bias (E,) and selection_bias (E,) as
    configured; the last has no gradient. Logits, scores and the choice are float32 at least, under
    autocast too: in bfloat16 unequal logits would be equal. Of equal scores the lower number wins.
    Source: Shazeer et al. 2017, §2.1; groups and selection bias: DeepSeek-AI 2024 (V3), §2.1.2.
    """

    def __init__(self, d: int, config: MixtureConfig) -> None:
        super().__init__()
        self.config, self.top_k, count = config.router, config.top_k, config.n_experts
        self.weight = nn.Parameter(torch.zeros(count, d))
        self.bias = nn.Parameter(torch.zeros(count)) if config.router.bias else None
        self.selection_bias = (
            nn.Parameter(torch.zeros(count), requires_grad=False)
            if config.router.selection_bias
            else None
        )

    def forward(self, x: Tensor) -> Routing:
        """x (N, d) → where each goes."""
        config, wide = self.config, torch.promote_types(x.dtype, torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            bias = None if self.bias is None else self.bias.to(wide)
            logits = F.linear(x.to(wide), self.weight.to(wide), bias)
        scores = logits.softmax(-1) if config.score == "softmax" else logits.sigmoid()
        chosen = self._choose(scores.detach())
        weights = scores.gather(-1, chosen)
        if config.normalise:
            weights = weights / weights.sum(-1, keepdim=True)
        return Routing(chosen, weights * config.scale, scores)

    def _choose(self, scores: Tensor) -> Tensor:
        """scores (N, E) → the numbers of the k experts, (N, k)."""
        if self.selection_bias is not None:
            scores = scores + self.selection_bias.to(scores.dtype)
        groups = self.config.n_groups
        if groups > 1:
            in_groups = scores.view(len(scores), groups, -1)
            sums = in_groups.topk(2, dim=-1).values.sum(-1)
            closed = torch.ones_like(sums, dtype=torch.bool)
            closed.scatter_(-1, _largest(sums, self.config.top_groups), False)
            scores = in_groups.masked_fill(closed.unsqueeze(-1), float("-inf")).flatten(-2)
        return _largest(scores, self.top_k)


def _largest(scores: Tensor, count: int) -> Tensor:
    """The places of the `count` largest, (..., count), of equal ones the first (topk takes any)."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]


class StackedLinear(nn.Module):
    """A projection for each expert: weight (E, n_out, n_in), and bias (E, n_out) if it has one."""

    def __init__(self, count: int, n_in: int, n_out: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(count, n_out, n_in))
        self.bias = nn.Parameter(torch.zeros(count, n_out)) if bias else None

    def forward(self, x: Mapping[int, Tensor]) -> Own:
        """For some experts their tokens (n, n_in) → (n, n_out)."""
        weights, biases = (
            _unbound(self.weight),
            self.bias if self.bias is None else _unbound(self.bias),
        )
        return {
            expert: F.linear(own, weights[expert], None if biases is None else biases[expert])
            for expert, own in x.items()
        }


def _unbound(stack: Tensor) -> Sequence[Tensor] | Tensor:
    """What gives a matrix by its number."""
    # Of one taken by its number the gradient would be that of a whole stack.
    return stack.unbind() if torch.is_grad_enabled() else stack


class Experts(nn.Module):
    """E feed-forward networks of one kind, each for its own tokens.

    Shapes: x (n, d), first those of expert 0, then of 1 …, as `counts` (E) says → (n, d).
    """

    def __init__(self, d: int, count: int, config: FeedForwardConfig) -> None:
        super().__init__()
        f, bias = config.d_ff, config.bias
        if config.fused:
            self.gate_up = StackedLinear(count, d, 2 * f, bias)
        else:
            if config.kind == "glu":
                self.gate = StackedLinear(count, d, f, bias)
            self.up = StackedLinear(count, d, f, bias)
        self.down = StackedLinear(count, f, d, bias)
        self.dropout = nn.Dropout(config.dropout)
        self.config = config

    def forward(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """x (n, d), sorted by expert → (n, d)."""
        busy = [expert for expert, count in enumerate(counts) if count]
        parts = torch.split(x, [counts[expert] for expert in busy])
        own: Own = dict(zip(busy, parts, strict=True)) if busy else {}
        wide = {expert: self.dropout(inner) for expert, inner in self._inner(own).items()}
        down: Own = self.down(wide)
        return torch.cat(list(down.values())) if busy else x

    def _inner(self, x: Own) -> Own:
        """What each expert's down projection reads."""
        config = self.config
        if config.kind == "mlp":
            ups: Own = self.up(x)
            return {expert: ACTIVATIONS[config.activation](up) for expert, up in ups.items()}
        if config.fused:
            both: Own = self.gate_up(x)
            halves = {expert: each.chunk(2, dim=-1) for expert, each in both.items()}
            return {expert: gated(gate, up, config) for expert, (gate, up) in halves.items()}
        gates, ups = self.gate(x), self.up(x)
        return {expert: gated(gate, ups[expert], config) for expert, gate in gates.items()}


class MixtureOfExperts(nn.Module):
    """Σ over the chosen experts of weight · expert(x), plus a shared network where there is one.

    Shapes: x (..., d) → (..., d), in x's type, the sum in float32 at least. Parameters: those of
    router, experts (stacked, first dimension E) and shared, and shared_gate (1, d).
    While `keeps_routing` is set, `routing` is that of the last pass; it holds a graph, so take it
    and set it to None. Experts without tokens are not computed and get gradients of zeros.
    Source: Shazeer et al. 2017; shared experts: Dai et al. 2024 (DeepSeekMoE), §3.2.
    """

    def __init__(self, d: int, config: MixtureConfig) -> None:
        super().__init__()
        self.router = Router(d, config)
        self.experts = Experts(d, config.n_experts, config.expert)
        self.shared = None if config.shared is None else build_feedforward(d, config.shared)
        self.shared_gate = nn.Linear(d, 1, bias=False) if config.shared_gate else None
        self.n_experts = config.n_experts
        self.keeps_routing = False
        self.routing: Routing | None = None

    def forward(self, x: Tensor) -> Tensor:
        """x (..., d) → (..., d)."""
        rows = x.reshape(-1, x.shape[-1])
        routing: Routing = self.router(rows)
        if self.keeps_routing:
            self.routing = routing
        out = self._routed(rows, routing).to(x.dtype)
        if self.shared is not None:
            shared = self.shared(rows)
            if self.shared_gate is not None:
                shared = torch.sigmoid(self.shared_gate(rows)) * shared
            out = out + shared
        return out.view(x.shape)

    def _routed(self, x: Tensor, routing: Routing) -> Tensor:
        """x (N, d) → the experts' weighted sum, (N, d), in the type of the weights."""
        n, k = routing.chosen.shape
        by_expert = routing.chosen.flatten()
        order = by_expert.argsort(stable=True)
        counts = by_expert.bincount(minlength=self.n_experts).tolist()
        sorted_out = self.experts(x[order // k], counts)
        # Back beside the token that chose, in the order of choice: a sum in a fixed order.
        place = torch.empty_like(order)
        place[order] = torch.arange(n * k, device=order.device)
        out = sorted_out[place].view(n, k, x.shape[1])
        summed: Tensor = (out * routing.weights.unsqueeze(-1)).sum(1)
        return summed
