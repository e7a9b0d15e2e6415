"""One process or many: who this one is, and how all of them come to the same end.

Without a process group there is one rank, and nothing is sent. Between ranks, objects are sent as
torch sends them (pickled, from a live process of the same run to another); nothing of that comes
from a file or goes to one.
"""

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from armillary.errors import UserError

T = TypeVar("T")


def is_distributed() -> bool:
    """Whether this process is a rank of a group."""
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    """The number of this process among all, from 0."""
    return dist.get_rank() if is_distributed() else 0


def n_ranks() -> int:
    """How many processes train together."""
    return dist.get_world_size() if is_distributed() else 1


def gather(value: T) -> list[T]:
    """What each rank gave, in their order, on every rank."""
    if not is_distributed():
        return [value]
    values = [value] * n_ranks()
    dist.all_gather_object(values, value)
    return values


def on_every_rank(action: Callable[[], T]) -> T:
    """Do something on every rank at once; return what came of it here.

    What one rank raises ends all of them, instead of leaving the others waiting for it: a
    UserError is raised everywhere as it is, anything else as a RuntimeError that names the rank.
    """
    fault: UserError | str | None = None
    try:
        result = action()
    except UserError as error:
        fault = error
    except BaseException as error:
        gather(f"rank {rank()}: {type(error).__name__}: {error}")
        raise
    for found in gather(fault):
        if found is not None:
            raise found if isinstance(found, UserError) else RuntimeError(found)
    return result


def on_first_rank(action: Callable[[], T]) -> T:
    """Do something on rank 0 alone, while the others wait; return to all what came of it.

    Raises as `on_every_rank`.
    """
    results: list[T] = gather(on_every_rank(action if rank() == 0 else _nothing))  # type: ignore[arg-type]
    return results[0]


def _nothing() -> None:
    return None
