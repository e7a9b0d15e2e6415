"""What the process has freed goes back to the system."""

import ctypes


def give_back() -> None:
    """Let the C library return freed memory to the system, where it can be told to.

    What was freed in pieces of some MB stays with the process otherwise, in places that nothing of
    another size fits into, and adds up.
    """
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return
    trim(0)
