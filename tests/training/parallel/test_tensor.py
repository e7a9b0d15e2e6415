"""The plan of tensor parallelism, as far as it can be told without processes."""

from fnmatch import fnmatchcase
from unittest import mock

import pytest
from torch.distributed.tensor import Shard

from armillary import Decoder
from armillary.errors import ConfigError
from armillary.training.lora import LoraConfig, add_lora
from armillary.training.objective import Objective
from armillary.training.parallel.tensor import plan_of, split_tensors
from support.models import VARIANTS, config


@pytest.mark.parametrize("name", [name for name in VARIANTS if name != "fused glu"])
def test_what_is_split_is_split_by_heads_channels_or_ids_and_nothing_else_is(name):
    """A name that the plan did not know would quietly stay whole, on every process."""
    decoder = Decoder(VARIANTS[name])
    for path, parameter in decoder.named_parameters():
        share = next(s for pattern, s in plan_of(decoder.config, 2) if fnmatchcase(path, pattern))
        within = path.split(".")[2:]
        split = within[:1] in (["attention"], ["feedforward"]) and "norm" not in within[1]
        if within[1:] in (["out", "bias"], ["down", "bias"]):
            assert share.once
            split = False
        assert isinstance(share.placement, Shard) == split, path
        if isinstance(share.placement, Shard):
            assert parameter.shape[share.placement.dim] % 2 == 0


def test_a_vocabulary_is_split_where_it_divides():
    for size, split in ((62, True), (61, False)):
        plan = plan_of(config(vocab_size=size, head_bias=True), 2)
        for path in ("embedding.weight", "head.weight", "head.bias"):
            share = next(share for pattern, share in plan if fnmatchcase(path, pattern))
            assert isinstance(share.placement, Shard) == split


def test_adapters_are_refused_with_the_remedy():
    objective = Objective(Decoder(VARIANTS["plain"]))
    add_lora(objective.decoder, LoraConfig())
    with pytest.raises(ConfigError, match="parallel.tensor is 2, .*adapters.*set tensor to 1"):
        split_tensors(objective, mock.Mock(size=lambda: 2))
