"""Training on several ranks is training on one: losses, gradients, norms and weights.

In float64, where two orders of a sum differ by 1e-14 and any mistake by much more.
"""

from armillary.training.optimizer import OptimizerConfig
from armillary.training.parallel.config import Sizes
from support.models import VARIANTS
from support.ranks import on_ranks
from support.split_training import apart, train

ADAMW = OptimizerConfig(lr=1e-2)
CLOSE = 1e-9

Cases = list[tuple[str, Sizes, dict[str, bool]]]

# Whatever a process has only a part of stands in one of these.
ON_TWO: Cases = [
    ("tied head with bias", Sizes(shard=2), {}),
    ("tied head with bias", Sizes(shard=2), {"checkpoint": True, "reshard": False}),
    ("out bias", Sizes(tensor=2), {}),
    ("q/k layer norm", Sizes(tensor=2), {}),
    ("mlp relu", Sizes(tensor=2), {"checkpoint": True}),
    ("parallel sandwich", Sizes(tensor=2), {}),
    ("parallel, shared norm", Sizes(tensor=2), {}),
    ("learned", Sizes(context=2), {"checkpoint": True}),
    ("mixed layers", Sizes(context=2), {}),
    ("soft cap and window", Sizes(context=2), {}),
    ("rope dynamic", Sizes(context=2), {}),
]
ON_FOUR: Cases = [
    ("q/k norm", Sizes(shard=2, context=2), {}),
    ("q/k norm", Sizes(shard=2, tensor=2), {}),
    ("q/k norm", Sizes(context=2, tensor=2), {}),
    ("q/k norm", Sizes(replicate=2, shard=2), {}),
    ("q/k norm", Sizes(replicate=2, tensor=2), {}),
    ("q/k norm", Sizes(replicate=2, context=2), {}),
    ("q/k norm", Sizes(context=4), {}),
]


def _gaps(cases: Cases) -> list[dict[str, float]]:
    alone = {name: train(VARIANTS[name], Sizes(), ADAMW) for name, _, _ in cases}
    return [
        apart(train(VARIANTS[name], sizes, ADAMW, **options), alone[name])
        for name, sizes, options in cases
    ]


def _assert_close(n_ranks: int, cases: Cases) -> None:
    for gaps in on_ranks(n_ranks, _gaps, cases):
        for case, gap in zip(cases, gaps, strict=True):
            assert max(gap.values()) < CLOSE, (case, gap)


def test_two_ranks_are_one():
    _assert_close(2, ON_TWO)


def test_four_ranks_in_every_combination_of_two_kinds_are_one():
    _assert_close(4, ON_FOUR)
