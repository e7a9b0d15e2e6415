"""What a preparation counts, step by step, as data that is written beside each committed step."""

from typing import NamedTuple

from pydantic import BaseModel, ConfigDict

from armillary.data.documents import Skipped
from armillary.data.prepared import EXAMPLES, Example, SkippedFacts


class Counts(NamedTuple):
    """What one split holds; `bytes` are of text, `learned` tokens of chats."""

    documents: int = 0
    tokens: int = 0
    bytes: int = 0
    learned: int = 0


class Tally(BaseModel):
    """Counts of one step, or of several put together.

    splits    what each split holds
    sources   of each split, how many documents are of which source, by its number as a text
    lengths   documents by the power of two that their tokens reach
    skipped   by reason
    """

    model_config = ConfigDict(strict=True, extra="forbid")

    splits: dict[str, Counts] = {}
    sources: dict[str, dict[str, int]] = {}
    lengths: dict[str, int] = {}
    skipped: dict[str, SkippedFacts] = {}

    def add_document(
        self, split: str, tokens: int, size: int, learned: int, source: int = 0
    ) -> None:
        """Count a document of `tokens` tokens, `size` bytes of text long, from a source."""
        self._add_counts(split, Counts(1, tokens, size, learned))
        _add(self.sources.setdefault(split, {}), str(source), 1)
        _add(self.lengths, str(1 << (tokens.bit_length() - 1)), 1)

    def add_skipped(self, event: Skipped) -> None:
        """Count something that was skipped, and keep it as an example if it is an early one."""
        self._add_facts(
            event.reason,
            SkippedFacts(count=1, examples=[Example(id=event.id, detail=event.detail)]),
        )

    def add(self, other: "Tally") -> None:
        """Add the counts of a later step."""
        for split, counts in other.splits.items():
            self._add_counts(split, counts)
        for split, documents in other.sources.items():
            for source, count in documents.items():
                _add(self.sources.setdefault(split, {}), source, count)
        for start, count in other.lengths.items():
            _add(self.lengths, start, count)
        for reason, facts in other.skipped.items():
            self._add_facts(reason, facts)

    def why_empty(self) -> str:
        """Return what to say when nothing was found: that, and each reason with its first place."""
        reasons = [
            f"{facts.count} × {reason}, the first at {facts.examples[0].id} "
            f"({facts.examples[0].detail})"
            for reason, facts in self.skipped.items()
        ]
        return "; ".join(["the sources hold no documents", *reasons])

    def _add_counts(self, split: str, more: Counts) -> None:
        had = self.splits.get(split, Counts())
        self.splits[split] = Counts(*map(sum, zip(had, more, strict=True)))

    def _add_facts(self, reason: str, more: SkippedFacts) -> None:
        facts = self.skipped.get(reason, SkippedFacts(count=0, examples=[]))
        self.skipped[reason] = SkippedFacts(
            count=facts.count + more.count,
            examples=[*facts.examples, *more.examples][:EXAMPLES],
        )


class Step(BaseModel):
    """A committed step: how far the reading had come, the files it wrote, what it counted.

    file, events   so many events of the source number `file` are done with
    files          name → bytes and SHA-256
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    file: int
    events: int
    files: dict[str, tuple[int, str]]
    tally: Tally


def _add(counts: dict[str, int], key: str, more: int) -> None:
    counts[key] = counts.get(key, 0) + more
