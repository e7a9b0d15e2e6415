"""A change that would undo what may have gone wrong in a conversion, in words and as keys."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from armillary.diagnosis.patient import Patient
from armillary.errors import ConfigError

Change = Callable[[Patient], Patient]


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


def applied(patient: Patient, hypotheses: Iterable[Hypothesis]) -> Patient | None:
    """The patient with changes made one after the other; None where they do not fit it."""
    try:
        for hypothesis in hypotheses:
            patient = hypothesis.change(patient)
    except (ConfigError, ValueError, KeyError):
        return None
    return patient
