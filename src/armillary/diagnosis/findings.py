"""What an examination found, as facts."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

HEALTHY = "healthy"


@dataclass(frozen=True)
class Finding:
    """Something that is wrong.

    `code` is the stable name of the kind of fault; `fault` says it in a line, `evidence` what was
    measured, `remedy` what to do. `patch` has keys and values for the file that `patch_file` names.
    `layers` are those concerned, when it is not the whole model.
    """

    code: str
    fault: str
    evidence: str = ""
    remedy: str = ""
    patch: Mapping[str, Any] = field(default_factory=dict)
    patch_file: str = ""
    layers: tuple[int, ...] = ()


@dataclass(frozen=True)
class Check:
    """One thing that was looked at. `holds` is None where it could not be."""

    name: str
    holds: bool | None
    seen: str


@dataclass
class Report:
    """An examination: checks in the order in which they were made, and what they found.

    `loss` is nats a token on the text as the model is, `chance` what guessing costs, `cured` the
    loss with everything changed that helps.
    """

    model: str
    format: str = ""
    findings: list[Finding] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    loss: float | None = None
    chance: float | None = None
    cured: float | None = None

    @property
    def diagnosis(self) -> str:
        """In a line: the first finding, or that there is none."""
        if not self.findings:
            return HEALTHY
        first, *more = self.findings
        also = f" (and {len(more)} more finding{'s' if len(more) > 1 else ''})" if more else ""
        told = f"; {first.evidence}" if first.evidence else ""
        return f"{first.fault}{told}{also}"

    def add(self, check: Check, findings: list[Finding] | None = None) -> None:
        """Take down a check and what it found."""
        self.checks.append(check)
        self.findings += findings or []

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "model": self.model,
            "diagnosis": self.diagnosis,
            "healthy": not self.findings,
            "format": self.format,
            "loss": self.loss,
            "chance": self.chance,
            "cured": self.cured,
            "findings": [asdict(finding) for finding in self.findings],
            "checks": [asdict(check) for check in self.checks],
            "notes": self.notes,
        }
