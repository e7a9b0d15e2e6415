"""How long `armillary --help` takes beside a program that only imports typer and rich.

The peer is the smallest program with the same command line: typer's help, drawn by rich. Both are
whole processes, from start to end, in turns.
"""

import subprocess
import sys
import time
from collections.abc import Callable

from protocol import Row, finish, medians, parser

ARMILLARY = "import sys; from armillary.cli import main; sys.exit(main(['--help']))"
IMPORT = "import armillary"
TYPER_AND_RICH = """
import rich
import typer

app = typer.Typer(add_completion=False, rich_markup_mode="rich")

@app.command()
def one(name: str) -> None:
    "Say one thing."

@app.command()
def two(name: str) -> None:
    "Say another."

app(["--help"])
"""


def seconds(program: str) -> Callable[[], float]:
    """Return a measurement of one process that runs the program."""

    def measure() -> float:
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.DEVNULL)
        return time.perf_counter() - start

    return measure


def main() -> None:
    """Measure, print and check."""
    arguments = parser(__doc__).parse_args()
    peer = "typer and rich"
    programs = {"armillary --help": ARMILLARY, "import armillary": IMPORT, peer: TYPER_AND_RICH}
    runs = {name: seconds(program) for name, program in programs.items()}
    taken = medians(runs, repeats=5 if arguments.quick else 20)
    # At most twice the peer's time, which is a ratio of at least a half.
    rows = [
        Row(name, taken[name], peer, taken[peer], "s", goal=0.5, higher_is_better=False)
        for name in ("armillary --help", "import armillary")
    ]
    finish(rows, arguments)


if __name__ == "__main__":
    main()
