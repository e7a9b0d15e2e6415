"""What a longer window would take: each rule's frequencies and their price, memory, time, advice.

Computes from a configuration alone. Nothing here knows how good a model becomes; that is measured.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from armillary.config import DecoderConfig
from armillary.diagnosis.frequencies import (
    FrequencyChange,
    RotaryGroup,
    frequency_change,
    rotary_groups,
    smallest_base,
)
from armillary.diagnosis.size import (
    BYTES_OF,
    cache_bytes,
    check_sizes,
    parameter_count,
    prefill_bytes,
    prefill_flops,
)
from armillary.errors import ConfigError
from armillary.extension.machine import Machine
from armillary.extension.rules import (
    RULES,
    Extension,
    Over,
    RuleName,
    RuleOptions,
    existing_rule,
    extend,
)
from armillary.rope_scaling import AnyRopeScaling, Unscaled

# Rules that a model keeps while it is adapted; the dynamic one is put on untrained.
_TRAINED = frozenset({"linear", "ntk", "yarn", "llama3", "longrope"})
CHUNK = 512  # tokens that a prefill takes in at a time, by default


@dataclass(frozen=True, eq=False)
class GroupChange:
    """What a rule does to layers that rotate alike."""

    group: RotaryGroup
    change: FrequencyChange


@dataclass(frozen=True, eq=False)
class RulePlan:
    """A rule as it would be put on the model, or why it cannot be.

    `changes` has an entry for each group of layers that read beyond the old window; `over` is set
    where the model carries a rule already.
    """

    name: RuleName
    over: Over | None
    rule: AnyRopeScaling | None
    changes: tuple[GroupChange, ...]
    notices: tuple[str, ...] = ()
    refused: str | None = None

    @property
    def unseen(self) -> int:
        """Channel pairs that would meet angles never trained on, in the group with most of them."""
        return max((int(each.change.unseen.sum()) for each in self.changes), default=0)

    @property
    def change_in_short_texts(self) -> float:
        """The largest change of an angle inside a text of the old window, in turns."""
        return max((each.change.change_in_short_texts for each in self.changes), default=0.0)

    @property
    def change_in_long_texts(self) -> float:
        """The same, inside the old window's reach in a text of the target's length."""
        return max((each.change.change_in_long_texts for each in self.changes), default=0.0)


@dataclass(frozen=True)
class BaseBound:
    """The base of some layers, and the smallest with which the target's distances keep their order.

    See `diagnosis.frequencies.smallest_base`; None where no base up to 10¹² does.
    """

    group: RotaryGroup
    base: float
    smallest: float | None


@dataclass(frozen=True)
class Needs:
    """What a prompt of the target's length takes, in bytes, FLOPs and, on a machine, seconds.

    Activations are those of a prefill in chunks. `seconds` is what the products take at the
    machine's full speed: a bound, not a promise.
    """

    dtype: str
    weights: int
    cache: int
    activations: int
    flops: int
    machine: Machine | None

    @property
    def total(self) -> int:
        """Bytes in all; the program itself is not counted."""
        return self.weights + self.cache + self.activations

    @property
    def fits(self) -> bool | None:
        """Whether the machine has as much; None without a machine."""
        return None if self.machine is None else self.total <= self.machine.memory

    @property
    def seconds(self) -> float | None:
        """The least time; None without a machine."""
        return None if self.machine is None else self.flops / self.machine.flops


@dataclass(frozen=True, eq=False)
class ExtensionPlan:
    """All that is known before anything is written or run.

    rules        what each would do, the one that was asked for alone
    recommended  the one to take, with why in a sentence; None where none can be
    kept         layers that keep their frequencies, reading no further than the old window
    baseline     what an extended model must beat
    """

    window: int
    target: int
    carries: AnyRopeScaling | None
    rules: tuple[RulePlan, ...]
    recommended: RulePlan | None
    why: str
    kept: tuple[RotaryGroup, ...]
    bounds: tuple[BaseBound, ...]
    needs: Needs
    baseline: str


def plan(
    config: DecoderConfig,
    *,
    to: int,
    rule: RuleName | None = None,
    options: RuleOptions | None = None,
    dtype: str = "float32",
    machine: Machine | None = None,
) -> ExtensionPlan:
    """Say what a window of `to` tokens would take, under one rule or under each that there is.

    `options` go with a rule that is named. Where the model carries a rule and `options.over` is
    not said, both readings of a factor are shown. `dtype` is that of weights, cache and
    activations; without a `machine` there is no time, and nothing to fit into.
    Raises UserError for a learned position table shorter than `to`; ConfigError for a rule that was
    named and cannot be applied.
    """
    check_sizes(config, 1, to)
    options = options or RuleOptions()
    window = config.max_positions
    groups = rotary_groups(config)
    reaching = tuple(group for group in groups if group.reads_beyond(window))
    carries = existing_rule(reaching) if reaching else None
    rules: tuple[RulePlan, ...] = ()
    if to > window:
        names = RULES if rule is None else (rule,)
        rules = tuple(each for name in names for each in _readings(config, to, name, options))
        if all(each.refused for each in rules):
            extend(config, to, names[-1], options)  # which says why
    recommended, why = _advice(config, to, rules, reaching)
    return ExtensionPlan(
        window=window,
        target=to,
        carries=None if isinstance(carries, Unscaled) else carries,
        rules=rules,
        recommended=recommended,
        why=why,
        kept=tuple(group for group in groups if group not in reaching),
        bounds=tuple(_bounds(reaching, to)),
        needs=needs(config, to, dtype, machine),
        baseline=f"the same text cropped to its last {min(window, to):,} tokens",
    )


def needs(config: DecoderConfig, length: int, dtype: str, machine: Machine | None) -> Needs:
    """What taking a prompt of `length` tokens in needs."""
    return Needs(
        dtype=dtype,
        weights=parameter_count(config) * BYTES_OF[dtype],
        cache=cache_bytes(config, dtype, length),
        activations=prefill_bytes(config, dtype, length, CHUNK),
        flops=prefill_flops(config, length),
        machine=machine,
    )


def changes_of(config: DecoderConfig, extension: Extension) -> tuple[GroupChange, ...]:
    """What an extension does to each group of layers that reads beyond the old window."""
    window, target = config.max_positions, extension.config.max_positions
    return tuple(
        GroupChange(group, frequency_change(group.rotary, after, window, target))
        for group in rotary_groups(config)
        if group.reads_beyond(window)
        and (after := extension.config.layers[group.layers[0]].attention.rotary) is not None
    )


def _readings(
    config: DecoderConfig, to: int, name: RuleName, options: RuleOptions
) -> Iterator[RulePlan]:
    """The rule as asked for; over another one without a word, both ways that it can be meant."""
    if name == "none":
        options = replace(options, over=None)  # there is no factor that it would be said of
    first = _one(config, to, name, options)
    reaching = [g for g in rotary_groups(config) if g.reads_beyond(config.max_positions)]
    scaled = any(not isinstance(group.rotary.scaling, Unscaled) for group in reaching)
    if first.refused is None or options.over is not None or not scaled:
        yield first
        return
    ways: tuple[Over, Over] = ("replace", "multiply")
    both = [_one(config, to, name, replace(options, over=over)) for over in ways]
    # A rule of another kind has one reading only, which needs no second line.
    possible = [each for each in both if each.refused is None]
    yield from possible or both[:1]


def _one(config: DecoderConfig, to: int, name: RuleName, options: RuleOptions) -> RulePlan:
    try:
        extension = extend(config, to, name, options)
    except ConfigError as error:
        return RulePlan(name, options.over, None, (), refused=str(error))
    changes = changes_of(config, extension)
    return RulePlan(name, options.over, extension.rule, changes, extension.notices)


def _bounds(groups: tuple[RotaryGroup, ...], to: int) -> Iterator[BaseBound]:
    found: dict[tuple[int, int], float | None] = {}
    for group in groups:
        reach = to if group.window is None else min(group.window, to)
        key = (group.rotary.d_rotary, reach)
        if key not in found:
            found[key] = smallest_base(*key)
        yield BaseBound(group, group.rotary.base, found[key])


def _advice(
    config: DecoderConfig,
    to: int,
    rules: tuple[RulePlan, ...],
    reaching: tuple[RotaryGroup, ...],
) -> tuple[RulePlan | None, str]:
    """The rule to take and why, out of the numbers of the plan."""
    window = config.max_positions
    if to <= window:
        return None, f"{to:,} positions are within the window of {window:,}: no rule is needed."
    possible = [each for each in rules if each.refused is None]
    if not reaching:
        none = next((each for each in possible if each.name == "none"), None)
        return none, (
            f"No layer rotates and reads beyond {window:,} positions, so there is no angle that a "
            "rule could bring back."
        )
    best = _preferred(possible, existing_rule(reaching))
    return best, _why(config, to, best, reaching)


def _preferred(possible: list[RulePlan], carried: AnyRopeScaling) -> RulePlan:
    """The carried kind, then YaRN, then what there is; of two readings the cheaper one."""
    kinds = [*_TRAINED.intersection({carried.kind}), "yarn", "llama3"]

    def order(each: RulePlan) -> tuple[int, int, float]:
        rank = kinds.index(each.name) if each.name in kinds else len(kinds)
        return rank, each.unseen, each.change_in_short_texts

    return min(possible, key=order)


def _why(config: DecoderConfig, to: int, best: RulePlan, reaching: tuple[RotaryGroup, ...]) -> str:
    window = config.max_positions
    largest = max(best.changes, key=lambda each: len(each.group.layers))
    change = largest.change
    pairs = len(change.before)
    never = int((change.turns < 1).sum())
    carried = existing_rule(reaching)
    if best.name == carried.kind and best.name in _TRAINED:
        beginning = f"The model carries {carried.kind} already. "
    else:
        beginning = ""
    if never:
        seen = (
            f"{never} of {pairs} channel pairs complete no turn in {window:,} positions, so beyond "
            "that they meet angles that were never trained"
        )
    else:
        seen = (
            f"All {pairs} channel pairs complete a turn in {window:,} positions, so no angle is "
            f"new in {to:,}, though more positions compete"
        )
    if best.rule is None:
        return f"{beginning}{seen}."
    kept = int(np.isclose(change.after, change.before, rtol=1e-9, atol=0).sum())
    slowest = float(np.max(change.before / change.after))
    rest = f" {best.unseen} pairs still meet new angles." if best.unseen else ""
    return (
        f"{beginning}{seen}; {best.name} slows pairs by up to {slowest:.3g} times, leaves {kept} "
        f"as they are and moves no angle inside the old window by more than "
        f"{best.change_in_short_texts:.3g} turns.{rest}"
    )
