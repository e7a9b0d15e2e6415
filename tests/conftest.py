"""Settings for the whole suite."""

import os
import random

import numpy as np
import pytest
from hypothesis import settings

from support.browser import chromium

# The same examples in every run, and none fails for being slow on a busy machine.
settings.register_profile("armillary", derandomize=True, deadline=None)
settings.load_profile("armillary")

# What would make the command line draw for a terminal that is not there.
for _name in ("FORCE_COLOR", "PY_COLORS", "GITHUB_ACTIONS", "TTY_COMPATIBLE"):
    os.environ.pop(_name, None)

# Tests of the prompt cache ask for it, and say where it lies.
os.environ["ARMILLARY_PROMPT_CACHE"] = "0"

if "PYTEST_XDIST_WORKER" in os.environ:
    # Workers share the cores; each with all of them would only wait for the others. Read by torch
    # when it is first imported, and by the processes that tests start.
    os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup():
    """A test and its fixtures draw the same numbers whichever tests ran before them."""
    import torch

    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def kernels():
    """The engine's kernels, compiled before a test looks at all that is said."""
    from armillary.engine.kernels import all_kernels
    from armillary.engine.library import library
    from armillary.engine.machine import host

    for each in all_kernels(host()):
        library().kernel(each.name)


@pytest.fixture(scope="session")
def device():
    """A GPU's name where there is one, else the CPU's: the same tests run on either."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def pytest_collection_modifyitems(items):
    """Leave out, by name, what needs a browser where there is none."""
    if chromium() is None:
        without = pytest.mark.skip(reason="needs a browser: apt-get install chromium")
        for item in items:
            if item.get_closest_marker("browser"):
                item.add_marker(without)
