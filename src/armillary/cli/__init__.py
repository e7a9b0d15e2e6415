"""The command line: `armillary COMMAND …`, one module for each command.

A command's module is named after it and holds one function of the same name. At its top it imports
typer and the shared options only; what the command runs is imported inside the function, so that
`armillary --help` stays quick. This file knows the commands and turns every way to end into an exit
code and at most one line on standard error:

    0    done
    1    a fault of armillary's (`--debug` shows where), or the reader of our output has gone; from
         doctor and diff: something was found
    2    something that the user gave cannot be used, or the command line cannot be read
    3    what came out does not hold to what was asked (the gates of an adaptation)
    130  interrupted (143 by SIGTERM)
"""

import contextlib
import io
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Annotated

import typer

from armillary import __version__
from armillary.cli._options import Debug, Interrupted, Invocation, one_line
from armillary.cli.chat import chat
from armillary.cli.compare import compare
from armillary.cli.convert import convert
from armillary.cli.diff import diff
from armillary.cli.doctor import doctor
from armillary.cli.evaluate import evaluate
from armillary.cli.extend import extend
from armillary.cli.generate import generate
from armillary.cli.inspect import inspect
from armillary.cli.prepare import prepare
from armillary.cli.prompts import prompts
from armillary.cli.pull import pull
from armillary.cli.quantize import quantize
from armillary.cli.tokenizer import tokenizer
from armillary.cli.train import train
from armillary.errors import UserError

COMMANDS: tuple[Callable[..., None], ...] = (
    pull,
    inspect,
    generate,
    chat,
    prompts,
    tokenizer,
    prepare,
    train,
    extend,
    evaluate,
    compare,
    quantize,
    convert,
    doctor,
    diff,
)

app = typer.Typer(
    name="armillary",
    add_completion=False,
    pretty_exceptions_enable=False,  # `main` prints errors
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _command in COMMANDS:
    app.command()(_command)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"armillary {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and stop."
        ),
    ] = False,
    debug: Debug = False,
) -> None:
    """Modern decoder language models: fetch, generate, train, extend, evaluate, convert.

    Examples:
      armillary pull smollm2-135m
      armillary generate smollm2-135m "The capital of France is"
      armillary chat smollm2-135m
      armillary inspect smollm2-135m
      armillary prepare python-stdlib --tokenizer smollm2-135m --out tokens
      armillary train examples/stdlib-small.yaml
      armillary extend plan smollm2-135m --to 32768
      armillary evaluate smollm2-135m --out results --minutes 10
      armillary quantize my-model --to q8_0 --out my-model.gguf
      armillary convert my-model my-model.gguf --to gguf
      armillary doctor my-model
      armillary diff my-model my-model.gguf
      armillary COMMAND --help

    Results go to standard output, progress and errors to standard error.
    """
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code.

    `arguments` are those after the program's name; those of the process when not given.
    """
    _open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A terminal that cannot show a character gets its escape, not an exception.
            stream.reconfigure(errors="backslashreplace")
    invocation = Invocation()
    try:
        code = _run(sys.argv[1:] if arguments is None else list(arguments), invocation)
        sys.stdout.flush()
    except BrokenPipeError:
        # What reads our output has ended. Python would flush once more at its end and complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code


def _open_closed_streams() -> None:
    """Let a stream that the caller has closed (`<&-`, `>&-`; Python has None there) be empty."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115


def _run(arguments: list[str], invocation: Invocation) -> int:
    try:
        code = app(arguments, prog_name="armillary", standalone_mode=False, obj=invocation)
    except BrokenPipeError:
        raise
    except KeyboardInterrupt:
        code = 130
    except Interrupted as interrupted:
        _say(interrupted.line)
        return interrupted.code
    except UserError as error:
        return _failed(str(error), 2, invocation)
    except typer.TyperException as error:
        return _failed(_with_help(error), error.exit_code, invocation)
    except OSError as error:
        # A full disk, a directory that may not be read: not ours to mend, so no fault of ours.
        where = f"{error.filename}: " if error.filename is not None else ""
        return _failed(f"{where}{error.strerror or error}", 2, invocation)
    except Exception as error:
        kind = type(error).__name__
        return _failed(
            f"a fault of armillary's own ({kind}: {error}); run it again with --debug to see where",
            1,
            invocation,
        )
    if code == 130:  # what typer makes of an interrupt
        _say("interrupted")
    return code or 0


def _failed(message: str, code: int, invocation: Invocation) -> int:
    if invocation.debug:
        traceback.print_exc()
    _say(one_line(message))
    return code


def _say(what: str) -> None:
    with contextlib.suppress(OSError):  # nowhere to say it; the exit code tells
        print(f"armillary: {what}", file=sys.stderr, flush=True)


def _with_help(error: typer.TyperException) -> str:
    """Return a usage error's message with the command whose help would have said it."""
    message = error.format_message().rstrip(".")
    context = getattr(error, "ctx", None)
    return message if context is None else f"{message} (see {context.command_path} --help)"
