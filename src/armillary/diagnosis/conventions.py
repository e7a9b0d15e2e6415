"""Conventions that a configuration may say wrongly, as changes of it.

A table: each entry makes another `Patient` out of the one at hand.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from armillary.config import (
    AttentionConfig,
    DecoderConfig,
    FeedForwardConfig,
    LayerConfig,
    RotaryConfig,
)
from armillary.diagnosis.hypothesis import Change, Hypothesis
from armillary.diagnosis.misplaced import reordered_rows
from armillary.diagnosis.patient import Patient
from armillary.rope_scaling import AnyRopeScaling, Llama3, PositionInterpolation, Unscaled, YaRN

BASES = (1e4, 1e5, 5e5, 1e6, 2.5e4, 5e4, 2.5e5, 2e6, 5e6, 1e7)
EPSILONS = (1e-5, 1e-6, 1e-8, 1e-4, 1e-3)
"""The commonest first."""
FACTORS = (2.0, 4.0, 8.0)
_LLAMA3_WINDOW = 8192


def conventions(patient: Patient) -> Iterator[Hypothesis]:
    """Those that would change something in this patient."""
    sources = (
        _head_widths,
        _bases,
        _scalings,
        _norms,
        _norm_orders,
        _heads_of_the_model,
        _feedforwards,
        _scales,
        _caps,
    )
    for source in sources:
        yield from source(patient)


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
