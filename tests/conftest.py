"""Settings for the whole suite."""

import os

from hypothesis import settings

# The same examples in every run, and none fails for being slow on a busy machine.
settings.register_profile("armillary", derandomize=True, deadline=None)
settings.load_profile("armillary")

if "PYTEST_XDIST_WORKER" in os.environ:
    # Workers share the cores; each with all of them would only wait for the others. Read by torch
    # when it is first imported, and by the processes that tests start.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
