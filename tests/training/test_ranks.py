"""What goes wrong on one rank is said on all of them, and none waits for ever."""

import pytest
import torch.distributed as dist

from armillary.errors import CheckpointError, UserError
from armillary.training.ranks import gather, is_distributed, n_ranks, on_every_rank, on_first_rank
from armillary.training.ranks import rank as this_rank
from support.ranks import on_ranks


def test_one_process_is_rank_0_of_1():
    assert (is_distributed(), this_rank(), n_ranks()) == (False, 0, 1)
    assert gather("here") == ["here"]
    assert on_every_rank(lambda: 3) == on_first_rank(lambda: 3) == 3


@pytest.mark.parametrize("error", [UserError, CheckpointError, KeyboardInterrupt])
def test_in_one_process_errors_pass_through(error):
    def fail():
        raise error("no luck")

    for run in (on_every_rank, on_first_rank):
        with pytest.raises(error, match="no luck"):
            run(fail)


def fails_on(number, error):
    if this_rank() == number:
        raise error
    return this_rank()


def on_each_rank():
    """Runs on every rank; returns what it saw."""
    seen = [is_distributed(), this_rank(), n_ranks(), gather(this_rank() * 10)]
    seen += [on_every_rank(this_rank), on_first_rank(lambda: f"from {this_rank()}")]
    for run, number, error in (
        (on_every_rank, 1, CheckpointError("disk of 1: is full")),
        (on_first_rank, 0, UserError("first")),
        (on_every_rank, 0, ValueError("a fault of ours")),
    ):
        try:
            run(lambda number=number, error=error: fails_on(number, error))
            seen.append(None)
        except Exception as raised:
            seen.append((type(raised).__name__, str(raised)))
    dist.barrier()  # they are still in step
    return seen


def test_an_error_on_one_rank_is_raised_on_all():
    zero, one = on_ranks(2, on_each_rank)
    assert zero[:6] == [True, 0, 2, [0, 10], 0, "from 0"]
    assert one[:6] == [True, 1, 2, [0, 10], 1, "from 0"]
    shared = [("CheckpointError", "disk of 1: is full"), ("UserError", "first")]
    assert zero[6:8] == one[6:8] == shared
    # A mistake in a program keeps its type where it was made, and is named elsewhere.
    assert zero[8] == ("ValueError", "a fault of ours")
    assert one[8] == ("RuntimeError", "rank 0: ValueError: a fault of ours")
