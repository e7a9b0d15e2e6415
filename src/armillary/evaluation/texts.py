"""The documents that losses are measured on: any source of text, or what every machine has.

Names of documents hold no folders, so that results of one text read on two machines pair.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

from armillary.data.dataset import TokenDataset
from armillary.data.documents import Skipped
from armillary.data.prepared import FACTS, VALIDATION
from armillary.data.sources import PYTHON_STDLIB, Source, find_sources, read_source
from armillary.errors import UserError
from armillary.evaluation.perplexity import Document
from armillary.tokenizer import Tokenizer

_LARGEST = 32  # files of python-stdlib
_MOST_BYTES = 64 << 20  # of text; what is drawn from more would not tell more


def read_documents(
    arguments: Sequence[str], tokenizer: Tokenizer, *, least: int
) -> tuple[tuple[Document, ...], tuple[str, ...]]:
    """Return documents as ids without BOS, and what is to be said of those that are left out.

    arguments  files, directories, patterns, `python-stdlib`, `hub:…`, as `find_sources` takes them;
               or a directory that `armillary prepare` or a training run made, alone, of which the
               held-out documents are taken
    least      tokens without which a document is of no use
    Of python-stdlib the 32 largest files are taken, of other text the first 64 MiB.
    Raises UserError for what is no text or holds no document that is long enough.
    """
    if len(arguments) == 1 and (Path(arguments[0]) / FACTS).is_file():
        return _held_out(Path(arguments[0]), tokenizer, least)
    sources = find_sources(arguments)
    largest_first = list(arguments) == [PYTHON_STDLIB]
    if largest_first:
        sources.sort(key=lambda source: (-source.size, source.name))
    documents: list[Document] = []
    short = read = 0
    notices: list[str] = []
    names: Counter[str] = Counter()
    for name, text in _texts(sources, notices):
        if largest_first and (len(documents) == _LARGEST or len(text) < least):
            break  # what follows is smaller still
        if read > _MOST_BYTES:
            notices.append(f"the first {len(documents):,} documents are taken; there is more text")
            break
        read += len(text)
        ids = tuple(tokenizer.encode(text, bos=False))
        if len(ids) < least:
            short += 1
        else:
            names[name] += 1
            number = names[name]
            documents.append(Document(name if number == 1 else f"{name}#{number}", ids))
    return _found(documents, short, notices, ", ".join(arguments), least)


def _found(
    documents: Sequence[Document], short: int, notices: list[str], where: str, least: int
) -> tuple[tuple[Document, ...], tuple[str, ...]]:
    if not documents:
        raise UserError(
            f"{where}: no document has {least:,} tokens; give a longer text with --text, or "
            "shorter --lengths"
        )
    if short:
        notices.append(f"{short:,} documents have fewer than {least:,} tokens and are left out")
    return tuple(documents), tuple(notices)


def _held_out(
    directory: Path, tokenizer: Tokenizer, least: int
) -> tuple[tuple[Document, ...], tuple[str, ...]]:
    """The documents that no training run on this prepared text sees, without BOS and end token."""
    dataset = TokenDataset(directory, VALIDATION, tokenizer=tokenizer)
    if dataset.masked:
        raise UserError(f"{directory}: holds chats; losses are measured on long documents")
    start = len(tokenizer.begin([]))
    documents: list[Document] = []
    for number, length in enumerate(dataset.lengths.tolist()):
        if length - start - 1 >= least:
            ids = tuple(dataset[number][start:-1].tolist())
            documents.append(Document(f"{VALIDATION}/{number}", ids))
    short = len(dataset) - len(documents)
    return _found(documents, short, [], str(directory), least)


def _texts(sources: Sequence[Source], notices: list[str]) -> Iterator[tuple[str, str]]:
    """The name and the text of each document; of what is none a notice is made."""
    skipped = 0
    for source in sources:
        parts: list[str] = []
        for event in read_source(source):
            if isinstance(event, Skipped):
                skipped += event.reason != "empty"
                parts = []
                continue
            parts.append(event.text)
            if event.last:
                yield _name(event.id), "".join(parts)
                parts = []
    if skipped:
        notices.append(f"{skipped:,} files or records are no text and are passed over")


def _name(identity: str) -> str:
    """Where a document is, without folders of this machine; the standard library's have none."""
    if identity.startswith((f"{PYTHON_STDLIB}/", "hub:")):
        return identity
    return PurePosixPath(identity).name
