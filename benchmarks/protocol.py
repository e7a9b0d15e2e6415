"""What every benchmark shares: rows against a peer or a ceiling of the same run, and three flags.

A row says what ours and the peer's figure are, their ratio (above 1 is better for us), the goal
for the ratio, and whether it holds. Machines are noisy: figures are medians of repeats that take
turns, and only ratios from one run count. A figure that no machine changes, such as a loss, is held
to bounds instead.

    --json    one object a line        --quick   within a minute or so, where it can
    --check   exit 1 when a row does not hold
"""

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Row:
    """One claim. `higher_is_better` tells speeds from times and sizes."""

    name: str
    ours: float
    peer_name: str
    peer: float
    unit: str
    goal: float | None = None
    higher_is_better: bool = True

    @property
    def ratio(self) -> float:
        """How many times better than the peer."""
        better, worse = (self.ours, self.peer) if self.higher_is_better else (self.peer, self.ours)
        return better / worse

    @property
    def holds(self) -> bool | None:
        """Whether the goal is met; None where there is none."""
        return None if self.goal is None else self.ratio >= self.goal


@dataclass(frozen=True)
class Bound:
    """One claim on a figure itself. `margin` is half its interval of 95 %, where it has one."""

    name: str
    ours: float
    unit: str
    low: float | None = None
    high: float | None = None
    margin: float | None = None

    @property
    def holds(self) -> bool | None:
        """Whether the figure is within its bounds; None where there are none."""
        if self.low is None and self.high is None:
            return None
        low = -math.inf if self.low is None else self.low
        return low <= self.ours <= (math.inf if self.high is None else self.high)


def parser(description: str | None) -> argparse.ArgumentParser:
    """An argument parser with the three flags."""
    arguments = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--json", action="store_true", help="one object a line")
    arguments.add_argument("--quick", action="store_true", help="fewer repeats and sizes")
    arguments.add_argument("--check", action="store_true", help="exit 1 when a row does not hold")
    return arguments


def finish(rows: Iterable[Row | Bound], arguments: argparse.Namespace) -> None:
    """Print the rows and end the process with the code that `--check` asks for."""
    rows = list(rows)
    if arguments.json:
        for row in rows:
            ratio = {"ratio": row.ratio} if isinstance(row, Row) else {}
            print(json.dumps(asdict(row) | ratio | {"holds": row.holds}))
    else:
        _print_ratios([row for row in rows if isinstance(row, Row)])
        _print_bounds([row for row in rows if isinstance(row, Bound)])
    sys.exit(1 if arguments.check and any(row.holds is False for row in rows) else 0)


def note(text: str) -> None:
    """Say on standard error what is going on."""
    print(text, file=sys.stderr, flush=True)


def medians(runs: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, float]:
    """The median of each measurement, taken in turns; one more of each first warms up."""
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(repeats + 1):
        for name, run in runs.items():
            value = run()
            if repeat:
                taken[name].append(value)
    return {name: statistics.median(values) for name, values in taken.items()}


_HOLDS = {True: "yes", False: "no", None: "–"}


def _print_ratios(rows: list[Row]) -> None:
    header = ("", "ours", "peer", "", "", "ratio", "goal", "holds")
    body = [
        (
            row.name,
            f"{row.ours:,.4g}",
            f"{row.peer:,.4g}",
            row.unit,
            row.peer_name,
            f"{row.ratio:.2f}",
            "–" if row.goal is None else f"{row.goal:.2f}",
            _HOLDS[row.holds],
        )
        for row in rows
    ]
    _print_table(header, body, left={0, 3, 4})


def _print_bounds(rows: list[Bound]) -> None:
    header = ("", "ours", "±", "", "from", "to", "holds")
    body = [
        (
            row.name,
            f"{row.ours:+.4f}",
            "–" if row.margin is None else f"{row.margin:.4f}",
            row.unit,
            "–" if row.low is None else f"{row.low:+.4g}",
            "–" if row.high is None else f"{row.high:+.4g}",
            _HOLDS[row.holds],
        )
        for row in rows
    ]
    _print_table(header, body, left={0, 3})


def _print_table(
    header: tuple[str, ...], body: list[tuple[str, ...]], left: Container[int]
) -> None:
    """Columns as wide as they need to be; nothing where there are no rows."""
    if not body:
        return
    widths = [max(len(line[column]) for line in [header, *body]) for column in range(len(header))]
    for line in [header, *body]:
        cells = [
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())
