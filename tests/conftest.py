"""Settings for the whole suite."""

from hypothesis import settings

# The same examples in every run, and none fails for being slow on a busy machine.
settings.register_profile("armillary", derandomize=True, deadline=None)
settings.load_profile("armillary")
