"""Make the library's own code faulty for the length of a test.

A fault is told as a change of a function's text, as in a diff; the function's code is then put in
the place of the sound one, so that whoever imported the function meets the fault.
"""

import inspect
import textwrap
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any

import pytest


def mutate(
    monkeypatch: pytest.MonkeyPatch, function: Callable[..., Any] | property, old: str, new: str
) -> None:
    """Let `function` run as if `old`, which must stand in it exactly once, read `new`."""
    plain = _plain(function)
    source = textwrap.dedent(inspect.getsource(plain))
    assert source.count(old) == 1, f"{plain.__qualname__} holds {old!r} {source.count(old)} times"
    # In a class, since super() needs one around it.
    text = "class _:\n" + textwrap.indent(source.replace(old, new), "    ")
    code = _find(compile(text, inspect.getfile(plain), "exec"), plain.__name__)
    monkeypatch.setattr(plain, "__code__", code)


def _plain(function: Callable[..., Any] | property) -> FunctionType:
    """The function below a property, a bound class method or a decorator."""
    if isinstance(function, property):
        assert function.fget is not None
        function = function.fget
    unwrapped = inspect.unwrap(getattr(function, "__func__", function))
    assert isinstance(unwrapped, FunctionType)
    return unwrapped


def _find(code: CodeType, name: str) -> CodeType:
    body = next(part for part in code.co_consts if isinstance(part, CodeType))
    return next(
        part for part in body.co_consts if isinstance(part, CodeType) and part.co_name == name
    )
