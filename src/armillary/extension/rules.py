"""A rule for a longer window, chosen by name and options, and the configuration that carries it.

Knows configurations only. The mathematics is that of `rope_scaling`; here stands what may be asked
of a model: which options go with which rule, what holds where nothing is said, and what is refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from armillary.config import DecoderConfig, LayerConfig
from armillary.diagnosis.frequencies import RotaryGroup, rotary_groups
from armillary.diagnosis.size import layers_text
from armillary.errors import ConfigError
from armillary.rope_scaling import (
    NTK,
    AnyRopeScaling,
    DynamicNTK,
    Llama3,
    LongRoPE,
    PositionInterpolation,
    Unscaled,
    YaRN,
)

RuleName = Literal["none", "linear", "ntk", "dynamic", "yarn", "llama3", "longrope"]
Over = Literal["replace", "multiply"]


@dataclass(frozen=True)
class RuleOptions:
    """What may be said of a rule; None leaves it to the rule, or to the windows.

    factor           s; the target divided by the original window when None
    original_window  L, the window before the rule; the model's own when None
    over             where the model carries a rule already: whether the factor takes its place or
                     multiplies it
    """

    factor: float | None = None
    original_window: int | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    attention_factor: float | None = None
    truncate: bool | None = None
    low: float | None = None
    high: float | None = None
    short_factors: tuple[float, ...] | None = None
    long_factors: tuple[float, ...] | None = None
    over: Over | None = None


# Option → the rule's own name for it, beside `factor` and `original_window`.
_OWN: Mapping[RuleName, Mapping[str, str]] = {
    "none": {},
    "linear": {},
    "ntk": {},
    "dynamic": {},
    "yarn": {
        "beta_fast": "beta_fast",
        "beta_slow": "beta_slow",
        "truncate": "truncate",
        "attention_factor": "explicit_attention_factor",
    },
    "llama3": {"low": "low_freq_factor", "high": "high_freq_factor"},
    "longrope": {
        "short_factors": "short_factor",
        "long_factors": "long_factor",
        "attention_factor": "explicit_attention_factor",
    },
}
RULES: tuple[RuleName, ...] = tuple(_OWN)
_CLASSES = {
    "linear": PositionInterpolation,
    "ntk": NTK,
    "dynamic": DynamicNTK,
    "yarn": YaRN,
    "llama3": Llama3,
    "longrope": LongRoPE,
}


@dataclass(frozen=True)
class Extension:
    """A configuration whose window is the target.

    rule      what its layers carry now; None when they turn as before
    changed   the groups of layers, as they were, that the rule is put on
    kept      those that rotate as before, since they read no further than the old window
    notices   one line each for what a person may want to know of the rule
    """

    config: DecoderConfig
    rule: AnyRopeScaling | None
    changed: tuple[RotaryGroup, ...]
    kept: tuple[RotaryGroup, ...]
    notices: tuple[str, ...]


def extend(
    config: DecoderConfig, to: int, rule: RuleName, options: RuleOptions | None = None
) -> Extension:
    """Put a rule on the layers that will read beyond the window of `config`, which becomes `to`.

    Raises ConfigError for a target that is not above the window, a model whose positions no rule
    can lengthen, options that the rule has not, a factor below 1 (or one over another without a
    word on which is meant), and whatever the rule itself refuses.
    """
    options = options or RuleOptions()
    _check_target(config, to)
    _check_options(rule, options)
    groups = rotary_groups(config)
    changed = tuple(group for group in groups if group.reads_beyond(config.max_positions))
    kept = tuple(group for group in groups if group not in changed)
    if rule == "none":
        longer = config.model_copy(update={"max_positions": to})
        return Extension(longer, None, (), kept, ())
    if not changed:
        raise ConfigError(
            f"no layer rotates and reads beyond the window of {config.max_positions:,}, so the "
            f"rule {rule} has nothing to act on; take --rule none"
        )
    before = existing_rule(changed)
    if isinstance(before, Unscaled):
        if options.over is not None:
            raise ConfigError(f"--over {options.over}: the model carries no rule yet; leave it out")
        made, notices = _made(rule, config, to, options, before)
    elif options.over == "multiply":
        made, notices = _multiplied(rule, config, to, options, before)
    elif options.over == "replace":
        made, notices = _made(rule, config, to, options, before)
    else:
        raise ConfigError(_which_is_meant(rule, config, to, options, before))
    layers = _with_rule(config, made, {i for group in changed for i in group.layers})
    longer = config.model_copy(update={"max_positions": to, "layers": layers})
    return Extension(longer, made, changed, kept, tuple(notices))


def existing_rule(groups: tuple[RotaryGroup, ...]) -> AnyRopeScaling:
    """The one rule that these layers carry. Raises ConfigError when they carry different ones."""
    found = {group.rotary.scaling for group in groups}
    if len(found) > 1:
        kinds = ", ".join(
            f"{group.rotary.scaling.kind} (layer {group.layers[0]})" for group in groups
        )
        raise ConfigError(f"layers carry different rules, {kinds}; one for all cannot follow them")
    (rule,) = found
    return rule


def kept_notices(groups: tuple[RotaryGroup, ...]) -> tuple[str, ...]:
    """What is to be said of layers that rotate as before, a line for each group."""
    return tuple(
        f"{layers_text(group.layers)}: window of {group.window:,} and frequencies are kept, since "
        "nothing further is read"
        for group in groups
    )


def _check_target(config: DecoderConfig, to: int) -> None:
    if to <= config.max_positions:
        raise ConfigError(
            f"the target {to:,} is not above the model's window of {config.max_positions:,}; "
            "there is nothing to extend"
        )
    if config.position_table == "learned":
        raise ConfigError(
            f"the model has a learned position table of {config.max_positions:,} rows, and no rule "
            "makes more of them; crop texts to that"
        )


def _check_options(rule: RuleName, options: RuleOptions) -> None:
    allowed = {"factor", "original_window", "over", *_OWN[rule]} if rule != "none" else set()
    for entry in fields(options):
        if getattr(options, entry.name) is not None and entry.name not in allowed:
            option = f"--{entry.name.replace('_', '-')}"
            raise ConfigError(f"{option}: the rule {rule} has no such option; leave it out")
    if options.factor is not None and not options.factor >= 1:
        raise ConfigError(
            f"--factor {options.factor:g}: a window grows by a factor of 1 or more; "
            "leave it out, and it follows from the target"
        )
    if options.original_window is not None and options.original_window < 1:
        raise ConfigError(f"--original-window {options.original_window}: must be at least 1")


def _made(
    rule: RuleName, config: DecoderConfig, to: int, options: RuleOptions, before: AnyRopeScaling
) -> tuple[AnyRopeScaling, list[str]]:
    """The rule on the unscaled frequencies."""
    window = options.original_window
    if window is None:
        window = _window_before(config, before)
    factor = to / window if options.factor is None else options.factor
    if factor < 1:
        raise ConfigError(
            f"--original-window {window:,} is above the target {to:,}: a factor of {factor:g}; "
            "give the window before any extension"
        )
    own = _own(rule, options)
    if rule == "longrope":
        for option in ("short_factors", "long_factors"):
            if getattr(options, option) is None:
                raise ConfigError(
                    f"the rule longrope needs a divisor for each channel pair: give "
                    f"--{option.replace('_', '-')} FILE, a JSON list"
                )
    kind = _CLASSES[rule]
    if "original_window" in {entry.name for entry in fields(kind)}:
        own["original_window"] = window
    return kind(factor=factor, **own), _mismatch(rule, factor, window, to)


def _own(rule: RuleName, options: RuleOptions) -> dict[str, Any]:
    """What was said of the rule itself, under its names."""
    said = {name: getattr(options, option) for option, name in _OWN[rule].items()}
    return {name: value for name, value in said.items() if value is not None}


def _window_before(config: DecoderConfig, before: AnyRopeScaling) -> int:
    if isinstance(before, Unscaled):
        return config.max_positions
    window = getattr(before, "original_window", None)
    if window is None:
        raise ConfigError(
            f"the model carries {before.kind} with factor {before.factor:g}, which does not say "
            "the window before it; give --original-window"
        )
    return int(window)


def _multiplied(
    rule: RuleName, config: DecoderConfig, to: int, options: RuleOptions, before: AnyRopeScaling
) -> tuple[AnyRopeScaling, list[str]]:
    """The model's own rule with a larger factor, its other settings kept where none is given."""
    if isinstance(before, Unscaled | LongRoPE) or before.kind != rule:
        raise ConfigError(
            f"--over multiply: the model carries {before.kind}, and its factor cannot be "
            f"multiplied into {rule}; say --over replace"
        )
    if options.original_window is not None:
        raise ConfigError(
            "--original-window goes with --over replace; --over multiply keeps the model's own"
        )
    own = _own(rule, options)
    factor = before.factor * (
        to / config.max_positions if options.factor is None else options.factor
    )
    notices = []
    if getattr(before, "explicit_attention_factor", None) and options.attention_factor is None:
        notices.append(
            f"the model's own attention factor {before.attention_factor():g} is kept; "
            "--attention-factor gives another"
        )
    return replace(before, factor=factor, **own), notices


def _which_is_meant(
    rule: RuleName, config: DecoderConfig, to: int, options: RuleOptions, before: AnyRopeScaling
) -> str:
    ways = []
    for over, make in (("replace", _made), ("multiply", _multiplied)):
        try:
            made, _ = make(rule, config, to, options, before)
        except ConfigError as error:
            ways.append(f"not --over {over} ({error})")
        else:
            factor = getattr(made, "factor", 1.0)
            ways.append(f"--over {over} gives factor {factor:g}")
    window = getattr(before, "original_window", None)
    over_window = "" if window is None else f" over {window:,} positions"
    return (
        f"the model already carries {before.kind} with factor "
        f"{getattr(before, 'factor', 1.0):g}{over_window}; say which is meant: {', '.join(ways)}"
    )


def _mismatch(rule: RuleName, factor: float, window: int, to: int) -> list[str]:
    """The factor that was given wins over the windows, and both numbers are said."""
    if rule in {"dynamic", "longrope"} or abs(factor * window - to) <= 0.5:
        return []
    return [
        f"factor {factor:g} × {window:,} positions is {factor * window:,.0f}, not the target "
        f"{to:,}; the factor is used as it stands"
    ]


def _with_rule(
    config: DecoderConfig, rule: AnyRopeScaling, numbers: set[int]
) -> tuple[LayerConfig, ...]:
    def changed(layer: LayerConfig) -> LayerConfig:
        assert layer.attention.rotary is not None
        rotary = layer.attention.rotary.model_copy(update={"scaling": rule})
        attention = layer.attention.model_copy(update={"rotary": rotary})
        return layer.model_copy(update={"attention": attention})

    return tuple(
        changed(layer) if number in numbers else layer for number, layer in enumerate(config.layers)
    )
