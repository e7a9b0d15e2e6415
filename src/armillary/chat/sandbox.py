"""Jinja templates from strangers, rendered without a way into Python and within a budget.

Jinja's own sandbox keeps attributes such as __class__ away and makes values immutable. It does
not bound what a template costs. Here each loop step, call, filter and operator is paid for by a
budget of work, and whatever makes a text or a list is checked before it is made. The white-space
options, the filters and the functions are those that transformers renders chat templates with.
"""

import functools
import json
import re
from collections.abc import Callable, Iterable, Sized
from contextvars import ContextVar
from datetime import datetime
from types import BuiltinMethodType
from typing import Any, NoReturn, TypeVar

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from armillary.errors import UserError

_SOURCE = 1 << 20  # characters of a template
_TEXT = 4 << 20  # characters of any text, or of a container's contents, that a template makes
_NUMBER = 1024  # bits of any integer that it makes
_COUNT = 100_000  # steps of a range, and any width, that it asks for
_WORK = 1_000_000  # steps of a whole rendering, a few seconds
_CHARACTERS_A_STEP = 256
_NODES_A_STEP = 64  # of the template's tree, in the body of a loop
_ENTRY = 16  # characters that an entry of a container counts for

_FORBIDDEN_METHODS = frozenset({"encode", "expandtabs", "maketrans", "translate"})
_CONTAINER_METHODS = frozenset({"copy", "count", "get", "index", "items", "keys", "values"})
_LEFT_OUT = ("filesizeformat", "pprint", "random", "striptags", "urlize", "wordwrap", "xmlattr")
# Filters that do not make a text of what they are given.
_LAZY = frozenset(
    (
        *("abs", "attr", "batch", "count", "d", "default", "dictsort", "first", "float", "groupby"),
        *("int", "items", "last", "length", "list", "map", "max", "min", "reject", "rejectattr"),
        *("reverse", "round", "select", "selectattr", "slice", "sort", "sum", "unique"),
    )
)
_Result = TypeVar("_Result")
_LONG_WIDTH = re.compile(r"\d{5}|%[^%a-zA-Z]*\*|:[^{}]*\{")


class _OutOfBoundsError(Exception):
    """The template asked for more than its budget."""


class _Budget:
    """What a rendering may still spend."""

    def __init__(self) -> None:
        self.left = _WORK

    def spend(self, characters: int = 0, steps: int = 1) -> None:
        """Pay for steps and for the characters that they touch."""
        if characters > _TEXT:
            raise _OutOfBoundsError(
                f"makes a text of more than {_TEXT} characters, or a list as large"
            )
        self.left -= steps + characters // _CHARACTERS_A_STEP
        if self.left < 0:
            raise _OutOfBoundsError(f"takes more than {_WORK} steps")


_budget: ContextVar[_Budget] = ContextVar("budget of a rendering")
_marks: ContextVar[tuple[str, str]] = ContextVar("marks of a rendering")
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


def compile_template(source: str) -> jinja2.Template:
    """Compile a chat template. Raises UserError in one line when it is no Jinja."""
    if not isinstance(source, str):
        raise UserError(f"chat template: must be a string, not {type(source).__name__}")
    if len(source) > _SOURCE:
        raise UserError(f"chat template: has {len(source)} characters; at most {_SOURCE} are read")
    return _bounded(lambda: _environment().from_string(source))


def marks_generation(source: str) -> bool:
    """Whether a template says by the tag {% generation %} what the assistant wrote."""
    return _GENERATION.search(source) is not None


def render(
    template: jinja2.Template, variables: dict[str, Any], marks: tuple[str, str] = ("", "")
) -> str:
    """Render within a budget. Raises UserError in one line, with the template's line.

    `marks` are written where a block of {% generation %} begins and where it ends.
    """
    token = _marks.set(marks)
    try:
        return _bounded(lambda: template.render(variables))
    finally:
        _marks.reset(token)


def _bounded(work: Callable[[], _Result]) -> _Result:
    token = _budget.set(_Budget())
    try:
        return work()
    except Exception as error:  # a template can cause any of Python's
        raise UserError(_message(error)) from error
    finally:
        _budget.reset(token)


def _message(error: Exception) -> str:
    line = getattr(error, "lineno", None)
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<template>":
            line = trace.tb_lineno
        trace = trace.tb_next
    where = "chat template" if line is None else f"chat template: line {line}"
    if isinstance(error, SecurityError):
        problem = f"is refused: {error}"
    elif isinstance(error, RecursionError):
        problem = "calls itself too deep"
    elif isinstance(error, _OutOfBoundsError | jinja2.TemplateError):
        problem = str(error)
    else:
        problem = f"{type(error).__name__}: {error}"
    return f"{where}: {' '.join(problem.split())[:500]}"


def _measure(value: object, per_level: int = 0) -> int:
    """Characters that a value takes when it is written out, at least; stops counting at the limit.

    `per_level` is what each entry costs for each level that it is nested.
    """
    total = 0
    waiting: list[tuple[object, int]] = [(value, 0)]
    while waiting and total <= _TEXT:
        item, level = waiting.pop()
        total += _ENTRY + level * per_level
        if isinstance(item, str):
            total += len(item)
        elif isinstance(item, dict):
            waiting += [(x, level + 1) for pair in item.items() for x in pair]
        elif isinstance(item, list | tuple):
            waiting += [(x, level + 1) for x in item]
        elif isinstance(item, range):
            total += _ENTRY * len(item)
        elif isinstance(item, Namespace):
            waiting.append((object.__getattribute__(item, "_Namespace__attrs"), level + 1))
    return total


def _size(value: object) -> int:
    """Characters that a value counts for by itself, whatever its entries hold."""
    if isinstance(value, str):
        return len(value)
    return _ENTRY * len(value) if isinstance(value, Sized) else 0


def _spend(characters: int = 0) -> None:
    _budget.get().spend(characters)


def _checked_width(width: object) -> int:
    size = len(width) if isinstance(width, str) else abs(width) if isinstance(width, int) else 0
    if size > _COUNT:
        raise _OutOfBoundsError(f"asks for a width or a count of more than {_COUNT}")
    return size


def _format_size(pattern: str, values: object) -> int:
    if _LONG_WIDTH.search(pattern):
        raise _OutOfBoundsError(f"formats with a width that is not known to be under {_COUNT}")
    fields = pattern.count("%") + pattern.count("{")
    widths = 10_000 * fields if re.search(r"\d{3}", pattern) else 1_000 * fields
    return len(pattern) + widths + fields * _measure(values)


def _replace_size(text: str, old: object = "", new: object = "", *_: object) -> int:
    count = text.count(old) if isinstance(old, str) and old else len(text) + 1
    return len(text) + count * _measure(new)


def _join_size(separator: object, items: list[object]) -> int:
    return sum(map(_measure, items)) + len(items) * _measure(separator)


def _bits(operator: str, left: int, right: int) -> int:
    """Bits of a product or a power, at most; other operators make nothing long."""
    if operator == "*":
        return left.bit_length() + right.bit_length()
    return left.bit_length() * max(right, 0) if operator == "**" else 0


class _Toll:
    """Is paid when a template looks up how many steps a loop's or a macro's body takes."""

    def __getitem__(self, steps: int) -> None:
        _budget.get().spend(steps=steps)


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, in which everything that costs is paid for."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        return _PaidFor().visit(tree)  # type: ignore[no-any-return]

    def concat(self, pieces: Iterable[str]) -> str:
        """Join what a template, a block or a macro wrote."""
        kept = []
        total = 0
        for piece in pieces:
            total += len(piece)
            if total > _TEXT:
                break
            kept.append(piece)
        _spend(total)
        return "".join(kept)

    toll = _Toll()

    def unsafe_undefined(self, obj: object, attribute: str) -> NoReturn:
        """Refuse at once; Jinja's own sandbox prints such an attribute as nothing."""
        raise SecurityError(f"{attribute!r} of {type(obj).__name__} is kept from templates")

    def tilde(self, values: list[object]) -> str:
        """Join values as the operator ~ does."""
        _spend(sum(map(_measure, values)))
        return "".join(map(str, values))

    def mark(self, at_end: bool) -> str:
        """Return what stands where a block of {% generation %} begins or ends."""
        return _marks.get()[at_end]

    def literal(self, value: object) -> object:
        """Pay for a list, tuple or dict written in the template."""
        _spend(_measure(value))
        return value

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str):
            _spend(_format_size(left, right))
        elif operator == "+" and isinstance(left, Sized) and isinstance(right, Sized):
            _spend(_size(left) + _size(right))
        elif operator == "*" and isinstance(left, Sized) != isinstance(right, Sized):
            sized, times = (left, right) if isinstance(left, Sized) else (right, left)
            _spend(_size(sized) * max(times, 0) if isinstance(times, int) else 0)
        else:
            _spend()
            if type(left) is type(right) is int and _bits(operator, left, right) > _NUMBER:
                raise _OutOfBoundsError(f"makes a number of more than {_NUMBER} bits")
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        method = getattr(obj, "__wrapped__", obj)  # the sandbox wraps str.format
        if isinstance(method, BuiltinMethodType):
            args = self._pay_for_method(method, args, kwargs)
        else:
            _spend()
        return super().call(context, obj, *args, **kwargs)

    def _pay_for_method(
        self, method: BuiltinMethodType, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, ...]:
        owner, name = method.__self__, method.__name__
        if isinstance(owner, str) and name not in _FORBIDDEN_METHODS:
            size = len(owner)
            if name in ("format", "format_map"):
                size = _format_size(owner, [*args, kwargs])
            elif name == "replace":
                size = _replace_size(owner, *args)
            elif name == "join" and args:
                args = (list(args[0]),)
                size = _join_size(owner, args[0])
            elif name in ("center", "ljust", "rjust", "zfill") and args:
                size += _checked_width(args[0])
            _spend(size)
        elif isinstance(owner, dict | list | tuple | range) and name in _CONTAINER_METHODS:
            _spend(_size(owner))
        else:
            raise SecurityError(f"the method {name} of {type(owner).__name__} is not offered")
        return args


class _PaidFor(NodeTransformer):
    """Puts into a template's tree the calls that pay for what Jinja does not let one intercept."""

    def visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> Any:
        self.generic_visit(node, *args, **kwargs)
        if isinstance(node, nodes.For | nodes.Macro | nodes.CallBlock):
            steps = 1 + sum(1 for _ in node.find_all(nodes.Node)) // _NODES_A_STEP
            toll = nodes.EnvironmentAttribute("toll", lineno=node.lineno)
            paid = nodes.Getitem(toll, nodes.Const(steps), "load", lineno=node.lineno)
            node.body.insert(0, nodes.ExprStmt(paid, lineno=node.lineno))
        elif isinstance(node, nodes.Concat):
            return _call("tilde", node.lineno, nodes.List(node.nodes, lineno=node.lineno))
        elif isinstance(node, nodes.List | nodes.Dict) or (
            isinstance(node, nodes.Tuple) and node.ctx == "load"
        ):
            return _call("literal", node.lineno, node)
        return node


def _call(name: str, line: int, *args: nodes.Expr) -> nodes.Call:
    """A call of a method of the environment."""
    function = nodes.EnvironmentAttribute(name, lineno=line)
    return nodes.Call(function, list(args), [], None, None, lineno=line)


class _Generation(jinja2.ext.Extension):
    """The tag {% generation %}, a block of its own that marks what the assistant wrote."""

    tags = {"generation"}  # noqa: RUF012 - Jinja reads a class attribute

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        begin, end = (
            nodes.Output([_call("mark", line, nodes.Const(at_end))], lineno=line)
            for at_end in (False, True)
        )
        return nodes.Scope([begin, *body, end], lineno=line)


@functools.cache
def _environment() -> _Environment:
    environment = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        optimized=False,  # nothing is computed while a template is compiled
        finalize=_printed,
        extensions=[_Generation, jinja2.ext.loopcontrols],
    )
    for name in _LEFT_OUT:
        del environment.filters[name]
    environment.filters["tojson"] = _tojson
    for name, function in environment.filters.items():
        environment.filters[name] = _paid_filter(name, function)
    del environment.globals["lipsum"]
    environment.globals |= {
        "range": _range,
        "dict": _dict,
        "namespace": Namespace,
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
    }
    return environment


def _paid_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    position = int(hasattr(function, "jinja_pass_arg"))

    @functools.wraps(function)
    def paid(*args: Any, **kwargs: Any) -> Any:
        head, value, rest = args[:position], args[position], args[position + 1 :]
        options = [*rest, *kwargs.values()]
        if name == "join":
            value = list(value)
            size = _join_size(options, value)
        elif name in _LAZY:
            size = _size(value)
            if name in ("batch", "slice", "round"):
                size += _ENTRY * sum(map(_checked_width, options))
            elif name == "sum" and any(isinstance(option, list | tuple) for option in options):
                raise SecurityError("sum adds numbers only")
        elif name == "replace":
            size = _replace_size(str(value) if _measure(value) <= _TEXT else "", *options)
        elif name == "format":
            size = _format_size(str(value), options)
        elif name == "center":
            size = _measure(value) + sum(map(_checked_width, options))
        elif name == "indent":
            lines = value.count("\n") + 1 if isinstance(value, str) else 1
            size = _measure(value) + lines * sum(map(_checked_width, options or [4]))
        elif name == "tojson":
            size = 0  # pays itself
        else:
            size = _measure(value) + _measure(options)
        _spend(size)
        return function(*head, value, *rest, **kwargs)

    return paid


def _printed(value: object) -> object:
    _spend(_measure(value))
    return value


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    width = _checked_width(indent) + sum(map(_checked_width, separators or ()))
    _spend(_measure(value, per_level=width))
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _range(*args: int) -> range:
    steps = range(*args)
    if len(steps) > _COUNT:
        raise _OutOfBoundsError(f"asks for a range of more than {_COUNT} steps")
    _spend(_ENTRY * len(steps))
    return steps


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    entries = dict(*args, **kwargs)
    _spend(_measure(entries))
    return entries


def _raise_exception(message: object) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
