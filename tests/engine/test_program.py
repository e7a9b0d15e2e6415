"""A program takes the arguments of its kernels and nothing else."""

from typing import Any

import numpy as np
import pytest

from armillary.engine.library import library
from armillary.engine.program import Program, aligned

X = np.zeros((2, 16), np.float32)
RIGHT: dict[str, Any] = {"x": X, "stride": 64, "n": 16, "cap": 2.0, "rows": np.array([2])}


def add(**changes: Any) -> Program:
    program = Program(library())
    program.add("soft_cap", wait=True, **(RIGHT | changes))
    return program


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"y": X}, "soft_cap: y missing or not known"),
        ({"rows": 2}, "rows: what has an address is a contiguous array, not 2"),
        ({"rows": None}, "rows: what has an address"),
        ({"rows": np.array([2, 3])}, "rows: a live count is an array of one int64"),
        ({"rows": np.array([2], np.int32)}, "rows: a live count is an array of one int64"),
        ({"x": X.T}, "x: what has an address is a contiguous array"),
        ({"x": X[:, ::2]}, "x: what has an address is a contiguous array"),
        ({"x": 12345}, "x: what has an address is a contiguous array"),
        ({"n": X}, "n: a size is given as"),
        ({"n": 16.0}, "n: a size is given as 16.0"),
        ({"n": None}, "n: a size is given as None"),
        ({"cap": np.ones(1)}, "cap: a number is given as"),
        ({"cap": None}, "cap: a number is given as None"),
    ],
)
def test_wrong_arguments_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        add(**changes)


def test_every_argument_is_needed() -> None:
    for name in RIGHT:
        program = Program(library())
        with pytest.raises(TypeError, match=f"soft_cap: {name} missing"):
            program.add("soft_cap", wait=True, **{k: v for k, v in RIGHT.items() if k != name})
        assert len(program) == 0


def test_an_unknown_kernel_is_refused() -> None:
    with pytest.raises(KeyError, match="no_such"):
        Program(library()).add("no_such", wait=True)


def test_a_program_ends_with_a_step_that_waits() -> None:
    """Else a thread might still be at work when the next one begins, or when results are read."""
    program = Program(library())
    with pytest.raises(ValueError, match="ends with a step that waits"):
        _ = program.address
    program.add("soft_cap", wait=False, **RIGHT)
    with pytest.raises(ValueError, match="ends with a step that waits"):
        _ = program.address
    program.add("soft_cap", wait=True, **RIGHT)
    assert program.address
    assert len(program) == 2


def test_memory_begins_on_a_cache_line_and_is_zero() -> None:
    for nbytes in (1, 64, 1000):
        memory = aligned(nbytes)
        assert memory.nbytes == nbytes
        assert memory.ctypes.data % 64 == 0
        assert not memory.any()
