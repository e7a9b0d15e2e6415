"""Where two traces of one input part: the first step whose difference is more than rounding."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from armillary.diagnosis.trace import Place, Trace, places

TOLERANCES: Mapping[str, float] = {
    "float64": 1e-10,
    "float32": 1e-5,
    "float16": 1e-2,
    "bfloat16": 5e-2,
}
"""What rounding may make of a step in the first layer, over the step's root mean square."""

_OF_ENCODINGS: Mapping[str, float] = {"F64": 0.0, "F32": 0.0, "F16": 1e-2, "BF16": 5e-2}
_OF_BLOCKS = 0.5


@dataclass(frozen=True)
class StepDifference:
    """How far two models are apart after a step.

    `most` is the largest difference of two numbers, `relative` the root mean square of the
    difference over that of the step; both infinite for shapes that differ or numbers that are none.
    """

    layer: int | None
    step: str
    most: float
    relative: float
    tolerance: float

    @property
    def parts(self) -> bool:
        """Whether it is more than rounding."""
        return not self.relative <= self.tolerance

    @property
    def name(self) -> str:
        """The layer and the step."""
        return self.step if self.layer is None else f"layer {self.layer}, {self.step}"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; an infinite difference is null."""
        entries = asdict(self)
        for key in ("most", "relative"):
            if entries[key] == float("inf"):
                entries[key] = None
        return entries | {"parts": self.parts}


def tolerance_of(dtypes: tuple[str, str], encodings: tuple[set[str], set[str]]) -> float:
    """That of the narrower type; where files hold other encodings, that of the narrower one too."""
    wide = max(TOLERANCES[dtype] for dtype in dtypes)
    if encodings[0] == encodings[1]:
        return wide
    each = [_OF_ENCODINGS.get(name, _OF_BLOCKS) for name in encodings[0] ^ encodings[1]]
    return max(wide, *each)


def differences(one: Trace, other: Trace, tolerance: float) -> list[StepDifference]:
    """The steps that both have, in the order of the computation.

    Rounding adds up, so a layer's tolerance is that of the first times its number.
    """
    layers = 1 + max((layer for layer, _ in [*one, *other] if layer is not None), default=-1)
    found = []
    for place in places(layers):
        if place in one and place in other:
            found.append(_difference(place, one[place], other[place], tolerance, layers))
    return found


def _difference(
    place: Place, a: Tensor, b: Tensor, tolerance: float, layers: int
) -> StepDifference:
    layer, step = place
    depth = (0 if step == "embedding" else layers) if layer is None else layer
    allowed = tolerance * (1 + depth)
    if a.shape != b.shape or not bool(torch.isfinite(a).all() and torch.isfinite(b).all()):
        same = a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num())
        apart = 0.0 if same else float("inf")
        return StepDifference(layer, step, apart, apart, allowed)
    difference = a - b
    size = float(a.square().mean().sqrt())
    rms = float(difference.square().mean().sqrt())
    relative = 0.0 if rms == 0 else rms / size if size else float("inf")
    return StepDifference(layer, step, float(difference.abs().max()), relative, allowed)


def first_parting(found: list[StepDifference]) -> StepDifference | None:
    """The first step that is more than rounding apart."""
    return next((step for step in found if step.parts), None)
