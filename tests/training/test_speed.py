"""The speed of matrix products is a number of the right kind."""

import torch

from armillary.training.speed import measured_flops


def test_it_is_a_speed_that_a_machine_may_have():
    found = measured_flops(torch.device("cpu"), torch.float32)
    assert 1e7 < found < 1e16
