"""On several ranks, compiled layers give the gradients that one process gives."""

import pytest
import torch

from armillary.config import RotaryConfig
from armillary.decoder import Decoder
from armillary.training.native.build import NotBuiltError, kernels
from armillary.training.objective import Objective
from armillary.training.optimizer import clip_gradients
from armillary.training.parallel.config import Sizes
from armillary.training.parallel.ranks import Ranks, start_ranks
from armillary.training.parallel.sharding import parallelise
from armillary.training.precision import Precision
from support.models import VOCABULARY, config, layer
from support.ranks import on_ranks

try:
    kernels()
except NotBuiltError as error:
    pytest.skip(f"the kernels cannot be built here: {error}", allow_module_level=True)

TURN = RotaryConfig(d_rotary=32, base=100.0)
LAYER = layer(attention={"d_head": 32, "rotary": TURN}, feedforward={"d_ff": 96})
ROWS, LENGTH = 2, 128


def gradient_norm(ranks: Ranks, compile: bool) -> float:
    decoder = Decoder(config(LAYER, LAYER, d_model=64))
    decoder.initialise(0.1, torch.Generator().manual_seed(1))
    objective = Objective(decoder)
    parallelise(objective, ranks, compile=compile, compute=torch.bfloat16)
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=generator)
    mine = tokens[ranks.data_rank :: ranks.data_ranks]
    with Precision("bfloat16").autocast():
        loss = objective(mine, mine.roll(-1, 1))
    (loss.total / (ROWS * LENGTH)).backward()
    return clip_gradients(objective.parameters()).norm


def _on_two() -> list[float]:
    norms = []
    for sizes in (Sizes(shard=2), Sizes(tensor=2), Sizes(context=2)):
        with start_ranks(sizes) as ranks:
            norms.append(gradient_norm(ranks, compile=True))
    return norms


def test_gradients_are_those_of_one_process():
    alone = gradient_norm(Ranks.single(), compile=False)
    assert gradient_norm(Ranks.single(), compile=True) == pytest.approx(alone, rel=5e-3)
    for norms in on_ranks(2, _on_two):
        assert norms == pytest.approx([alone] * 3, rel=5e-3)
