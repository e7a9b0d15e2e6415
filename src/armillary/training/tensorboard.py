"""Curves of a run for TensorBoard, which is an extra: pip install "armillary[tensorboard]"."""

import math
from pathlib import Path
from types import TracebackType
from typing import Self

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


class TensorBoardLog:
    """A listener that writes scalars and texts for `tensorboard --logdir DIRECTORY`.

    A run that goes on after `resumed_at` steps takes back what was drawn beyond them, so that no
    curve folds back; None begins anew beside what the directory holds. Raises UserError when
    TensorBoard is not installed.
    """

    def __init__(self, directory: Path, resumed_at: int | None) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UserError(
                f"log.tensorboard: TensorBoard cannot be imported ({error}); "
                'pip install "armillary[tensorboard]", or set it to false'
            ) from error
        purged = None if resumed_at is None else resumed_at + 1
        self._writer = SummaryWriter(str(directory), purge_step=purged)

    def __call__(self, event: Event) -> None:
        """Write what the event brings for a curve, or its text."""
        match event:
            case StepDone():
                self._scalar("train/loss", event.loss, event.step)
                self._scalar("train/gradient norm", event.gradient_norm, event.step)
                self._scalar("train/learning rate", event.learning_rate, event.step)
                self._scalar("train/skipped steps", event.skipped_so_far, event.step)
                self._scalar("speed/tokens per second", event.tokens_per_second, event.step)
                self._scalar("speed/utilisation", event.utilisation, event.step)
                self._scalar("speed/peak memory in bytes", event.memory, event.step)
            case Validated():
                self._scalar("validation/loss", event.loss, event.step)
                self._scalar("validation/bits per byte", event.bits_per_byte, event.step)
            case Sampled():
                self._text("sample", f"{event.prompt} → {event.text}", event.step)
            case Notice():
                self._text("notice", event.text, event.step)
            case CheckpointSaved():
                # The run may go on from here: what is drawn up to here must not be lost.
                self._writer.flush()
            case RunStarted():
                self._text("settings", _yaml(event.config), event.step)

    def close(self) -> None:
        """Write what is left, and close the file."""
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

    def _scalar(self, name: str, value: float, step: int) -> None:
        if math.isfinite(value):
            self._writer.add_scalar(name, value, step)

    def _text(self, name: str, text: str, step: int) -> None:
        # Indented lines are code to Markdown, so a text cannot be anything but text.
        lines = escaped(text).splitlines()
        self._writer.add_text(name, "\n".join(f"    {line}" for line in lines), step)


def _yaml(config: dict[str, object]) -> str:
    import yaml

    return yaml.safe_dump(config, sort_keys=False, allow_unicode=True)
