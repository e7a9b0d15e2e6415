"""How far apart tokens may stand before a model is lost: the angles that it was never trained on.

Part of a short text is put far from the rest by its positions, so that no long text is computed.
A model within its window minds little, since the nearer part still reads itself; at distances
whose angles it has never seen, attention fails and the loss leaps.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from armillary.diagnosis.conventions import first_rotary, rules, scaling_hypothesis
from armillary.diagnosis.patient import Patient, losses_apart
from armillary.diagnosis.probe_text import ProbeText, with_prefix
from armillary.diagnosis.search import COST_ELSEWHERE, LEAST_Z, Cure, Tell, paired_gain

LEAP = 0.5
"""Nats a token more than at a near distance; within a window a third of it is usual."""
_NEAR = 1 / 32
_STEPS = (1 / 4, 1 / 2, 3 / 4, 1.0)


@dataclass(frozen=True)
class Distances:
    """Losses by the distance of the parts of a text, and the rule that lowers them."""

    losses: dict[int, float]
    cure: Cure | None

    @property
    def leap(self) -> float:
        """By how much the worst is above the nearest."""
        each = list(self.losses.values())
        return max(each) - each[0]

    @property
    def sound_to(self) -> int:
        """The farthest distance before the leap."""
        nearest, reached = next(iter(self.losses.values())), 0
        for distance, loss in self.losses.items():
            if loss - nearest > LEAP:
                break
            reached = distance
        return reached


def far_apart(
    patient: Patient, text: ProbeText, prefix: Sequence[int], tell: Tell
) -> Distances | None:
    """Try the distances of the window, `prefix` before each row.

    None for models without rotation or with a small window.
    """
    window, rows = patient.config.max_positions, with_prefix(text.far, prefix)
    rotary = first_rotary(patient.config)
    room = window - rows.shape[1]
    if rotary is None or patient.config.position_table is not None or room < rows.shape[1]:
        return None
    places = [round(room * share) for share in (_NEAR, *_STEPS)]
    measured = {}
    for number, distance in enumerate(places):
        tell("reading far apart", number, len(places))
        measured[distance] = float(losses_apart(patient, rows, distance).mean())
    found = Distances(measured, None)
    if found.leap <= LEAP:
        return found
    before, nearby = (
        losses_apart(patient, rows, places[-1]),
        float(losses_apart(patient, rows, places[0]).mean()),
    )
    best: Cure | None = None
    tried = list(rules(window))
    for number, (named, rule) in enumerate(tried):
        tell("trying scaling rules far apart", number, len(tried))
        if rule == rotary.scaling:
            continue
        hypothesis = scaling_hypothesis(rotary, named, rule)
        changed = hypothesis.change(patient)
        after = losses_apart(changed, rows, places[-1])
        gain, z = paired_gain(before, after)
        if gain < LEAP / 2 or z < LEAST_Z:
            continue
        if float(losses_apart(changed, rows, places[0]).mean()) - nearby > COST_ELSEWHERE:
            continue
        # Of rules that are about as good, the one that comes first.
        if best is None or gain > best.gain + COST_ELSEWHERE:
            best = Cure(hypothesis, float(before.mean()), float(after.mean()), z)
    return Distances(measured, best)
