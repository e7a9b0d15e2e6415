"""The model as data: one `LayerConfig` per layer, strict and validated.

A configuration says everything that the mathematics depends on and nothing about files, devices
or number types. Sliding and full attention, rotated and unrotated layers are entries of the list
`layers`. Unknown keys are errors that name the nearest key.

Symbols follow the specification: d = d_model, h = n_heads, h_kv = n_kv_heads, d_h = d_head,
f = d_ff, V = vocab_size, L = max_positions.
"""

import difflib
import json
import reprlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from armillary.errors import ConfigError
from armillary.files import without_duplicates
from armillary.rope_scaling import AnyRopeScaling, Unscaled

Size = Annotated[int, Field(ge=1)]
Probability = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Finite = Annotated[float, Field(allow_inf_nan=False)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy with entries replaced, checked as a new one is (pydantic's own checks nothing).

        Raises ConfigError for an unknown key or entries that do not fit each other.
        """
        if update is None:
            return super().model_copy(deep=deep)
        entries = {name: getattr(self, name) for name in type(self).model_fields}
        with one_line_errors(type(self).__name__):
            return self.model_validate({**entries, **update})


class NormConfig(_Strict):
    """A normalisation over the last dimension (spec §5).

    `offset` is added to the weight before use (1.0 in Gemma, whose files store weight − 1).
    `cast_before_weight`: back to the input's type before the weight is applied (Llama), or after
    it (Gemma). Only LayerNorm may have a bias.
    """

    kind: Literal["rms", "layer"] = "rms"
    eps: Positive = 1e-5
    offset: Finite = 0.0
    bias: bool = False
    cast_before_weight: bool = True

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.kind == "rms" and self.bias:
            raise ValueError("an rms norm has no bias; set bias: false or kind: layer")
        if self.kind == "layer" and self.offset != 0:
            raise ValueError(f"a layer norm takes no offset, found {self.offset}; set offset: 0.0")
        return self


class RotaryConfig(_Strict):
    """Rotation of the first `d_rotary` channels of each query and key head (spec §2).

    Channels from `d_rotary` on are left as they are. `layout` says which channels make a pair:
    (i, i + d_rotary/2) when half_split, (2i, 2i + 1) when interleaved.
    """

    d_rotary: Annotated[int, Field(ge=2, le=1_000_000)]
    base: Annotated[float, Field(gt=1, allow_inf_nan=False)] = 10000.0
    layout: Literal["half_split", "interleaved"] = "half_split"
    scaling: Annotated[AnyRopeScaling, Field(discriminator="kind")] = Unscaled()

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.d_rotary % 2:
            raise ValueError(
                f"d_rotary is {self.d_rotary}; channels turn in pairs, so make it even"
            )
        with np.errstate(over="ignore"):
            frequencies = self.scaling.frequencies(self.base, self.d_rotary, length=1)
        if not np.isfinite(frequencies).all():
            raise ValueError("the scaling makes frequencies too large for a number")
        return self


class AttentionConfig(_Strict):
    """Causal attention with h query heads on h_kv key/value heads.

    `window` w lets a position read itself and the w − 1 before it; None reads all before.
    `scale` multiplies the scores, d_head^(−1/2) when None. `soft_cap` c turns scores into
    c·tanh(score / c). `qk_norm` normalises each query and key head before the rotation.
    """

    n_heads: Size
    n_kv_heads: Size
    d_head: Size
    rotary: RotaryConfig | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: NormConfig | None = None
    window: Size | None = None
    soft_cap: Positive | None = None
    scale: Positive | None = None
    dropout: Probability = 0.0

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.n_heads % self.n_kv_heads:
            raise ValueError(
                f"n_heads {self.n_heads} is no multiple of n_kv_heads {self.n_kv_heads}"
            )
        if self.rotary is not None and self.rotary.d_rotary > self.d_head:
            raise ValueError(
                f"d_rotary {self.rotary.d_rotary} is more than a head's width d_head {self.d_head}"
            )
        return self

    @property
    def score_scale(self) -> float:
        """What scores are multiplied by."""
        return self.d_head**-0.5 if self.scale is None else self.scale


class FeedForwardConfig(_Strict):
    """A two-matrix MLP, or a gated unit: (act(x·W_g) ⊙ (x·W_u))·W_d (spec §6).

    The gated family by activation: identity is Bilinear, sigmoid GLU, relu ReGLU, gelu GEGLU,
    silu SwiGLU. `fused` keeps gate and up in one matrix, the gate half first.
    """

    kind: Literal["glu", "mlp"] = "glu"
    d_ff: Size
    activation: Literal["silu", "gelu", "gelu_tanh", "relu", "sigmoid", "identity"] = "silu"
    bias: bool = False
    fused: bool = False
    dropout: Probability = 0.0

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.kind == "mlp" and self.fused:
            raise ValueError("an mlp has no gate to fuse; set fused: false or kind: glu")
        return self


class LayerConfig(_Strict):
    """Attention and feed-forward on a residual path.

    `norm_placement`: pre normalises what a sub-layer reads, post its result before it is added
    (OLMo 2), sandwich both (Gemma 2). `residual`: in sequence; or parallel, where both sub-layers
    read the layer's input, through norms of their own (GPT-NeoX) or through one (Falcon, Phi).
    `dropout` falls on each sub-layer's result.
    """

    attention: AttentionConfig
    feedforward: FeedForwardConfig
    norm: NormConfig = NormConfig()
    norm_placement: Literal["pre", "post", "sandwich"] = "pre"
    residual: Literal["sequential", "parallel", "parallel_shared_norm"] = "sequential"
    dropout: Probability = 0.0

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.residual == "parallel_shared_norm" and self.norm_placement != "pre":
            raise ValueError(
                f"residual parallel_shared_norm shares the norm that is read, so norm_placement "
                f"must be pre, not {self.norm_placement}"
            )
        return self


class DecoderConfig(_Strict):
    """A whole decoder: embedding → layers → final norm → projection to the vocabulary.

    `max_positions` is the window L that the model is meant for (after scaling, where a rotary
    rule scales). `position_table` is added to the embeddings; None adds nothing.
    `embedding_scale` multiplies the embeddings, `final_soft_cap` bounds the logits.
    """

    vocab_size: Size
    d_model: Size
    max_positions: Size
    layers: Annotated[tuple[LayerConfig, ...], Field(min_length=1)]
    final_norm: NormConfig | None = NormConfig()
    position_table: Literal["sinusoidal", "learned"] | None = None
    tie_head: bool = False
    head_bias: bool = False
    embedding_scale: Positive = 1.0
    final_soft_cap: Positive | None = None
    input_dropout: Probability = 0.0

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.position_table == "sinusoidal" and self.d_model % 2:
            raise ValueError(f"a sinusoidal table needs an even d_model, not {self.d_model}")
        return self

    @property
    def n_layers(self) -> int:
        """N."""
        return len(self.layers)

    @property
    def rotaries(self) -> list[RotaryConfig]:
        """The rotations of the layers, each once."""
        found = dict.fromkeys(layer.attention.rotary for layer in self.layers)
        return [rotary for rotary in found if rotary is not None]

    @classmethod
    def uniform(
        cls,
        *,
        vocab_size: int,
        d_model: int,
        n_layers: int,
        n_heads: int,
        max_positions: int,
        n_kv_heads: int | None = None,
        d_head: int | None = None,
        d_ff: int | None = None,
        rope_base: float = 10000.0,
        rope_scaling: AnyRopeScaling | None = None,
        rope_layout: Literal["half_split", "interleaved"] = "half_split",
        eps: float = 1e-5,
        tie_head: bool = False,
    ) -> Self:
        """The usual modern stack: RoPE, RMSNorm, SwiGLU, grouped queries, no biases.

        Left out, `n_kv_heads` is `n_heads`, `d_head` is d_model / n_heads (which must divide) and
        `d_ff` has the budget of a plain MLP four times as wide as the model, rounded up to a
        multiple of 32. For anything else, `model_copy(update=...)` the layers.
        """
        if d_head is None:
            d_head = _equal_heads(d_model, n_heads)
        with one_line_errors("DecoderConfig.uniform"):
            norm = NormConfig(eps=eps)
            layer = LayerConfig(
                attention=AttentionConfig(
                    n_heads=n_heads,
                    n_kv_heads=n_heads if n_kv_heads is None else n_kv_heads,
                    d_head=d_head,
                    rotary=RotaryConfig(
                        d_rotary=d_head,
                        base=rope_base,
                        layout=rope_layout,
                        scaling=Unscaled() if rope_scaling is None else rope_scaling,
                    ),
                ),
                feedforward=FeedForwardConfig(
                    d_ff=gated_width(4 * d_model, multiple=32) if d_ff is None else d_ff
                ),
                norm=norm,
            )
            return cls(
                vocab_size=vocab_size,
                d_model=d_model,
                max_positions=max_positions,
                layers=(layer,) * n_layers,
                final_norm=norm,
                tie_head=tie_head,
            )

    @classmethod
    def baseline_2017(
        cls,
        *,
        vocab_size: int,
        d_model: int,
        n_layers: int,
        n_heads: int,
        max_positions: int,
        d_ff: int | None = None,
        activation: Literal["relu", "gelu"] = "relu",
        position_table: Literal["sinusoidal", "learned"] = "sinusoidal",
        dropout: float = 0.0,
    ) -> Self:
        """The parts of 2017 on the same residual path: a position table, LayerNorm, an MLP, biases.

        Left out, `d_ff` is four times d_model. Source: Vaswani et al. 2017, §3.
        """
        with one_line_errors("DecoderConfig.baseline_2017"):
            norm = NormConfig(kind="layer", bias=True)
            layer = LayerConfig(
                attention=AttentionConfig(
                    n_heads=n_heads,
                    n_kv_heads=n_heads,
                    d_head=_equal_heads(d_model, n_heads),
                    qkv_bias=True,
                    out_bias=True,
                    dropout=dropout,
                ),
                feedforward=FeedForwardConfig(
                    kind="mlp",
                    d_ff=4 * d_model if d_ff is None else d_ff,
                    activation=activation,
                    bias=True,
                ),
                norm=norm,
                dropout=dropout,
            )
            return cls(
                vocab_size=vocab_size,
                d_model=d_model,
                max_positions=max_positions,
                layers=(layer,) * n_layers,
                final_norm=norm,
                position_table=position_table,
                input_dropout=dropout,
            )

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; every key is there, runs of equal layers are written once.

        An entry of `layers` that stands for several carries `repeat`.
        """
        entries: dict[str, Any] = self.model_dump(mode="json")
        entries["layers"] = list(_runs(entries["layers"]))
        return entries

    @classmethod
    def from_dict(cls, entries: Mapping[str, Any], where: str = "config") -> Self:
        """What `to_dict` wrote, or a person; missing keys have the defaults above.

        Raises ConfigError naming the key, what is wrong with it and the nearest known key.
        """
        # An entry is checked once, however often it repeats: its mistakes are told once, and under
        # its number in the file.
        once, repeats = _split_repeats(entries, where)
        try:
            text = json.dumps(once, default=str)
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(f"{where}: not plain names and values: {error}") from error
        with one_line_errors(where):
            # Only its JSON form lets pydantic be strict and still build nested models from dicts.
            config = cls.model_validate_json(text)
        layers = zip(config.layers, repeats, strict=True)
        return config.model_copy(
            update={"layers": tuple(layer for layer, count in layers for _ in range(count))}
        )

    def to_json(self) -> str:
        """`to_dict` as indented JSON."""
        return json.dumps(self.to_dict(), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str, where: str = "config.json") -> Self:
        """Raises ConfigError for what is not JSON or describes no decoder."""
        try:
            entries = json.loads(text, object_pairs_hook=without_duplicates)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{where}: not JSON: {error}") from error
        return cls.from_dict(_mapping(entries, where), where)

    def to_yaml(self) -> str:
        """`to_dict` as YAML."""
        import yaml

        return yaml.safe_dump(self.to_dict(), sort_keys=False)

    @classmethod
    def from_yaml(cls, text: str, where: str = "config.yaml") -> Self:
        """Raises ConfigError for what is not YAML or describes no decoder."""
        from armillary.strict_yaml import parse_yaml

        return cls.from_dict(_mapping(parse_yaml(text, where), where), where)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """A .json, .yaml or .yml file."""
        from armillary.strict_yaml import read_text

        path = Path(path)
        text = read_text(path)
        if path.suffix == ".json":
            return cls.from_json(text, str(path))
        if path.suffix in {".yaml", ".yml"}:
            return cls.from_yaml(text, str(path))
        raise ConfigError(f"{path}: a configuration's name ends in .json, .yaml or .yml")


def gated_width(d_ff: int, multiple: int = 1) -> int:
    """The f at which a gated feed-forward (3·d·f) has the weights of a plain one (2·d·d_ff).

    f = 2·d_ff / 3, rounded up to a multiple for the hardware. Source: Shazeer 2020, §2.
    Raises ValueError for sizes below 1.
    """
    if d_ff < 1 or multiple < 1:
        raise ValueError(f"d_ff {d_ff} and multiple {multiple} must be at least 1")
    return -(-2 * d_ff // (3 * multiple)) * multiple


def _equal_heads(d_model: int, n_heads: int) -> int:
    """The width of a head when the heads together are as wide as the model."""
    if n_heads < 1 or d_model % n_heads:
        raise ConfigError(
            f"d_model {d_model} is no multiple of n_heads {n_heads}, so heads need a width of "
            "their own: d_head"
        )
    return d_model // n_heads


def _mapping(entries: object, where: str) -> dict[str, Any]:
    if not isinstance(entries, dict) or not all(isinstance(key, str) for key in entries):
        raise ConfigError(f"{where}: a configuration is a mapping of names to values")
    return entries


def _runs(layers: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Each run of equal entries as one entry with its `repeat`."""
    for layer, run in groupby(layers):
        count = len(list(run))
        yield layer if count == 1 else {"repeat": count, **layer}


def _split_repeats(entries: Mapping[str, Any], where: str) -> tuple[dict[str, Any], list[int]]:
    """The entries with `repeat` taken out of each layer, and how often each layer is meant."""
    layers = entries.get("layers")
    if not isinstance(layers, list):
        return dict(entries), []
    once, repeats = [], []
    for number, layer in enumerate(layers):
        count = layer.get("repeat", 1) if isinstance(layer, dict) else 1
        if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= 10_000:
            raise ConfigError(
                f"{where}: layers.{number}.repeat must be a whole number from 1 to 10000, "
                f"found {reprlib.repr(count)}"
            )
        repeats.append(count)
        once.append(
            {key: value for key, value in layer.items() if key != "repeat"}
            if isinstance(layer, dict)
            else layer
        )
    return {**entries, "layers": once}, repeats


@contextmanager
def one_line_errors(where: str) -> Iterator[None]:
    """Let a ValidationError of these classes leave as a ConfigError of one line.

    The line names `where`, the key, what is wrong, what was found and, for an unknown key, the
    nearest one. For code that builds configurations out of a file's entries.
    """
    try:
        yield
    except ValidationError as error:
        # A misspelt key is a missing one too; the spelling is what helps.
        problems = sorted(
            _without_consequences(error.errors()),
            key=lambda problem: problem["type"] not in _UNKNOWN_KEY,
        )
        text = _explain(problems[0], error.title)
        if len(problems) > 1:
            text += f"; and {len(problems) - 1} more problem{'s' if len(problems) > 2 else ''}"
        raise ConfigError(f"{where}: {text}") from error


_UNKNOWN_KEY = {"extra_forbidden", "unexpected_keyword_argument"}

# The part that stands under each key.
_PARTS: Mapping[str, type[BaseModel]] = {
    "layers": LayerConfig,
    "attention": AttentionConfig,
    "rotary": RotaryConfig,
    "feedforward": FeedForwardConfig,
    "norm": NormConfig,
    "qk_norm": NormConfig,
    "final_norm": NormConfig,
}
_RULE_KEYS = {rule.kind: set(rule.__dataclass_fields__) for rule in AnyRopeScaling.__args__}
Location = tuple[int | str, ...]


def _without_consequences(problems: list[ErrorDetails]) -> list[ErrorDetails]:
    """Without those of a part that are there because something inside it is wrong."""
    places = [problem["loc"] for problem in problems]
    return [
        problem
        for problem in problems
        if not any(
            len(place) > len(problem["loc"]) and place[: len(problem["loc"])] == problem["loc"]
            for place in places
        )
    ]


def _explain(problem: ErrorDetails, title: str) -> str:
    """One problem in a line; `title` is the class that was being built."""
    location, kind, context = problem["loc"], problem["type"], problem.get("ctx", {})
    path = _path(location)
    if kind in _UNKNOWN_KEY:
        path = _path(location[:-1])
        text = f"unknown key {location[-1]!r} ({_suggestion(location, title)})"
    elif kind == "value_error":
        text = problem["msg"].removeprefix("Value error, ")
    else:
        match kind:
            case "missing":
                return f"{path} is missing"
            case "union_tag_not_found":
                return f"{path}.kind is missing"
            case "union_tag_invalid":
                known = context["expected_tags"]
                return f"{path}.kind {context['tag']!r} is not known; known are {known}"
            case "too_short":
                return f"{path} must have at least {context['min_length']} entry"
            case _:
                wanted = problem["msg"].replace("Input should be", "must be")
                return f"{path} {wanted}, found {_told(problem['input'])}"
    return f"{path}: {text}" if path else text


def _told(found: object) -> str:
    return (
        reprlib.repr(found) if isinstance(found, str | int | float | None) else type(found).__name__
    )


def _path(location: Location) -> str:
    """layers.0.attention.n_heads; the rule's name, which pydantic adds below scaling, left out."""
    named = [
        str(part)
        for before, part in zip((None, *location), location, strict=False)
        if before != "scaling"
    ]
    return ".".join(named)


def _suggestion(location: Location, title: str) -> str:
    """The nearest key of that part, or the part where a key of this name belongs."""
    key = str(location[-1])
    here = sorted(_keys_beside(location, title))
    misspelt = difflib.get_close_matches(key, here, n=1, cutoff=0.8)
    if misspelt:
        return f"did you mean {misspelt[0]!r}?"
    if key in DecoderConfig.model_fields:
        return "it belongs at the top level"
    for under, part in _PARTS.items():
        if key in part.model_fields:
            return f"it belongs under {under!r}"
    if any(key in keys for keys in _RULE_KEYS.values()):
        return "it belongs under 'scaling'"
    return f"the nearest is {difflib.get_close_matches(key, here, n=1, cutoff=0.0)[0]!r}"


def _keys_beside(location: Location, title: str) -> set[str]:
    """The known keys of the part that a key stands in."""
    above = [part for part in location[:-1] if isinstance(part, str)]
    if "scaling" in above:
        return _RULE_KEYS[above[-1]]
    parts: dict[str, type[BaseModel]] = {"DecoderConfig": DecoderConfig}
    parts |= {part.__name__: part for part in _PARTS.values()}
    part = _PARTS[above[-1]] if above else parts[title]
    return set(part.model_fields) | ({"repeat"} if part is LayerConfig else set())
