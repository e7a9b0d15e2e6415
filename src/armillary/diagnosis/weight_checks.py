"""Whether stored tensors can be weights at all: numbers, none dead, none twice, none unset.

Each tensor is read once, by blocks of rows; nothing is kept.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from armillary.checkpoints.tensors import StoredTensor
from armillary.diagnosis.findings import Check, Finding

_ABSURD = 1e6
"""No weight is so large; memory that nobody wrote to often is."""

_LISTED = 3


@dataclass(frozen=True)
class _Facts:
    finite: bool
    least: float
    most: float
    digest: bytes


def check_weights(tensors: Mapping[str, StoredTensor]) -> tuple[list[Check], list[Finding]]:
    """Look at every number of every tensor."""
    facts = {name: _facts(tensor) for name, tensor in tensors.items()}
    odd = [name for name, fact in facts.items() if not fact.finite]
    sound = {name: fact for name, fact in facts.items() if fact.finite}
    unset = [name for name, fact in sound.items() if max(abs(fact.least), abs(fact.most)) > _ABSURD]
    dead = [
        name
        for name, fact in sound.items()
        if fact.least == fact.most and _should_vary(name, tensors[name], fact.most)
    ]
    twice = _twice(tensors, sound, dead)
    findings = []
    if odd:
        findings.append(
            Finding(
                code="not-finite",
                fault=f"{_some(odd)} hold{_s(odd)} numbers that are none (NaN or infinite)",
                evidence=f"of {len(tensors)} tensors {len(odd)}",
                remedy="fetch or convert those tensors again",
                layers=_layers(odd),
            )
        )
    findings += [_dead(name, facts[name].most) for name in dead]
    if unset:
        findings.append(
            Finding(
                code="never-assigned",
                fault=f"{_some(unset)} hold{_s(unset)} numbers beyond {_ABSURD:g}, as memory does "
                "that nobody wrote to",
                remedy="convert again; a tensor was never assigned",
                layers=_layers(unset),
            )
        )
    for one, other in twice:
        findings.append(
            Finding(
                code="duplicate",
                fault=f"{one} and {other} are the same numbers",
                remedy="convert again; one of them was written in the other's place",
                layers=_layers([one, other]),
            )
        )
    n = len(tensors)
    checks = [
        Check("numbers", not odd, f"{n} tensors, all finite" if not odd else _some(odd)),
        Check("dead", not dead, "none is constant" if not dead else _some(dead)),
        Check("unset", not unset, "none beyond what weights are" if not unset else _some(unset)),
        Check(
            "twice",
            not twice,
            "no two are the same" if not twice else ", ".join(" = ".join(pair) for pair in twice),
        ),
    ]
    return checks, findings


def _facts(tensor: StoredTensor) -> _Facts:
    least, most, finite = np.inf, -np.inf, True
    digest = hashlib.blake2b(digest_size=16)
    for start, stop in tensor.row_blocks():
        rows = tensor.rows(start, stop)
        digest.update(rows.tobytes())
        finite = finite and bool(np.isfinite(rows).all())
        if rows.size and finite:
            least, most = min(least, float(rows.min())), max(most, float(rows.max()))
    tensor.release()
    return _Facts(finite, least, most, digest.digest())


def _should_vary(name: str, tensor: StoredTensor, value: float) -> bool:
    """Matrices are never constant; a bias may be, and a norm, unless it silences its input."""
    return len(tensor.shape) > 1 or ("norm" in name and name.endswith("weight") and value == 0.0)


def _dead(name: str, value: float) -> Finding:
    held = "all zeros" if value == 0.0 else f"{value:g} throughout"
    if name == "head.weight":
        return Finding(
            code="untied-head",
            fault=f"the head is untied and its matrix is {held}",
            remedy="tie the head to the embedding, or convert again with the head's matrix",
        )
    return Finding(
        code="dead",
        fault=f"{name} is {held}",
        remedy="convert again; the tensor was never filled",
        layers=_layers([name]),
    )


def _twice(
    tensors: Mapping[str, StoredTensor], facts: Mapping[str, _Facts], dead: list[str]
) -> list[tuple[str, str]]:
    first: dict[tuple[bytes, tuple[int, ...]], str] = {}
    pairs = []
    for name, fact in facts.items():
        shape = tensors[name].shape
        # A head that repeats the embedding says the same in another way.
        if name in dead or fact.least == fact.most or name == "head.weight":
            continue
        key = (fact.digest, shape)
        if key in first:
            pairs.append((first[key], name))
        else:
            first[key] = name
    return pairs


def _layers(names: list[str]) -> tuple[int, ...]:
    numbers = {int(name.split(".")[1]) for name in names if name.startswith("layers.")}
    return tuple(sorted(numbers))


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more


def _s(names: list[str]) -> str:
    return "s" if len(names) == 1 else ""
