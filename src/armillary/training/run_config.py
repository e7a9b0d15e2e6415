"""A training run as data: one strict file that says everything a run depends on.

Every key has its type, bounds, default and description here and nowhere else; `explain` prints
them. What belongs to a part (optimiser, schedule, adapters) is checked by that part's own settings.
"""

import json
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo

from armillary.config import DecoderConfig
from armillary.data.mixture import Mixture
from armillary.data.skipping import Skip
from armillary.errors import ConfigError
from armillary.strict_dict import nearest
from armillary.strict_yaml import parse_yaml, read_text
from armillary.training.lora import LoraConfig
from armillary.training.optimizer import OptimizerConfig
from armillary.training.parallel.config import ParallelConfig, Sizes, check_parallel
from armillary.training.schedule import ScheduleConfig

Count = Annotated[int, Field(ge=1)]
CountOrNone = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Section(BaseModel):
    """Settings that belong together: no other keys, no wrong types, never changed."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class UniformSettings(Section):
    """A new decoder of equal modern layers: RoPE, RMSNorm, SwiGLU, grouped queries, no biases."""

    d_model: Count = Field(description="Width of the residual path.")
    n_layers: Count = Field(description="Layers.")
    n_heads: Count = Field(description="Query heads of a layer.")
    n_kv_heads: Count | None = Field(None, description="Key/value heads; n_heads if left out.")
    d_head: Count | None = Field(
        None, description="Width of a head; d_model / n_heads if left out."
    )
    d_ff: Count | None = Field(
        None, description="Inner width of the feed-forward; 8/3 of d_model, rounded, if left out."
    )
    rope_base: Positive = Field(10000.0, description="Base of the rotary frequencies.")
    tie_head: bool = Field(False, description="Use the embedding as the output matrix too.")


class ModelSettings(Section):
    """The decoder that is trained; one of checkpoint, uniform and decoder."""

    checkpoint: str | None = Field(
        None,
        description="Go on from a model: an alias, a directory, a .gguf file or a Hub repository.",
    )
    uniform: UniformSettings | None = Field(
        None, description="A new decoder of equal layers, with the tokenizer's vocabulary."
    )
    decoder: str | None = Field(
        None, description="A new decoder of any parts: the path of its configuration."
    )
    dropout: Share | None = Field(
        None,
        description="Dropout on embeddings and on what layers add; the model's own if left out.",
    )
    init_std: Positive = Field(0.02, description="Standard deviation of a new decoder's matrices.")

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        given = [n for n in ("checkpoint", "uniform", "decoder") if getattr(self, n) is not None]
        if len(given) != 1:
            said = " and ".join(given) or "none of them"
            raise ValueError(f"needs one of checkpoint, uniform and decoder, found {said}")
        return self


class MixtureSettings(Section):
    """How often long documents and short sequences are drawn; each source keeps its share."""

    long: Annotated[int, Field(ge=2)] | None = Field(
        None, description="Tokens from which a document is long; all are alike if left out."
    )
    long_share: Share = Field(
        0.0,
        description="Least share of each source's tokens that is of its long documents, where it "
        "has some.",
    )
    long_repeat: Annotated[float, Field(ge=1)] = Field(
        5.0, description="Long documents come at most so many times as often as they would."
    )
    short: Annotated[int, Field(ge=2)] | None = Field(
        None, description="Most tokens of a short sequence; no rows of them if left out."
    )
    short_share: Share = Field(
        0.0, description="Share of each step's rows that hold short sequences only; one at least."
    )

    @model_validator(mode="after")
    def _whole(self) -> Self:
        for share, size in (("long_share", "long"), ("short_share", "short")):
            if (getattr(self, size) is None) == bool(getattr(self, share)):
                raise ValueError(f"{share} and {size} go together; give both or none")
        return self


class SkipSettings(Section):
    """Positions that skip, so that short rows train the distances of a long window (PoSE)."""

    to: Annotated[int, Field(ge=2)] = Field(description="Positions that a row's are spread over.")
    chunks: Annotated[int, Field(ge=2)] = Field(
        2, description="Pieces of a document within a row that are moved on, each by its own bias."
    )


class TextSettings(Section):
    """The text, whatever is made of it."""

    sources: tuple[str, ...] = Field(
        (),
        description="Files, directories, patterns, python-stdlib or hub:owner/name, prepared into "
        "OUT/data at the start.",
    )
    prepared: str | None = Field(
        None, description="Instead of sources: a directory that armillary prepare made."
    )
    tokenizer: str | None = Field(
        None,
        description="A model, a tokenizer.json or its directory; that of the checkpoint or of the "
        "prepared data if left out.",
    )
    format: Literal["auto", "text", "jsonl", "parquet", "chat"] = Field(
        "auto",
        description="What sources hold; auto goes by the name's ending. Of chats only the answers "
        "are learned.",
    )
    field: str | None = Field(
        None, description="Key of JSON lines, or column of a table, that holds the text or chat."
    )
    end_token: str | None = Field(
        None,
        description="The control token after each document; the tokenizer's end token if left out.",
    )
    validation: Share = Field(
        0.01, description="Share of the documents that is held out, when sources are prepared."
    )
    mode: Literal["packed", "cropped"] = Field(
        "packed",
        description="packed: several documents a row, each reading only itself; cropped: one "
        "document a row, cut at its end.",
    )
    workers: Count | None = Field(
        None, description="Processes that prepare sources; one for each core if left out."
    )

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if bool(self.sources) == (self.prepared is not None):
            raise ValueError("needs sources or prepared, one of them")
        return self


class DataSettings(TextSettings):
    """The text, and how it is laid in rows of tokens."""

    vocab_size: Count | None = Field(
        None, description="Instead of tokenizer: learn a byte-level BPE of this size from sources."
    )
    length: Annotated[int, Field(ge=2)] = Field(description="Tokens of a row.")
    mixture: MixtureSettings | None = Field(
        None,
        description="How often long documents and short sequences are drawn; null as they are.",
    )
    skip: SkipSettings | None = Field(None, description="Positions that skip; null counts them.")

    @model_validator(mode="after")
    def _fitting(self) -> Self:
        if self.vocab_size is not None and (self.tokenizer or self.prepared):
            raise ValueError("vocab_size learns a tokenizer from sources; leave out the others")
        if self.skip is not None and self.skip.to <= self.length:
            raise ValueError(
                f"skip.to {self.skip.to} is not beyond rows of {self.length}, so nothing would skip"
            )
        return self


class StepSettings(Section):
    """Optimiser, schedule and how steps are computed, however many they are."""

    batch_size: Count = Field(description="Rows of a step, of all processes together.")
    micro_batch_size: Count | None = Field(
        None,
        description="Rows that a process computes at once; gradients of a step's parts are added "
        "up, each token counting the same. All at once if left out.",
    )
    optimizer: Literal["adamw", "muon"] = Field(
        "adamw", description="adamw; or muon for the layers' matrices and adamw for all else."
    )
    lr: Positive = Field(3e-4, description="Learning rate at the schedule's top.")
    muon_lr: Positive | None = Field(
        None, description="Learning rate of the matrices under muon; lr if left out."
    )
    weight_decay: NotNegative = Field(0.1, description="Decoupled decay of matrices.")
    decay_embeddings: bool = Field(True, description="Whether embeddings decay as matrices do.")
    beta1: Share = Field(0.9, description="AdamW's average of gradients.")
    beta2: Share = Field(0.95, description="AdamW's average of their squares.")
    eps: Positive = Field(1e-8, description="AdamW's addition to the denominator.")
    momentum: Share = Field(0.95, description="Muon's average of gradients.")
    clip: Positive | None = Field(
        1.0, description="Longest gradient of a step, all parameters together; null leaves it."
    )
    schedule: Literal["constant", "cosine", "wsd"] = Field(
        "cosine", description="How the learning rate goes; wsd is warm-up, stable, decay."
    )
    warmup: CountOrNone = Field(0, description="Steps of linear rise at the beginning.")
    decay: CountOrNone = Field(0, description="wsd: steps of descent at the end.")
    decay_shape: Literal["linear", "sqrt"] = Field("linear", description="wsd: how it descends.")
    final: Annotated[float, Field(ge=0, le=1)] = Field(
        0.0, description="What the learning rate comes down to, as a share of its top."
    )
    precision: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="What products are computed in, over float32 weights; auto is bfloat16 where "
        "the machine is built for it.",
    )
    z_loss: NotNegative = Field(
        0.0, description="Weight of (log Σ exp logits)² per token, which keeps logits small."
    )
    balance_loss: NotNegative = Field(
        0.0,
        description="Weight of the loss that keeps experts equally busy, beside a token's "
        "cross-entropy; 0.01 is usual. It is 1 where they are.",
    )
    balance_rate: NotNegative = Field(
        0.0,
        description="How far the routers' selection biases move at a step towards an even load, "
        "without a loss; 0.001 is usual.",
    )
    recompute: bool = Field(
        False, description="Compute each layer again for its gradients instead of keeping it."
    )
    compile: bool = Field(
        False,
        description="Compile the layers: on a CPU built for bfloat16 to kernels of ours, in "
        "seconds, elsewhere by torch, in a minute or so. Without a compiler the run says so and "
        "goes on.",
    )
    max_skipped: Count = Field(
        10, description="Steps in a row with gradients that are no numbers, after which it stops."
    )
    device: str = Field("auto", description="As torch names it; auto is a GPU where there is one.")


class TrainSettings(StepSettings):
    """Steps, optimiser, schedule and how they are computed."""

    steps: Count = Field(description="Optimiser steps of the whole run.")


class LoraSettings(Section):
    """Low-rank adapters on a frozen model, merged into it at the end."""

    targets: tuple[str, ...] = Field(
        LoraConfig.targets, description="Patterns over the names of projections."
    )
    rank: Count = Field(8, description="Inner width of an adapter.")
    alpha: Positive = Field(16.0, description="An adapter is added alpha / rank times.")
    dropout: Share = Field(0.0, description="Dropout of an adapter's inputs.")


class ValidationSettings(Section):
    """The loss on held-out documents."""

    every: CountOrNone = Field(100, description="Steps between validations; 0 is at the end only.")
    at_start: bool | None = Field(
        None,
        description="Whether there is one before the first step; where a model is gone on from if "
        "left out.",
    )
    rows: Count | None = Field(
        None,
        description="How many rows, drawn once from all held-out ones and rounded up to whole "
        "batches; all if left out.",
    )
    batch_size: Count = Field(8, description="Rows that a process computes at once.")
    compressors: bool = Field(
        True, description="At the end, compare with gzip -9 and xz -9 on the same text."
    )


class SampleSettings(Section):
    """Texts that the model writes on the way."""

    every: CountOrNone = Field(0, description="Steps between samples; 0 is at the end only.")
    prompts: tuple[str, ...] = Field((), description="What is continued.")
    max_tokens: Count = Field(48, description="Longest continuation.")
    temperature: NotNegative = Field(0.7, description="0 takes the likeliest token.")


class CheckpointSettings(Section):
    """States that a run goes on from."""

    every: CountOrNone = Field(
        100, description="Steps between them; 0 saves only when interrupted and at the end."
    )
    keep_last: Count = Field(2, description="How many of the newest are kept.")
    keep_best: CountOrNone = Field(
        0, description="How many of those with the lowest validation loss are kept beside them."
    )


class LogSettings(Section):
    """What is written of the run."""

    every: Count = Field(10, description="Steps between lines of the log.")
    tensorboard: bool = Field(
        False, description='Write TensorBoard curves (pip install "armillary[tensorboard]").'
    )


class SettingsFile(Section):
    """Settings that a person wrote into a YAML file."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values; every key is there."""
        return self.model_dump(mode="json")

    def to_yaml(self) -> str:
        """`to_dict` as YAML, which `load` reads."""
        return yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True)

    @classmethod
    def from_dict(cls, entries: object, where: str = "run") -> Self:
        """Raises ConfigError naming the key, what is wrong with it and what would be right."""
        if not isinstance(entries, dict):
            raise ConfigError(f"{where}: a run is a mapping of names to values")
        try:
            # Only its JSON form lets pydantic be strict and still take lists for tuples.
            return cls.model_validate_json(_as_json(entries, where))
        except ValidationError as error:
            raise ConfigError(f"{where}: {_explained(error, cls)}") from error

    @classmethod
    def load(cls, path: str | Path, settings: Sequence[str] = ()) -> Self:
        """A YAML file with entries replaced: `settings` are KEY=VALUE, train.lr=3e-4."""
        path = Path(path)
        entries = parse_yaml(read_text(path), str(path))
        if not isinstance(entries, dict):
            raise ConfigError(f"{path}: a run is a mapping of names to values")
        for setting in settings:
            _replace(entries, setting)
        return cls.from_dict(entries, str(path))


class RunConfig(SettingsFile):
    """A whole training run."""

    out: str = Field(description="Directory for checkpoints, log, summary and the model.")
    seed: CountOrNone = Field(
        0, description="Decides initial weights, order of the data, dropout and samples."
    )
    model: ModelSettings = Field(description="The decoder that is trained.")
    data: DataSettings = Field(description="The text, and how it is laid in rows.")
    train: TrainSettings = Field(description="Steps, optimiser, schedule, precision.")
    lora: LoraSettings | None = Field(None, description="Adapters; null trains all weights.")
    parallel: ParallelConfig = Field(
        ParallelConfig(), description="How the run is spread over the processes of torchrun."
    )
    validation: ValidationSettings = Field(
        ValidationSettings(), description="The loss on held-out documents."
    )
    samples: SampleSettings = Field(SampleSettings(), description="Texts written on the way.")
    checkpoints: CheckpointSettings = Field(
        CheckpointSettings(), description="States that the run goes on from."
    )
    log: LogSettings = Field(LogSettings(), description="What is written of the run.")

    @model_validator(mode="after")
    def _possible(self) -> Self:
        new = self.model.checkpoint is None
        if self.lora is not None and new:
            raise ValueError("lora: adapters need model.checkpoint, a model to adapt")
        if new and not (self.data.prepared or self.data.tokenizer or self.data.vocab_size):
            raise ValueError("data: a new decoder needs a tokenizer or a vocab_size")
        if not new and self.data.vocab_size:
            raise ValueError("data.vocab_size: a checkpoint has its own tokenizer; leave it out")
        self.optimizer()
        self.schedule()
        self.adapters()
        mixture = self.mixture()
        if mixture is not None:
            mixture.short_rows(self.train.batch_size)
        return self

    def optimizer(self) -> OptimizerConfig:
        """The settings of the optimiser."""
        own = self.train
        return OptimizerConfig(
            kind=own.optimizer,
            lr=own.lr,
            muon_lr=own.muon_lr,
            weight_decay=own.weight_decay,
            decay_embeddings=own.decay_embeddings,
            beta1=own.beta1,
            beta2=own.beta2,
            eps=own.eps,
            momentum=own.momentum,
        )

    def schedule(self) -> ScheduleConfig:
        """The settings of the learning rate's course."""
        own = self.train
        return ScheduleConfig(
            steps=own.steps,
            kind=own.schedule,
            warmup=own.warmup,
            decay=own.decay,
            shape=own.decay_shape,
            final=own.final,
        )

    def validates_at_start(self) -> bool:
        """Whether what steps gain is measured from before the first; chance's loss needs none."""
        asked = self.validation.at_start
        return self.model.checkpoint is not None if asked is None else asked

    def mixture(self) -> Mixture | None:
        """How often which documents are drawn, where it is said."""
        own = self.data.mixture
        return None if own is None else Mixture(**own.model_dump())

    def skip(self) -> Skip | None:
        """How positions skip, where they do."""
        return None if self.data.skip is None else Skip(**self.data.skip.model_dump())

    def adapters(self) -> LoraConfig | None:
        """The settings of the adapters, where there are some."""
        return None if self.lora is None else LoraConfig(**self.lora.model_dump())

    def sizes(self, decoder: DecoderConfig, world: int) -> Sizes:
        """How `world` processes share the run. Raises ConfigError for what does not divide."""
        own, parallel = self.train, self.parallel
        # All rows that a process gets, when nothing smaller is asked for.
        share = own.batch_size * parallel.tensor * parallel.context // world
        return check_parallel(
            parallel,
            decoder,
            world=world,
            length=self.data.length,
            batch_size=own.batch_size,
            micro_batch=own.micro_batch_size or max(share, 1),
        )


def differences(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """The dotted keys whose values differ, each with "was → is now"."""
    found: dict[str, str] = {}
    for key in dict.fromkeys([*old, *new]):
        was, now = old.get(key), new.get(key)
        if isinstance(was, dict) and isinstance(now, dict):
            found |= differences(was, now, f"{prefix}{key}.")
        elif was != now:
            found[f"{prefix}{key}"] = f"{was!r} → {now!r}"
    return found


def explain(file: type[SettingsFile] = RunConfig) -> Iterator[tuple[str, str, str, str]]:
    """Each key of a file: its name, type, default ("" where it must be given), meaning.

    Of each section those that must be given come first.
    """
    yield from _explained_fields(file, "")


def _explained_fields(section: type[BaseModel], prefix: str) -> Iterator[tuple[str, str, str, str]]:
    fields = sorted(section.model_fields.items(), key=lambda pair: not pair[1].is_required())
    for name, field in fields:
        inner = _section_of(field.annotation)
        if get_origin(field.annotation) is tuple and inner is not None:
            name += "[]"  # noqa: PLW2901  # one of a list of sections
        default = "" if field.is_required() else _told(field.default)
        if inner is None:
            kind = _kind(field)
            yield f"{prefix}{name}", kind, default, field.description or ""
        else:
            shown = "null" if field.default is None else ""
            yield f"{prefix}{name}", "section", shown, field.description or ""
            yield from _explained_fields(inner, f"{prefix}{name}.")


def _told(default: object) -> str:
    if isinstance(default, BaseModel):
        return ""
    text = yaml.safe_dump(
        list(default) if isinstance(default, tuple) else default, default_flow_style=True
    )
    return text.removesuffix("...\n").strip()


def _kind(field: FieldInfo) -> str:
    """A field's type as a person says it."""
    return _kind_of(field.annotation)


def _kind_of(annotation: Any) -> str:
    origin = get_origin(annotation)
    if origin is Annotated:
        return _kind_of(get_args(annotation)[0])
    if origin is Literal:
        return ", ".join(map(str, get_args(annotation)))
    if origin is tuple:
        return "list of texts"
    if origin in (Union, types.UnionType):
        known = [part for part in get_args(annotation) if part is not type(None)]
        return " or ".join([*map(_kind_of, known), "null"])
    names = {int: "whole number", float: "number", str: "text", bool: "true or false"}
    return names[annotation]


def _section_of(annotation: Any) -> type[BaseModel] | None:
    """The section that a field holds, if it holds one."""
    for part in (annotation, *get_args(annotation)):
        if isinstance(part, type) and issubclass(part, BaseModel):
            return part
    return None


def _as_json(entries: dict[str, Any], where: str) -> str:
    try:
        return json.dumps(entries, default=str)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not plain names and values: {error}") from error


def _replace(entries: dict[str, Any], setting: str) -> None:
    key, equals, text = setting.partition("=")
    parts = key.split(".")
    if not equals or not all(parts):
        raise ConfigError(f"--set {setting}: must be KEY=VALUE, such as train.lr=3e-4")
    for part in parts[:-1]:
        if not isinstance(entries.get(part), dict):
            entries[part] = {}
        entries = entries[part]
    entries[parts[-1]] = parse_yaml(text, f"--set {key}")


def _explained(error: ValidationError, file: type[BaseModel]) -> str:
    """The first problem in a line; a misspelt key goes before the missing one that it causes."""
    problems = sorted(error.errors(), key=lambda p: p["type"] != "extra_forbidden")
    problem = problems[0]
    path = ".".join(map(str, problem["loc"]))
    if problem["type"] == "extra_forbidden":
        known = _keys_beside(problem["loc"], file)
        key = str(problem["loc"][-1])
        hint = nearest(key, known) or f" (known are {', '.join(known)})"
        text = f"unknown key {path!r}{hint}"
    elif problem["type"] == "missing":
        text = f"{path} is missing"
    elif problem["type"] == "value_error":
        said = problem["msg"].removeprefix("Value error, ")
        text = f"{path}: {said}" if path else said
    else:
        wanted = problem["msg"].replace("Input should be", "must be")
        for theirs, ours in (("valid array", "list"), ("valid string", "text")):
            wanted = wanted.replace(theirs, ours)
        text = f"{path} {wanted}, found {problem['input']!r}"
    more = len(problems) - 1
    return text + (f"; and {more} more problem{'s' if more > 1 else ''}" if more else "")


def _keys_beside(location: tuple[int | str, ...], section: type[BaseModel]) -> list[str]:
    for part in location[:-1]:
        if isinstance(part, str):  # numbers are places in a list of sections
            section = _section_of(section.model_fields[part].annotation) or section
    return list(section.model_fields)
