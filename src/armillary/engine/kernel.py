"""What a kernel is: a Python function that Numba compiles, and how a program calls it.

A kernel's parameters are `thread` and `threads`, by which the threads share out its work, and then
its arguments, annotated with what they are. In a program they lie side by side, 8 bytes each.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

Address = Annotated[int, "address"]
"""Where something lies in memory; 0 for nothing."""
Size = Annotated[int, "size"]
"""A count that the program fixes."""
Live = Annotated[int, "live"]
"""A count that changes between runs: the program holds where it is kept, a kernel gets it."""
Number = Annotated[float, "number"]
"""A float32 that the program fixes."""

Kind = Literal["address", "size", "live", "number"]
_KINDS: dict[Any, Kind] = {Address: "address", Size: "size", Live: "live", Number: "number"}


@dataclass(frozen=True)
class Kernel:
    """A function to compile, its name in the object file, and the kinds of its arguments.

    Sums may be taken in any order, to be taken as vectors, unless they are `exact`.
    """

    name: str
    function: Callable[..., None]
    arguments: dict[str, Kind]
    exact: bool = False


def kernel(function: Callable[..., None], *variant: object, exact: bool = False) -> Kernel:
    """The kernel that a function is. `variant` tells apart those that a factory makes of one."""
    names = list(inspect.signature(function).parameters)
    if names[:2] != ["thread", "threads"]:
        raise TypeError(f"{function.__name__} must begin with (thread, threads), not {names[:2]}")
    kinds = {}
    for name in names[2:]:
        if function.__annotations__.get(name) not in _KINDS:
            raise TypeError(f"{function.__name__}: {name} is no Address, Size, Live or Number")
        kinds[name] = _KINDS[function.__annotations__[name]]
    name = "_".join([function.__name__, *map(str, variant)])
    return Kernel(name, function, kinds, exact)
