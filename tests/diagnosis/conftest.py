"""A model that has learned a little, trained once for all that is planted in it."""

import pytest
import torch

from support.trained import trained


@pytest.fixture(scope="session")
def learned(tmp_path_factory):
    """Its checkpoint."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield trained(tmp_path_factory.mktemp("learned"))
    torch.set_num_threads(threads)
