"""How rotary frequencies are scaled for a longer window: one small class per rule.

A rule owns its mathematics, its attention factor and its names in Hugging Face and GGUF files.
It knows nothing of heads, layers, tensors or caches: frequencies are a pure function of the base,
the rotary width and (for two rules) the length, in float64.

Symbols: d rotary width, pair i = 0 … d/2 − 1, θ_i = b^(−2i/d), wavelength λ_i = 2π/θ_i,
s the factor L'/L, L the original window, M the original window of the dynamic rule.
The attention factor multiplies cos and sin, so scores grow by its square.

To add a rule, add a class, its place in `AnyRopeScaling`, and a line in `_HUGGINGFACE_TYPES` for
each name that files give it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from armillary.errors import ConfigError
from armillary.strict_dict import StrictDict

Frequencies = NDArray[np.float64]

# How a configuration validates a rule (read by pydantic, which this module does not need).
_STRICT: Mapping[str, object] = {"extra": "forbid", "strict": True}


def base_frequencies(base: float, d_rotary: int) -> Frequencies:
    """θ_i = b^(−2i/d) in float64: shape (d_rotary / 2,). Source: Su et al. 2021, §3.2.2."""
    return np.asarray(base ** (-np.arange(0, d_rotary, 2, dtype=np.float64) / d_rotary))


def trained_frequencies(
    rule: "RopeScaling", base: float, d_rotary: int, length: int
) -> Frequencies:
    """θ under a rule as models know it, shape (d_rotary / 2,): float32 where θ was trained in it.

    Models are trained under θ as float32 arithmetic gives it, an error that grows with the
    position. What the rule makes of it is exact. Each step is rounded once, so that it does not
    depend on whose powers are taken.
    """
    exponents = np.arange(0, d_rotary, 2, dtype=np.float32) / np.float32(d_rotary)
    powers = (base ** exponents.astype(np.float64)).astype(np.float32)
    trained = (np.float32(1) / powers).astype(np.float64)
    scaled = rule.frequencies(base, d_rotary, length) / base_frequencies(base, d_rotary)
    return np.asarray(trained * scaled)


class RopeScaling(Protocol):
    """What every rule offers."""

    @property
    def kind(self) -> str:
        """The rule's name in our own configurations."""

    def frequencies(self, base: float, d_rotary: int, length: int) -> Frequencies:
        """Radians turned per position, shape (d_rotary / 2,), for a text of `length` tokens."""

    def attention_factor(self) -> float:
        """What cos and sin are multiplied by."""

    def regime(self, length: int) -> int:
        """A number that is the same for two lengths exactly when their frequencies are."""

    def to_huggingface(self, base: float, d_rotary: int) -> dict[str, object]:
        """The entries of `rope_parameters`, `rope_theta` among them."""


def _positive(rule: object, **values: float | None) -> None:
    for name, value in values.items():
        if value is not None and not (math.isfinite(value) and value > 0):
            raise ConfigError(
                f"{type(rule).__name__}: {name} is {value}; it must be a positive number"
            )


class _OneRegime:
    """For rules whose frequencies do not depend on the length."""

    def regime(self, length: int) -> int:
        """One for all lengths."""
        del length
        return 0

    def attention_factor(self) -> float:
        """1: the rule leaves scores alone."""
        return 1.0


@dataclass(frozen=True)
class Unscaled(_OneRegime):
    """θ as trained."""

    __pydantic_config__: ClassVar[Mapping[str, object]] = _STRICT
    kind: Literal["default"] = "default"

    def frequencies(self, base: float, d_rotary: int, length: int) -> Frequencies:
        """θ."""
        del length
        return base_frequencies(base, d_rotary)

    def to_huggingface(self, base: float, d_rotary: int) -> dict[str, object]:
        """`default`."""
        del d_rotary
        return {"rope_type": "default", "rope_theta": base}

    @classmethod
    def from_huggingface(cls, entries: StrictDict, max_positions: int) -> Self:
        """`default` has no entries of its own."""
        del entries, max_positions
        return cls()


@dataclass(frozen=True)
class PositionInterpolation(_OneRegime):
    """m' = m·L/L': every angle shrinks by the same factor (Chen et al. 2023, §2)."""

    factor: float
    __pydantic_config__: ClassVar[Mapping[str, object]] = _STRICT
    kind: Literal["linear"] = "linear"

    def __post_init__(self) -> None:
        _positive(self, factor=self.factor)

    def frequencies(self, base: float, d_rotary: int, length: int) -> Frequencies:
        """θ / s."""
        del length
        return base_frequencies(base, d_rotary) / self.factor

    def to_huggingface(self, base: float, d_rotary: int) -> dict[str, object]:
        """`linear`."""
        del d_rotary
        return {"rope_type": "linear", "rope_theta": base, "factor": self.factor}

    @classmethod
    def from_huggingface(cls, entries: StrictDict, max_positions: int) -> Self:
        """Reads `factor`."""
        del max_positions
        return cls(factor=entries.take("factor", float))


def _ntk_base(base: float, d_rotary: int, stretch: float) -> float:
    if d_rotary <= 2:
        raise ConfigError(f"d_rotary is {d_rotary}; an NTK rule needs at least 4 rotary channels")
    try:
        return float(base * stretch ** (d_rotary / (d_rotary - 2)))
    except OverflowError as error:
        raise ConfigError(
            f"base {base} stretched {stretch} times is too large for a number; lower the factor"
        ) from error


@dataclass(frozen=True)
class NTK(_OneRegime):
    """b' = b·s^(d/(d−2)): the first pair stays, the last turns at exactly θ/s (bloc97, 2023).

    Hugging Face files have no such type: it is written as `default` with the new base.
    """

    factor: float
    __pydantic_config__: ClassVar[Mapping[str, object]] = _STRICT
    kind: Literal["ntk"] = "ntk"

    def __post_init__(self) -> None:
        _positive(self, factor=self.factor)

    def frequencies(self, base: float, d_rotary: int, length: int) -> Frequencies:
        """θ for the larger base."""
        del length
        return base_frequencies(_ntk_base(base, d_rotary, self.factor), d_rotary)

    def to_huggingface(self, base: float, d_rotary: int) -> dict[str, object]:
        """`default` with the larger base."""
        return {"rope_type": "default", "rope_theta": _ntk_base(base, d_rotary, self.factor)}


@dataclass(frozen=True)
class DynamicNTK:
    """b' = b·(f·ℓ/M − (f − 1))^(d/(d−2)) with ℓ = max(length, M): NTK that grows with the text.

    Up to the original window M nothing changes. Longer texts have other frequencies at every
    length, so keys rotated for one length are wrong for the next.
    """

    factor: float
    original_window: int
    __pydantic_config__: ClassVar[Mapping[str, object]] = _STRICT
    kind: Literal["dynamic"] = "dynamic"

    def __post_init__(self) -> None:
        _positive(self, factor=self.factor, original_window=self.original_window)

    def frequencies(self, base: float, d_rotary: int, length: int) -> Frequencies:
        """θ for the base that the length asks for."""
        # f·ℓ/M − (f − 1), arranged so that it is exactly 1 up to the original window.
        stretch = 1 + self.factor * (self.regime(length) / self.original_window - 1)
        return base_frequencies(_ntk_base(base, d_rotary, stretch), d_rotary)

    def attention_factor(self) -> float:
        """1: the rule leaves scores alone."""
        return 1.0

    def regime(self, length: int) -> int:
        """The length itself, past the original window."""
        return max(length, self.original_window)

    def to_huggingface(self, base: float, d_rotary: int) -> dict[str, object]:
        """`dynamic`; readers take M from `max_position_embeddings`, so a writer puts M there."""
        del d_rotary
        return {
            "rope_type": "dynamic",
            "rope_theta": base,
            "factor": self.factor,
            "original_max_position_embeddings": self.original_window,
        }

    @classmethod
    def from_huggingface(cls, entries: StrictDict, max_positions: int) -> Self:
        """Reads `factor`; M is `original_max_position_embeddings`, else `max_positions`.

        Files of this type state the original window as the model's: that is the format's rule.
        """
        return cls(
            factor=entries.take("factor", float),
            original_window=entries.take("original_max_position_embeddings", int, max_positions),
        )


def _yarn_growth(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


@dataclass(frozen=True)
class YaRN(_OneRegime):
    """Fast pairs stay, slow pairs are interpolated, a ramp between (Peng et al. 2023, §3.2).

    The paper ramps in rotations; every implementation ramps in the pair index between the two
    pairs that turn `beta_fast` and `beta_slow` times in the original window. We follow the
    implementations. `truncate` rounds those two bounds outwards to whole pairs.
    """

    factor: float
    original_window: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    explicit_attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    __pydantic_config__: ClassVar[Mapping[str, object]] = _STRICT
    kind: Literal["yarn"] = "yarn"

    def __post_init__(self) -> None:
        _positive(
            self,
            factor=self.factor,
            original_window=self.original_window,
            beta_fast=self.beta_fast,
            beta_slow=self.beta_slow,
            attention_factor=self.explicit_attention_factor,
        )
        for name, value in (("mscale", self.mscale), ("mscale_all_dim", self.mscale_all_dim)):
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"YaRN: {name} is {value}; it must be 0 or a positive number")
        if self.beta_fast < self.beta_slow:
            raise ConfigError(
                f"YaRN: beta_fast is {self.beta_fast} and beta_slow {self.beta_slow}; "
                "beta_fast must not be the smaller"
            )

    def ramp_bounds(self, base: float, d_rotary: int) -> tuple[float, float]:
        """The pair indices where interpolation begins and where it is complete."""

        def pair_that_turns(times: float) -> float:
            turns = math.log(self.original_window / (times * 2 * math.pi))
            return d_rotary * turns / (2 * math.log(base))

        low, high = pair_that_turns(self.beta_fast), pair_that_turns(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, d_rotary - 1)
        return low, high + 0.001 if low == high else high

    def frequencies(self, base: float, d_rotary: int, length: int) -> Frequencies:
        """ramp·θ/s + (1 − ramp)·θ."""
        del length
        theta = base_frequencies(base, d_rotary)
        low, high = self.ramp_bounds(base, d_rotary)
        # Typed, since torch.compile would divide whole numbers in float32.
        pair = np.arange(d_rotary // 2, dtype=np.float64)
        ramp = np.clip((pair - low) / (high - low), 0, 1)
        return np.asarray(ramp * theta / self.factor + (1 - ramp) * theta)

    def attention_factor(self) -> float:
        """The explicit one when given, else 1 + 0.1·ln s, or the ratio of the two mscales."""
        if self.explicit_attention_factor is not None:
            return self.explicit_attention_factor
        if self.mscale and self.mscale_all_dim:
            return _yarn_growth(self.factor, self.mscale) / _yarn_growth(
                self.factor, self.mscale_all_dim
            )
        return _yarn_growth(self.factor, 1.0)

    def score_factor(self) -> float:
        """What DeepSeek multiplies scores by: the square of what `mscale_all_dim` makes of s."""
        growth = _yarn_growth(self.factor, self.mscale_all_dim or 0.0)
        return growth * growth

    def to_huggingface(self, base: float, d_rotary: int) -> dict[str, object]:
        """`yarn`; entries that are not set are left out."""
        del d_rotary
        optional = {
            "attention_factor": self.explicit_attention_factor,
            "mscale": self.mscale,
            "mscale_all_dim": self.mscale_all_dim,
        }
        return {
            "rope_type": "yarn",
            "rope_theta": base,
            "factor": self.factor,
            "original_max_position_embeddings": self.original_window,
            "beta_fast": self.beta_fast,
            "beta_slow": self.beta_slow,
            "truncate": self.truncate,
        } | {name: value for name, value in optional.items() if value is not None}

    @classmethod
    def from_huggingface(cls, entries: StrictDict, max_positions: int) -> Self:
        """Reads the `yarn` entries; a null is an absent one. `factor` wins over the windows."""
        window = entries.take("original_max_position_embeddings", int)
        return cls(
            factor=_factor(entries, max_positions, window),
            original_window=window,
            beta_fast=entries.take_optional("beta_fast", float) or 32.0,
            beta_slow=entries.take_optional("beta_slow", float) or 1.0,
            truncate=entries.take("truncate", bool, True),
            explicit_attention_factor=entries.take_optional("attention_factor", float),
            mscale=entries.take_optional("mscale", float),
            mscale_all_dim=entries.take_optional("mscale_all_dim", float),
        )


def _factor(entries: StrictDict, max_positions: int, window: int) -> float:
    """`factor` as given, else the ratio of the windows (as Phi-3's and DeepSeek's files mean)."""
    given = entries.take_optional("factor", float)
    return max_positions / window if given is None else given


@dataclass(frozen=True)
class Llama3(_OneRegime):
    """Short waves stay, long waves are divided by s, a blend between (Llama 3.1, 2024).

    The blend's weight is linear in L/λ and reaches both ends exactly.
    """

    factor: float
    original_window: int
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    __pydantic_config__: ClassVar[Mapping[str, object]] = _STRICT
    kind: Literal["llama3"] = "llama3"

    def __post_init__(self) -> None:
        _positive(
            self,
            factor=self.factor,
            original_window=self.original_window,
            low_freq_factor=self.low_freq_factor,
            high_freq_factor=self.high_freq_factor,
        )
        if self.high_freq_factor <= self.low_freq_factor:
            raise ConfigError(
                f"Llama3: high_freq_factor is {self.high_freq_factor} and low_freq_factor "
                f"{self.low_freq_factor}; the high one must be larger"
            )

    def frequencies(self, base: float, d_rotary: int, length: int) -> Frequencies:
        """(1 − t)·θ/s + t·θ with t = (L/λ − low)/(high − low) held to 0 … 1."""
        del length
        theta = base_frequencies(base, d_rotary)
        turns = self.original_window * theta / (2 * math.pi)
        span = self.high_freq_factor - self.low_freq_factor
        kept = np.clip((turns - self.low_freq_factor) / span, 0, 1)
        return np.asarray((1 - kept) * theta / self.factor + kept * theta)

    def to_huggingface(self, base: float, d_rotary: int) -> dict[str, object]:
        """`llama3`."""
        del d_rotary
        return {
            "rope_type": "llama3",
            "rope_theta": base,
            "factor": self.factor,
            "original_max_position_embeddings": self.original_window,
            "low_freq_factor": self.low_freq_factor,
            "high_freq_factor": self.high_freq_factor,
        }

    @classmethod
    def from_huggingface(cls, entries: StrictDict, max_positions: int) -> Self:
        """Reads the four `llama3` entries; all are required."""
        del max_positions
        return cls(
            factor=entries.take("factor", float),
            original_window=entries.take("original_max_position_embeddings", int),
            low_freq_factor=entries.take("low_freq_factor", float),
            high_freq_factor=entries.take("high_freq_factor", float),
        )


@dataclass(frozen=True)
class LongRoPE:
    """A divisor per pair: one list up to the original window, another beyond (Ding et al. 2024).

    The attention factor √(1 + ln s / ln L) holds for short texts too. Equal lists make a rule
    that does not depend on the length; GGUF's `rope_freqs` divisors are read as that.
    """

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    factor: float
    original_window: int
    explicit_attention_factor: float | None = None
    __pydantic_config__: ClassVar[Mapping[str, object]] = _STRICT
    kind: Literal["longrope"] = "longrope"

    def __post_init__(self) -> None:
        _positive(
            self,
            factor=self.factor,
            original_window=self.original_window,
            attention_factor=self.explicit_attention_factor,
        )
        if len(self.short_factor) != len(self.long_factor):
            raise ConfigError(
                f"LongRoPE: short_factor has {len(self.short_factor)} entries and long_factor "
                f"{len(self.long_factor)}; both need one per channel pair"
            )
        for name in ("short_factor", "long_factor"):
            for pair, divisor in enumerate(getattr(self, name)):
                _positive(self, **{f"{name}[{pair}]": divisor})
        if self.original_window == 1:
            raise ConfigError(
                "LongRoPE: original_window is 1; its attention factor √(1 + ln s / ln L) needs "
                "a window of at least 2"
            )

    def frequencies(self, base: float, d_rotary: int, length: int) -> Frequencies:
        """θ_i / factor_i; the long list when length > L, strictly."""
        divisors = self.long_factor if self.regime(length) else self.short_factor
        if len(divisors) != d_rotary // 2:
            raise ConfigError(
                f"LongRoPE: {len(divisors)} factors for {d_rotary // 2} channel pairs; "
                "there must be one each"
            )
        return base_frequencies(base, d_rotary) / np.asarray(divisors, dtype=np.float64)

    def attention_factor(self) -> float:
        """The explicit one when given, else √(1 + ln s / ln L), 1 for s ≤ 1."""
        if self.explicit_attention_factor is not None:
            return self.explicit_attention_factor
        if self.factor <= 1:
            return 1.0
        return math.sqrt(1 + math.log(self.factor) / math.log(self.original_window))

    def regime(self, length: int) -> int:
        """0 short, 1 long; always 0 when the lists agree."""
        return int(length > self.original_window and self.long_factor != self.short_factor)

    def to_huggingface(self, base: float, d_rotary: int) -> dict[str, object]:
        """`longrope`."""
        del d_rotary
        entries: dict[str, object] = {
            "rope_type": "longrope",
            "rope_theta": base,
            "factor": self.factor,
            "original_max_position_embeddings": self.original_window,
            "short_factor": list(self.short_factor),
            "long_factor": list(self.long_factor),
        }
        if self.explicit_attention_factor is not None:
            entries["attention_factor"] = self.explicit_attention_factor
        return entries

    @classmethod
    def from_huggingface(cls, entries: StrictDict, max_positions: int) -> Self:
        """Reads the `longrope` entries (`su` in the first Phi-3 files)."""
        window = entries.take("original_max_position_embeddings", int)
        return cls(
            short_factor=tuple(entries.take_list("short_factor", float)),
            long_factor=tuple(entries.take_list("long_factor", float)),
            factor=_factor(entries, max_positions, window),
            original_window=window,
            explicit_attention_factor=entries.take_optional("attention_factor", float),
        )


AnyRopeScaling = Unscaled | PositionInterpolation | NTK | DynamicNTK | YaRN | Llama3 | LongRoPE

_HUGGINGFACE_TYPES: Mapping[
    str,
    type[Unscaled]
    | type[PositionInterpolation]
    | type[DynamicNTK]
    | type[YaRN]
    | type[Llama3]
    | type[LongRoPE],
] = {
    "default": Unscaled,
    "linear": PositionInterpolation,
    "dynamic": DynamicNTK,
    "yarn": YaRN,
    "llama3": Llama3,
    "longrope": LongRoPE,
    "su": LongRoPE,
}


def rule_from_huggingface(entries: StrictDict, max_positions: int) -> AnyRopeScaling:
    """The rule that a `rope_scaling` or `rope_parameters` dict describes.

    `type` and `rope_type` are the old and the new name of one entry; both may be there when they
    agree. Reads only the rule's own entries: the caller takes `rope_theta` and
    `partial_rotary_factor`, then calls `finish` on the dict.
    Raises ConfigError for an unknown type, a missing entry or an impossible value.
    Source: transformers, `modeling_rope_utils`.
    """
    old, new = entries.take_optional("type", str), entries.take_optional("rope_type", str)
    if old is not None and new is not None and old != new:
        raise ConfigError(
            f"{entries.where}: type is {old!r} but rope_type is {new!r}; keep the one that is meant"
        )
    name = new or old or "default"
    if name not in _HUGGINGFACE_TYPES:
        raise ConfigError(
            f"{entries.where}: rope_type {name!r} is not known; "
            f"known are {', '.join(sorted(_HUGGINGFACE_TYPES))}"
        )
    try:
        return _HUGGINGFACE_TYPES[name].from_huggingface(entries, max_positions)
    except ConfigError as error:
        if str(error).startswith(entries.where):  # an entry is missing or of the wrong type
            raise
        raise ConfigError(f"{entries.where}: {error}") from error
