"""What is wrong with a checkpoint that talks nonsense.

First what can be read off the files: numbers, tables of frequencies, the tokenizer. Then what must
hold of any decoder. Then the text's price under other conventions, one and two changes at a time,
and between parts of a text that stand far apart.
"""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from armillary.checkpoints import Checkpoint, open_checkpoint
from armillary.checkpoints.families import FAMILIES
from armillary.checkpoints.gguf_file import read_gguf_file
from armillary.checkpoints.safetensors import read_sharded
from armillary.diagnosis.distance import LEAP, Distances, far_apart
from armillary.diagnosis.findings import Check, Finding, Report
from armillary.diagnosis.frequency_tables import check_frequency_tables
from armillary.diagnosis.invariants import check_invariants
from armillary.diagnosis.patches import patch_for
from armillary.diagnosis.patient import read_patient
from armillary.diagnosis.probe_text import ProbeText, probe_text, with_prefix
from armillary.diagnosis.search import Cure, Search, Tell, search
from armillary.diagnosis.vocabulary import check_vocabulary
from armillary.diagnosis.weight_checks import check_weights
from armillary.errors import CheckpointError, ConfigError, TruncatedError, UserError
from armillary.files import read_json

_INVARIANT_TOKENS = 24
_OF_CHANCE = 0.9
"""A loss above this share of ln V is none that anything was learned by."""


def examine(
    path: Path,
    texts: Sequence[str],
    tell: Tell,
    *,
    model: str = "",
    ignore_keys: Iterable[str] = (),
) -> Report:
    """Examine the checkpoint at a path on some texts.

    `tell(what, done, of)` is told how far it is.
    Raises UserError where there is nothing that could be examined: no checkpoint, a pickle, an
    architecture that is not known. A file that is cut off, and one whose configuration and tensors
    do not fit each other, are findings.
    """
    report = Report(model or str(path))
    tell("reading", 0, 1)
    checkpoint = _opened(path, report, ignore_keys)
    if checkpoint is None:
        return report
    report.format = checkpoint.format
    report.notes += checkpoint.notices
    checks, findings = check_weights(checkpoint.tensors)
    for check in checks:
        report.add(check)
    report.findings += findings
    check, found = check_frequency_tables(checkpoint.config, checkpoint.source, checkpoint.format)
    report.add(check, found)
    if any(finding.code == "not-finite" for finding in findings):
        report.add(Check("text", None, "not tried on numbers that are none"))
    else:
        _try_text(checkpoint, texts, report, tell)
    report.findings.sort(key=lambda finding: _ORDER.index(finding.code))
    return report


# Which finding is told first: what explains the most.
_ORDER = (
    *("unreadable", "not-finite", "untied-head", "dead", "never-assigned", "tokenizer"),
    *("head-count", "layout", "swapped-gate-up", "swapped-layers", "swapped-tensors"),
    *("transposed", "norm-offset", "norm-kind", "norm-order", "tied-head", "activation"),
    *("embedding-scale", "attention-scale", "soft-cap", "scaling", "rotary-base", "epsilon"),
    *("far", "frequency-table", "bos", "duplicate", "invariant", "implausible"),
)


def _opened(path: Path, report: Report, ignore_keys: Iterable[str]) -> Checkpoint | None:
    """The checkpoint, or a finding that says why it cannot be had."""
    try:
        checkpoint = open_checkpoint(path, ignore_keys=ignore_keys)
    except TruncatedError as error:
        fault = f"the file is truncated: {error}"
        report.add(Check("file", False, "cut off"), [Finding("unreadable", fault)])
        return None
    except (CheckpointError, ConfigError) as error:
        if not _holds_a_known_model(path):
            raise
        fault = f"configuration and tensors do not fit: {error}"
        report.add(Check("file", False, str(error)), [Finding("unreadable", fault)])
        return None
    n = len(checkpoint.tensors)
    report.add(Check("file", True, f"every key read, {n} tensors of the declared shapes"))
    return checkpoint


def _holds_a_known_model(path: Path) -> bool:
    """Whether the containers can be read, and an architecture is named that is known."""
    try:
        if path.is_dir():
            entries = read_json(path / "config.json")
            read_sharded(path, allow_missing=True, blocks=True, raw=True)
            named = {entries.get("model_type"), *(entries.get("architectures") or ())}
            known = {table.architecture for table in (f.huggingface for f in FAMILIES)}
            known |= {table.model_type for table in (f.huggingface for f in FAMILIES)}
            return entries.get("format") is not None or bool(named & known)
        metadata = read_gguf_file(path).metadata
    except (UserError, OSError, TypeError):
        return False
    known = {family.gguf.architecture for family in FAMILIES if family.gguf is not None}
    return metadata.get("general.architecture") in known


def _try_text(checkpoint: Checkpoint, texts: Sequence[str], report: Report, tell: Tell) -> None:
    tell("reading weights", 0, 1)
    patient = read_patient(checkpoint)
    config, tokenizer = checkpoint.config, checkpoint.tokenizer
    report.chance = math.log(config.vocab_size)
    checks, findings = check_vocabulary(checkpoint, patient.tensors["embedding.weight"].numpy())
    for check in checks:
        report.add(check)
    report.findings += findings
    if tokenizer is None:
        report.add(Check("text", None, "there is no tokenizer"))
        return
    text = probe_text(tokenizer, texts, config.max_positions)
    if int(text.long.max()) >= config.vocab_size:
        report.add(Check("text", None, "it comes to tokens that the model does not know"))
        return
    tell("checking what must hold", 0, 1)
    tokens = with_prefix(text.short[:1, :_INVARIANT_TOKENS], text.prefix)
    checks, found = check_invariants(patient.decoder(), tokens)
    for check in checks:
        report.add(check)
    report.findings += found
    if any(finding.code == "tokenizer" for finding in findings):
        # Whatever made such a text cheaper would do so by chance.
        report.add(Check("text", None, "not tried with another model's tokenizer"))
        return
    result = search(patient, text, tokenizer.bos_id, tell)
    _add_search(checkpoint, report, text, result)
    distances = far_apart(result.patient, text, result.prefix, tell)
    _add_distances(checkpoint, report, distances)


def _add_search(checkpoint: Checkpoint, report: Report, text: ProbeText, result: Search) -> None:
    chance = math.log(checkpoint.config.vocab_size)
    helped = result.cured <= _OF_CHANCE * chance
    cures = result.cures if helped else []
    bits = result.loss / math.log(2) / text.bytes_per_token
    report.loss, report.cured = result.loss, result.cured if cures else result.loss
    seen = (
        f"{result.loss:.2f} nats a token (guessing: {chance:.2f}), {bits:.2f} bits a byte; "
        f"{result.tried} changes tried, "
        + (f"{len(cures)} made: {result.cured:.2f}" if cures else "none helps")
    )
    implausible = result.loss > _OF_CHANCE * chance
    report.add(Check("text", not cures and not implausible, seen))
    for cure in cures:
        _add_cure(checkpoint, report, cure)
    if implausible and not cures and not report.findings:
        report.findings.append(
            Finding(
                code="implausible",
                fault="the text is as dear as by guessing, and no change of conventions helps",
                evidence=f"{result.loss:.2f} nats a token, guessing costs {chance:.2f}",
                remedy="the weights are untrained, or more than two things are wrong",
            )
        )


def _add_cure(checkpoint: Checkpoint, report: Report, cure: Cure) -> None:
    hypothesis = cure.hypothesis
    evidence = f"the text costs {cure.before:.2f} nats a token, {cure.after:.2f} with that changed"
    if hypothesis.code == "tied-head":
        for place, finding in enumerate(report.findings):
            if finding.code == "untied-head":
                keys, file = _patch(checkpoint, hypothesis.patch)
                report.findings[place] = Finding(
                    finding.code, finding.fault, evidence, finding.remedy, keys, file
                )
                return
    keys, file = _patch(checkpoint, hypothesis.patch)
    report.findings.append(
        Finding(
            code=hypothesis.code,
            fault=hypothesis.fault,
            evidence=evidence,
            remedy=hypothesis.remedy,
            patch=keys,
            patch_file=file if keys else "",
            layers=hypothesis.layers,
        )
    )


def _patch(checkpoint: Checkpoint, patch: object) -> tuple[dict[str, object], str]:
    assert isinstance(patch, dict)
    if not patch:
        return {}, ""
    return patch_for(checkpoint.format, checkpoint.source, patch, checkpoint.config)


def _add_distances(checkpoint: Checkpoint, report: Report, distances: Distances | None) -> None:
    name = "far apart"
    if distances is None:
        report.add(Check(name, None, "no rotation, or too small a window"))
        return
    far = ", ".join(f"{loss:.2f} at {at:,}" for at, loss in distances.losses.items())
    window = checkpoint.config.max_positions
    if distances.leap <= LEAP:
        report.add(Check(name, True, f"nats a token: {far}"))
        return
    report.add(Check(name, False, f"nats a token: {far}"))
    cure = distances.cure
    if cure is None:
        report.findings.append(
            Finding(
                code="far",
                fault=f"tokens are lost to each other beyond {distances.sound_to:,} positions, "
                f"within the window of {window:,}",
                evidence=f"nats a token by distance: {far}",
                remedy="the window is stated too large, or a scaling rule is missing that is none "
                "of those tried",
            )
        )
        return
    keys, file = _patch(checkpoint, dict(cure.hypothesis.patch))
    report.findings.append(
        Finding(
            code="scaling",
            fault=cure.hypothesis.fault,
            evidence=f"with parts of a text far apart in the window of {window:,} it costs "
            f"{cure.before:.2f} nats a token, {cure.after:.2f} with that changed",
            remedy=cure.hypothesis.remedy,
            patch=keys,
            patch_file=file if keys else "",
        )
    )
