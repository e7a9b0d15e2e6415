"""What a run needs of each process's memory, from its settings alone: no model is built.

    plan(config, decoder, ranks)            what takes how much, and when
    to_fit(config, decoder, ranks, memory)  the changes of settings that make a run fit

Held against what tensors really take by the tests. Not counted: the program and the CUDA context
(about a gigabyte), kernels' workspaces, what the allocator holds unused (5 to 10 %), validation
and samples.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch.distributed.tensor import Shard

from armillary.config import DecoderConfig, LayerConfig
from armillary.diagnosis.size import Weight, forward_flops, layer_groups, outer_steps
from armillary.errors import ConfigError
from armillary.training.activations import Adapted, Kept, Pass, layer_kept, outside_kept, widest
from armillary.training.loss import CHUNK
from armillary.training.parallel.config import Sizes, shares_vocabulary
from armillary.training.parallel.tensor import share_of
from armillary.training.run_config import RunConfig

ITEMS = ("weights", "gradients", "optimiser", "activations", "logits", "batch")
MOMENTS = ("loss", "last_layer", "first_layer", "update")
"""When memory may be at its peak: a chunk's logits are there, beside all activations; the backward
pass begins; it ends, and only one layer's activations are left, but all gradients are there; the
embedding's gradient and the optimiser's step."""

_WIDE = 4  # bytes of weights, gradients, optimiser state and sums
_LAYER = "layers.0."  # where a layer's weights stand in a decoder; any number will do


@dataclass(frozen=True)
class Term:
    """One thing that takes memory: the item that it is part of, and its bytes at each moment."""

    item: str
    name: str
    loss: int = 0
    last_layer: int = 0
    first_layer: int = 0
    update: int = 0

    @classmethod
    def always(cls, item: str, name: str, count: int) -> "Term":
        """Something that stays from step to step."""
        return cls(item, name, count, count, count, count)

    def at(self, moment: str) -> int:
        """Bytes at one of MOMENTS."""
        return int(getattr(self, moment))

    @property
    def most(self) -> int:
        """The most bytes at any moment."""
        return max(self.at(moment) for moment in MOMENTS)


@dataclass(frozen=True)
class MemoryPlan:
    """The memory of a process (of that which holds most), and the work of a step.

    rows             of a micro-batch
    micro_batches    passes of a process in a step
    flops_per_token  to train on a row's average token, what is computed again among them
    """

    sizes: Sizes
    precision: str
    rows: int
    length: int
    micro_batches: int
    parameters: int
    trained_parameters: int
    flops_per_token: int
    terms: tuple[Term, ...]

    @property
    def tokens_per_step(self) -> int:
        """Places in the rows of all processes."""
        return self.sizes.data * self.rows * self.micro_batches * self.length

    def at(self, moment: str, item: str | None = None) -> int:
        """Bytes at one of MOMENTS, of everything or of one of ITEMS."""
        return sum(term.at(moment) for term in self.terms if item in (None, term.item))

    @property
    def moment(self) -> str:
        """The one of MOMENTS at which most is held."""
        return max(MOMENTS, key=self.at)

    @property
    def peak(self) -> int:
        """The most bytes that are held at once."""
        return self.at(self.moment)


@dataclass(frozen=True)
class Change:
    """Settings, as the command line takes them, and the plan that they come to."""

    settings: tuple[str, ...]
    plan: MemoryPlan


def plan(config: RunConfig, decoder: DecoderConfig, ranks: int) -> MemoryPlan:
    """What each of `ranks` processes needs.

    `precision: auto` counts as bfloat16, and a compiled pass as one that is not. Raises
    ConfigError for sizes that do not divide.
    """
    run = _Run(config, decoder, ranks)
    terms = (
        *_weights(run),
        *_gradients(run),
        *_optimiser(run),
        *_activations(run),
        *_logits(run),
        *_batch(run),
    )
    times = (3 if config.lora is None else 2) + config.train.recompute
    return MemoryPlan(
        sizes=run.sizes,
        precision=run.precision,
        rows=run.rows,
        length=config.data.length,
        micro_batches=run.micro_batches,
        parameters=run.total(lambda share: share.count),
        trained_parameters=run.total(lambda share: share.count * share.trains),
        flops_per_token=times * forward_flops(decoder, (config.data.length + 1) // 2),
        terms=tuple(term for term in terms if term.most),
    )


def least_ranks(config: RunConfig) -> int:
    """The processes that `parallel` names; one for `shard` where that is left open."""
    own = config.parallel
    return max(own.shard, 1) * own.replicate * own.tensor * own.context


def to_fit(
    config: RunConfig,
    decoder: DecoderConfig,
    ranks: int,
    memory: int,
    settings: tuple[str, ...] = (),
) -> tuple[Change, ...]:
    """The changes of one setting that each make a run fit in `memory` bytes, most saving first.

    Each is tried by planning again: recomputed layers, smaller micro-batches, one copy of the
    weights instead of several, tensor parallelism. Where none is enough, what saves most is added
    to `settings` and the others are tried on top; more processes come last. Empty when nothing
    helps.
    """
    tried = [_mildest(lever, decoder, memory) for lever in _levers(config, decoder, ranks)]
    found = sorted((trial for trial in tried if trial), key=lambda trial: trial.plan.peak)
    fitting = tuple(
        Change((*settings, trial.setting), trial.plan)
        for trial in found
        if trial.plan.peak <= memory
    )
    if fitting:
        return fitting
    if found and found[0].plan.peak < plan(config, decoder, ranks).peak:
        best = found[0]
        with_it = (*settings, best.setting)
        return to_fit(best.config, decoder, best.ranks, memory, with_it)[:1]
    more = _mildest([(f"--ranks {ranks * n}", config, ranks * n) for n in _TIMES], decoder, memory)
    if more and more.plan.peak <= memory:
        return (Change((*settings, more.setting), more.plan),)
    return ()


# The weights of a run, by name


@dataclass(frozen=True)
class _Share:
    """A weight of a layer or outside.

    count  numbers in it
    used   numbers that a process computes with
    held   numbers that a process keeps from step to step
    """

    weight: Weight
    count: int
    used: int
    held: int
    trains: bool

    @property
    def is_matrix(self) -> bool:
        """Whether it has two dimensions, as a table too."""
        return len(self.weight.shape) == 2

    @property
    def is_narrowed(self) -> bool:
        """Whether autocast copies it into the type that products are computed in."""
        name = self.weight.name
        return "norm" not in name and "router" not in name and not self.weight.is_table


@dataclass(frozen=True)
class _Layers:
    """Some layers that are alike."""

    number: int
    layer: LayerConfig
    adapted: Adapted | None
    shares: tuple[_Share, ...]


Measure = Callable[[_Share], int]


class _Run:
    """The settings of a run as the terms need them."""

    def __init__(self, config: RunConfig, decoder: DecoderConfig, ranks: int) -> None:
        self.config, self.decoder, own = config, decoder, config.train
        self.sizes = config.sizes(decoder, ranks)
        self.precision = "bfloat16" if own.precision == "auto" else own.precision
        self.narrow = _WIDE if self.precision == "float32" else 2
        rows = own.batch_size // self.sizes.data
        self.rows = own.micro_batch_size or rows
        self.micro_batches = rows // self.rows
        self.is_sharded = self.sizes.world > 1
        self.one_pass = Pass(
            rows=self.rows,
            length=config.data.length,
            documents=config.data.mode == "packed",
            narrow=self.narrow,
            tensor=self.sizes.tensor,
            context=self.sizes.context,
        )
        self.layers = tuple(self._layers())
        self.outside = tuple(
            self._share(weight, config.lora is None)
            for step in outer_steps(decoder, 1, 1)
            for weight in step.weights
        )
        self.kept = [
            layer_kept(kind.layer, decoder.d_model, self.one_pass, kind.adapted)
            for kind in self.layers
        ]

    def total(self, measure: Measure) -> int:
        """The sum over all weights."""
        return self.in_layers(measure) + self.around(measure)

    def in_layers(self, measure: Measure) -> int:
        """The sum over the layers' weights."""
        return sum(kind.number * sum(map(measure, kind.shares)) for kind in self.layers)

    def in_largest(self, measure: Measure) -> int:
        """The sum over the weights of the layer where it is largest."""
        return max(sum(map(measure, kind.shares)) for kind in self.layers)

    def around(self, measure: Measure) -> int:
        """The sum over the weights outside the layers."""
        return sum(map(measure, self.outside))

    @property
    def table(self) -> int:
        """V × d, of the ids that a process has the rows of."""
        return self.ids * self.decoder.d_model

    @property
    def ids(self) -> int:
        """V, or a process's share of it."""
        split = shares_vocabulary(self.decoder, self.sizes.tensor)
        return self.decoder.vocab_size // (self.sizes.tensor if split else 1)

    def _layers(self) -> Iterator[_Layers]:
        for group in layer_groups(self.decoder, 1, 1):
            weights = [weight for step in group.steps for weight in step.weights]
            alike: dict[Adapted | None, int] = {}
            for index in group.indices:
                adapted = self._adapted(index, weights)
                alike[adapted] = alike.get(adapted, 0) + 1
            for adapted, number in alike.items():
                shares = [self._share(weight, adapted is None, _LAYER) for weight in weights]
                if adapted is not None:
                    shares += [
                        self._share(weight, True, _LAYER) for weight in _adapters(adapted, weights)
                    ]
                yield _Layers(number, group.layer, adapted, tuple(shares))

    def _adapted(self, index: int, weights: list[Weight]) -> Adapted | None:
        lora = self.config.lora
        if lora is None:
            return None
        # Norms, the router and stacks of experts are no projections with adapters.
        linear = {
            weight.name.removesuffix(".weight")
            for weight in weights
            if len(weight.shape) == 2 and "router" not in weight.name
        }
        projections = frozenset(
            name
            for name in (weight.name.removesuffix(".weight") for weight in weights)
            if name in linear
            and any(fnmatchcase(f"layers.{index}.{name}", target) for target in lora.targets)
        )
        return Adapted(projections, lora.rank, lora.dropout > 0)

    def _share(self, weight: Weight, trains: bool, where: str = "") -> _Share:
        shape = list(weight.shape)
        placement = share_of(where + weight.name, self.decoder, self.sizes.tensor).placement
        if isinstance(placement, Shard):
            shape[placement.dim] //= self.sizes.tensor
        used = math.prod(shape)
        # Rows are dealt out; the first process has as many as any.
        shape[0] = -(-shape[0] // (self.sizes.shard * self.sizes.context))
        trains = trains and not weight.name.endswith("selection_bias")
        return _Share(weight, weight.count, used, math.prod(shape), trains)


def _adapters(adapted: Adapted, weights: list[Weight]) -> Iterator[Weight]:
    for weight in weights:
        name = weight.name.removesuffix(".weight")
        if name in adapted.projections:
            n_out, n_in = weight.shape
            yield Weight(f"{name}.lora_a", (adapted.rank, n_in))
            yield Weight(f"{name}.lora_b", (n_out, adapted.rank))


# What takes memory


def _weights(run: _Run) -> Iterator[Term]:
    """Master weights; and what is computed with, where that is something else."""
    yield Term.always("weights", "layers", _WIDE * run.in_layers(lambda w: w.held))
    outside = _WIDE * run.around(lambda w: w.held)
    yield Term.always("weights", "embedding and head", outside)
    if run.is_sharded:
        # The layer that runs and the next, which is fetched meanwhile.
        two = 2 * run.narrow * run.in_largest(lambda w: w.used)
        yield Term("weights", "two layers, gathered", 0, two, two)
        whole = _WIDE * run.around(lambda w: w.used)
        yield Term.always("weights", "embedding and head, gathered", whole)
    elif run.narrow < _WIDE:
        narrow = run.narrow * run.in_layers(lambda w: w.used * w.is_narrowed)
        one = run.narrow * run.in_largest(lambda w: w.used * w.is_narrowed)
        recompute, adapters = run.config.train.recompute, run.config.lora is not None
        # Autocast keeps copies of what trains until the pass is over, gradients theirs until used.
        loss = 0 if recompute and adapters else narrow
        name = f"copies in {run.precision}"
        yield Term("weights", name, loss, one if recompute else narrow, one)


def _gradients(run: _Run) -> Iterator[Term]:
    """Float32, of what trains; between micro-batches all are there."""
    before = run.micro_batches > 1
    layers = _WIDE * run.in_layers(lambda w: w.held * w.trains)
    yield Term("gradients", "layers", before * layers, before * layers, layers, layers)
    held = _WIDE * run.around(lambda w: w.held * w.trains)
    trained = run.config.lora is None
    table = _WIDE * run.table * trained
    if run.is_sharded:
        yield Term(
            "gradients", "embedding and head", before * held, before * held, before * held, held
        )
        # As they are computed, and once more in float32 as they are sent.
        one = (run.narrow + _WIDE) * run.in_largest(lambda w: w.used * w.trains)
        yield Term("gradients", "one layer, to be summed", 0, one, one)
        whole = 2 * _WIDE * run.around(lambda w: w.used * w.trains)
        yield Term("gradients", "embedding and head, to be summed", 0, table, table, whole)
        return
    waits = table if before or run.decoder.tie_head else 0
    at_first = before * held or table
    yield Term("gradients", "embedding and head", before * held, at_first, at_first, held)
    tied = waits if run.decoder.tie_head and before else 0
    yield Term("gradients", "embedding, to be added", 0, tied, tied, waits)


def _optimiser(run: _Run) -> Iterator[Term]:
    muon = run.config.train.optimizer == "muon"

    def of_layer(share: _Share) -> int:
        return share.trains * (_WIDE * share.held if muon and share.is_matrix else adamw(share))

    def adamw(share: _Share) -> int:
        # Two averages, and the count of steps.
        return share.trains * (2 * _WIDE * share.held + 4)

    yield Term.always("optimiser", "averages, layers", run.in_layers(of_layer))
    yield Term.always("optimiser", "averages, embedding and head", run.around(adamw))
    if muon:
        matrices = [
            share.weight.shape
            for kind in run.layers
            for share in kind.shares
            if share.trains and share.is_matrix
        ]
        # A float32 update, its orthogonal form in bfloat16 twice, two products of its short side.
        working = max(8 * math.prod(shape) + 4 * min(shape) ** 2 for shape in matrices)
        yield Term("optimiser", "muon's update of a matrix", update=working)


def _activations(run: _Run) -> Iterator[Term]:
    d = run.decoder.d_model
    path = _WIDE * run.one_pass.tokens * d
    largest = max(run.kept, key=Kept.total)
    if run.config.train.recompute:
        inputs = run.decoder.n_layers * path
        yield Term("activations", "inputs of layers", inputs, inputs)
        again = largest.total()
        yield Term("activations", "one layer, computed again", 0, again, again)
    else:
        everything = Kept()
        for kind, kept in zip(run.layers, run.kept, strict=True):
            everything += Kept({name: kind.number * count for name, count in kept.items()})
        for name, count in everything.items():
            yield Term("activations", name, count, count, largest[name])
    for name, count in outside_kept(run.decoder, run.one_pass, run.config.lora is None).items():
        yield Term("activations", name, count, count)
    flowing = max(widest(kind.layer, d, run.one_pass) for kind in run.layers)
    yield Term("activations", "gradients on their way", 0, flowing, flowing, path)


def _logits(run: _Run) -> Iterator[Term]:
    """What the chunked loss makes; see `chunked_cross_entropy`."""
    tokens = run.one_pass.tokens
    chunk = min(CHUNK, tokens)
    is_narrow = run.narrow < _WIDE
    # Logits as multiplied, in float32, and their logarithms; a cap keeps what it is made of.
    copies = run.narrow + _WIDE * is_narrow + _WIDE
    if run.decoder.final_soft_cap is not None:
        copies += 2 * run.narrow
    logits = chunk * run.ids * copies
    yield Term("logits", f"logits of {chunk} tokens", logits)
    if is_narrow:
        yield Term("logits", f"head in {run.precision}", run.narrow * run.table)
    if run.config.lora is None:
        yield Term("logits", "head's gradient", _WIDE * run.table)
        if is_narrow:
            yield Term("logits", "part of it, to be added", run.narrow * run.table)
    hidden = 2 * _WIDE * tokens * run.decoder.d_model
    yield Term("logits", "hidden states and their gradient", hidden)


def _batch(run: _Run) -> Iterator[Term]:
    """Tokens and labels, and documents and positions where rows have several documents."""
    arrays = 4 if run.one_pass.documents else 2
    yield Term.always("batch", "a micro-batch", arrays * 8 * run.rows * run.config.data.length)


# What could be changed

_TIMES = (2, 4, 8, 16, 32, 64)
_Trial = tuple[str, RunConfig, int]


@dataclass(frozen=True)
class _Tried:
    """A change, the run that it makes, and its plan."""

    setting: str
    config: RunConfig
    ranks: int
    plan: MemoryPlan


def _mildest(lever: list[_Trial], decoder: DecoderConfig, memory: int) -> _Tried | None:
    """The first that fits of changes that go ever further; the last possible one if none does."""
    last = None
    for setting, config, ranks in lever:
        try:
            last = _Tried(setting, config, ranks, plan(config, decoder, ranks))
        except ConfigError:
            continue  # what does not divide is no remedy
        if last.plan.peak <= memory:
            break
    return last


def _levers(config: RunConfig, decoder: DecoderConfig, ranks: int) -> Iterator[list[_Trial]]:
    """For each setting that saves memory its values, ever further from what it is."""
    own = config.train
    if not own.recompute:
        yield [("train.recompute=true", _with(config, "train", recompute=True), ranks)]
    rows = _Run(config, decoder, ranks).rows
    fewer = [rows // n for n in range(2, rows + 1) if rows % n == 0]
    yield [
        (f"train.micro_batch_size={n}", _with(config, "train", micro_batch_size=n), ranks)
        for n in fewer
    ]
    if config.parallel.replicate > 1:
        shared = _with(config, "parallel", replicate=1, shard=-1)
        yield [("parallel.replicate=1", shared, ranks)]
    if config.lora is None:
        yield [
            (f"parallel.tensor={n}", _with(config, "parallel", tensor=n, shard=-1), ranks)
            for n in (2, 4, 8)
            if n > config.parallel.tensor and ranks % n == 0
        ]


def _with(config: RunConfig, section: str, **entries: object) -> RunConfig:
    changed = getattr(config, section).model_copy(update=entries)
    return config.model_copy(update={section: changed})
