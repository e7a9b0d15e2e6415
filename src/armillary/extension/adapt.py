"""A model adapted to a longer window: stage after stage, each a training run with gates behind it.

    OUT.adaptation/
      adaptation.json     what is adapted, to what and how; under other settings it is refused
      data/               the prepared text
      start/              the model with its rule, before any step
      unextended/         results of the model as it was, which gates compare with
      stage-1/            a training run (log, summary, checkpoints, model) …
      stage-1/measured/   … and the results of its model
      stage-1/gates.json  … and what was made of them, when it is done
    OUT/                  the adapted model

Whatever ends it, the same call goes on: a stage from its newest checkpoint bit for bit, measuring
from its last whole cell, and what is done is not done again.
"""

import contextlib
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import filelock
import numpy as np

from armillary.checkpoints import Checkpoint, open_checkpoint
from armillary.checkpoints.tokenizers import open_tokenizer
from armillary.data import TokenDataset, prepare
from armillary.data.prepared import TRAIN, VALIDATION, read_prepared
from armillary.errors import ConfigError, UserError
from armillary.evaluation.run import Progress as Measured
from armillary.evaluation.run import Stopped
from armillary.extension.adapt_config import FREE, AdaptConfig, long_from
from armillary.extension.apply import Applied, Format, verify, write_extended
from armillary.extension.gates import Compared, Gate, Gates, Held
from armillary.extension.rules import Extension, RuleName, RuleOptions, extend
from armillary.files import as_user_error, read_json_if_there, write_json
from armillary.tokenizer import Tokenizer
from armillary.training.events import Listener
from armillary.training.loop import CHECKPOINTS, MODEL, ROUNDING
from armillary.training.parallel.ranks import start_ranks, world_size
from armillary.training.ranks import on_first_rank, rank
from armillary.training.run import train
from armillary.training.run_config import RunConfig, differences
from armillary.training.setup import Progress, device_of

_STATE, _GATES, _LOCK = "adaptation.json", "gates.json", ".lock"


@dataclass(frozen=True)
class Watch:
    """Whom to tell how an adaptation goes, on the main process.

    say        a line now and then
    listeners  a context of listeners for each stage's run
    measured   which model is measured, and how far that is
    progress   how far the preparation of data is
    """

    say: Callable[[str], None] = lambda _: None
    listeners: Callable[[], AbstractContextManager[Sequence[Listener]]] = lambda: nullcontext(())
    measured: Callable[[str, Measured], None] | None = None
    progress: Progress | None = None


@dataclass(frozen=True)
class Stage:
    """What came of a stage; `passed` when no gate fails."""

    number: int
    length: int
    steps: int
    gates: tuple[Gate, ...] = ()
    losses: tuple[Compared, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether what could be asked holds."""
        return all(gate.passed is not False for gate in self.gates)


@dataclass(frozen=True)
class Adapted:
    """How an adaptation ended.

    reason   "finished"; "gates" when the last of the stages did not pass; else the signal's name
    applied  the model that was written, when it finished
    work     the directory of everything in between
    """

    reason: str
    stages: tuple[Stage, ...]
    work: Path
    applied: Applied | None = None


def adapt(
    checkpoint: Checkpoint,
    out: Path,
    config: AdaptConfig,
    *,
    to: int,
    rule: RuleName,
    options: RuleOptions | None = None,
    format: Format = "auto",
    dtype: str | None = None,
    watch: Watch | None = None,
) -> Adapted:
    """Adapt a model to a window of `to` under a rule, alone or as one of torchrun's processes.

    Arguments are those of `apply`, and errors too. The rule is the target's from the first stage
    on, so that no stage has to unlearn the frequencies of the one before. Raises UserError in one
    line for what a user can mend: lengths that do not fit the model, text without documents so
    long, an adaptation of other settings in the same place.
    """
    watch = watch or Watch()
    extension = extend(checkpoint.config, to, rule, options)
    _check_lengths(config, checkpoint.config.max_positions, to)
    work = out.with_name(f"{out.name}.adaptation")
    # What a run of any stage refuses is seen before anything is prepared.
    window = checkpoint.config.max_positions
    runs = [
        config.run(number, model=work, data=work, out=work, window=window)
        for number in range(len(config.stages))
    ]
    sizes, *_ = [run.sizes(extension.config, world_size()) for run in runs]
    with start_ranks(sizes, device_of(runs[0])), _alone(work):
        adaptation = _Adaptation(checkpoint, out, work, config, extension, watch)
        on_first_rank(lambda: adaptation.begin(rule))
        return adaptation.run(format, dtype)


def _check_lengths(config: AdaptConfig, window: int, to: int) -> None:
    first, last = config.stages[0].length, config.stages[-1].length
    if first <= window:
        raise ConfigError(
            f"stages: a length of {first:,} is within the model's window of {window:,}; there is "
            "nothing to adapt to"
        )
    if last > to:
        raise ConfigError(
            f"stages: a length of {last:,} is beyond the target of {to:,}; lower it, or say "
            f"--to {last}"
        )


@contextlib.contextmanager
def _alone(work: Path) -> Iterator[None]:
    """Keep a second adaptation out of the directory."""
    if rank():
        yield
        return
    with as_user_error(work):
        work.mkdir(parents=True, exist_ok=True)
    try:
        with filelock.FileLock(work / _LOCK, timeout=0):
            yield
    except filelock.Timeout as error:
        raise UserError(f"{work}: another process is adapting here; choose another out") from error


@dataclass(frozen=True)
class _Adaptation:
    """One run of an adaptation over what earlier ones have left."""

    checkpoint: Checkpoint
    out: Path
    work: Path
    config: AdaptConfig
    extension: Extension
    watch: Watch

    @property
    def window(self) -> int:
        """Before any extension."""
        return self.checkpoint.config.max_positions

    def folder(self, number: int) -> Path:
        """Of a stage, counted from 0."""
        return self.work / f"stage-{number + 1}"

    def begin(self, rule: RuleName) -> None:
        """Note what is adapted, or hold it against what is noted."""
        said = self._facts(rule)
        there = read_json_if_there(self.work / _STATE)
        if there:
            self._refuse_changes(there, said)
        write_json(self.work / _STATE, said)

    def _facts(self, rule: RuleName) -> dict[str, Any]:
        made = self.extension.rule
        return {
            "model": str(self.checkpoint.source.resolve()),
            "decoder": self.checkpoint.config.to_dict(),
            "to": self.extension.config.max_positions,
            "rule": rule,
            "settings": None if made is None else _plain(asdict(made)),
            "config": self.config.to_dict(),
        }

    def _refuse_changes(self, there: dict[str, Any], said: dict[str, Any]) -> None:
        """Stages that are passed stay as they were; of the others only the run itself can tell."""
        passed = len([*self._passed()])

        def comparable(facts: dict[str, Any]) -> dict[str, Any]:
            stages = facts["config"]["stages"][:passed]
            return facts | {"config": facts["config"] | {"stages": stages}}

        found = differences(comparable(there), comparable(said))
        may = [f"config.{name}" for name in (*FREE, *ROUNDING)]
        refused = {key: told for key, told in found.items() if not _named(key, may)}
        if refused:
            listed = "; ".join(f"{key}: {told}" for key, told in refused.items())
            raise ConfigError(
                f"{self.work}: was begun under other settings: {listed}. Put them back, or choose "
                "another out"
            )

    def _passed(self) -> Iterator[Stage]:
        """The stages from the first on that are passed already."""
        for number in range(len(self.config.stages)):
            found = read_json_if_there(self.folder(number) / _GATES)
            if not found.get("passed"):
                return
            yield _stage_of(number, found)

    def run(self, format: Format, dtype: str | None) -> Adapted:
        """Make all stages that are left, and write the model."""
        data = self._prepared()
        self._check_documents(data)
        gates = self._gates(data)
        on_first_rank(self._start)
        stages = on_first_rank(lambda: [*self._passed()])
        for stage in stages:
            self._say(f"stage {stage.number + 1}: passed before")
        for number in range(len(stages), len(self.config.stages)):
            reason = self._train(number, data)
            if reason != "finished":
                return Adapted(reason, tuple(stages), self.work)
            outcome = self._hold(number, gates)
            if isinstance(outcome, str):
                return Adapted(outcome, tuple(stages), self.work)
            stages.append(outcome)
            if not outcome.passed:
                return Adapted("gates", tuple(stages), self.work)
        applied = on_first_rank(lambda: self._write(format, dtype))
        return Adapted("finished", tuple(stages), self.work, applied)

    # Text

    def _prepared(self) -> Path:
        own = self.config.data
        if own.prepared is not None:
            return Path(own.prepared)
        data = self.work / "data"
        told = self.watch.progress.prepared if self.watch.progress is not None else None
        on_first_rank(
            lambda: prepare(
                own.sources,
                self._tokenizer(),
                data,
                field=own.field,
                format=own.format,
                validation=own.validation,
                seed=self.config.seed,
                end_token=own.end_token,
                workers=own.workers,
                progress=told,
            )
        )
        return data

    def _tokenizer(self) -> Tokenizer:
        if self.config.data.tokenizer is not None:
            return open_tokenizer(self.config.data.tokenizer)
        if self.checkpoint.tokenizer is None and self.config.data.prepared is not None:
            return TokenDataset(self.config.data.prepared).tokenizer
        if self.checkpoint.tokenizer is None:
            raise UserError(
                f"{self.checkpoint.source}: has no tokenizer; name one as data.tokenizer"
            )
        return self.checkpoint.tokenizer

    def _check_documents(self, data: Path) -> None:
        """Without a document that is long enough, a stage would train nothing that is new."""
        lengths = TokenDataset(data, TRAIN).lengths
        reached = self.window
        for number, stage in enumerate(self.config.stages):
            least = long_from(stage, reached)
            long = lengths[lengths >= least]
            if not len(long) and not stage.skips:
                raise UserError(
                    f"{data}: no document has {least:,} tokens or more (the longest has "
                    f"{int(np.max(lengths)):,}), so stage {number + 1} would see no distance that "
                    "is new; give longer documents, or let positions skip (rows below its length)"
                )
            share = long.sum() / lengths.sum()
            self._say(
                f"stage {number + 1}: {len(long):,} of {len(lengths):,} documents have {least:,} "
                f"tokens or more, {share:.0%} of the text"
            )
            reached = stage.length
        target = self.extension.config.max_positions
        if reached < target:
            self._say(
                f"the last stage reaches {reached:,} of {target:,} positions; beyond it nothing is "
                "trained or measured"
            )

    # Stages

    def _start(self) -> None:
        """The model with its rule: what the first stage goes on from."""
        start, lengths = self.work / "start", (self.window, self.extension.config.max_positions)
        if start.exists():
            verify(start, self.extension, lengths)
            return
        write_extended(self.checkpoint, self.extension, start, lengths=lengths)

    def _model(self, number: int) -> Path:
        """What the stages before a stage have made."""
        return self.folder(number - 1) / MODEL if number else self.work / "start"

    def _run(self, number: int, data: Path) -> RunConfig:
        return self.config.run(
            number,
            model=self._model(number),
            data=data,
            out=self.folder(number),
            window=self.window,
        )

    def _train(self, number: int, data: Path) -> str:
        """Make a stage's steps, or those that are left; return how that ended."""
        run, stage = self._run(number, data), self.config.stages[number]
        how = f", positions skip in rows of {stage.row:,}" if stage.skips else ""
        self._say(
            f"stage {number + 1} of {len(self.config.stages)}: {stage.steps:,} steps to "
            f"{stage.length:,} positions{how}"
        )
        begun = on_first_rank((self.folder(number) / CHECKPOINTS).is_dir)
        with self.watch.listeners() as listeners:
            return train(
                run,
                resume=begun,
                allow=("train.steps", "train.warmup"),  # more of them is what gates may ask for
                listeners=listeners,
                progress=self.watch.progress,
            ).reason

    def _hold(self, number: int, gates: Gates | None) -> Stage | str:
        """Measure a stage's model and note what its gates say; or the name of a signal."""

        def measure() -> Held | str:
            if gates is None:
                return Held((), ())
            self._say(f"stage {number + 1}: measuring what its gates ask for")
            try:
                return self._measured(number, gates)
            except Stopped as stopped:
                return signal.Signals(stopped.number).name

        found = on_first_rank(measure)
        if isinstance(found, str):
            return found
        own = self.config.stages[number]
        stage = Stage(number, own.length, own.steps, found.gates, found.losses)
        for gate in found.gates:
            verdict = {True: "holds", False: "does not hold", None: "left out"}[gate.passed]
            self._say(f"stage {number + 1}: {gate.name} {verdict}: {gate.said}")
        on_first_rank(lambda: write_json(self.folder(number) / _GATES, _facts_of(stage)))
        return stage

    def _measured(self, number: int, gates: Gates) -> Held:
        folder = self.folder(number)
        model, alone = open_checkpoint(folder / MODEL), open_checkpoint(self.work / "start")
        return gates.measure(model, alone, self.config.stages[number].length, folder / "measured")

    def _gates(self, data: Path) -> Gates | None:
        if self.config.gates is None:
            return None
        held_out = None
        if VALIDATION in read_prepared(data).splits:
            held_out = TokenDataset(data, VALIDATION)
        return Gates(
            self.config.gates,
            self.config.seed,
            self.checkpoint,
            self._tokenizer(),
            held_out,
            self.work / "unextended",
            device_of(self._run(0, data)),
            self.watch.measured,
        )

    def _write(self, format: Format, dtype: str | None) -> Applied:
        """The last stage's model with the rule, read back as `apply` does it."""
        last = open_checkpoint(self.folder(len(self.config.stages) - 1) / MODEL)
        lengths = (self.window, self.extension.config.max_positions)
        return write_extended(
            last, self.extension, self.out, lengths=lengths, format=format, dtype=dtype
        )

    def _say(self, line: str) -> None:
        if rank() == 0:
            self.watch.say(line)


def _facts_of(stage: Stage) -> dict[str, Any]:
    return {
        "length": stage.length,
        "steps": stage.steps,
        "passed": stage.passed,
        "gates": [asdict(gate) for gate in stage.gates],
        "losses": [asdict(each) for each in stage.losses],
    }


def _stage_of(number: int, facts: dict[str, Any]) -> Stage:
    return Stage(
        number,
        facts["length"],
        facts["steps"],
        tuple(Gate(**entries) for entries in facts["gates"]),
        tuple(Compared(**entries) for entries in facts["losses"]),
    )


def _plain(value: Any) -> Any:
    """As JSON gives it back."""
    return [_plain(each) for each in value] if isinstance(value, tuple) else value


def _named(key: str, names: Sequence[str]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in names)
