"""Signals that ask a run to stop, noted until the loop comes to a place where it can."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

_ASKS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """A context in which SIGINT and SIGTERM are noted in `received` instead of ending the process.

    A second SIGINT is a KeyboardInterrupt: whoever asks twice does not want to wait. Outside the
    main thread, where Python has no handlers, nothing is noted.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in _ASKS}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGINT and self.received == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = signal.Signals(number)
