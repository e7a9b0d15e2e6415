"""What several commands share: their argument and option types, and how they print.

A command takes `debug: Debug = False` and does nothing with it: the option's callback notes it for
the frame.
"""

import json
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from armillary.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console


@dataclass
class Invocation:
    """What one run of the command line was asked for that concerns every command."""

    debug: bool = False


class Interrupted(Exception):  # noqa: N818  # like KeyboardInterrupt, it is no error
    """The user, or the system, has interrupted, and there is more to say than that.

    `code` is the exit code: 128 and the signal's number.
    """

    def __init__(self, said: str, code: int = 130) -> None:
        super().__init__(said)
        self.code = code

    @property
    def line(self) -> str:
        """What is printed of it."""
        return f"interrupted; {self}"


class NotReached(Interrupted):
    """What was asked for does not hold of what came out, such as the gates of an adaptation."""

    def __init__(self, said: str) -> None:
        super().__init__(said, code=3)

    @property
    def line(self) -> str:
        """What is printed of it."""
        return str(self)


def _note_debug(context: typer.Context, wanted: bool) -> bool:
    if wanted and isinstance(context.obj, Invocation):
        context.obj.debug = True
    return wanted


Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="An alias (smollm2-135m), a directory, a .gguf file, or a Hub repository "
        "(owner/name, owner/name@revision, owner/name/file.gguf).",
        show_default=False,
    ),
]
Json = Annotated[
    bool,
    typer.Option(
        "--json", help="Print facts for programs, one object a line.", rich_help_panel="Output"
    ),
]
IgnoreKey = Annotated[
    list[str] | None,
    typer.Option(
        "--ignore-key",
        metavar="KEY",
        help="Go on although this key of the model's configuration is unknown (may be repeated).",
        rich_help_panel="Loading",
        show_default=False,
    ),
]
Debug = Annotated[
    bool,
    typer.Option(
        "--debug",
        callback=_note_debug,
        is_eager=True,
        help="Show the traceback of an error.",
    ),
]


def one_line(text: str) -> str:
    """Join lines, and show control characters (a file's own text may hold them) as escapes."""
    joined = " ".join(text.split())
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in joined)


def utf8(raw: bytes, where: str) -> str:
    """Decode what a user gave. Raises UserError naming the place and the byte that is none."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{where}: byte {error.start} is no valid UTF-8; convert it first"
        ) from None


def shows_styles(stream: TextIO) -> bool:
    """Whether what reads a stream is a terminal that can show bold and colours, and may."""
    capable = os.environ.get("TERM", "dumb") not in {"dumb", "unknown"}
    return stream.isatty() and capable and not os.environ.get("NO_COLOR")


def dim(text: str, stream: TextIO) -> str:
    """Return a text as it is written to a stream when it matters less than the model's."""
    return f"\x1b[2m{text}\x1b[0m" if shows_styles(stream) else text


def progress_console() -> "Console":
    """Return a console on standard error, where everything goes that is not a result."""
    from rich.console import Console

    return Console(stderr=True)


def output_console() -> "Console":
    """Return one on standard output; where that is no terminal, so wide that no row is broken."""
    from rich.console import Console

    console = Console(markup=False, highlight=False, emoji=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 10_000
    return console


def print_json(facts: Mapping[str, object]) -> None:
    """Print one object on a line of its own to standard output, and pass it on at once."""
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


def print_keys(keys: Iterable[tuple[str, str, str, str]], json: bool) -> None:
    """Print the keys of a file of settings: name, type, default ("" for none) and meaning."""
    for name, kind, default, meaning in keys:
        if json:
            print_json({"key": name, "type": kind, "default": default, "meaning": meaning})
        elif kind == "section":
            print(f"\n{name}{' (null)' if default else ''}: {meaning}")
        else:
            given = f", default {default}" if default else ", must be given"
            print(f"  {name}  ({kind}{given})\n      {meaning}")
