"""Divisors for the rule longrope, found by evolution (Ding et al. 2024, §3.2, algorithm 1).

Divisors, one a channel pair, never fall from pair to pair. Those that a measure finds best are
kept, and new ones are made of them by mutation and crossover. The first are what position
interpolation, NTK and YaRN divide by, so what is found is no worse than these where it was
measured. Of the paper's search, the number of first tokens that stay unscaled is left out: no file
of a model has a place for it.

Each evaluation is noted in a file before the next one begins. The search is a function of its seed
and of what was measured, so whoever stops it, the same call replays the notes and goes on.
"""

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

from armillary.errors import UserError
from armillary.files import as_user_error, parse_json, write_atomically
from armillary.rope_scaling import NTK, YaRN, base_frequencies

# The paper's: how likely each pair is changed, the largest divisor over the factor, the grid.
_CHANGED, _BEYOND, _STEP = 0.3, 1.25, 0.01
_TRIES = 64  # to make one that is new

Factors = tuple[float, ...]
Fitness = Callable[[Factors], float]


@dataclass(frozen=True)
class Evaluation:
    """One candidate that was measured; `start` is its name among the first, if it is one."""

    number: int
    factors: Factors
    loss: float
    start: str | None


@dataclass(frozen=True)
class Found:
    """The best of all, and what the first ones came to by name."""

    best: Evaluation
    starts: Mapping[str, float]
    evaluations: int


def starting_factors(
    base: float, d_rotary: int, *, factor: float, window: int
) -> dict[str, Factors]:
    """What other rules divide each pair's frequency by, (d_rotary / 2,), by the rule's name."""
    theta = base_frequencies(base, d_rotary)
    ntk = NTK(factor).frequencies(base, d_rotary, window)
    yarn = YaRN(factor, window).frequencies(base, d_rotary, window)
    made = {"linear": theta / (theta / factor), "ntk": theta / ntk, "yarn": theta / yarn}
    return {name: tuple(float(each) for each in divisors) for name, divisors in made.items()}


def search(
    fitness: Fitness,
    starts: Mapping[str, Factors],
    *,
    factor: float,
    evaluations: int,
    population: int = 16,
    seed: int = 0,
    notes: Path | None = None,
    about: Mapping[str, Any] | None = None,
    told: Callable[[Evaluation, Evaluation], None] | None = None,
) -> Found:
    """Look for the divisors with the lowest fitness.

    fitness      the loss of a candidate; one that is no number counts as infinite
    factor       divisors go from 1 to 1.25 times this
    evaluations  how many candidates are measured; more of them, later, go on from the notes
    population   how many of a generation are kept; as many are made of them, half by mutation and
                 half by crossover
    notes        the file of what was measured
    about        what decides the fitness; notes of a search about something else are refused
    told         hears of each evaluation, and of the best so far
    Raises UserError for notes that cannot be gone on with, ValueError for a population below 2 or
    fewer evaluations than starts.
    """
    if population < 2 or evaluations < len(starts):
        raise ValueError(
            f"a population of {population} and {evaluations} evaluations; at least 2 and "
            f"{len(starts)} are needed"
        )
    settings = {"about": dict(about or {}), "population": population, "seed": seed}
    settings |= {"factor": factor, "starts": {name: [*f] for name, f in starts.items()}}
    best: Evaluation | None = None
    measured: dict[Factors, float] = {}
    names: dict[Factors, str] = {}
    for name, factors in starts.items():
        names.setdefault(factors, name)
    with _Notes(notes, settings) as noted:
        for number, factors in enumerate(_candidates(starts, measured, factor, population, seed)):
            if number == evaluations:
                break
            loss = noted.loss(number, factors)
            if loss is None:
                loss = fitness(factors)
                loss = loss if math.isfinite(loss) else math.inf
                noted.add(factors, loss)
            measured[factors] = loss
            evaluation = Evaluation(number, factors, loss, names.get(factors))
            best = evaluation if best is None or loss < best.loss else best
            if told is not None:
                told(evaluation, best)
    assert best is not None  # there is a start at least
    return Found(best, {name: measured[f] for name, f in starts.items()}, len(measured))


def _candidates(
    starts: Mapping[str, Factors],
    measured: Mapping[Factors, float],
    factor: float,
    population: int,
    seed: int,
) -> Iterator[Factors]:
    """Candidates, none of them twice; the next is asked for when the one before is `measured`."""
    random = Random(seed)
    known = list(dict.fromkeys(starts.values()))
    yield from known
    parents = known
    while True:
        children: list[Factors] = []
        first = len(parents) < population  # then the population is filled up with mutations
        for number in range(population):
            crossed = not first and number >= population // 2
            made = _crossed(parents, random) if crossed else None
            made = made or _mutated(random.choice(parents), factor, random)
            for _ in range(_TRIES):
                if made not in measured and made not in children:
                    break
                made = _mutated(made, factor, random)
            else:
                continue
            children.append(made)
        if not children:
            return  # the grid has no more
        yield from children
        parents = sorted(measured, key=lambda each: (measured[each], each))[:population]


def _mutated(factors: Factors, factor: float, random: Random) -> Factors:
    """Some divisors drawn anew between those of their neighbours."""
    made = [*factors]
    for pair in range(len(made)):
        if random.random() < _CHANGED:
            low = made[pair - 1] if pair else 1.0
            high = made[pair + 1] if pair + 1 < len(made) else max(low, _BEYOND * factor)
            drawn = low + random.random() * (high - low)
            made[pair] = min(high, max(low, round(drawn / _STEP) * _STEP))
    return tuple(made)


def _crossed(parents: Sequence[Factors], random: Random) -> Factors | None:
    """Divisors of one parent, some in their place from another; None where they would fall."""
    for _ in range(_TRIES):
        one, other = random.choice(parents), random.choice(parents)
        made = tuple(
            b if random.random() < _CHANGED else a for a, b in zip(one, other, strict=True)
        )
        if made not in {one, other} and all(a <= b for a, b in pairwise(made)):
            return made
    return None


class _Notes:
    """A file of JSON lines: what the search is, then each candidate with its loss."""

    def __init__(self, path: Path | None, settings: dict[str, Any]) -> None:
        self._path = path
        self._settings = settings
        self._there: list[tuple[Factors, float]] = []

    def __enter__(self) -> "_Notes":
        if self._path is not None:
            with as_user_error(self._path):
                self._open(self._path)
        return self

    def __exit__(self, *_: object) -> None:
        if self._path is not None:
            self._file.close()

    def _open(self, path: Path) -> None:
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        whole = [line for line in lines if line.endswith(b"\n")]  # a kill may cut the last short
        if whole:
            self._read(path, whole)
        path.parent.mkdir(parents=True, exist_ok=True)
        with write_atomically(path) as file:
            file.writelines(whole or [_line(self._settings)])
        self._file = path.open("ab")

    def _read(self, path: Path, lines: list[bytes]) -> None:
        there = parse_json(lines[0], f"{path}: line 1")
        ours = json.loads(_line(self._settings))
        for name in {**ours, **there}:
            if there.get(name) != ours.get(name):
                raise UserError(
                    f"{path}: holds another search, {name} is {_short(there.get(name))} and not "
                    f"{_short(ours.get(name))}; remove it, or choose another out"
                )
        for number, line in enumerate(lines[1:], 2):
            entry = parse_json(line, f"{path}: line {number}")
            try:
                loss = math.inf if entry["loss"] is None else float(entry["loss"])
                self._there.append((tuple(map(float, entry["factors"])), loss))
            except (KeyError, TypeError, ValueError) as error:
                raise UserError(
                    f"{path}: line {number}: is no evaluation; remove the file to begin anew"
                ) from error

    def loss(self, number: int, factors: Factors) -> float | None:
        """What was measured before. Raises UserError where it was another candidate's turn."""
        if number >= len(self._there):
            return None
        there, loss = self._there[number]
        if there != factors:
            raise UserError(
                f"{self._path}: line {number + 2}: is not what this search would have measured; "
                "remove the file to begin anew"
            )
        return loss

    def add(self, factors: Factors, loss: float) -> None:
        """Note an evaluation, and see that it is on the disk."""
        if self._path is None:
            return
        with as_user_error(self._path):
            known = loss if math.isfinite(loss) else None
            self._file.write(_line({"factors": [*factors], "loss": known}))
            self._file.flush()
            os.fsync(self._file.fileno())


def _line(entries: Mapping[str, Any]) -> bytes:
    return json.dumps(entries, allow_nan=False).encode() + b"\n"


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "…"
