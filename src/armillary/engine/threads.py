"""Threads that run programs together.

Each stays in compiled code, without Python's lock, while programs follow each other closely, and
sleeps when none has come for about a millisecond.
"""

import ctypes
import os
import threading
from functools import cache
from pathlib import Path

import numpy as np

from armillary.engine.gate import COUNT, GO, PROGRAM, YIELD, gate_bytes
from armillary.engine.library import Library, library
from armillary.engine.program import Program, aligned


def physical_cores() -> int:
    """Cores that this process may use, those that share one counted once."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    if allowed is None:
        return max(1, (os.cpu_count() or 1))
    seen = set()
    for number in allowed:
        path = Path(f"/sys/devices/system/cpu/cpu{number}/topology/thread_siblings_list")
        try:
            seen.add(path.read_text().strip())
        except OSError:
            seen.add(str(number))
    return max(1, len(seen))


class Team:
    """A number of threads, this one among them."""

    def __init__(self, code: Library, threads: int) -> None:
        self.threads = threads
        kind = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)
        self._run, self._serve, self._launch = (
            kind(code.kernel(name).address) for name in ("run", "serve", "launch")
        )
        self._begin()

    def _begin(self) -> None:
        self._process = os.getpid()
        self._gate = aligned(gate_bytes(self.threads))
        self._asleep = np.zeros(self.threads, dtype=np.int64)
        self._arguments = np.array([self._gate.ctypes.data, self._asleep.ctypes.data])
        self._place = int(self._arguments.ctypes.data)
        self._gate.view(np.int64)[YIELD // 8] = _yield_address()
        self._wake = [threading.Semaphore(0) for _ in range(self.threads)]
        self._lock = threading.Lock()
        for number in range(1, self.threads):
            threading.Thread(
                target=self._work, args=(number,), name=f"armillary-{number}", daemon=True
            ).start()

    def run(self, program: Program) -> None:
        """Run a program to its end."""
        if self._process != os.getpid():
            # A process that was forked off has none of the others.
            self._begin()
        with self._lock:
            gate = self._gate.view(np.int64)
            gate[PROGRAM // 8], gate[COUNT // 8] = program.address, len(program)
            rounds = gate[GO // 8]
            try:
                if self.threads > 1:
                    self._launch(self._place, 0, self.threads)
            finally:
                # Once the others have begun they wait for this one, whatever interrupts it.
                if self.threads == 1 or gate[GO // 8] != rounds:
                    self._together()

    def _together(self) -> None:
        if self._asleep.any():
            for number in np.flatnonzero(self._asleep):
                self._wake[number].release()
            self._asleep[:] = 0
        self._run(self._place, 0, self.threads)

    def _work(self, number: int) -> None:
        while True:
            self._serve(self._place, number, self.threads)
            self._wake[number].acquire()


@cache
def team(threads: int) -> Team:
    """The team of so many threads: models share it. Raises ValueError for none."""
    if threads < 1:
        raise ValueError(f"threads is {threads}; at least one must do the work")
    return Team(library(), threads)


def _yield_address() -> int:
    try:
        return ctypes.cast(ctypes.CDLL(None).sched_yield, ctypes.c_void_p).value or 0
    except (AttributeError, OSError, TypeError):
        return 0
