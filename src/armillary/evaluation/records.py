"""What an evaluation writes: cells of work, and the rows that each gives.

A cell is done whole or not at all, and resuming goes by its key. A row is one measured fact that
can be set beside the same fact of another model: `instance` names it, and `prompt` is the checksum
of the tokens that were asked, so that two rows with the same of both were measured on the same
thing. Rows hold no times and no dates: the same evaluation writes the same bytes.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from armillary.evaluation.scoring import Scorer

Setting = str | int | float | bool | None


@dataclass(frozen=True)
class Cell:
    """A piece of work of a task: its key (task/…, unique in a run), and what determines it.

    `work` are the tokens that it takes in, as pairs of (tokens already there, tokens new to them):
    what its time is estimated from.
    """

    key: str
    settings: Mapping[str, Setting]
    work: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class LossRow:
    """The summed loss of some target tokens under some length of context.

    instance  names the targets: rows of other lengths and models with the same name are of the same
    document  what intervals draw by: targets of one document are not independent
    length    tokens of context and targets together, as the model took them in
    position  of the first target in what the model took in
    group     "all", under each length; "key", those of them whose loss tells of far context;
              "position", what stands at a position of one long context, where `length` is up to the
              last target; "short", fixed short texts
    """

    task: str
    instance: str
    prompt: str
    document: str
    length: int
    position: int
    group: str
    tokens: int
    nats: float


@dataclass(frozen=True)
class QuestionRow:
    """A question after a context, scored by forcing its answer.

    variant    which of the task's kinds ("passkey", "near-miss", …)
    length     tokens of context, question and answer together
    factors    what the question varies in: depth (0 to 1), distractors, hops, …
    logprob    nats of the whole answer
    control    the same where what answers the question is not in the context; None where there is
               no such control
    exact      whether every token of the answer was the likeliest
    rank       0 when no other candidate was as likely as the answer, and so on
    candidates how many there were, the answer included: chance is 1 / candidates; 0 where none were
    """

    task: str
    instance: str
    prompt: str
    variant: str
    length: int
    factors: Mapping[str, Setting]
    logprob: float
    control: float | None
    exact: bool
    rank: int
    candidates: int


@dataclass(frozen=True)
class ChoiceRow:
    """A short task's instance: which of its choices the model finds likeliest.

    correct             by log-probability
    correct_normalised  by log-probability per character of the choice (lm-eval's acc_norm); None
                        for tasks without choices
    logprobs            of each choice, nats (of the one continuation for LAMBADA)
    answer              the right choice's number
    cut                 tokens of its start that were left out, where it is longer than the window
    """

    task: str
    instance: str
    prompt: str
    correct: bool
    correct_normalised: bool | None
    logprobs: tuple[float, ...]
    answer: int
    cut: int = 0


Row = LossRow | QuestionRow | ChoiceRow


class Task(Protocol):
    """Something that is measured, in cells.

    `version` changes with anything that changes what is asked or how it is scored.
    """

    @property
    def name(self) -> str:
        """The first part of its cells' keys."""

    @property
    def version(self) -> int:
        """Which of its definitions this is."""

    def cells(self) -> Sequence[Cell]:
        """All cells, in order, a pure function of the task's settings and seed."""

    def run(self, cell: Cell, scorer: Scorer) -> list[Row]:
        """Measure one cell."""


def prompt_checksum(*parts: Iterable[int]) -> str:
    """16 hexadecimal digits of SHA-256 over token ids, with the borders between parts."""
    digest = hashlib.sha256()
    for part in parts:
        ids = np.asarray(list(part), dtype="<i8")
        digest.update(len(ids).to_bytes(8, "little") + ids.tobytes())
    return digest.hexdigest()[:16]


@dataclass(frozen=True)
class Run:
    """What was evaluated, and how: the first line of a file of results.

    name             as the user calls the model
    model            checksums of weights, configuration and tokenizer, and what the model is:
                     parameters, rule, base, dtype, engine
    window           the positions that it claims
    original_window  those of the model before any extension: what cropping crops to
    tasks            each task's version and settings
    plan             what a budget of time made of what was asked; empty without one
    """

    name: str
    model: Mapping[str, Setting]
    window: int
    original_window: int
    seed: int
    tasks: Mapping[str, Mapping[str, Setting]] = field(default_factory=dict)
    plan: Mapping[str, Setting] = field(default_factory=dict)
