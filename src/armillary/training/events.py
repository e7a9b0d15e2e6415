"""What a run reports as it goes: plain facts, taken by logs, displays and summaries alike.

Steps are counted as those that are done: `step` 1 is the state after the first. Losses are in nats
per predicted token, times in seconds, learning rates those of the schedule's top group.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar


@dataclass(frozen=True)
class Event:
    """One fact of a run. `to_json` is the line of the log that stands for it."""

    kind: ClassVar[str]
    step: int

    def to_json(self) -> dict[str, Any]:
        """Plain values, the kind first."""
        return {"kind": self.kind, **asdict(self)}


@dataclass(frozen=True)
class RunStarted(Event):
    """The run begins, or goes on after `step` steps.

    `steps`, `rows` (of a step) and `length` are those of the whole run; `peak_flops` is the
    measured speed of matrix products in the type that is computed in, of one process.
    """

    kind = "start"
    steps: int
    rows: int
    length: int
    parameters: int
    trained_parameters: int
    precision: str
    device: str
    processes: int
    flops_per_token: float
    peak_flops: float
    epoch_steps: float
    config: dict[str, Any]


@dataclass(frozen=True)
class StepDone(Event):
    """A step that was made, or skipped (`skipped` says why: nonfinite, no_targets).

    `tokens` are all places that were computed up to here, `targets` the predicted ones of this
    step. `tokens_per_second` and `utilisation` (of `peak_flops`, 0 to 1) are those of the steps
    since the last event. `memory` is the most that the process has held, in bytes. `balance` is
    the balance loss of a model with experts, 1 where all are equally busy.
    """

    kind = "step"
    loss: float
    learning_rate: float
    gradient_norm: float
    targets: int
    tokens: int
    epoch: float
    seconds: float
    tokens_per_second: float
    utilisation: float
    memory: int
    skipped: str | None = None
    skipped_so_far: int = 0
    balance: float | None = None


@dataclass(frozen=True)
class Validated(Event):
    """The loss on held-out rows; bits per byte of the text that the predicted tokens stand for."""

    kind = "validation"
    loss: float
    bits_per_byte: float
    targets: int
    bytes: int
    seconds: float
    best: bool


@dataclass(frozen=True)
class Sampled(Event):
    """What the model made of a prompt."""

    kind = "sample"
    prompt: str
    text: str


@dataclass(frozen=True)
class CheckpointSaved(Event):
    """A state was saved at `path`, from which the run goes on."""

    kind = "checkpoint"
    path: str
    seconds: float


@dataclass(frozen=True)
class Notice(Event):
    """Something that the user should hear of, in one line."""

    kind = "notice"
    text: str


@dataclass(frozen=True)
class RunEnded(Event):
    """The run is over: finished, or stopped at `step` (`reason` says by what).

    `compressors` are bits per byte of general compressors on the text of the validation, by name;
    `model` is where the result was written.
    """

    kind = "end"
    reason: str
    seconds: float
    model: str | None = None
    compressors: dict[str, float] = field(default_factory=dict)


Listener = Callable[[Event], None]
