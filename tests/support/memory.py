"""How much memory Python and NumPy allocate while something runs."""

import contextlib
import tracemalloc
from collections.abc import Iterator


@contextlib.contextmanager
def allocates_less_than(limit: int) -> Iterator[None]:
    """Fail when more than `limit` bytes are held at any moment of the block."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < limit, f"{peak} bytes were allocated, {limit} are allowed"
