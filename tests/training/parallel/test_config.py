"""Sizes that do not divide are refused before anything starts, with the numbers."""

import subprocess
import sys

import pytest
from pydantic import ValidationError

from armillary import DecoderConfig
from armillary.errors import ConfigError
from armillary.training.parallel.config import ParallelConfig, Sizes, check_parallel
from support.models import MIXTURES, VARIANTS

DECODER = DecoderConfig.uniform(
    vocab_size=61, d_model=40, n_layers=2, n_heads=6, n_kv_heads=2, d_head=10, d_ff=24,
    max_positions=64,
)  # fmt: skip


def check(config: ParallelConfig, decoder: DecoderConfig = DECODER, **sizes: int) -> Sizes:
    usual = {"world": 8, "length": 64, "batch_size": 16, "micro_batch": 2}
    return check_parallel(config, decoder, **(usual | sizes))


def test_shard_takes_what_the_others_leave():
    assert check(ParallelConfig()) == Sizes(shard=8)
    given = ParallelConfig(replicate=2, tensor=2, context=2)
    assert check(given) == Sizes(replicate=2, shard=1, context=2, tensor=2)
    assert check(ParallelConfig(), world=1) == Sizes()
    assert check(ParallelConfig(shard=4, context=2)) == Sizes(shard=4, context=2)


@pytest.mark.parametrize(
    ("config", "sizes", "said"),
    [
        (ParallelConfig(tensor=2, context=2), {"world": 6}, ["6 processes", "= 4"]),
        (ParallelConfig(shard=4), {}, ["shard 4 = 4", "8 processes", "--nproc-per-node=4"]),
        (ParallelConfig(tensor=4), {}, ["parallel.tensor is 4", "n_heads 6"]),
        (ParallelConfig(tensor=3), {"world": 3}, ["parallel.tensor is 3", "n_kv_heads 2"]),
        (ParallelConfig(context=4), {"length": 60}, ["context is 4", "8 equal", "60 tokens"]),
        (ParallelConfig(), {"batch_size": 24}, ["24 rows", "16 taken at once", "8 data ranks"]),
        (
            ParallelConfig(replicate=2, context=2),
            {"batch_size": 12},
            ["12 rows", "8 taken at once", "replicate 2 × shard 2", "2 rows each"],
        ),
    ],
)
def test_what_does_not_divide_is_refused_with_the_numbers(config, sizes, said):
    with pytest.raises(ConfigError) as error:
        check(config, **sizes)
    for words in said:
        assert words in str(error.value)


def test_the_width_of_the_feed_forward_divides_too():
    narrow = DecoderConfig.uniform(
        vocab_size=61, d_model=40, n_layers=1, n_heads=4, d_head=10, d_ff=26, max_positions=64
    )
    with pytest.raises(ConfigError, match="tensor is 4, but layer 0 has d_ff 26"):
        check(ParallelConfig(tensor=4), narrow)


def test_fused_gates_are_refused_with_the_remedy():
    with pytest.raises(ConfigError, match="layer 0 has gate and up fused .* set fused: false"):
        check(ParallelConfig(tensor=2), VARIANTS["fused glu"])


def test_experts_are_not_shared_out_by_channels_and_that_is_said():
    with pytest.raises(ConfigError, match="layer 0 has a mixture of experts.* set tensor to 1"):
        check(ParallelConfig(tensor=2), MIXTURES["experts"])
    check(ParallelConfig(), MIXTURES["experts"])


@pytest.mark.parametrize("entries", [{"shard": 0}, {"shard": -2}, {"tensor": 0}, {"tensors": 2}])
def test_settings_are_strict(entries):
    with pytest.raises(ValidationError):
        ParallelConfig(**entries)


def test_settings_need_no_torch():
    """So that `armillary train --explain` answers at once."""
    code = "import armillary.training.parallel.config, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
