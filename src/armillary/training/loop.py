"""The training loop: batch → loss → gradients → step, with everything around it that a run needs.

A step is a function of the state before it: the learning rate and the data are computed from its
number, random numbers go on from the saved states. So a run that is stopped, by whatever, goes on
as if it had not been. Knows no command line; what happens is told to listeners as events.
"""

import math
import resource
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from armillary.checkpoints.huggingface import check_window
from armillary.data import Batch
from armillary.diagnosis.size import forward_flops
from armillary.errors import CheckpointError, ConfigError, UserError
from armillary.generation.sampling import SamplingConfig
from armillary.training.batches import arguments
from armillary.training.checkpoint import load_checkpoint, read_state
from armillary.training.checkpoint_folder import CheckpointFolder
from armillary.training.events import (
    CheckpointSaved,
    Event,
    Listener,
    Notice,
    RunEnded,
    RunStarted,
    Sampled,
    StepDone,
    Validated,
)
from armillary.training.interrupts import Interrupts
from armillary.training.lora import add_lora, merge_lora
from armillary.training.objective import Objective
from armillary.training.optimizer import build_optimizer
from armillary.training.parallel.export import export_armillary, export_huggingface
from armillary.training.parallel.ranks import Ranks
from armillary.training.parallel.sharding import parallelise, synchronise
from armillary.training.precision import Precision
from armillary.training.run_config import RunConfig, differences
from armillary.training.samples import continued
from armillary.training.schedule import set_learning_rates
from armillary.training.setup import Work, with_dropout
from armillary.training.speed import measured_flops
from armillary.training.validation import (
    HeldOutLoss,
    compressed_bits_per_byte,
    held_out_loss,
)

CHECKPOINTS, MODEL = "checkpoints", "model"

# Settings that change nothing of what is computed, and may be others when a run goes on.
FREE = ("out", "data.workers", "validation", "samples", "checkpoints", "log")
# Those that change how it is computed, and with it the last bits.
ROUNDING = (
    "parallel",
    "train.micro_batch_size",
    "train.recompute",
    "train.compile",
    "train.device",
)


@dataclass
class Progress:
    """How far a run is; saved with every checkpoint.

    step             steps that are done, skipped ones among them
    tokens           places of rows that were computed, over all processes
    skipped          steps whose gradients were no numbers, or that had nothing to learn
    skipped_in_row   of these, the last ones in a row
    best             the lowest validation loss so far, in nats per token
    seconds          time that the run has taken, over all its parts
    """

    step: int = 0
    tokens: int = 0
    skipped: int = 0
    skipped_in_row: int = 0
    best: float | None = None
    seconds: float = 0.0


@dataclass
class _Pace:
    """Steps since the last line of the log; pauses for other things are not in them."""

    tokens: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class _Result:
    """What one step came to: a loss in nats per token, and why it changed nothing, if so.

    `balance` is the experts' balance loss, 1 where all are equally busy.
    """

    loss: float
    norm: float
    learning_rate: float
    targets: int
    skipped: str | None = None
    balance: float | None = None


@dataclass
class Trainer:
    """A run: `run()` makes all steps that are left.

        with start_ranks(sizes) as ranks:
            trainer = Trainer(config, prepare_run(config, ranks), ranks, precision)
            trainer.run()

    Listeners hear of everything on the main process. Raises UserError for what a user can mend: a
    checkpoint that cannot be written, gradients that stay no numbers.
    """

    config: RunConfig
    work: Work
    ranks: Ranks
    precision: Precision
    listeners: Sequence[Listener] = ()
    progress: Progress = field(default_factory=Progress)

    def __post_init__(self) -> None:
        own = self.config.train
        adapters = self.config.adapters()
        if adapters is not None:
            torch.manual_seed(self.config.seed)  # every process draws the same adapters
            add_lora(self.work.decoder, adapters)
        torch.manual_seed(self.ranks.seed(self.config.seed))
        self.parameters = _count(self.work.decoder.parameters())
        self.trained = _count(p for p in self.work.decoder.parameters() if p.requires_grad)
        self.objective = Objective(
            self.work.decoder,
            z_loss=own.z_loss,
            balance_loss=own.balance_loss,
            balance_rate=own.balance_rate,
        ).train()
        self._compiled = parallelise(
            self.objective,
            self.ranks,
            checkpoint=own.recompute,
            compile=own.compile,
            weights=self.work.weights,
            compute=self.precision.dtype,
        )
        self.optimizer = build_optimizer(self.objective, self.config.optimizer())
        self.schedule = self.config.schedule()
        self.folder = CheckpointFolder(
            Path(self.config.out) / CHECKPOINTS,
            keep_last=self.config.checkpoints.keep_last,
            keep_best=self.config.checkpoints.keep_best,
        )
        self._saved_at = -1
        self._pace = _Pace()

    # The run

    def run(self) -> RunEnded:
        """Make the steps that are left, and write the model; or save where a signal asks to stop.

        The result's `reason` is "finished", or the signal's name.
        """
        own = self.config.train
        with Interrupts() as interrupts:
            self._tell(self._started())
            if self._compiled is not None:
                self._tell(Notice(self.progress.step, self._compiled))
            self._began = time.perf_counter() - self.progress.seconds
            if self.progress.step == 0 and self.config.validates_at_start():
                self._validate()
            while self.progress.step < own.steps:
                result = self._timed_step()
                self._report(result)
                self._check_skips(result)
                self._at_milestones()
                number = int(self.ranks.maximum([interrupts.received or 0])[0])
                if number and self.progress.step < own.steps:
                    self._save()
                    return self._end(_signal_name(number))
            return self._end("finished", str(self._export()), self._compressors())

    def _timed_step(self) -> _Result:
        start = time.perf_counter()
        result = self._step(self.progress.step)
        self._pace.seconds += time.perf_counter() - start
        tokens = self.config.train.batch_size * self.config.data.length
        self._pace.tokens += tokens
        self.progress.tokens += tokens
        self.progress.step += 1
        return result

    def _step(self, step: int) -> _Result:
        """One optimiser step; a loss is each token's alike, over micro-batches and ranks."""
        own = self.config.train
        batch = self.work.train.batch(step)
        targets = int(self.ranks.sum_of_rows([batch.n_targets])[0])
        factor = set_learning_rates(self.optimizer, self.schedule, step)
        lr = own.lr * factor
        if targets == 0:
            return _Result(math.nan, 0.0, lr, 0, "no_targets")
        parts = batch.split(len(batch.tokens) // (own.micro_batch_size or len(batch.tokens)))
        sums = [0.0, 0.0]
        for number, part in enumerate(parts):
            synchronise(self.objective, number == len(parts) - 1)
            sums = [a + b for a, b in zip(sums, self._accumulate(part, targets), strict=True)]
        norm = self.precision.step(self.optimizer, own.clip)
        loss, balance = (total / targets for total in self.ranks.sum_of_parts(sums))
        skipped = None if norm.is_finite else "nonfinite"
        experts = self.objective.balance
        if experts is None:
            return _Result(loss, norm.norm, lr, targets, skipped)
        experts.move_biases(self.ranks.sum_of_parts)
        return _Result(loss, norm.norm, lr, targets, skipped, balance)

    def _accumulate(self, part: Batch, targets: int) -> list[float]:
        """Add the gradients of one micro-batch; its loss in nats and its balance, summed."""
        with self.precision.autocast():
            loss = self.objective(*arguments(part, self.ranks.device))
        self.precision.backward(loss.total / targets)
        return [float(loss.cross_entropy), 0.0 if loss.balance is None else float(loss.balance)]

    def _check_skips(self, result: _Result) -> None:
        if result.skipped is None:
            self.progress.skipped_in_row = 0
            return
        self.progress.skipped += 1
        self.progress.skipped_in_row += result.skipped == "nonfinite"
        most = self.config.train.max_skipped
        if self.progress.skipped_in_row > most:
            raise UserError(
                f"step {self.progress.step}: gradients were no numbers {most + 1} steps in a row; "
                "lower train.lr, or go on from the last checkpoint with another train.precision"
            )

    # What happens now and then

    def _at_milestones(self) -> None:
        step, last = self.progress.step, self.progress.step == self.config.train.steps
        held_out: HeldOutLoss | None = None
        if _due(step, self.config.validation.every, last):
            held_out = self._validate()
        if _due(step, self.config.samples.every, last):
            self._sample()
        if _due(step, self.config.checkpoints.every, last):
            self._save(None if held_out is None else held_out.loss)

    def _validate(self) -> HeldOutLoss | None:
        """The loss on held-out rows, told; None where nothing is held out."""
        if self.work.validation is None:
            return None
        start = time.perf_counter()
        rows = self.config.validation.rows
        found = held_out_loss(
            self.objective, self.work.validation, self.precision, self.ranks, rows
        )
        best = self.progress.best is None or found.loss < self.progress.best
        if best:
            self.progress.best = found.loss
        self._tell(
            Validated(
                step=self.progress.step,
                loss=found.loss,
                bits_per_byte=found.bits_per_byte,
                targets=found.targets,
                bytes=found.bytes,
                seconds=time.perf_counter() - start,
                best=best,
            )
        )
        return found

    def _sample(self) -> None:
        own = self.config.samples
        sampling = SamplingConfig(
            max_tokens=own.max_tokens, temperature=own.temperature, seed=self.config.seed
        )
        for prompt in own.prompts:
            with self.precision.autocast():  # in which sharded layers are gathered
                text = continued(
                    self.objective,
                    self.work.tokenizer,
                    prompt,
                    sampling,
                    end_ids=self._end_ids(),
                    ranks=self.ranks,
                )
            self._tell(Sampled(self.progress.step, prompt, text))

    def _save(self, metric: float | None = None) -> None:
        if self._saved_at == self.progress.step:
            return
        start = time.perf_counter()
        self.progress.seconds = start - self._began
        path = self.folder.save(
            self.progress.step, self.objective, self.optimizer, self._facts(), metric=metric
        )
        self._saved_at = self.progress.step
        self._tell(CheckpointSaved(self.progress.step, str(path), time.perf_counter() - start))

    def _facts(self) -> dict[str, Any]:
        return {
            "progress": vars(self.progress),
            "scaler": self.precision.state_dict(),
            "data": self.work.train.fingerprint,
            "sizes": asdict(self.ranks.sizes),
            "config": self.config.to_dict(),
        }

    # Going on

    def resume(self, path: Path, allowed: Sequence[str] = ()) -> None:
        """Go on from a checkpoint of this run; `allowed` names settings that may have changed.

        Raises UserError for other changes, listed, and for a checkpoint that does not fit.
        """
        facts = read_state(path).facts
        if set(facts) != set(self._facts()):
            raise CheckpointError(f"{path}: was saved by another version of armillary")
        changed = refuse_changes(path, facts, self.config, self.work.train.fingerprint, allowed)
        load_checkpoint(
            path,
            self.objective,
            self.optimizer,
            # Where states are those of other processes; tensor peers must draw the same.
            seed=self.ranks.seed(self.config.seed),
            reseed=facts["sizes"] != asdict(self.ranks.sizes),
            report=lambda text: self._tell(Notice(self.progress.step, text)),
            verify=False,  # done when it was found
        )
        if changed:
            told = f"{', '.join(changed)} changed: the last bits are not those of the run before"
            self._tell(Notice(facts["progress"]["step"], told))
        self.precision.load_state_dict(facts["scaler"])
        self.progress = Progress(**facts["progress"])
        self._saved_at = self.progress.step

    # The end

    def _end(
        self, reason: str, model: str | None = None, compressors: dict[str, float] | None = None
    ) -> RunEnded:
        seconds = time.perf_counter() - self._began
        ended = RunEnded(self.progress.step, reason, seconds, model, compressors or {})
        self._tell(ended)
        return ended

    def _compressors(self) -> dict[str, float]:
        own, batches = self.config.validation, self.work.validation
        if not own.compressors or batches is None or not self.ranks.is_main:
            return {}
        if batches.dataset.masked:
            return {}  # of chats the model is measured on the answers alone
        return compressed_bits_per_byte(batches, own.rows)

    def _export(self) -> Path:
        """Write the model for transformers, or where no family of theirs has it, in our format."""
        path, decoder = Path(self.config.out) / MODEL, self.work.decoder
        config = with_dropout(decoder.config, 0.0)  # which is of training
        unmerge = None if self.config.lora is None else merge_lora(decoder)
        generation = {**self.work.generation, "eos_token_id": list(self._end_ids())}
        tokenizer = self.work.tokenizer
        try:
            check_window(config)
            export_huggingface(path, decoder, tokenizer, generation, config=config)
        except ConfigError as error:
            self._tell(Notice(self.progress.step, f"the model is written in our format: {error}"))
            export_armillary(path, decoder, tokenizer, generation, config=config)
        if unmerge is not None:
            unmerge()
        return path

    def _end_ids(self) -> tuple[int, ...]:
        stated = self.work.generation.get("eos_token_id")
        if stated is None:
            return (self.work.train.dataset.end_id,)
        return (stated,) if isinstance(stated, int) else tuple(stated)

    # Telling

    def _tell(self, event: Event) -> None:
        if self.ranks.is_main:
            for listener in self.listeners:
                listener(event)

    def _report(self, result: _Result) -> None:
        step, own = self.progress.step, self.config
        if not _due(step, own.log.every, step == own.train.steps) and result.skipped is None:
            return
        rate = self._pace.tokens / max(self._pace.seconds, 1e-9)
        self._pace = _Pace()
        self._tell(
            StepDone(
                step=step,
                loss=result.loss,
                learning_rate=result.learning_rate,
                gradient_norm=result.norm,
                targets=result.targets,
                tokens=self.progress.tokens,
                epoch=self.work.train.epoch(step),
                seconds=time.perf_counter() - self._began,
                tokens_per_second=rate,
                utilisation=rate * self._flops_per_token() / (self._peak * self.ranks.world),
                memory=_peak_memory(self.ranks.device),
                skipped=result.skipped,
                skipped_so_far=self.progress.skipped + (result.skipped is not None),
                balance=result.balance,
            )
        )

    def _started(self) -> RunStarted:
        own = self.config
        self._peak = measured_flops(self.ranks.device, self.precision.dtype)
        return RunStarted(
            step=self.progress.step,
            steps=own.train.steps,
            rows=own.train.batch_size,
            length=own.data.length,
            parameters=self.parameters,
            trained_parameters=self.trained,
            precision=str(self.precision.dtype).removeprefix("torch."),
            device=str(self.ranks.device),
            processes=self.ranks.world,
            flops_per_token=self._flops_per_token(),
            peak_flops=self._peak,
            epoch_steps=self.work.train.epoch_steps,
            config=own.to_dict(),
        )

    def _flops_per_token(self) -> float:
        """Of a row's average token; a frozen model needs no gradients of its weights."""
        forward = forward_flops(self.work.decoder.config, (self.config.data.length + 1) // 2)
        return forward * (3 if self.config.lora is None else 2)


def refuse_changes(
    path: Path,
    facts: dict[str, Any],
    config: RunConfig,
    fingerprint: str,
    allowed: Sequence[str] = (),
) -> list[str]:
    """Hold a run's settings and data against those that a checkpoint was made under.

    Settings that change nothing of what is computed (`FREE`) may differ, or only its last bits
    (`ROUNDING`, which are returned), others where `allowed` names them, or their section. Raises
    ConfigError that lists the rest.
    """
    found = differences(facts["config"], config.to_dict())
    if facts["data"] != fingerprint:
        found["data"] = "the prepared documents or their order are others"
    may = (*FREE, *ROUNDING, *allowed)
    refused = {key: told for key, told in found.items() if not _named(key, may)}
    if refused:
        listed = "; ".join(f"{key}: {told}" for key, told in refused.items())
        permit = " ".join(f"--allow {key}" for key in refused)
        raise ConfigError(
            f"{path}: was made under other settings: {listed}. Put them back, or say {permit}"
        )
    return [key for key in found if _named(key, ROUNDING)]


def _named(key: str, names: Sequence[str]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in names)


def _due(step: int, every: int, last: bool) -> bool:
    return last or (every > 0 and step % every == 0)


def _signal_name(number: int) -> str:
    return signal.Signals(number).name


def _count(parameters: Iterable[torch.nn.Parameter]) -> int:
    return sum(parameter.numel() for parameter in parameters)


def _peak_memory(device: torch.device) -> int:
    """The most bytes held: of the process, or on its GPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
