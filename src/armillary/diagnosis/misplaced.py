"""Weights that stand where others should: rows, matrices and layers that were exchanged or turned.

Each entry puts them back, in all layers or in one.
"""

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from armillary.diagnosis.hypothesis import Change, Hypothesis
from armillary.diagnosis.patient import Patient
from armillary.rope_layout import half_split_from_interleaved, interleaved_from_half_split

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
_PARTS = {"qk": "Q and K", "q": "Q", "k": "K"}
_STORED = {"half_split": "interleaved", "interleaved": "half-split"}
_LAYOUT_KEYS = tuple((parts, to) for parts in _PARTS for to in _STORED)


def misplaced(patient: Patient) -> Iterator[Hypothesis]:
    """What may stand elsewhere in every layer."""
    return _in_layers(patient, tuple(range(patient.config.n_layers)), "")


def misplaced_in(patient: Patient, number: int) -> Iterator[Hypothesis]:
    """What may stand elsewhere in one layer alone."""
    return _in_layers(patient, (number,), f" of layer {number}")


def _in_layers(patient: Patient, layers: tuple[int, ...], where: str) -> Iterator[Hypothesis]:
    for one, other in PAIRS:
        shape = _shape(patient, layers[0], one)
        if shape is not None and shape == _shape(patient, layers[0], other):
            yield exchange(one, other, layers, where)
    for name in MATRICES:
        shape = _shape(patient, layers[0], name)
        if shape is not None and len(shape) == 2 and shape[0] == shape[1]:
            yield transposition(name, layers, where)
    yield from layouts(patient, layers, where)


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
