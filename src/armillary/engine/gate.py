"""Where things lie in the memory by which threads wait for each other, for both sides of it.

Each is on a cache line of its own. Past the last come lines for each thread: how many programs it
has run, and whether it sleeps.
"""

LINE = 64
ARRIVED, ROUND, GO, PROGRAM, COUNT, YIELD, FIRST_THREAD = (LINE * line for line in range(7))


def gate_bytes(threads: int) -> int:
    """Bytes of a gate."""
    return FIRST_THREAD + LINE * threads
