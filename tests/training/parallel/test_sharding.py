"""Training on several gloo ranks is training on one: losses, gradients and weights."""

import torch

from armillary.training.optimizer import OptimizerConfig
from armillary.training.parallel.config import Sizes
from support.models import VARIANTS
from support.ranks import on_ranks
from support.split_training import apart, train

ADAMW = OptimizerConfig(lr=1e-2)
MUON = OptimizerConfig(kind="muon", lr=1e-2)
ALONE = Sizes()


def _on_two_ranks() -> dict[str, dict[str, float]]:
    two = Sizes(shard=2)
    plain = VARIANTS["tied head with bias"]
    alone = train(plain, ALONE, ADAMW)
    gaps = {"fsdp": apart(train(plain, two, ADAMW), alone)}
    options = {"checkpoint": True, "reshard": False}
    gaps["fsdp, checkpointed"] = apart(train(plain, two, ADAMW, **options), alone)
    return gaps
    muon = train(plain, ALONE, MUON)
    gaps["fsdp, muon"] = apart(train(plain, two, MUON), muon)
    return gaps


SPLIT_BY_HEADS = (
    "tied head with bias",
    "qkv bias",
    "out bias",
    "q/k layer norm",
    "mlp relu",
    "parallel sandwich",
    "parallel, shared norm",
    "post norm",
    "mixed layers",
)


def _by_heads() -> dict[str, dict[str, float]]:
    gaps = {}
    for name in SPLIT_BY_HEADS:
        alone = train(VARIANTS[name], ALONE, ADAMW)
        checkpoint = name == "mlp relu"
        split = train(VARIANTS[name], Sizes(tensor=2), ADAMW, checkpoint=checkpoint)
        gaps[name] = apart(split, alone)
    return gaps


def test_by_heads():
    for gaps in on_ranks(2, _by_heads):
        for case, gap in gaps.items():
            print(case, gap)
            assert max(gap.values()) < 1e-10, (case, gap)


SPLIT_BY_PLACES = (
    "tied head with bias",
    "learned",
    "mixed layers",
    "soft cap and window",
    "q/k norm",
    "rope dynamic",
)


def _by_places() -> dict[str, dict[str, float]]:
    gaps = {}
    for name in SPLIT_BY_PLACES:
        alone = train(VARIANTS[name], ALONE, ADAMW)
        checkpoint = name == "learned"
        split = train(VARIANTS[name], Sizes(context=2), ADAMW, checkpoint=checkpoint)
        gaps[name] = apart(split, alone)
    return gaps


def test_by_places():
    for gaps in on_ranks(2, _by_places):
        for case, gap in gaps.items():
            print(case, gap)
            assert max(gap.values()) < 1e-10, (case, gap)


FOUR = (
    Sizes(shard=2, context=2),
    Sizes(shard=2, tensor=2),
    Sizes(context=2, tensor=2),
    Sizes(replicate=2, shard=2),
    Sizes(replicate=2, tensor=2),
    Sizes(replicate=2, context=2),
    Sizes(context=4),
    Sizes(shard=4),
)


def _on_four() -> dict[str, dict[str, float]]:
    name = "out bias"
    alone = train(VARIANTS[name], ALONE, ADAMW)
    return {str(sizes): apart(train(VARIANTS[name], sizes, ADAMW), alone) for sizes in FOUR}


def test_four():
    for gaps in on_ranks(4, _on_four):
        for case, gap in gaps.items():
            print(case, gap)
            assert max(gap.values()) < 1e-10, (case, gap)


def test_two_ranks_are_one():
    for gaps in on_ranks(2, _on_two_ranks):
        for case, gap in gaps.items():
            print(case, gap)
            assert max(gap.values()) < 1e-10, (case, gap)
