"""What the events of a run, resumed or not, come to."""

import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Self

from armillary.training.events import (
    CheckpointSaved,
    Event,
    Notice,
    RunEnded,
    RunStarted,
    Sampled,
    StepDone,
    Validated,
)
from armillary.wording import loss_text


@dataclass
class History:
    """The events of a run by kind, in order, and the figures that follow from them.

    Figures of a run of which too little is known are None.
    """

    starts: list[RunStarted] = field(default_factory=list)
    steps: list[StepDone] = field(default_factory=list)
    validations: list[Validated] = field(default_factory=list)
    samples: list[Sampled] = field(default_factory=list)
    checkpoints: list[CheckpointSaved] = field(default_factory=list)
    notices: list[Notice] = field(default_factory=list)
    ends: list[RunEnded] = field(default_factory=list)

    @classmethod
    def of(cls, events: Iterable[Event]) -> Self:
        """Sort events."""
        history = cls()
        for event in events:
            history.add(event)
        return history

    def add(self, event: Event) -> None:
        """Take one more event."""
        match event:
            case RunStarted():
                self.starts.append(event)
            case StepDone():
                self.steps.append(event)
            case Validated():
                self.validations.append(event)
            case Sampled():
                self.samples.append(event)
            case CheckpointSaved():
                self.checkpoints.append(event)
            case Notice():
                self.notices.append(event)
            case RunEnded():
                self.ends.append(event)

    @property
    def start(self) -> RunStarted | None:
        """The last start, which holds what the run was in the end."""
        return self.starts[-1] if self.starts else None

    @property
    def end(self) -> RunEnded | None:
        """How the run ended, if it did."""
        return self.ends[-1] if self.ends else None

    @property
    def resumed_at(self) -> list[int]:
        """The steps after which the run was interrupted and went on."""
        return sorted({start.step for start in self.starts if start.step})

    @property
    def step(self) -> int:
        """How many steps are done."""
        return max((event.step for event in (*self.starts, *self.steps, *self.ends)), default=0)

    @property
    def tokens(self) -> int:
        """How many places were computed."""
        return max((step.tokens for step in self.steps), default=0)

    @property
    def seconds(self) -> float:
        """How long it took, over all its parts."""
        timed: list[StepDone | RunEnded] = [*self.steps, *self.ends]
        return max((event.seconds for event in timed), default=0.0)

    @property
    def tokens_per_second(self) -> float | None:
        """The median over what was logged, without validations and the like."""
        return _median(step.tokens_per_second for step in self.steps)

    @property
    def utilisation(self) -> float | None:
        """The median share of the machine's measured speed, 0 to 1."""
        return _median(step.utilisation for step in self.steps)

    @property
    def memory(self) -> int | None:
        """The most that a process held, in bytes."""
        return max((step.memory for step in self.steps if step.memory > 0), default=None)

    @property
    def skipped(self) -> int:
        """How many steps were skipped."""
        return max((step.skipped_so_far for step in self.steps), default=0)

    @property
    def last_validation(self) -> Validated | None:
        """The validation of the state that the run ended with."""
        return self.validations[-1] if self.validations else None

    @property
    def best_validation(self) -> Validated | None:
        """The validation with the lowest loss."""
        return min(
            (each for each in self.validations if each.loss == each.loss),
            key=lambda each: each.loss,
            default=None,
        )

    @property
    def better_validation(self) -> Validated | None:
        """The best validation, where it is told otherwise than the last one."""
        last, best = self.last_validation, self.best_validation
        if last is None or best is None or loss_text(best.loss) == loss_text(last.loss):
            return None
        return best


def _median(values: Iterable[float]) -> float | None:
    known = [value for value in values if value > 0]
    return statistics.median(known) if known else None
