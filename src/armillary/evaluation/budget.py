"""A grid that fits a time: fewer instances first, then fewer steps of what questions vary in.

What a cell costs is estimated from the tokens that it takes in, and from the model's own speed at
two lengths. Knows no tasks: what is asked is a `Grid`, and what it costs is for the caller to say.
"""

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from armillary.errors import UserError
from armillary.evaluation.records import Setting
from armillary.evaluation.scoring import Continuation, Scorer

Work = Sequence[tuple[int, int]]

_FILLED = 0.9  # share of the time that is planned for; the rest is for what no estimate knows
_SHORT, _LONG = 128, 1024  # tokens that a speed is measured with
_PATIENCE = 5.0  # seconds that the longer one may take


@dataclass(frozen=True)
class Speed:
    """Seconds that a token takes, and those that reading one position before it takes."""

    per_token: float
    per_pair: float

    def seconds(self, work: Work) -> float:
        """Estimate the time of a piece of work, (tokens there, tokens new to them) each."""
        return sum(
            self.per_token * new + self.per_pair * new * (there + new / 2) for there, new in work
        )


RELATIVE = Speed(1.0, 1 / 8192)  # in times of a token: how work is weighed before it is measured


def measured_speed(scorer: Scorer) -> Speed:
    """Take the time of a short and of a longer text, and what grows with each length from them."""
    short = min(_SHORT, scorer.window // 2)
    seconds = _timed(scorer, short)
    long = min(_LONG, scorer.window)
    while long > 2 * short and seconds * (long / short) ** 1.5 > _PATIENCE:
        long //= 2
    longer = _timed(scorer, long)
    per_pair = max(0.0, 2 * (longer / long - seconds / short) / (long - short))
    return Speed(max(longer / long - per_pair * long / 2, 1e-9), per_pair)


def _timed(scorer: Scorer, length: int) -> float:
    """Return the shorter of two times; the first may still wake what sleeps."""
    ids = [number % scorer.vocab_size for number in range(length)]
    half = max(1, length // 2)
    times = []
    for _ in range(2):
        scorer.begin()
        start = time.perf_counter()
        scorer.score(ids[:half], [Continuation(tuple(ids[half:]), length - half)])
        times.append(time.perf_counter() - start)
    scorer.begin()
    return min(times)


@dataclass(frozen=True)
class Grid:
    """How much is asked; a user can say every entry, and a budget can make less of it.

    lengths      tokens of a context, shortest first
    instances    contexts for each place of a question's grid
    windows      stretches of text that losses are measured on
    depths       how many places between the beginning (0) and the end (1) of a context
    distractors  how many other records stand beside the one that is asked for
    hops         that a question goes over
    limit        questions of each short task; None for all
    """

    lengths: tuple[int, ...]
    instances: int = 4
    windows: int = 16
    depths: int = 11
    distractors: tuple[int, ...] = (15,)
    hops: tuple[int, ...] = (1, 2, 4)
    limit: int | None = 500


ENTRIES = frozenset(field.name for field in fields(Grid))


@dataclass(frozen=True)
class Plan:
    """A grid that was made to fit, what it will take, and what was asked for."""

    asked: Grid
    grid: Grid
    minutes: float
    seconds: float

    @property
    def left_out(self) -> tuple[str, ...]:
        """What became less, a line for each: "instances 8 → 4"."""
        return tuple(
            f"{name} {_text(before)} → {_text(after)}"
            for name, before, after in _changes(self.asked, self.grid)
        )

    @property
    def fits(self) -> bool:
        """Whether even the least grid is within the time."""
        return self.seconds <= 60 * self.minutes

    def settings(self) -> dict[str, Setting]:
        """What the header of results keeps of it: so `kept` makes the same grid again."""
        changes = {f"{name}": _text(after) for name, _, after in _changes(self.asked, self.grid)}
        return {"minutes": self.minutes, **_entries(self.asked, "asked"), **changes}


def fitted(
    asked: Grid,
    minutes: float,
    cost: Callable[[Grid], float],
    matters: Collection[str] = ENTRIES,
    *,
    spent: float = 0.0,
) -> Plan:
    """Make a grid that takes no longer than some minutes; `cost` estimates a grid's seconds.

    `matters` are the entries of the grid that the tasks look at; the others stay as they are.
    `spent` are seconds of the time that are gone already.

    Instances (of questions, losses, short tasks) become fewer first, since they cost certainty
    and no answer; then depths, distractors and hops; then the longest lengths are left out. What
    is left in the end is the grid even where it takes longer.
    """
    grid, seconds = asked, 0.0
    for grid in _less_and_less(asked, matters):
        seconds = cost(grid)
        if seconds <= 60 * minutes * _FILLED - spent:
            break
    return Plan(asked, grid, minutes, seconds)


def kept(
    asked: Grid, minutes: float | None, plan: Mapping[str, Setting], where: str
) -> Grid | None:
    """Return the grid that an earlier call planned for the same wish, from its header.

    None where nothing was planned. Raises UserError when something else was asked then.
    """
    if not plan and minutes is None:
        return None
    wished = {"minutes": minutes, **_entries(asked, "asked")}
    for name, value in wished.items():
        if plan.get(name) != value:
            before, now = (value_ or "none" for value_ in (plan.get(name), value))
            raise UserError(
                f"{where}: was begun with {name.removeprefix('asked_')} {before}, not {now}; ask "
                "for the same, or choose another directory"
            )
    changes: dict[str, Any] = {
        field.name: _value(field.name, plan[field.name])
        for field in fields(Grid)
        if field.name in plan
    }
    return replace(asked, **changes)


def _less_and_less(grid: Grid, matters: Collection[str] = ENTRIES) -> Iterator[Grid]:
    yield grid
    while (fewer := _fewer_instances(grid, matters)) != grid:
        grid = fewer
        yield grid
    while "depths" in matters and grid.depths > 3:
        grid = replace(grid, depths=max(3, grid.depths - 2))
        yield grid
    for name in ("distractors", "hops"):
        while name in matters and len(values := getattr(grid, name)) > 2:
            ends: dict[str, Any] = {name: (*values[:-2], values[-1])}
            grid = replace(grid, **ends)
            yield grid
    while "lengths" in matters and len(grid.lengths) > 1:
        grid = replace(grid, lengths=grid.lengths[:-1])
        yield grid


def _fewer_instances(grid: Grid, matters: Collection[str]) -> Grid:
    """Three quarters of each kind of instance, of which some must stay for an interval."""
    fewer: dict[str, Any] = {
        name: min(count, max(least, count * 3 // 4))
        for name, least in (("instances", 2), ("windows", 4), ("limit", 50))
        if name in matters and (count := getattr(grid, name)) is not None
    }
    return replace(grid, **fewer)


def _changes(asked: Grid, grid: Grid) -> list[tuple[str, object, object]]:
    pairs = [(f.name, getattr(asked, f.name), getattr(grid, f.name)) for f in fields(Grid)]
    return [(name, before, after) for name, before, after in pairs if before != after]


def _entries(grid: Grid, prefix: str) -> dict[str, Setting]:
    return {f"{prefix}_{f.name}": _text(getattr(grid, f.name)) for f in fields(Grid)}


def _text(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _value(name: str, text: Setting) -> object:
    numbers = tuple(int(part) for part in str(text).split(","))
    return numbers if name in {"lengths", "distractors", "hops"} else numbers[0]
