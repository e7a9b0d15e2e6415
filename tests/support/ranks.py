"""Run a function on several ranks of a gloo group, each a process of its own.

    losses = on_ranks(2, train_some, tmp_path, 7)     # train_some(tmp_path, 7) on each rank

The function stands at the top of its module, asks torch.distributed who it is, and takes and
returns what can be sent between processes (arrays rather than tensors). Its module is loaded from
its file, since test modules have no name that another process could import.
"""

import importlib.util
import inspect
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

_SECONDS = 120.0


def on_ranks(n_ranks: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """What the function returns on each rank, in their order.

    Raises AssertionError with the traceback of the first rank that fails; the others are ended.
    """
    context = fresh_processes()
    file, name = inspect.getfile(function), function.__qualname__
    with tempfile.TemporaryDirectory() as meeting:
        processes, pipes = [], []
        for rank in range(n_ranks):
            pipe, end = context.Pipe(duplex=False)
            given = (rank, n_ranks, f"{meeting}/store", end, file, name, args)
            processes.append(context.Process(target=_run, args=given, daemon=True))
            processes[-1].start()
            end.close()
            pipes.append(pipe)
        try:
            return _results(pipes)
        finally:
            for process in processes:
                process.kill()
                process.join()


def fresh_processes() -> ForkServerContext:
    """A way to start processes that have imported what is slow to import, and done nothing else.

    Importing it anew in each would be most of the time of a test.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["torch._dynamo", "armillary.training.shard_storage", "armillary.training.objective"]
    )
    return context


def _results(pipes: list[Connection]) -> list[Any]:
    results: dict[int, Any] = {}
    deadline = time.monotonic() + _SECONDS
    while len(results) < len(pipes):
        open_pipes = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
        ready = wait(open_pipes, timeout=deadline - time.monotonic())
        assert ready, f"ranks {_unheard(pipes, results)} gave no result within {_SECONDS:.0f} s"
        for pipe in ready:
            rank = pipes.index(pipe)
            try:
                failure, result = pipe.recv()
            except EOFError:
                failure, result = "died without a word", None
            assert failure is None, f"rank {rank}: {failure}"
            results[rank] = result
    return [results[rank] for rank in range(len(pipes))]


def _unheard(pipes: list[Connection], results: dict[int, Any]) -> list[int]:
    return [rank for rank in range(len(pipes)) if rank not in results]


def _run(
    rank: int, n_ranks: int, store: str, pipe: Connection, file: str, name: str, args: tuple[Any]
) -> None:
    import torch
    import torch.distributed as dist

    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    try:
        function = getattr(_load(Path(file)), name)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=n_ranks,
            timeout=timedelta(seconds=_SECONDS / 2),
        )
        pipe.send((None, function(*args)))
    except BaseException:
        pipe.send((traceback.format_exc(), None))
    finally:
        # The group is left standing: to take it down is a collective in which a failed rank,
        # which never comes to it, would be waited for.
        pipe.close()


def _load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module
