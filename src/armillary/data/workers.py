"""Documents → ids in several processes, in order.

Each worker is a fresh process with a tokenizer of its own, whose library runs on one thread. What
comes out does not depend on their number.
"""

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Generic, TypeVar

from armillary.data.documents import Document
from armillary.data.encoders import ChatEncoder, EncoderSettings, Result, TextEncoder
from armillary.errors import UserError

T = TypeVar("T")


class Batch(Generic[T]):
    """Documents that go to a worker together, with what their sender wants to know of them."""

    def __init__(self, documents: list[Document], note: T) -> None:
        self.documents, self.note = documents, note


@contextlib.contextmanager
def encoding(
    settings: EncoderSettings, workers: int
) -> Iterator[Callable[[Iterable[Batch[T]]], Iterator[tuple[Batch[T], list[Result]]]]]:
    """Give a function from batches to batches with what they become, in order, few at a time.

    With one worker everything happens in this process. Raises UserError where a worker dies.
    """
    if workers == 1:
        encoder = settings.build()
        yield lambda batches: ((batch, [*map(encoder, batch.documents)]) for batch in batches)
        return
    pool = ProcessPoolExecutor(
        workers,
        # A forked copy of a process that runs threads can hang.
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start,
        initargs=(settings,),
    )
    try:
        yield lambda batches: _in_order(pool, batches, 2 * workers + 2)
    except BrokenProcessPool as error:
        raise UserError(
            "a worker process was ended, most often for want of memory; run the same command "
            "again to go on, with fewer --workers"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _in_order(
    pool: ProcessPoolExecutor, batches: Iterable[Batch[T]], at_once: int
) -> Iterator[tuple[Batch[T], list[Result]]]:
    waiting: deque[tuple[Batch[T], Future[list[Result]]]] = deque()
    for batch in batches:
        with _program_left_alone():  # submitting starts workers
            waiting.append((batch, pool.submit(_encode, batch.documents)))
        if len(waiting) >= at_once:
            first, future = waiting.popleft()
            yield first, future.result()
    while waiting:
        first, future = waiting.popleft()
        yield first, future.result()


@contextlib.contextmanager
def _program_left_alone() -> Iterator[None]:
    """Keep workers that are started from importing the program that runs, which they do not need.

    A script without a guard around what it does would do it again in each of them.
    """
    program = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = program


_encoder: TextEncoder | ChatEncoder


def _start(settings: EncoderSettings) -> None:
    """Make this process a worker, which ends when its parent does, however that ends."""
    global _encoder  # noqa: PLW0603 - a worker's state is the process's
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent says when to stop
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _encoder = settings.build()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _encode(documents: list[Document]) -> list[Result]:
    return [*map(_encoder, documents)]
