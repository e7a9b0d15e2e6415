"""Which change of conventions makes a text cheaper: many tried briefly, the best ones at length.

A change is judged on the same tokens as the model without it, so that only the difference has to
stand out. Of a healthy model none helps: conventions that were trained with are the best there are.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

import torch
from torch import Tensor, nn

from armillary.decoder import DecoderLayer
from armillary.diagnosis.conventions import conventions
from armillary.diagnosis.hypothesis import Hypothesis, applied
from armillary.diagnosis.misplaced import exchanged_layers, misplaced, misplaced_in
from armillary.diagnosis.patient import Course, Patient, losses, losses_apart
from armillary.diagnosis.probe_text import ProbeText, with_prefix
from armillary.parts.mask import Visibility
from armillary.parts.rotary import Rotation

LEAST_GAIN = 0.02
"""Nats a token; what rounding and luck stay below."""
LEAST_Z = 4.0
"""Standard errors above nothing: of a hundred changes tried, none gets there by chance."""
COST_ELSEWHERE = 0.25
"""Nats a token that a change of rotation may cost at other distances, to be called a cure."""
_PROMISING = (0.005, 1.0)
_HOPELESS = -0.25
"""Nats a token on the first few tokens: so much worse, a change is tried no further."""
_KEPT = 6
_MOST_CURES = 3
_SUSPECTS = 4
_LOOKED_AT_AGAIN = 12
_IMPLAUSIBLE = 0.6
"""Of ln V, which guessing costs. Trained models of a language stay well below it in it."""
_WORTH_MORE = 0.5
"""Nats a token: what a whole-model change must bring before no single layer is looked at."""
_AS_GOOD = 0.97
_WORST = 50.0
"""Stands for a loss that is no number."""

Tell = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Cure:
    """A change that helps, and by how much: nats a token before and after, on long rows."""

    hypothesis: Hypothesis
    before: float
    after: float
    z: float

    @property
    def gain(self) -> float:
        """Nats a token."""
        return self.before - self.after


@dataclass
class Search:
    """What came of trying changes: the cures in the order in which they were taken."""

    cures: list[Cure]
    loss: float
    cured: float
    tried: int
    patient: Patient
    prefix: tuple[int, ...]


class Trials:
    """The losses of a patient and of its variants on the same rows."""

    def __init__(self, patient: Patient, rows: Tensor, prefix: Sequence[int]) -> None:
        self.patient, self.rows, self.prefix = patient, rows, tuple(prefix)
        self.before = self.of(patient)

    def of(self, patient: Patient, prefix: Sequence[int] | None = None) -> Tensor:
        """Nats for each token of the rows but their first, whatever stands before them."""
        prefix = self.prefix if prefix is None else prefix
        given = losses(patient.decoder(), with_prefix(self.rows, prefix))
        return _numbers(given[:, len(prefix) :])

    def gain(self, after: Tensor) -> tuple[float, float]:
        """Nats a token, and in standard errors."""
        return paired_gain(self.before, after)


def _numbers(given: Tensor) -> Tensor:
    return given.nan_to_num(_WORST, _WORST, -_WORST).clamp(max=_WORST)


def paired_gain(before: Tensor, after: Tensor) -> tuple[float, float]:
    """How much lower losses of the same tokens became: the mean, and in standard errors."""
    fewer = (before - after).flatten().double()
    error = float(fewer.std()) / math.sqrt(fewer.numel())
    mean = float(fewer.mean())
    return mean, mean / error if error > 0 else math.copysign(math.inf, mean) if mean else 0.0


def search(patient: Patient, text: ProbeText, bos: int | None, tell: Tell) -> Search:
    """Try changes until none helps any more.

    `bos` is a token that may have to stand before a text; the tokenizer's own rule is in the text.
    """
    state = _State(patient, text, bos, tell)
    loss = state.long_loss()
    while len(state.cures) < _MOST_CURES and state.step():
        pass
    return Search(state.cures, loss, state.long_loss(), state.tried, state.patient, state.prefix)


class _State:
    """The patient as far as it is cured."""

    def __init__(self, patient: Patient, text: ProbeText, bos: int | None, tell: Tell) -> None:
        self.patient, self.text, self.bos, self.tell = patient, text, bos, tell
        self.prefix = text.prefix
        self.cures: list[Cure] = []
        self.tried = 0
        self._begin()

    def _begin(self) -> None:
        self.long = Trials(self.patient, self.text.long, self.prefix)
        self.short = Trials(self.patient, self.text.short, self.prefix)
        self.brief = Trials(self.patient, self.text.brief, self.prefix)
        self.row = Trials(self.patient, self.text.short[:1], self.prefix)

    def long_loss(self) -> float:
        return float(self.long.before.mean())

    @property
    def implausible(self) -> bool:
        return self.long_loss() > _IMPLAUSIBLE * math.log(self.patient.config.vocab_size)

    def step(self) -> bool:
        """Find the change that helps most, and make it. False when none does."""
        done = {cure.hypothesis.group for cure in self.cures}
        known = [*misplaced(self.patient), *conventions(self.patient)]
        singles = [h for h in known if h.group not in done]
        found = self._best([(single,) for single in singles], "conventions")
        beginning = self._beginning() if "bos" not in done else None
        if beginning is not None and (not found or beginning.gain > found[0].gain):
            self._take_beginning(beginning)
            return True
        found = self._narrowed(found)
        # Once something was found and the text reads well, a second fault is one of conventions.
        wanted = self.implausible if self.cures else True
        if wanted and (not found or found[0].gain < _WORTH_MORE):
            local = self._local()
            if local and (not found or sum(c.gain for c in local) > sum(c.gain for c in found)):
                found = local
        if not found and self.implausible:
            pairs = list(combinations([h for h in singles if h.structural], 2))
            found = self._best([p for p in pairs if p[0].group != p[1].group], "pairs of them")
        for cure in found:
            self.patient = cure.hypothesis.change(self.patient)
            self.cures.append(cure)
        if found:
            self._begin()
        return bool(found)

    def _narrowed(self, found: list[Cure]) -> list[Cure]:
        """The same change in one layer, where that helps as much as in all of them."""
        if len(found) != 1 or found[0].hypothesis.in_layer is None:
            return found
        in_layer = found[0].hypothesis.in_layer
        course = self._course()
        gains = []
        for number in range(self._layers):
            self.tell("trying it in single layers", number, self._layers)
            after = self._briefly(course, in_layer(number))
            if after is not None:
                gains.append((self.row.gain(after)[0], number))
        gains.sort(reverse=True)
        best = self._best([(in_layer(number),) for _, number in gains[:2]], "it in single layers")
        return best if best and best[0].gain >= _AS_GOOD * found[0].gain else found

    def _course(self) -> Course:
        """The patient's way through one row, from which trials of a layer begin."""
        return Course(self.patient.decoder(), with_prefix(self.row.rows, self.prefix))

    def _briefly(self, course: Course, hypothesis: Hypothesis) -> Tensor | None:
        """Losses of that row with some layers changed; None where the change does not fit."""
        changed = applied(self.patient, [hypothesis])
        if changed is None:
            return None
        decoder = changed.decoder()
        modules = {layer: decoder.layers[layer] for layer in hypothesis.layers}
        return _numbers(course.losses_with(modules)[:, len(self.prefix) :])

    def _take_beginning(self, cure: Cure) -> None:
        self.prefix = () if self.prefix else (self.bos,) if self.bos is not None else ()
        self.cures.append(cure)
        self._begin()

    def _best(self, sets: Sequence[tuple[Hypothesis, ...]], what: str) -> list[Cure]:
        """The set of changes that helps most, one cure for each."""
        promising: list[tuple[float, int, tuple[Hypothesis, ...]]] = []
        for number, hypotheses in enumerate(sets):
            self.tell(f"trying {what}", number, len(sets))
            changed = applied(self.patient, hypotheses)
            briefly = None if changed is None else _losses_or_none(self.brief, changed)
            if changed is None or briefly is None:
                continue
            self.tried += 1
            if self.brief.gain(briefly)[0] < _HOPELESS:
                continue
            gain, z = self.short.gain(self.short.of(changed))
            if gain > _PROMISING[0] and z > _PROMISING[1]:
                promising.append((gain, number, hypotheses))
        return self._confirmed(promising, what)

    def _confirmed(
        self, promising: list[tuple[float, int, tuple[Hypothesis, ...]]], what: str
    ) -> list[Cure]:
        """The best of those that help on long rows too."""
        promising.sort(key=lambda entry: (-entry[0], entry[1]))
        confirmed = []
        for number, (_, place, hypotheses) in enumerate(promising[:_KEPT]):
            self.tell(f"confirming {what}", number, min(_KEPT, len(promising)))
            changed = applied(self.patient, hypotheses)
            assert changed is not None
            gain, z = self.long.gain(self.long.of(changed))
            if gain >= LEAST_GAIN and z >= LEAST_Z and self._holds_far_apart(hypotheses, changed):
                confirmed.append((gain, z, place, hypotheses))
        if not confirmed:
            return []
        most = max(gain for gain, *_ in confirmed)
        # Of those that are as good, the one that stands first in the table: the commonest.
        gain, z, _, hypotheses = min(
            (entry for entry in confirmed if entry[0] >= _AS_GOOD * most),
            key=lambda entry: entry[2],
        )
        return self._as_cures(hypotheses, gain, z)

    def _holds_far_apart(self, hypotheses: tuple[Hypothesis, ...], changed: Patient) -> bool:
        """Whether a change of rotation costs nothing at the window's end, where a rule is for."""
        if not {hypothesis.code for hypothesis in hypotheses} & {"scaling", "rotary-base"}:
            return True
        rows = with_prefix(self.text.far, self.prefix)
        distance = self.patient.config.max_positions - rows.shape[1]
        if distance < rows.shape[1]:
            return True
        before, after = (
            float(_numbers(losses_apart(patient, rows, distance)).mean())
            for patient in (self.patient, changed)
        )
        return after <= before + COST_ELSEWHERE

    def _as_cures(self, hypotheses: tuple[Hypothesis, ...], gain: float, z: float) -> list[Cure]:
        """A cure for each change; of several, each counts from where the one before it led."""
        before = self.long_loss()
        if len(hypotheses) == 1:
            return [Cure(hypotheses[0], before, before - gain, z)]
        changed = applied(self.patient, hypotheses[:1])
        assert changed is not None
        between = float(self.long.of(changed).mean())
        return [
            Cure(hypotheses[0], before, between, z),
            Cure(hypotheses[1], between, before - gain, z),
        ]

    def _beginning(self) -> Cure | None:
        """Whether a text should begin with BOS, or should not."""
        if self.bos is None:
            return None
        other = () if self.prefix else (self.bos,)
        gain, z = self.long.gain(self.long.of(self.patient, other))
        self.tried += 1
        if gain < LEAST_GAIN or z < LEAST_Z:
            return None
        hypothesis = Hypothesis(
            code="bos",
            fault="texts begin with BOS, where the weights want none"
            if self.prefix
            else "BOS is missing: the weights want it before a text",
            remedy="correct the tokenizer's rule for raw text",
            change=lambda patient: patient,
            patch={"add_bos_token": not self.prefix},
        )
        before = self.long_loss()
        return Cure(hypothesis, before, before - gain, z)

    def _local(self) -> list[Cure]:
        """What is wrong in single layers, looked for where a layer is of no use."""
        course = self._course()
        suspects = self._suspects(course)
        candidates = [h for number in suspects for h in misplaced_in(self.patient, number)]
        candidates += self._exchanges_of_layers(suspects)
        hopeful = []
        for number, hypothesis in enumerate(candidates):
            self.tell("trying single layers", number, len(candidates))
            after = self._briefly(course, hypothesis)
            if after is None:
                continue
            self.tried += 1
            if self.row.gain(after)[0] > 0:
                hopeful.append((hypothesis,))
        self.tried -= len(hopeful)
        return self._best(hopeful, "the likeliest of these")

    def _exchanges_of_layers(self, suspects: Sequence[int]) -> list[Hypothesis]:
        """Layers that may have changed places: neighbours, and suspects with each other.

        Two neighbours exchanged do nearly the same work as before, so neither need be a suspect.
        """
        pairs = set(pairwise(range(self._layers))) | set(combinations(sorted(suspects), 2))
        found = [exchanged_layers(self.patient, one, other) for one, other in sorted(pairs)]
        return [hypothesis for hypothesis in found if hypothesis is not None]

    @property
    def _layers(self) -> int:
        return self.patient.config.n_layers

    def _suspects(self, course: Course) -> list[int]:
        """Layers whose attention or feed-forward could best be done without.

        Told on one row for all, and on all short ones for the most suspicious.
        """
        parts = [
            (number, what)
            for number in range(self._layers)
            for what in ("attention", "feedforward")
        ]
        parts = self._least_missed(course, self.row, parts)[:_LOOKED_AT_AGAIN]
        whole = Course(course.decoder, with_prefix(self.short.rows, self.prefix))
        parts = self._least_missed(whole, self.short, parts)
        return list(dict.fromkeys(number for number, _ in parts))[:_SUSPECTS]

    def _least_missed(
        self, course: Course, trials: Trials, parts: Sequence[tuple[int, str]]
    ) -> list[tuple[int, str]]:
        """Sub-layers, those first without which the text is cheapest."""
        gains = []
        for done, (number, what) in enumerate(parts):
            self.tell("doing without each layer", done, len(parts))
            without = _Without(course.decoder.layers[number], what)
            after = _numbers(course.losses_with({number: without})[:, len(self.prefix) :])
            gains.append((trials.gain(after)[0], number, what))
        return [(number, what) for _, number, what in sorted(gains, reverse=True)]


class _Without(nn.Module):
    """A layer of which one sub-layer adds nothing."""

    def __init__(self, layer: nn.Module, what: str) -> None:
        super().__init__()
        assert isinstance(layer, DecoderLayer)
        self.layer, self.what = layer, what

    def forward(
        self, x: Tensor, visibility: Visibility, turn: Rotation | None = None, store: None = None
    ) -> Tensor:
        """x (B, T, d) → (B, T, d)."""
        module = getattr(self.layer, self.what)
        handle = module.register_forward_hook(lambda _module, _given, out: torch.zeros_like(out))
        try:
            out: Tensor = self.layer(x, visibility, turn, store)
        finally:
            handle.remove()
        return out


def _losses_or_none(trials: Trials, changed: Patient) -> Tensor | None:
    """None for a change that makes a decoder which the tensors do not fit."""
    try:
        return trials.of(changed)
    except (KeyError, ValueError):
        return None
