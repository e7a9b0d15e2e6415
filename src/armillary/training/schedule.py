"""The learning rate as a pure function of the step, so that resuming needs no state.

`factor(config, step)` multiplies each group's own learning rate. It is above 0 in every step of
the run: warm-up begins at 1/warmup, and the final factor is that of the step after the last.
"""

import math
from dataclasses import dataclass
from typing import Literal

from torch.optim import Optimizer

from armillary.errors import ConfigError
from armillary.training.checks import check_choice, check_number, check_whole


@dataclass(frozen=True)
class ScheduleConfig:
    """How the learning rate goes through a run of `steps` optimiser steps.

    steps     optimiser steps of the whole run
    kind      constant; cosine, half a period down to `final` (Loshchilov and Hutter 2017, §3); or
              wsd, warm-up–stable–decay, constant until the last `decay` steps (Hu et al. 2024, §4)
    warmup    steps of linear rise at the beginning, part of `steps`
    decay     wsd only: steps of descent at the end
    shape     wsd only: linear, or sqrt for 1 − √progress (Hägele et al. 2024, §3.2)
    final     the factor that is come down to, 0 to 1

    Raises ConfigError naming the setting, its value and what is right.
    """

    steps: int
    kind: Literal["constant", "cosine", "wsd"] = "cosine"
    warmup: int = 0
    decay: int = 0
    shape: Literal["linear", "sqrt"] = "linear"
    final: float = 0.0

    def __post_init__(self) -> None:
        check_whole("steps", self.steps, 1)
        check_choice("kind", self.kind, ("constant", "cosine", "wsd"))
        check_whole("warmup", self.warmup, 0)
        check_whole("decay", self.decay, 0)
        check_choice("shape", self.shape, ("linear", "sqrt"))
        check_number("final", self.final, 0.0, 1.0)
        if self.kind == "wsd" and self.decay == 0:
            raise ConfigError("decay is 0, but wsd comes down at its end; give decay 1 or more")
        if self.kind != "wsd" and self.decay:
            raise ConfigError(f"decay is {self.decay}, but only wsd has it; set kind to 'wsd'")
        if self.warmup + self.decay > self.steps:
            raise ConfigError(
                f"warmup {self.warmup} and decay {self.decay} take more than the {self.steps} "
                "steps of the run; make them fewer"
            )


def factor(config: ScheduleConfig, step: int) -> float:
    """What learning rates are multiplied by in a step, counted from 0.

    Past the run's end it stays what it came to. Raises ValueError for a step below 0.
    """
    if step < 0:
        raise ValueError(f"step is {step}; steps are counted from 0")
    if step < config.warmup:
        return (step + 1) / config.warmup
    if config.kind == "constant":
        return 1.0
    if config.kind == "wsd":
        progress = _progress(step, config.steps - config.decay, config.steps)
        down = progress if config.shape == "linear" else math.sqrt(progress)
    else:
        # The last step of warm-up is the top of the curve.
        progress = _progress(step, max(config.warmup - 1, 0), config.steps)
        down = (1 - math.cos(math.pi * progress)) / 2
    return 1.0 + (config.final - 1.0) * down


def _progress(step: int, start: int, end: int) -> float:
    """0 up to `start`, 1 from `end` on, in between linear."""
    return min(max((step - start) / (end - start), 0.0), 1.0)


def set_learning_rates(optimizer: Optimizer, config: ScheduleConfig, step: int) -> float:
    """Give each group the learning rate of a step, its `initial_lr` × factor; return the factor.

    `build_optimizer` records `initial_lr`; where it is missing, the rate there now is recorded.
    """
    now = factor(config, step)
    for group in optimizer.param_groups:
        group["lr"] = group.setdefault("initial_lr", group["lr"]) * now
    return now
