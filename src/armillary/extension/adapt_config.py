"""An adaptation as data: what is trained, at which lengths, and what has to hold after each.

The file of `armillary extend apply --adapt`. Model, target, rule and output are the command's; the
sections that a run has too are a run's (`armillary.training.run_config`). Each stage becomes a
training run of its own.
"""

from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from armillary.training.parallel.config import ParallelConfig
from armillary.training.run_config import (
    CheckpointSettings,
    Count,
    CountOrNone,
    LogSettings,
    LoraSettings,
    NotNegative,
    Positive,
    RunConfig,
    SampleSettings,
    Section,
    SettingsFile,
    Share,
    StepSettings,
    TextSettings,
    ValidationSettings,
)

# Settings that change nothing of what is trained, and may be others when an adaptation goes on.
FREE = ("gates", "data.workers", "validation", "samples", "checkpoints", "log")


class StageSettings(Section):
    """A length, and the steps that lead to it."""

    length: Annotated[int, Field(ge=2)] = Field(
        description="Positions that the model is to read after it, in tokens."
    )
    steps: Count = Field(description="Optimiser steps.")
    rows: Annotated[int, Field(ge=2)] | None = Field(
        None,
        description="Tokens of a row, length if left out. Where they are fewer, positions skip "
        "(PoSE), and the stage costs what rows so short cost.",
    )
    chunks: Annotated[int, Field(ge=2)] = Field(
        2, description="Where positions skip: pieces of a row that are moved on, each by its own."
    )
    batch_size: Count | None = Field(
        None, description="Rows of a step; train.batch_size if left out."
    )

    @model_validator(mode="after")
    def _within(self) -> Self:
        if self.row > self.length:
            raise ValueError(f"rows of {self.row} are longer than the stage's {self.length}")
        return self

    @property
    def row(self) -> int:
        """Tokens of a row."""
        return self.rows or self.length

    @property
    def skips(self) -> bool:
        """Whether positions skip."""
        return self.row < self.length


class AdaptTrainSettings(StepSettings):
    """Optimiser, schedule and how steps are computed; as YaRN's authors adapt, if left out."""

    lr: Positive = Field(2e-5, description="Learning rate at the schedule's top.")
    weight_decay: NotNegative = Field(0.0, description="Decoupled decay of matrices.")
    schedule: Literal["constant", "cosine", "wsd"] = Field(
        "constant", description="How the learning rate goes in each stage; constant after warm-up."
    )
    warmup: CountOrNone = Field(
        20, description="Steps of linear rise at the beginning of each stage; all, if it has fewer."
    )


class AdaptMixtureSettings(Section):
    """How often long documents and short sequences are drawn; each source keeps its share."""

    long_share: Share = Field(
        0.5,
        description="Least share of each source's tokens that is of documents longer than what the "
        "stage before reached, where it has some; 0 leaves lengths as they are.",
    )
    long_repeat: Annotated[float, Field(ge=1)] = Field(
        5.0, description="Long documents come at most so many times as often as they would."
    )
    short_share: Share = Field(
        0.25,
        description="Share of each step's rows that hold sequences within the original window, "
        "one row at least; 0 for none.",
    )


class GateSettings(Section):
    """What has to hold for a stage to be passed, on texts that are held out."""

    short_texts: Annotated[int, Field(ge=2)] = Field(
        32, description="Held-out texts whose loss is compared, at most."
    )
    short_tokens: Annotated[int, Field(ge=2)] | None = Field(
        None,
        description="Tokens of such a text, at most; the original window if left out.",
    )
    long_texts: CountOrNone = Field(
        8,
        description="Held-out texts as long as the stage, at most, whose loss is told: before, "
        "under the rule alone, and adapted. No gate hangs on it; 0 for none.",
    )
    short_loss: NotNegative = Field(
        0.01,
        description="Nats per token that the short loss may be above the unextended model's: the "
        "paired difference's interval has to reach down to it.",
    )
    retrieval: Annotated[float, Field(gt=0, le=1)] = Field(
        0.85,
        description="Share of the unextended model's retrieval within its own window that "
        "retrieval at the stage's length has to keep.",
    )
    questions: Annotated[int, Field(ge=2)] = Field(
        44,
        description="Questions of retrieval a length, rounded up to whole contexts; fewer than 22 "
        "cannot show that all of it is kept.",
    )


class AdaptConfig(SettingsFile):
    """A whole adaptation."""

    stages: tuple[StageSettings, ...] = Field(
        description="The lengths, rising; the rule is the target's from the first stage on."
    )
    data: TextSettings = Field(description="The text.")
    train: AdaptTrainSettings = Field(description="Optimiser, schedule, precision.")
    seed: CountOrNone = Field(
        0, description="Decides the order of the data, where positions skip, and what is asked."
    )
    mixture: AdaptMixtureSettings = Field(
        AdaptMixtureSettings(), description="How often which documents are drawn."
    )
    gates: GateSettings | None = Field(
        GateSettings(), description="What a stage has to hold to; null measures nothing."
    )
    lora: LoraSettings | None = Field(None, description="Adapters; null trains all weights.")
    parallel: ParallelConfig = Field(
        ParallelConfig(), description="How stages are spread over the processes of torchrun."
    )
    validation: ValidationSettings = Field(
        ValidationSettings(), description="The loss on held-out documents, in rows of the stage."
    )
    samples: SampleSettings = Field(SampleSettings(), description="Texts written on the way.")
    checkpoints: CheckpointSettings = Field(
        CheckpointSettings(), description="States that a stage goes on from."
    )
    log: LogSettings = Field(LogSettings(), description="What is written of each stage.")

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if not self.stages:
            raise ValueError("stages: needs one at least")
        for before, after in pairwise(self.stages):
            if after.length <= before.length:
                raise ValueError(
                    f"stages: a length of {after.length} after one of {before.length}; they must "
                    "rise"
                )
        return self

    def run(self, number: int, *, model: Path, data: Path, out: Path, window: int) -> RunConfig:
        """The training run of stage `number`, counted from 0.

        model   what it goes on from, with the rule
        data    the prepared text
        out     the run's own directory
        window  the model's before any extension
        Raises ConfigError for what a run refuses.
        """
        stage = self.stages[number]
        reached = self.stages[number - 1].length if number else window
        text = self.data.model_dump(mode="json") | {"sources": [], "prepared": str(data)}
        train = self.train.model_dump(mode="json")
        return RunConfig.from_dict(
            {
                "out": str(out),
                "seed": self.seed,
                "model": {"checkpoint": str(model)},
                "data": text
                | {
                    "length": stage.row,
                    "mixture": self._mixture(stage, reached, window),
                    "skip": {"to": stage.length, "chunks": stage.chunks} if stage.skips else None,
                },
                "train": train
                | {
                    "steps": stage.steps,
                    "batch_size": stage.batch_size or self.train.batch_size,
                    "warmup": min(self.train.warmup, stage.steps - self.train.decay),
                },
                "lora": None if self.lora is None else self.lora.model_dump(mode="json"),
                "parallel": self.parallel.model_dump(mode="json"),
                "validation": self.validation.model_dump(mode="json"),
                "samples": self.samples.model_dump(mode="json"),
                "checkpoints": self.checkpoints.model_dump(mode="json"),
                "log": self.log.model_dump(mode="json"),
            },
            f"stage {number + 1}",
        )

    def _mixture(self, stage: StageSettings, reached: int, window: int) -> dict[str, float | None]:
        own = self.mixture
        return {
            "long": long_from(stage, reached) if own.long_share else None,
            "long_share": own.long_share,
            "long_repeat": own.long_repeat,
            "short": min(window, stage.row) if own.short_share else None,
            "short_share": own.short_share,
        }


def long_from(stage: StageSettings, reached: int) -> int:
    """Tokens from which a document is long enough for a stage.

    One longer than what the stage before `reached` holds distances that are new. Where positions
    skip, a document that fills a row does.
    """
    return min(stage.row, reached + 1)
