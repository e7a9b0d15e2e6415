"""Training on several ranks is training on one: losses, gradients, norms and weights.

In float64, where two orders of a sum differ by 1e-14 and any mistake by much more.
"""

import math

import torch
from torch.distributed.tensor import DTensor

from armillary.training.objective import Objective
from armillary.training.optimizer import OptimizerConfig, build_optimizer
from armillary.training.parallel.config import Sizes
from armillary.training.parallel.ranks import start_ranks
from armillary.training.parallel.sharding import parallelise
from support.models import EVERY_VARIANT, build, config, layer
from support.ranks import on_ranks
from support.split_training import apart, batch, train

ADAMW = OptimizerConfig(lr=1e-2)
MUON = OptimizerConfig(kind="muon", lr=1e-2)
CLOSE = 1e-9

# 61 ids are shared out by nobody, 62 by two.
MODELS = EVERY_VARIANT | {
    "62 ids": config(vocab_size=62, head_bias=True, final_soft_cap=1.5),
    "62 ids, tied": config(vocab_size=62, tie_head=True),
}
Cases = list[tuple[str, Sizes, dict[str, object]]]

# Whatever a process has only a part of stands in one of these.
ON_TWO: Cases = [
    ("tied head with bias", Sizes(shard=2), {}),
    ("tied head with bias", Sizes(shard=2), {"checkpoint": True, "reshard": False}),
    ("out bias", Sizes(tensor=2), {}),
    ("q/k layer norm", Sizes(tensor=2), {}),
    ("mlp relu", Sizes(tensor=2), {"checkpoint": True}),
    ("sinks", Sizes(tensor=2), {}),
    ("62 ids", Sizes(tensor=2), {}),
    ("62 ids, tied", Sizes(tensor=2), {}),
    ("parallel sandwich", Sizes(tensor=2), {}),
    ("parallel, shared norm", Sizes(tensor=2), {}),
    ("learned", Sizes(context=2), {"checkpoint": True}),
    ("mixed layers", Sizes(context=2), {}),
    ("soft cap and window", Sizes(context=2), {}),
    ("rope dynamic", Sizes(context=2), {}),
    ("experts, sigmoid in groups", Sizes(shard=2), {"checkpoint": True}),
    ("experts, clipped, biases", Sizes(context=2), {}),
]
ON_FOUR: Cases = [
    ("q/k norm", Sizes(shard=2, context=2), {}),
    ("q/k norm", Sizes(shard=2, tensor=2), {}),
    ("62 ids", Sizes(context=2, tensor=2), {}),
    ("62 ids, tied", Sizes(shard=2, tensor=2), {"on_meta": True}),
    ("q/k norm", Sizes(replicate=2, shard=2), {}),
    ("out bias", Sizes(replicate=2, tensor=2), {"on_meta": True}),
    ("q/k norm", Sizes(replicate=2, context=2), {}),
    ("q/k norm", Sizes(context=4), {"on_meta": True}),
    ("experts, sigmoid in groups", Sizes(replicate=2, shard=2), {"on_meta": True}),
]


def _gaps(cases: Cases) -> list[dict[str, float]]:
    alone = {name: train(MODELS[name], Sizes(), ADAMW) for name, _, _ in cases}
    return [
        apart(train(MODELS[name], sizes, ADAMW, **options), alone[name])
        for name, sizes, options in cases
    ]


def _assert_close(n_ranks: int, cases: Cases) -> None:
    for gaps in on_ranks(n_ranks, _gaps, cases):
        for case, gap in zip(cases, gaps, strict=True):
            assert max(gap.values()) < CLOSE, (case, gap)


def test_one_process_takes_its_weights_one_by_one_too():
    alone = train(MODELS["out bias"], Sizes(), ADAMW)
    assert apart(train(MODELS["out bias"], Sizes(), ADAMW, on_meta=True), alone)["weights"] == 0


def test_two_ranks_are_one():
    _assert_close(2, ON_TWO)


def test_four_ranks_in_every_combination_of_two_kinds_are_one():
    _assert_close(4, ON_FOUR)


def _muon_gap() -> float:
    alone = train(MODELS["plain"], Sizes(), MUON)
    return apart(train(MODELS["plain"], Sizes(shard=2), MUON), alone)["losses"]


def test_muon_turns_whole_matrices_though_each_rank_has_some_rows():
    """It works in bfloat16, so to 1e-4; turning each rank's rows alone makes 2e-3 of it."""
    assert max(on_ranks(2, _muon_gap)) < 5e-4


def _narrow_gaps() -> list[dict[str, float]]:
    """Of bfloat16 on this rank from bfloat16 on one process, and of that from float32."""
    name, narrow = "q/k norm", {"dtype": torch.float32, "compute": torch.bfloat16}
    alone = train(MODELS[name], Sizes(), ADAMW, **narrow)
    together = train(MODELS[name], Sizes(shard=2), ADAMW, **narrow)
    wide = train(MODELS[name], Sizes(), ADAMW, dtype=torch.float32)
    return [apart(together, alone), apart(alone, wide)]


def test_layers_gathered_in_bfloat16_are_as_exact_as_those_of_one_process():
    """Gradients are summed in float32, so that what differs is rounded as in one process."""
    for together, alone in on_ranks(2, _narrow_gaps):
        assert 0 < together["losses"] < 2 * alone["losses"]
        assert 0 < together["gradients"] < 2 * alone["gradients"]


def _with_dropout(sizes: Sizes) -> tuple[list[float], list[float]]:
    """The losses on this rank's part, and weights that each tensor peer has whole."""
    dropped = layer(dropout=0.3, attention={"dropout": 0.2}, feedforward={"dropout": 0.2})
    objective = Objective(build(config(dropped, dropped, input_dropout=0.1)).train())
    losses = []
    with start_ranks(sizes) as ranks:
        torch.manual_seed(ranks.seed(1))
        parallelise(objective, ranks)
        optimizer = build_optimizer(objective, ADAMW)
        for step in range(2):
            loss = objective(**batch(step))
            loss.total.backward()
            losses.append(float(loss.cross_entropy))
            optimizer.step()
            optimizer.zero_grad()
        norm = objective.decoder.get_parameter("final_norm.weight")
        assert isinstance(norm, DTensor)
        return losses, norm.to_local().tolist()


def test_tensor_peers_drop_the_same_of_what_they_have_in_common():
    """Otherwise their activations, and with them the weights that both have, would part."""
    one, other = on_ranks(2, _with_dropout, Sizes(tensor=2))
    assert one == other


def test_context_peers_drop_of_their_own():
    """Attention drops run by run there; both parts come to one set of gradients."""
    (one, _), (other, _) = on_ranks(2, _with_dropout, Sizes(context=2))
    assert all(0 < loss < math.inf for loss in one + other)
    assert one != other
