"""Rotary settings in the key schemas of Hugging Face and GGUF, brought to one form.

The form is the entries of a `RotaryConfig`. The rules themselves live in rope_scaling.py.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from armillary.checkpoints.families.family import FULL, SLIDING, RotaryKeys
from armillary.checkpoints.tensors import StoredTensor
from armillary.config import DecoderConfig, RotaryConfig
from armillary.errors import CheckpointError, ConfigError
from armillary.rope_scaling import (
    NTK,
    AnyRopeScaling,
    DynamicNTK,
    Llama3,
    LongRoPE,
    PositionInterpolation,
    Unscaled,
    YaRN,
    base_frequencies,
    rule_from_huggingface,
)
from armillary.strict_dict import StrictDict

Rotary = dict[str, Any]
LOCAL_BASE = "rope.freq_base_swa"
"""GGUF's key of the base of sliding layers."""
_LOG_MULTIPLIER = "yarn_log_multiplier"
_FLOAT32 = 1e-7  # of a number, about what float32 rounds
_WINDOW = "original_max_position_embeddings"


def read_huggingface_rotary(
    entries: StrictDict,
    *,
    d_head: int,
    max_positions: int,
    keys: RotaryKeys,
    notices: list[str],
) -> dict[str | None, Rotary]:
    """The rotary settings of a config.json for each layer type, or for all under None.

    Takes `rope_scaling`, `rope_parameters`, `rope_theta`, `partial_rotary_factor`, `rotary_dim`,
    `original_max_position_embeddings` and what else the family's `keys` name; old schema, new
    schema or both as long as they agree.
    Raises ConfigError when they do not, when the base is nowhere and the family has no default,
    and for what the rule refuses.
    """
    shared: dict[str, float | None] = {
        "rope_theta": _agreeing(entries, "rope_theta", keys.base),
        "partial_rotary_factor": _agreeing(entries, "partial_rotary_factor", keys.portion),
        _WINDOW: entries.take_optional(_WINDOW, int),
    }
    local = entries.take_optional(keys.local_base, float) if keys.local_base else None
    width = entries.take_optional("rotary_dim", int)
    old = entries.take_optional("rope_scaling", dict)
    new = entries.take_optional("rope_parameters", dict)
    by_type = _by_layer_type(old if new is None else new)
    if keys.local_base:
        by_type = _full_and_sliding(by_type, new is not None, entries.where)
    settings = {}
    for layer_type, given in by_type.items():
        key = "rope_parameters" if new is not None else "rope_scaling"
        where = f"{entries.where}: {key}" + (f": {layer_type}" if layer_type else "")
        beside, default_base = shared, keys.default_base
        if keys.local_base and layer_type == SLIDING:
            beside, default_base = shared | {"rope_theta": local}, keys.default_local

        def one(
            given: Mapping[str, Any],
            where: str,
            base: float | None,
            notices: list[str],
            beside: Mapping[str, float | None] = beside,
        ) -> Rotary:
            portion = keys.default_portion
            return _one(given, where, beside, d_head, width, portion, max_positions, base, notices)

        rotary = one(given, where, default_base, notices)
        if new is not None and old is not None and layer_type != SLIDING:
            also = _by_layer_type(old).get(layer_type, old)
            other = one(also, f"{entries.where}: rope_scaling", rotary["base"], [])
            if other != rotary:
                raise ConfigError(
                    f"{entries.where}: rope_scaling and rope_parameters disagree; "
                    "keep the one that is meant"
                )
        settings[layer_type] = rotary
    return settings


def _agreeing(entries: StrictDict, key: str, also: str) -> float | None:
    """A number that may stand under two keys, which must agree."""
    one, other = entries.take_optional(key, float), entries.take_optional(also, float)
    if one is not None and other is not None and one != other:
        raise ConfigError(
            f"{entries.where}: {key} is {one:g} but {also} is {other:g}; keep the one that is meant"
        )
    return other if one is None else one


def _full_and_sliding(
    by_type: Mapping[str | None, Mapping[str, Any]], is_new: bool, where: str
) -> dict[str | None, Mapping[str, Any]]:
    """Settings of a family whose sliding layers have a base of their own."""
    if set(by_type) != {None}:
        return {FULL: {}, SLIDING: {}, **by_type}
    given = by_type[None]
    if is_new and given:
        raise ConfigError(
            f"{where}: rope_parameters must say {FULL} and {SLIDING} apart in this family"
        )
    return {FULL: given, SLIDING: {}}


def _by_layer_type(given: Mapping[str, Any] | None) -> dict[str | None, Mapping[str, Any]]:
    """A dict of settings as it is, or one such dict for each layer type."""
    if given and all(isinstance(value, dict | None) for value in given.values()):
        return {layer_type: value for layer_type, value in given.items() if value is not None}
    return {None: given or {}}


def _one(
    given: Mapping[str, Any],
    where: str,
    shared: Mapping[str, float | None],
    d_head: int,
    width: int | None,
    default_portion: float,
    max_positions: int,
    default_base: float | None,
    notices: list[str],
) -> Rotary:
    """Read one dict of settings, into which what stands beside it is folded."""
    folded = dict(given)
    for key, value in shared.items():
        if value is not None and folded.setdefault(key, value) != value:
            raise ConfigError(
                f"{where}: {key} is {folded[key]!r:.40} here and {value} at the top; "
                "keep the one that is meant"
            )
    settings = StrictDict(folded, where)
    base = settings.take_optional("rope_theta", float)
    if base is None:
        if default_base is None:
            raise ConfigError(f"{where}: rope_theta is missing; add it to the file")
        base = default_base
        notices.append(f"rope_theta is absent; the family's default {base:g} is used")
    factor = settings.take("partial_rotary_factor", float, default_portion)
    d_rotary = int(d_head * factor)
    if width is not None:
        if "partial_rotary_factor" in settings and width != d_rotary:
            raise ConfigError(
                f"{where}: partial_rotary_factor {factor} of a head of {d_head} is {d_rotary}, "
                f"but rotary_dim is {width}; keep the one that is meant"
            )
        d_rotary = width
    rule = rule_from_huggingface(settings, max_positions)
    if isinstance(rule, Unscaled | PositionInterpolation | DynamicNTK):
        # Readers of these types pass over it, and writers leave it in when the type changes.
        settings.ignore(_WINDOW)
    settings.finish()
    if isinstance(rule, YaRN) and rule.factor * rule.original_window != max_positions:
        notices.append(
            f"yarn's factor {rule.factor:g} × {rule.original_window} original positions is not "
            f"max_position_embeddings {max_positions}; the factor is used as it stands"
        )
    return _entries(base, d_rotary, rule)


def _entries(base: float, d_rotary: int, rule: AnyRopeScaling) -> Rotary:
    return {
        "d_rotary": d_rotary,
        "base": base,
        "layout": "half_split",
        "scaling": asdict(rule),
    }


def write_huggingface_rotary(
    config: DecoderConfig, keys: RotaryKeys, where: str = "this family"
) -> dict[str, Any]:
    """The rotary keys of a config.json in the old and the new schema, which say the same.

    A reader of the old schema that met only the new one would silently take base 10000.
    Raises ConfigError where layers rotate in more ways than the family's keys can tell apart.
    """
    by_kind: dict[str, RotaryConfig] = {}
    for number, layer in enumerate(config.layers):
        rotary = layer.attention.rotary
        if rotary is None:
            continue
        sliding = layer.attention.window is not None and keys.local_base is not None
        if by_kind.setdefault(SLIDING if sliding else FULL, rotary) != rotary:
            raise ConfigError(
                f"{where} cannot express that layer {number} rotates in another way than "
                "those before it"
            )
    first = next(iter(by_kind.values()))
    if keys.local_base is None:
        return _one_written(first, config, keys)
    full, sliding_ = by_kind.get(FULL, first), by_kind.get(SLIDING, first)
    if by_kind.get(SLIDING) is not None and not isinstance(sliding_.scaling, Unscaled):
        raise ConfigError(f"the old schema of {where} has no rule for layers of type {SLIDING}")
    written = _one_written(full, config, keys)
    parameters = {FULL: written["rope_parameters"]}
    if SLIDING in by_kind:
        parameters[SLIDING] = _one_written(sliding_, config, keys)["rope_parameters"]
    return written | {keys.local_base: sliding_.base, "rope_parameters": parameters}


def _one_written(rotary: RotaryConfig, config: DecoderConfig, keys: RotaryKeys) -> dict[str, Any]:
    parameters = rotary.scaling.to_huggingface(rotary.base, rotary.d_rotary)
    base = parameters["rope_theta"]
    old: dict[str, Any] | None = {
        key: value for key, value in parameters.items() if key != "rope_theta"
    }
    if parameters["rope_type"] == "default":
        old = None
    written: dict[str, Any] = {keys.base: base, "rope_scaling": old, "rope_parameters": parameters}
    d_head = config.layers[0].attention.d_turning
    if keys.partial or rotary.d_rotary != d_head:
        portion = rotary.d_rotary / d_head
        written[keys.portion] = portion
        written["rope_parameters"] = parameters | {"partial_rotary_factor": portion}
    if keys.window_beside:
        window = getattr(rotary.scaling, "original_window", config.max_positions)
        written[_WINDOW] = window
    return written


def read_gguf_rotary(
    entries: StrictDict,
    *,
    d_head: int,
    max_positions: int,
    factors: Mapping[str, NDArray[np.float32]],
    notices: list[str],
    rounds_yarn: bool = True,
    yarn_scales_scores: bool = False,
) -> Rotary:
    """The rotary settings of a GGUF file, whose keys under the architecture are `entries`.

    What no key says of yarn the last two do, as in `GGUFTable`. `factors` holds the divisors of
    channel pairs that are stored as tensors, by the tensor's name: `rope_freqs.weight`, or
    `rope_factors_long.weight` with `rope_factors_short.weight`.
    Source: llama.cpp, `llama-model.cpp`, `ggml_rope_ext`; extension §2.
    """
    d_rotary = entries.take("rope.dimension_count", int, d_head)
    base = entries.take("rope.freq_base", float, None)
    if base is None:
        base = 10000.0
        notices.append("rope.freq_base is absent; the format's default 10000 is used")
    kind = entries.take_optional("rope.scaling.type", str)
    stretch = entries.take_optional("rope.scaling.factor", float)
    linear = entries.take_optional("rope.scale_linear", float)
    entries.ignore("rope.scaling.finetuned")
    if stretch is not None and linear is not None and stretch != linear:
        raise ConfigError(
            f"{entries.where}: rope.scaling.factor is {stretch} and rope.scale_linear {linear}; "
            "keep the one that is meant"
        )
    scale = stretch or linear or 1.0
    if kind is None:
        kind = "none" if scale == 1.0 else "linear"
    if kind not in {"none", "linear", "yarn", "longrope"}:
        raise ConfigError(
            f"{entries.where}: rope.scaling.type is {kind!r}; "
            "known are none, linear, yarn and longrope"
        )
    rule: AnyRopeScaling
    if kind == "longrope":
        rule = _gguf_longrope(entries, scale, max_positions, factors, notices)
    elif factors:
        if kind != "none" or set(factors) != {"rope_freqs.weight"}:
            raise ConfigError(
                f"{entries.where}: rope.scaling.type {kind} does not go with "
                f"{', '.join(sorted(factors))}"
            )
        rule = _rule_of_divisors(factors["rope_freqs.weight"], base, d_rotary, max_positions)
    elif kind == "yarn":
        rule = _gguf_yarn(entries, scale, max_positions, notices, yarn_scales_scores)
        rule = replace(rule, truncate=rounds_yarn)
    elif kind == "linear" and scale != 1.0:
        rule = PositionInterpolation(factor=scale)
    else:
        rule = Unscaled()
    if not isinstance(rule, YaRN | LongRoPE):
        entries.ignore("rope.scaling.original_context_length")
    return _entries(base, d_rotary, rule)


def _gguf_window(entries: StrictDict, max_positions: int, notices: list[str]) -> int:
    """The window before extension, as the engine reads it."""
    key = "rope.scaling.original_context_length"
    if key not in entries:
        notices.append(
            f"{key} is absent; the format's default, context_length {max_positions}, is used"
        )
    return entries.take(key, int, max_positions)


def _gguf_yarn(
    entries: StrictDict,
    factor: float,
    max_positions: int,
    notices: list[str],
    scales_scores: bool,
) -> YaRN:
    window = _gguf_window(entries, max_positions, notices)
    only_ones = {"yarn_ext_factor": 1.0} | ({} if scales_scores else {_LOG_MULTIPLIER: 0.0})
    for key, only in only_ones.items():
        value = entries.take(f"rope.scaling.{key}", float, only)
        if value != only:
            raise ConfigError(
                f"{entries.where}: rope.scaling.{key} is {value}; only {only} is supported"
            )
    # The engine multiplies both into its own 1 + 0.1·ln s.
    factors = [
        entries.take(f"rope.scaling.{key}", float, 1.0)
        for key in ("attn_factor", "yarn_attn_factor")
    ]
    rule = YaRN(
        factor=factor,
        original_window=window,
        beta_fast=entries.take("rope.scaling.yarn_beta_fast", float, 32.0),
        beta_slow=entries.take("rope.scaling.yarn_beta_slow", float, 1.0),
    )
    product = math.prod(factors)
    if scales_scores and factor > 1.0:
        log = entries.take(f"rope.scaling.{_LOG_MULTIPLIER}", float, 0.0)
        return _scaling_scores(rule, product, log)
    if product == 1.0:
        return rule
    return replace(rule, explicit_attention_factor=product * rule.attention_factor())


def _scaling_scores(rule: YaRN, given: float, log_multiplier: float) -> YaRN:
    """The rule whose factors of rotation and of scores are those that two keys of a file mean.

    Scores have the square of `given`·(1 + `log_multiplier`·ln s). Source: llama.cpp,
    `llama-context.cpp` and `models/deepseek2.cpp`, at DEEPSEEK2_YARN_LOG_MUL_FIX.
    """
    log, own = math.log(rule.factor), rule.attention_factor()
    rotation = given if log_multiplier else given * own
    scores = given * (1 + log_multiplier * log) if log_multiplier else rotation
    weight = (scores - 1) / (0.1 * log)
    for digits in range(10):
        short = round(weight, digits)
        if abs(0.1 * short * log + 1 - scores) <= _FLOAT32 * scores:
            weight = short
            break
    if weight and abs(rotation - 1) <= _FLOAT32:
        return replace(rule, mscale=weight, mscale_all_dim=weight)
    explicit = None if abs(rotation - own) <= _FLOAT32 else rotation
    return replace(rule, explicit_attention_factor=explicit, mscale_all_dim=weight or None)


def _gguf_longrope(
    entries: StrictDict,
    scale: float,
    max_positions: int,
    factors: Mapping[str, NDArray[np.float32]],
    notices: list[str],
) -> LongRoPE:
    wanted = ("rope_factors_short.weight", "rope_factors_long.weight")
    if set(factors) != set(wanted) or scale != 1.0:
        raise ConfigError(
            f"{entries.where}: rope.scaling.type longrope needs {' and '.join(wanted)}, nothing "
            f"else and no factor; found {', '.join(sorted(factors)) or 'none'} and factor {scale:g}"
        )
    window = _gguf_window(entries, max_positions, notices)
    short, long = (tuple(shortest_float(x) for x in factors[name]) for name in wanted)
    return LongRoPE(
        short_factor=short,
        long_factor=long,
        factor=max(1.0, max_positions / window),
        original_window=window,
        explicit_attention_factor=entries.take("rope.scaling.attn_factor", float, 1.0),
    )


def _rule_of_divisors(
    divisors: NDArray[np.float32], base: float, d_rotary: int, max_positions: int
) -> AnyRopeScaling:
    """The llama3 rule whose divisors these are, to float32's precision, else the divisors."""
    if np.all(divisors == 1.0):
        return Unscaled()
    if divisors.size and divisors.size * 2 == d_rotary and base > 1.0:
        factor = shortest_float(divisors[-1])
        theta = base_frequencies(base, d_rotary)
        for window in (1 << power for power in range(9, 18) if 1.0 < factor < math.inf):
            rule = Llama3(factor=factor, original_window=window)
            exact = theta / rule.frequencies(base, d_rotary, max_positions)
            if np.allclose(divisors, exact, rtol=1e-5, atol=0.0):
                return rule
    listed = tuple(shortest_float(x) for x in divisors)
    return LongRoPE(
        short_factor=listed, long_factor=listed, factor=1.0, original_window=max_positions
    )


def write_gguf_rotary(
    rotary: RotaryConfig, max_positions: int, *, rounds_yarn: bool = True
) -> tuple[dict[str, int | float | str], dict[str, NDArray[np.float32]]]:
    """The rotary keys under the architecture, and the tensors of divisors, that say this.

    `rounds_yarn` as in `read_gguf_rotary`. Raises ConfigError for a rule that the format has no
    keys for.
    """
    rule, d_rotary = rotary.scaling, rotary.d_rotary
    keys: dict[str, int | float | str] = {
        "rope.dimension_count": d_rotary,
        "rope.freq_base": rotary.base,
    }
    if isinstance(rule, NTK):
        keys["rope.freq_base"] = float(
            str(rule.to_huggingface(rotary.base, d_rotary)["rope_theta"])
        )
    elif isinstance(rule, PositionInterpolation):
        keys |= {"rope.scaling.type": "linear", "rope.scaling.factor": rule.factor}
    elif isinstance(rule, YaRN):
        keys |= _gguf_yarn_keys(rule, rounds_yarn)
    elif isinstance(rule, LongRoPE) and not _is_one_list(rule):
        names = ("rope_factors_short.weight", "rope_factors_long.weight")
        lists = (rule.short_factor, rule.long_factor)
        return keys | {
            "rope.scaling.type": "longrope",
            "rope.scaling.original_context_length": rule.original_window,
            "rope.scaling.attn_factor": rule.attention_factor(),
        }, {name: np.array(x, np.float32) for name, x in zip(names, lists, strict=True)}
    elif isinstance(rule, Llama3 | LongRoPE):
        theta = base_frequencies(rotary.base, d_rotary)
        divisors = theta / rule.frequencies(rotary.base, d_rotary, max_positions)
        return keys, {"rope_freqs.weight": divisors.astype(np.float32)}
    elif isinstance(rule, DynamicNTK):
        raise ConfigError(
            "GGUF has no keys for the dynamic rule; give the model another one with armillary "
            "extend apply, or write a directory"
        )
    return keys, {}


def _gguf_yarn_keys(rule: YaRN, rounds_yarn: bool) -> dict[str, int | float | str]:
    if rounds_yarn and not rule.truncate:
        raise ConfigError(
            "GGUF has no key for yarn with bounds that are not rounded (truncate is false); "
            "write a directory"
        )
    keys: dict[str, int | float | str] = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": rule.factor,
        "rope.scaling.original_context_length": rule.original_window,
        "rope.scaling.yarn_beta_fast": rule.beta_fast,
        "rope.scaling.yarn_beta_slow": rule.beta_slow,
    }
    # The engine multiplies this into its own 1 + 0.1·ln s.
    own = YaRN(factor=rule.factor, original_window=rule.original_window).attention_factor()
    if rule.attention_factor() != own:
        keys["rope.scaling.attn_factor"] = rule.attention_factor() / own
    return keys


def _is_one_list(rule: LongRoPE) -> bool:
    """Whether a rule is no more than divisors, whatever the length."""
    return rule.short_factor == rule.long_factor and rule.attention_factor() == 1.0


def shortest_float(number: float | np.float32) -> float:
    """The shortest decimal that a float32 stands for: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(number)))


def check_frequencies(tensor: StoredTensor, rotary: RotaryConfig) -> None:
    """Hold the frequencies that old files carry against the configuration.

    They are unscaled, and rounded when the model was saved in a low-precision type. Raises
    CheckpointError for others.
    """
    exact = rotary.base ** (-np.arange(0, rotary.d_rotary, 2) / rotary.d_rotary)
    if tensor.shape != exact.shape or not np.allclose(
        tensor.to_float32(), exact, rtol=5e-3, atol=0.0
    ):
        raise CheckpointError(
            f"{tensor.where}: {tensor.name} is not the frequencies of rope_theta "
            f"{rotary.base:g} over {rotary.d_rotary} channels"
        )
