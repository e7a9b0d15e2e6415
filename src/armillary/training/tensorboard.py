"""Curves of a run for TensorBoard, which is an extra: pip install "armillary[tensorboard]"."""

import math
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import yaml

from armillary.errors import UserError
from armillary.training.events import (
    CheckpointSaved,
    Event,
    Notice,
    RunStarted,
    Sampled,
    StepDone,
    Validated,
)
from armillary.wording import escaped

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoardLog:
    """A listener that writes scalars and texts for `tensorboard --logdir DIRECTORY`.

    It begins when the run starts. One that goes on after n steps takes back what was drawn beyond
    them, so that no curve folds back. Raises UserError when TensorBoard is not installed.
    """

    def __init__(self, directory: Path) -> None:
        try:
            import torch.utils.tensorboard  # noqa: F401
        except ImportError as error:
            raise UserError(
                f"log.tensorboard: TensorBoard cannot be imported ({error}); "
                'pip install "armillary[tensorboard]", or set it to false'
            ) from error
        self.directory = directory
        self._writer: SummaryWriter | None = None
        self._before_start: list[Event] = []

    def __call__(self, event: Event) -> None:
        """Write what the event brings for a curve, or its text."""
        if self._writer is None and not isinstance(event, RunStarted):
            self._before_start.append(event)
            return
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self.directory), purge_step=event.step + 1)
            for earlier in self._before_start:
                _write(self._writer, earlier)
        _write(self._writer, event)

    def close(self) -> None:
        """Write what is left, and close the file."""
        if self._writer is not None:
            self._writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _write(writer: "SummaryWriter", event: Event) -> None:
    match event:
        case StepDone() | Validated():
            for name, value in _scalars(event).items():
                if math.isfinite(value):
                    writer.add_scalar(name, value, event.step)
        case Sampled():
            writer.add_text("sample", _as_code(f"{event.prompt} → {event.text}"), event.step)
        case Notice():
            writer.add_text("notice", _as_code(event.text), event.step)
        case RunStarted():
            writer.add_text("settings", _as_code(_yaml(event.config)), event.step)
        case CheckpointSaved():
            # The run may go on from here: what is drawn up to here must not be lost.
            writer.flush()


def _scalars(event: StepDone | Validated) -> dict[str, float]:
    if isinstance(event, Validated):
        return {
            "validation/loss": event.loss,
            "validation/bits per byte": event.bits_per_byte,
        }
    balance = {} if event.balance is None else {"train/balance of experts": event.balance}
    return balance | {
        "train/loss": event.loss,
        "train/gradient norm": event.gradient_norm,
        "train/learning rate": event.learning_rate,
        "train/skipped steps": event.skipped_so_far,
        "speed/tokens per second": event.tokens_per_second,
        "speed/utilisation": event.utilisation,
        "speed/peak memory in bytes": event.memory,
    }


def _as_code(text: str) -> str:
    """Indented lines are code to Markdown, so that a text can be nothing but text."""
    return "\n".join(f"    {line}" for line in escaped(text).split("\n"))


def _yaml(config: dict[str, Any]) -> str:
    return yaml.safe_dump(config, sort_keys=False, allow_unicode=True)
