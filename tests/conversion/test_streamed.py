"""A decoder over weights in their file gives the logits of one that holds them, in no memory."""

import numpy as np
import pytest
import torch

from armillary.checkpoints import open_checkpoint, save_armillary
from armillary.config import DecoderConfig
from armillary.conversion.streamed import logits
from armillary.weights import to_write
from support.memory import allocates_less_than
from support.models import VARIANTS, build, tokens
from support.tensor_memory import TensorMemory

POSITIONS = [0, 1, 5, 7, 8, 9, 30, 63]


def saved(directory, config, std=0.3):
    decoder = build(config, std=std).float()
    save_armillary(directory, config, to_write(decoder))
    return decoder, open_checkpoint(directory)


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_at_positions_that_are_far_apart_are_those_of_the_decoder(tmp_path, name):
    decoder, checkpoint = saved(tmp_path / "m", VARIANTS[name])
    ids = tokens(1, len(POSITIONS))
    with torch.no_grad():
        expected = decoder(ids, positions=torch.tensor(POSITIONS), rotary_length=64)[0]
    found = logits(checkpoint.config, checkpoint.tensors, ids[0].tolist(), POSITIONS, length=64)
    np.testing.assert_allclose(found, expected.numpy(), rtol=0, atol=1e-5)


def test_rows_are_what_is_computed_with(tmp_path):
    _, checkpoint = saved(tmp_path / "m", VARIANTS["plain"])

    def halves(tensor, start, stop):
        return tensor.rows(start, stop) / 2

    ids = [1, 2, 3]
    found, other = (
        logits(checkpoint.config, checkpoint.tensors, ids, ids, length=4, **how)
        for how in ({}, {"rows": halves})
    )
    assert np.abs(found - other).max() > 0.1


def test_a_pass_holds_less_than_a_tensor(tmp_path):
    """Cases.md 81: the largest here has 15 MB."""
    sizes = {"vocab_size": 30_000, "d_model": 128, "n_layers": 2, "n_heads": 2, "d_ff": 8192}
    config = DecoderConfig.uniform(**sizes, max_positions=64)
    _, checkpoint = saved(tmp_path / "m", config, std=0.02)

    def run():
        logits(checkpoint.config, checkpoint.tensors, [1, 2, 3], [0, 9, 60], length=64)

    with TensorMemory():
        run()  # what torch imports when it is first used is not counted
    with allocates_less_than(8 << 20), TensorMemory() as memory:
        run()
    assert memory.peak < 8 << 20
