"""The texts of sources, one after the other, for what needs text alone, such as a vocabulary."""

from collections.abc import Callable, Iterator, Sequence

from armillary.data.documents import Skipped
from armillary.data.sources import Source, read_source
from armillary.data.tally import Tally
from armillary.errors import UserError


class Texts:
    """Iterate over the texts of sources, counted as they go by.

    field      the key of JSON lines, or the column of a table, that holds the text
    strict     the first thing to be skipped is an error
    progress   called after each file with bytes read and bytes in all

    Raises UserError at the end when there was no document. `documents`, `bytes` (of UTF-8) and
    `tally` (what was skipped) stand after it.
    """

    def __init__(
        self,
        files: Sequence[Source],
        *,
        field: str = "text",
        strict: bool = False,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self._files, self._field, self._strict, self._progress = files, field, strict, progress
        self.tally = Tally()
        self.documents = self.bytes = 0

    def __iter__(self) -> Iterator[str]:
        done, total = 0, sum(file.size for file in self._files)
        for file in self._files:
            for event in read_source(file, field=self._field):
                if isinstance(event, Skipped):
                    self._skip(event)
                else:
                    self.documents += event.last
                    self.bytes += len(event.text.encode())
                    yield event.text
            done += file.size
            if self._progress is not None:
                self._progress(done, total)
        if not self.documents:
            raise UserError(self.tally.why_empty())

    def _skip(self, event: Skipped) -> None:
        if self._strict:
            raise UserError(
                f"{event.id}: {event.reason}: {event.detail} (only counted without --strict)"
            )
        self.tally.add_skipped(event)
