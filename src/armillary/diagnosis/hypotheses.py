"""What may have gone wrong in a conversion, as changes that would undo it.

A table: each entry makes another `Patient` out of the one at hand, and says in words and as keys
of the configuration what it changed. Knows nothing of how a change is judged (search.py).
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from armillary.config import (
    AttentionConfig,
    DecoderConfig,
    FeedForwardConfig,
    LayerConfig,
    RotaryConfig,
)
from armillary.diagnosis.patient import Patient
from armillary.errors import ConfigError
from armillary.rope_layout import half_split_from_interleaved, interleaved_from_half_split
from armillary.rope_scaling import AnyRopeScaling, Llama3, PositionInterpolation, Unscaled, YaRN

Change = Callable[[Patient], Patient]

BASES = (1e4, 1e5, 5e5, 1e6, 2.5e4, 5e4, 2.5e5, 2e6, 5e6, 1e7)
EPSILONS = (1e-5, 1e-6, 1e-8, 1e-4, 1e-3)
"""The commonest first."""
FACTORS = (2.0, 4.0, 8.0)
_LLAMA3_WINDOW = 8192


@dataclass(frozen=True)
class Hypothesis:
    """One change.

    `code` is the kind of fault that it undoes. `fault` says what is wrong with the file if the
    change helps, `remedy` what to do; `patch` has facts of a configuration by our names. Of two
    hypotheses with one `exclusive`, at most one can hold. `structural` ones are tried in pairs.
    `layers` are those concerned, none for the whole model.
    """

    code: str
    fault: str
    remedy: str
    change: Change
    patch: Mapping[str, Any] = field(default_factory=dict)
    exclusive: str = ""
    structural: bool = False
    layers: tuple[int, ...] = ()
    in_layer: "Callable[[int], Hypothesis] | None" = None
    """The same for one layer alone, where that can be."""

    @property
    def group(self) -> str:
        """What it changes."""
        return self.exclusive or self.code


def all_hypotheses(patient: Patient) -> list[Hypothesis]:
    """Those that change something in this patient, for the whole model."""
    sources = (
        _layouts,
        _head_widths,
        _bases,
        _scalings,
        _norms,
        _norm_orders,
        _heads_of_the_model,
        _feedforwards,
        _scales,
        _caps,
        _exchanges,
    )
    return [hypothesis for source in sources for hypothesis in source(patient)]


def every_layer(config: DecoderConfig, change: Callable[[LayerConfig], LayerConfig]) -> Any:
    """The layers of a configuration, each changed; equal ones once."""
    made: dict[LayerConfig, LayerConfig] = {}
    for layer in config.layers:
        if layer not in made:
            made[layer] = change(layer)
    return tuple(made[layer] for layer in config.layers)


def _with_layers(patient: Patient, change: Callable[[LayerConfig], LayerConfig]) -> Patient:
    layers = every_layer(patient.config, change)
    return patient.with_config(patient.config.model_copy(update={"layers": layers}))


def _with_attention(
    patient: Patient, change: Callable[[AttentionConfig], AttentionConfig]
) -> Patient:
    return _with_layers(
        patient, lambda layer: layer.model_copy(update={"attention": change(layer.attention)})
    )


def _with_rotary(patient: Patient, change: Callable[[RotaryConfig], RotaryConfig]) -> Patient:
    def changed(attention: AttentionConfig) -> AttentionConfig:
        rotary = attention.rotary
        if rotary is None:
            return attention
        return attention.model_copy(update={"rotary": change(rotary)})

    return _with_attention(patient, changed)


def first_rotary(config: DecoderConfig) -> RotaryConfig | None:
    """The rotation of the first layer that has one."""
    rotaries = (layer.attention.rotary for layer in config.layers)
    return next((rotary for rotary in rotaries if rotary is not None), None)


# Channel layout of Q and K.


def reordered_rows(patient: Patient, parts: str, to: str, layers: Iterable[int]) -> Patient:
    """Q or K (or both) of some layers with their rows taken for the other pairing."""
    order = half_split_from_interleaved if to == "half_split" else interleaved_from_half_split
    changed = {}
    for number in layers:
        attention = patient.config.layers[number].attention
        rotary = attention.rotary
        if rotary is None:
            continue
        for part in parts:
            count = attention.n_heads if part == "q" else attention.n_kv_heads
            rows = torch.from_numpy(order(count, attention.d_head, rotary.d_rotary))
            for kind in ("weight", "bias"):
                name = f"layers.{number}.attention.{part}.{kind}"
                if name in patient.tensors:
                    changed[name] = patient.tensors[name][rows]
    return patient.with_tensors(changed)


def _rows_change(parts: str, to: str, layers: Iterable[int]) -> Change:
    return lambda patient: reordered_rows(patient, parts, to, layers)


_PARTS = {"qk": "Q and K", "q": "Q", "k": "K"}
_STORED = {"half_split": "interleaved", "interleaved": "half-split"}
_LAYOUT_KEYS = tuple((parts, to) for parts in _PARTS for to in _STORED)


def layouts(patient: Patient, layers: tuple[int, ...], where: str = "") -> Iterator[Hypothesis]:
    """Rows of Q and K that were left in, or brought to, the order of the other pairing."""
    attention = patient.config.layers[layers[0]].attention
    if attention.rotary is None:
        return
    for parts, named in _PARTS.items():
        for to, stored in _STORED.items():
            yield Hypothesis(
                code="layout",
                fault=f"{named}{where} {'are' if len(parts) > 1 else 'is'} stored for {stored} "
                "rotation, and rotated as the other",
                remedy=f"convert again, with the rows of {named} brought to the other order "
                f"({attention.n_heads} heads in Q, {attention.n_kv_heads} in K)",
                change=_rows_change(parts, to, layers),
                patch={"rotary.layout": stored.replace("-", "_")} if len(parts) > 1 else {},
                structural=parts == "qk",
                layers=layers if where else (),
                in_layer=None if where else _layout_of_layer(patient, parts, to),
            )


def _layout_of_layer(patient: Patient, parts: str, to: str) -> Callable[[int], Hypothesis]:
    def of_layer(number: int) -> Hypothesis:
        found = layouts(patient, (number,), f" of layer {number}")
        return next(h for h, key in zip(found, _LAYOUT_KEYS, strict=False) if key == (parts, to))

    return of_layer


def _layouts(patient: Patient) -> Iterator[Hypothesis]:
    yield from layouts(patient, tuple(range(patient.config.n_layers)))


# Head counts.


def _with_heads(patient: Patient, width: int, *, relaid: bool) -> Patient:
    """Heads of another width, as many as fill the same rows."""
    config = patient.config

    def changed(attention: AttentionConfig) -> AttentionConfig:
        rotary = attention.rotary
        if rotary is not None:
            whole = rotary.d_rotary == attention.d_head
            turned = width if whole else min(rotary.d_rotary, width)
            rotary = rotary.model_copy(update={"d_rotary": turned})
        rows, kv_rows = attention.n_heads, attention.n_kv_heads
        rows, kv_rows = rows * attention.d_head, kv_rows * attention.d_head
        heads = {"n_heads": rows // width, "n_kv_heads": kv_rows // width, "d_head": width}
        return attention.model_copy(update={**heads, "rotary": rotary})

    other = _with_attention(patient, changed)
    if not relaid:
        return other
    layers = range(config.n_layers)
    undone = reordered_rows(patient, "qk", "interleaved", layers)
    return reordered_rows(undone.with_config(other.config), "qk", "half_split", layers)


def _head_widths(patient: Patient) -> Iterator[Hypothesis]:
    attention = patient.config.layers[0].attention
    rows, kv_rows = (n * attention.d_head for n in (attention.n_heads, attention.n_kv_heads))
    for width in (attention.d_head * 2, attention.d_head * 4, attention.d_head // 2):
        if width < 2 or rows % width or kv_rows % width or attention.qk_norm is not None:
            continue
        for relaid in {patient.relaid, False}:
            yield Hypothesis(
                code="head-count",
                fault=f"the head counts are wrong: {attention.n_heads} query and "
                f"{attention.n_kv_heads} key/value heads of {attention.d_head} channels, where the "
                f"weights have {rows // width} and {kv_rows // width} of {width}",
                remedy="correct the counts; the shapes of the tensors stay the same",
                change=_heads_change(width, relaid),
                patch={"n_heads": rows // width, "n_kv_heads": kv_rows // width, "d_head": width},
                structural=True,
            )


def _heads_change(width: int, relaid: bool) -> Change:
    return lambda patient: _with_heads(patient, width, relaid=relaid)


# Rotary base and scaling.


def _bases(patient: Patient) -> Iterator[Hypothesis]:
    rotary = first_rotary(patient.config)
    if rotary is None:
        return
    for base in BASES:
        if math.isclose(base, rotary.base, rel_tol=0.1):
            continue
        yield Hypothesis(
            code="rotary-base",
            fault=f"the rotary base is {rotary.base:,.10g}, where the weights want about "
            f"{base:,.10g}",
            remedy="correct the base",
            change=_base_change(base),
            patch={"rope_base": base},
            structural=base in (1e4, 1e5, 5e5, 1e6),
        )


def _base_change(base: float) -> Change:
    return lambda patient: _with_rotary(
        patient, lambda rotary: rotary.model_copy(update={"base": base})
    )


def rules(window: int) -> Iterator[tuple[str, AnyRopeScaling]]:
    """Rules that a model of this window may have been extended with."""
    yield "no scaling", Unscaled()
    for factor in FACTORS:
        yield f"linear scaling by {factor:g}", PositionInterpolation(factor=factor)
    for factor in FACTORS:
        original = max(1, round(window / factor))
        yield (
            f"yarn by {factor:g} from {original:,} positions",
            YaRN(factor=factor, original_window=original),
        )
    for factor in FACTORS:
        original = max(1, round(window / factor))
        yield (
            f"llama3 scaling by {factor:g} from {original:,} positions",
            Llama3(factor=factor, original_window=original),
        )
    for factor in (8.0, 32.0):
        if window != factor * _LLAMA3_WINDOW:
            yield (
                f"llama3 scaling by {factor:g} from {_LLAMA3_WINDOW:,} positions",
                Llama3(factor=factor, original_window=_LLAMA3_WINDOW),
            )


def _scalings(patient: Patient) -> Iterator[Hypothesis]:
    rotary = first_rotary(patient.config)
    if rotary is None:
        return
    for named, rule in rules(patient.config.max_positions):
        if rule.kind == rotary.scaling.kind and rule == rotary.scaling:
            continue
        yield scaling_hypothesis(rotary, named, rule)


def scaling_hypothesis(rotary: RotaryConfig, named: str, rule: AnyRopeScaling) -> Hypothesis:
    """Another rule than the one that the configuration has."""
    now = "no scaling" if isinstance(rotary.scaling, Unscaled) else rotary.scaling.kind
    return Hypothesis(
        code="scaling",
        fault=f"the rotary scaling is wrong or was dropped: the file says {now}, the weights want "
        f"{named}",
        remedy="put the rule into the configuration",
        change=_scaling_change(rule),
        patch={"scaling": rule},
    )


def _scaling_change(rule: AnyRopeScaling) -> Change:
    return lambda patient: _with_rotary(
        patient, lambda rotary: rotary.model_copy(update={"scaling": rule})
    )


# Norms.


def with_norms(patient: Patient, update: Mapping[str, Any]) -> Patient:
    """All norms on the residual path changed alike, the final one too."""
    changed = _with_layers(
        patient,
        lambda layer: layer.model_copy(update={"norm": layer.norm.model_copy(update=update)}),
    )
    final = changed.config.final_norm
    if final is None:
        return changed
    config = changed.config.model_copy(update={"final_norm": final.model_copy(update=update)})
    return changed.with_config(config)


def _norms_change(update: Mapping[str, Any]) -> Change:
    return lambda patient: with_norms(patient, update)


def _norms(patient: Patient) -> Iterator[Hypothesis]:
    norm = patient.config.layers[0].norm
    for eps in EPSILONS:
        if not math.isclose(eps, norm.eps, rel_tol=0.5):
            yield Hypothesis(
                code="epsilon",
                fault=f"epsilon is {norm.eps:g}, where the weights want about {eps:g}",
                remedy="correct the norms' epsilon",
                change=_norms_change({"eps": eps}),
                patch={"eps": eps},
            )
    if norm.kind == "rms":
        for offset in (norm.offset - 1.0, norm.offset + 1.0):
            added = offset < norm.offset
            yield Hypothesis(
                code="norm-offset",
                fault="1 is added to the norms' weights once too often"
                if added
                else "the norms' weights are stored less 1, which is not added",
                remedy="convert again with the norms' weights "
                + ("as they were before 1 was added" if added else "and 1 added to them"),
                change=_norms_change({"offset": offset}),
                patch={"norm.offset": offset},
                structural=True,
            )
        yield Hypothesis(
            code="norm-kind",
            fault="the norms are layer norms, which subtract the mean",
            remedy="correct the kind of norm",
            change=_norms_change({"kind": "layer", "offset": 0.0}),
            patch={"norm.kind": "layer"},
        )
    else:
        yield Hypothesis(
            code="norm-kind",
            fault="the norms are RMS norms, which subtract no mean",
            remedy="correct the kind of norm",
            change=_norms_change({"kind": "rms", "bias": False}),
            patch={"norm.kind": "rms"},
        )


def _norm_orders(patient: Patient) -> Iterator[Hypothesis]:
    layer = patient.config.layers[0]
    numbers = range(patient.config.n_layers)
    if layer.norm_placement == "pre" and "layers.0.norm2.weight" in patient.tensors:
        yield Hypothesis(
            code="norm-order",
            fault="the norms stand after the sub-layers (post), not before them",
            remedy="correct where the norms stand",
            change=_post_norms,
            patch={"norm_placement": "post"},
            exclusive="norm-order",
        )
        yield Hypothesis(
            code="norm-order",
            fault="attention and feed-forward read the same input (parallel), not one after the "
            "other",
            remedy="correct the residual path",
            change=lambda patient: _with_layers(
                patient, lambda one: one.model_copy(update={"residual": "parallel"})
            ),
            patch={"residual": "parallel"},
            exclusive="norm-order",
        )
        yield exchange("norm1", "norm2", tuple(numbers))
    if layer.norm_placement == "post":
        yield Hypothesis(
            code="norm-order",
            fault="the norms stand before the sub-layers (pre), not after them",
            remedy="correct where the norms stand",
            change=_pre_norms,
            patch={"norm_placement": "pre"},
            exclusive="norm-order",
        )
    if layer.residual == "parallel":
        yield Hypothesis(
            code="norm-order",
            fault="attention and feed-forward come one after the other, not in parallel",
            remedy="correct the residual path",
            change=lambda patient: _with_layers(
                patient, lambda one: one.model_copy(update={"residual": "sequential"})
            ),
            patch={"residual": "sequential"},
            exclusive="norm-order",
        )


def _post_norms(patient: Patient) -> Patient:
    return _renamed_norms(patient, "", "post_", "post")


def _pre_norms(patient: Patient) -> Patient:
    return _renamed_norms(patient, "post_", "", "pre")


def _renamed_norms(patient: Patient, before: str, after: str, placement: str) -> Patient:
    named = {}
    for number in range(patient.config.n_layers):
        for norm in ("norm1", "norm2"):
            for kind in ("weight", "bias"):
                name = f"layers.{number}.{before}{norm}.{kind}"
                if name in patient.tensors:
                    named[f"layers.{number}.{after}{norm}.{kind}"] = patient.tensors[name]
    moved = _with_layers(patient, lambda one: one.model_copy(update={"norm_placement": placement}))
    return moved.with_tensors(named)


# Head, feed-forward, scales.


def _heads_of_the_model(patient: Patient) -> Iterator[Hypothesis]:
    if not patient.config.tie_head:
        yield Hypothesis(
            code="tied-head",
            fault="the head's own matrix is not the model's; the embedding serves as the head",
            remedy="tie the head to the embedding and leave its matrix out",
            change=lambda patient: patient.with_config(
                patient.config.model_copy(update={"tie_head": True})
            ),
            patch={"tie_head": True},
            structural=True,
        )


def exchange(one: str, other: str, layers: tuple[int, ...], where: str = "") -> Hypothesis:
    """Two tensors of a layer that have changed places, in some layers."""
    named = {
        "attention.q": "Q",
        "attention.k": "K",
        "attention.v": "V",
        "attention.out": "the output projection",
        "feedforward.gate": "gate",
        "feedforward.up": "up",
        "norm1": "norm 1",
        "norm2": "norm 2",
    }
    a, b = named.get(one, one), named.get(other, other)
    return Hypothesis(
        code="swapped-gate-up" if "feedforward.gate" in (one, other) else "swapped-tensors",
        fault=f"{a} and {b}{where} have changed places",
        remedy=f"convert again with the names of {a} and {b} exchanged",
        change=lambda patient: _exchanged(patient, one, other, layers),
        exclusive=f"exchange {one} {other}",
        structural=not where,
        layers=layers if where else (),
        in_layer=None
        if where
        else lambda number: exchange(one, other, (number,), f" of layer {number}"),
    )


def _exchanged(patient: Patient, one: str, other: str, layers: Iterable[int]) -> Patient:
    changed: dict[str, Tensor] = {}
    for number in layers:
        for kind in ("weight", "bias"):
            a, b = (f"layers.{number}.{name}.{kind}" for name in (one, other))
            if a in patient.tensors and b in patient.tensors:
                changed |= {a: patient.tensors[b], b: patient.tensors[a]}
    return patient.with_tensors(changed)


def transposition(name: str, layers: tuple[int, ...], where: str = "") -> Hypothesis:
    """A square matrix that is stored the other way round."""

    def change(patient: Patient) -> Patient:
        names = [f"layers.{number}.{name}.weight" for number in layers]
        present = [each for each in names if each in patient.tensors]
        return patient.with_tensors(
            {each: patient.tensors[each].T.contiguous() for each in present}
        )

    return Hypothesis(
        code="transposed",
        fault=f"{name}.weight{where} is transposed",
        remedy="convert again with the matrix (out, in), as in W·x",
        change=change,
        exclusive=f"transposed {name}",
        structural=not where,
        layers=layers if where else (),
        in_layer=None
        if where
        else lambda number: transposition(name, (number,), f" of layer {number}"),
    )


def _shape(patient: Patient, number: int, name: str) -> tuple[int, ...] | None:
    tensor = patient.tensors.get(f"layers.{number}.{name}.weight")
    return None if tensor is None else tuple(tensor.shape)


PAIRS = (
    ("attention.q", "attention.out"),
    ("attention.q", "attention.k"),
    ("attention.k", "attention.v"),
    ("feedforward.gate", "feedforward.up"),
    ("norm1", "norm2"),
)
MATRICES = (
    *("attention.q", "attention.k", "attention.v", "attention.out"),
    *("feedforward.gate", "feedforward.up", "feedforward.down"),
)


def _exchanges(patient: Patient) -> Iterator[Hypothesis]:
    layers = tuple(range(patient.config.n_layers))
    for one, other in PAIRS:
        shape = _shape(patient, 0, one)
        # Exchanged norms are among the orders of norms.
        if one != "norm1" and shape is not None and shape == _shape(patient, 0, other):
            yield exchange(one, other, layers)
    for name in MATRICES:
        shape = _shape(patient, 0, name)
        if shape is not None and len(shape) == 2 and shape[0] == shape[1]:
            yield transposition(name, layers)


def _feedforwards(patient: Patient) -> Iterator[Hypothesis]:
    feedforward = patient.config.layers[0].feedforward
    if not isinstance(feedforward, FeedForwardConfig):
        return
    for activation in ("silu", "gelu", "gelu_tanh", "relu"):
        if activation != feedforward.activation:
            yield Hypothesis(
                code="activation",
                fault=f"the activation is {feedforward.activation}, where the weights want "
                f"{activation}",
                remedy="correct the activation",
                change=_activation_change(activation),
                patch={"activation": activation},
            )


def _activation_change(activation: str) -> Change:
    def changed(layer: LayerConfig) -> LayerConfig:
        if not isinstance(layer.feedforward, FeedForwardConfig):
            return layer
        feedforward = layer.feedforward.model_copy(update={"activation": activation})
        return layer.model_copy(update={"feedforward": feedforward})

    return lambda patient: _with_layers(patient, changed)


def _scales(patient: Patient) -> Iterator[Hypothesis]:
    config = patient.config
    for scale in (1.0, config.d_model**0.5, config.d_model**-0.5):
        if not math.isclose(scale, config.embedding_scale, rel_tol=0.1):
            yield Hypothesis(
                code="embedding-scale",
                fault=f"embeddings are multiplied by {config.embedding_scale:g}, where the weights "
                f"want {scale:.6g}",
                remedy="correct the scale of the embeddings",
                change=_embedding_change(scale),
                patch={"embedding_scale": scale},
            )
    attention = config.layers[0].attention
    for named, value in (("1", 1.0), ("1/√d_head", None), ("1/d_head", 1 / attention.d_head)):
        scale = attention.d_head**-0.5 if value is None else value
        if not math.isclose(scale, attention.score_scale, rel_tol=0.1):
            yield Hypothesis(
                code="attention-scale",
                fault=f"scores are multiplied by {attention.score_scale:.6g}, where the weights "
                f"want {scale:.6g} ({named})",
                remedy="correct the scale of the scores",
                change=_score_change(value),
                patch={"attention.scale": value},
            )


def _embedding_change(scale: float) -> Change:
    return lambda patient: patient.with_config(
        patient.config.model_copy(update={"embedding_scale": scale})
    )


def _score_change(scale: float | None) -> Change:
    return lambda patient: _with_attention(
        patient, lambda attention: attention.model_copy(update={"scale": scale})
    )


def _caps(patient: Patient) -> Iterator[Hypothesis]:
    config = patient.config
    if config.final_soft_cap is not None:
        yield Hypothesis(
            code="soft-cap",
            fault=f"logits are capped at {config.final_soft_cap:g}, where the weights want no cap",
            remedy="take the cap out",
            change=lambda patient: patient.with_config(
                patient.config.model_copy(update={"final_soft_cap": None})
            ),
            patch={"final_soft_cap": None},
        )


# One layer.


def layer_hypotheses(patient: Patient, number: int) -> Iterator[Hypothesis]:
    """What may be wrong in one layer alone."""
    where, only = f" of layer {number}", (number,)
    for one, other in PAIRS:
        shape = _shape(patient, number, one)
        if shape is not None and shape == _shape(patient, number, other):
            yield exchange(one, other, only, where)
    for name in MATRICES:
        shape = _shape(patient, number, name)
        if shape is not None and len(shape) == 2 and shape[0] == shape[1]:
            yield transposition(name, only, where)
    yield from layouts(patient, only, where)


def exchanged_layers(patient: Patient, one: int, other: int) -> Hypothesis | None:
    """Two whole layers that have changed places; None where they are not alike."""
    if patient.config.layers[one] != patient.config.layers[other]:
        return None

    def change(patient: Patient) -> Patient:
        changed = {}
        for a, b in ((one, other), (other, one)):
            prefix = f"layers.{a}."
            for name, tensor in patient.tensors.items():
                if name.startswith(prefix):
                    changed[f"layers.{b}.{name.removeprefix(prefix)}"] = tensor
        return patient.with_tensors(changed)

    return Hypothesis(
        code="swapped-layers",
        fault=f"layers {one} and {other} have changed places",
        remedy="convert again with the layers in their order",
        change=change,
        exclusive=f"layers {one} {other}",
        layers=(one, other),
    )


def applied(patient: Patient, hypotheses: Iterable[Hypothesis]) -> Patient | None:
    """The patient with changes made one after the other; None where they do not fit it."""
    try:
        for hypothesis in hypotheses:
            patient = hypothesis.change(patient)
    except (ConfigError, ValueError, KeyError):
        return None
    return patient
