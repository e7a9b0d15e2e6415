"""Sources → a directory of token shards, in parallel, and to be gone on with after any end.

One process reads, in order; workers turn text into ids; what they give is written in order. So the
output is a function of sources, tokenizer and settings, whatever the number of workers and however
often it was interrupted. It is built in `.NAME.preparing` beside its target: when a shard is
full it is committed with a note of where the reading stood, and a later run keeps the committed
shards whose checksums hold, drops the rest and reads on from there.
"""

import contextlib
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import filelock
import numpy as np
from pydantic import ValidationError

from armillary.data import prepared
from armillary.data.documents import Document, Event, Skipped
from armillary.data.encoders import EncoderSettings, Result, chat_template
from armillary.data.prepared import Facts, Settings, Shard, Split
from armillary.data.shards import ShardWriter, narrowest
from armillary.data.sources import (
    CHAT,
    PART_BYTES,
    Format,
    Source,
    find_sources,
    printable,
    read_source,
)
from armillary.data.tally import Step, Tally
from armillary.data.workers import Batch, encoding
from armillary.errors import UserError
from armillary.files import (
    PARTIAL,
    as_user_error,
    read_json,
    sha256,
    write_json,
    write_manifest,
)
from armillary.tokenizer import Tokenizer

SHARD_TOKENS = 1 << 26
_TEXT, _MESSAGES = "text", "messages"
_BATCH_BYTES, _BATCH_DOCUMENTS = 1 << 18, 256
_GO_ON = "full shards are kept, and the same command goes on from them"


@dataclass(frozen=True)
class Progress:
    """How far a preparation is; `resumed_bytes` were read by the runs before this one."""

    bytes_read: int
    bytes_total: int
    resumed_bytes: int
    documents: int
    tokens: int
    skipped: int
    seconds: float


def prepare(
    sources: Sequence[str],
    tokenizer: Tokenizer,
    out: str | Path,
    *,
    field: str | None = None,
    format: Format = "auto",
    validation: float = 0.01,
    seed: int = 0,
    end_token: str | None = None,
    part_bytes: int = PART_BYTES,
    shard_tokens: int = SHARD_TOKENS,
    workers: int | None = 1,
    strict: bool = False,
    progress: Callable[[Progress], None] | None = None,
) -> Facts:
    """Turn the documents of the sources into token shards in the directory `out`.

    sources         see `find_sources`
    field           the key of JSON lines, or the column of a table, that holds the text, or of a
                    chat the list of messages; "text" or "messages" when left out
    format          see `find_sources`; "chat" for records that hold chats, which the tokenizer's
                    template writes, and of which the assistant's answers are learned
    validation      share of documents held out: those whose id below the source, hashed with the
                    seed, falls below it, so that neither more documents nor another place for all
                    of them moves the others
    end_token       what ends each document; the tokenizer's own end token when left out
    part_bytes      a longer document goes to the tokenizer in parts of so many bytes, cut at line
                    ends, and stays one document
    shard_tokens    tokens after which a shard ends with the document
    workers         processes, or None for one on each core; the output does not depend on it. Where
                    there are several, a script needs its `if __name__ == "__main__":`
    strict          the first thing to be skipped is an error
    progress        called now and then

    Prepared data that is already there is returned when its settings are the same. Raises UserError
    when they are not, when nothing is found, and where `out` cannot be written.
    """
    _check(validation, part_bytes, shard_tokens, workers)
    template = None
    if format == CHAT:
        chat_template(tokenizer)  # refuses a template that none of the chats could be written by
        template = prepared.chat_template_checksum(tokenizer)
    out = Path(os.path.abspath(out))
    settings = Settings(
        sources=[printable(name) for name in sources],
        field=field or (_MESSAGES if format == CHAT else _TEXT),
        format=format,
        seed=seed,
        validation=float(validation),
        part_bytes=part_bytes,
        shard_tokens=shard_tokens,
        tokenizer_sha256=prepared.tokenizer_checksum(tokenizer),
        chat_template_sha256=template,
        end_id=_end_id(tokenizer, end_token),
    )
    files = find_sources(sources, format)
    work = out.with_name(f".{out.name}.preparing")
    if (done := _already_there(out, settings, files)) is not None:
        shutil.rmtree(work, ignore_errors=True)
        return done
    out.parent.mkdir(parents=True, exist_ok=True)
    with _alone(work), as_user_error(out, _GO_ON):
        preparation = _Preparation(work, settings, files, tokenizer.vocab_size, strict, progress)
        preparation.begin(tokenizer)
        preparation.run(workers or _cores())
        facts = preparation.finish()
        if out.is_dir():
            out.rmdir()  # empty, as `_already_there` has seen
        (work / "data").rename(out)
        shutil.rmtree(work, ignore_errors=True)
    return facts


def is_validation(document_id: str, seed: int, share: float) -> bool:
    """Whether a document is held out: a function of its id below the source and the seed alone."""
    digest = hashlib.blake2b(f"{seed}:{document_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2**64


def _check(validation: float, limit: int, shard_tokens: int, workers: int | None) -> None:
    if not 0 <= validation < 1:
        raise UserError(f"validation: must be at least 0 and below 1, not {validation}")
    for name, value, least in (
        ("part_bytes", limit, 1024),
        ("shard_tokens", shard_tokens, 1),
        ("workers", workers, 1),
    ):
        if value is not None and value < least:
            raise UserError(f"{name}: must be at least {least}, not {value}")


def _end_id(tokenizer: Tokenizer, text: str | None) -> int:
    if text is not None:
        if text not in tokenizer.special_tokens:
            known = ", ".join(tokenizer.special_tokens) or "none"
            raise UserError(f"end token {text!r} is no control token of the tokenizer's: {known}")
        return tokenizer.special_tokens[text]
    named = tokenizer.named_tokens.get("eos_token", "")
    if named in tokenizer.special_tokens:
        return tokenizer.special_tokens[named]
    if not tokenizer.eos_ids:
        raise UserError(
            "the tokenizer names no token that ends a text; choose one of its control tokens with "
            "--end-token"
        )
    return tokenizer.eos_ids[0]


def _cores() -> int:
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


def _already_there(out: Path, settings: Settings, files: list[Source]) -> Facts | None:
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return None
    if not (out / prepared.FACTS).is_file():
        raise UserError(f"{out}: exists and is no prepared data; choose another name")
    facts = prepared.read_prepared(out)
    differences = facts.settings.differences(settings.model_dump())
    if _size(files) != (facts.source_files, facts.source_bytes):
        differences.append(
            f"the sources were {facts.source_files} files of {facts.source_bytes} bytes, "
            f"and are {len(files)} of {_size(files)[1]}"
        )
    if differences:
        raise UserError(
            f"{out}: was prepared in another way ({'; '.join(differences)}); choose another name "
            "or remove it"
        )
    return facts


def _size(files: list[Source]) -> tuple[int, int]:
    return len(files), sum(file.size for file in files)


@contextlib.contextmanager
def _alone(work: Path) -> Iterator[None]:
    """Let one process at a time work there; the lock ends with the process, however that ends."""
    work.mkdir(exist_ok=True)
    try:
        with filelock.FileLock(work / "lock", timeout=0):
            yield
    except filelock.Timeout as error:
        raise UserError(f"{work}: another process is preparing there; wait for it") from error


@dataclass(frozen=True)
class _Place:
    """Where the reading stands: `events` of the file number `file` are done with."""

    file: int
    events: int


class _Preparation:
    """One run over what earlier runs have left."""

    def __init__(
        self,
        work: Path,
        settings: Settings,
        files: list[Source],
        vocab_size: int,
        strict: bool,
        progress: Callable[[Progress], None] | None,
    ) -> None:
        self._data, self._steps = work / "data", work / "steps"
        self._settings, self._files, self._strict = settings, files, strict
        self._dtype = narrowest(vocab_size)
        self._vocab_size = vocab_size
        self._report = progress
        self._place = _Place(0, 0)
        self._index = 0  # of the step that is being written
        self._done = Tally()  # of the steps that are committed
        self._shards: dict[str, list[Shard]] = {name: [] for name in prepared.SPLITS}
        self._starts = np.cumsum([0, *(file.size for file in files)])
        self._open: dict[str, ShardWriter] = {}
        self._tally = Tally()
        self._writing: str | None = None  # split of the document whose parts are coming
        self._bytes_of_document = 0
        self._refused: str | None = None  # id of a document whose further parts are passed over

    def begin(self, tokenizer: Tokenizer) -> None:
        """Take over what an earlier run has left, if it was meant to do the same."""
        fingerprint = hashlib.sha256("\n".join(f.fingerprint() for f in self._files).encode())
        said = self._settings.model_dump() | {"files": fingerprint.hexdigest()}
        path = self._steps.parent / "settings.json"
        if path.is_file() and any(self._steps.glob("*.json")):
            self._hold_against(read_json(path), said, path)
            self._take_over()
        else:
            for leftover in (self._data, self._steps):
                shutil.rmtree(leftover, ignore_errors=True)
            self._steps.mkdir(parents=True)
            tokenizer.save(self._data / prepared.TOKENIZER)
            write_json(path, said)

    def _hold_against(self, there: dict[str, object], said: dict[str, object], path: Path) -> None:
        remedy = f"to begin anew, remove {path.parent}"
        if there.pop("files", None) != said["files"]:
            raise UserError(f"the sources have changed since this was interrupted; {remedy}")
        differences = self._settings.differences(there)
        if differences:
            raise UserError(
                f"an interrupted preparation of that name has other settings: "
                f"{'; '.join(differences)}; give them again, or, {remedy}"
            )

    def _take_over(self) -> None:
        """Keep the steps that are whole, in order, and remove everything after them."""
        while self._keep_step():
            self._index += 1
        for path in [*self._steps.parent.rglob(f"*{PARTIAL}")]:
            path.unlink()
        for folder in (self._steps, *(self._data / split for split in prepared.SPLITS)):
            for path in [*folder.glob("*")]:
                if int(path.name.partition(".")[0]) >= self._index:
                    path.unlink()

    def _keep_step(self) -> bool:
        path = self._step_path()
        if not path.is_file():
            return False
        try:
            step = Step.model_validate_json(path.read_bytes())
        except ValidationError:
            return False
        for name, (size, checksum) in step.files.items():
            file = self._data / name
            if not file.is_file() or file.stat().st_size != size or sha256(file) != checksum:
                return False
        self._count(step)
        return True

    def _count(self, step: Step) -> None:
        self._done.add(step.tally)
        for split, counts in step.tally.splits.items():
            shard = Shard(index=self._index, documents=counts.documents, tokens=counts.tokens)
            self._shards[split].append(shard)
        self._place = _Place(step.file, step.events)

    def _step_path(self) -> Path:
        return self._steps / f"{self._index:05d}.json"

    def run(self, workers: int) -> None:
        """Read on to the end, committing step after step."""
        started, resumed = time.monotonic(), int(self._starts[self._place.file])
        encoder = EncoderSettings(
            self._data / prepared.TOKENIZER / "tokenizer.json",
            self._settings.end_id,
            self._dtype.name,
            chats=self._settings.masked,
        )
        with encoding(encoder, workers) as encode:
            for batch, results in encode(_batches(self._events())):
                self._write(batch, results)
                self._say(batch.note[-1], resumed, started)
        # The last step also says that there is nothing more, with nothing in it if need be.
        self._commit(_Place(len(self._files), 0))

    def _events(self) -> Iterator["_Placed"]:
        for number in range(self._place.file, len(self._files)):
            source = self._files[number]
            read = 0.0

            def moved(share: float) -> None:
                nonlocal read
                read = share

            first = self._place.events if number == self._place.file else 0
            events = read_source(
                source,
                field=self._settings.field,
                chats=self._settings.masked,
                limit=self._settings.part_bytes,
                moved=moved,
            )
            for count, event in enumerate(islice(events, first, None), first + 1):
                done = int(self._starts[number]) + int(read * source.size)
                yield _Placed(event, _Place(number, count), done)

    def _write(self, batch: Batch[list["_Placed"]], results: list[Result]) -> None:
        encoded = iter(results)
        for placed in batch.note:
            event = placed.event
            if isinstance(event, Document):
                self._write_document(event, next(encoded), self._files[placed.place.file])
            else:
                self._skip(event)
            between = self._writing is None and self._refused is None
            if between and self._tokens_open() >= self._settings.shard_tokens:
                self._commit(placed.place)

    def _write_document(self, document: Document, encoded: Result, source: Source) -> None:
        if document.id == self._refused:
            self._refused = None if document.last else document.id
            return
        if isinstance(encoded, Skipped):
            self._skip(encoded)
            self._refused = None if document.last else document.id
            return
        split = self._split(source.below + document.id.removeprefix(source.name))
        writer = self._writer(split)
        if document.part == 0:
            self._bytes_of_document = 0
        writer.append(encoded.ids, encoded.runs)
        self._bytes_of_document += encoded.size
        self._writing = None if document.last else split
        if document.last:
            self._tally.add_document(
                split,
                tokens=writer.end_document(),
                size=self._bytes_of_document,
                learned=encoded.learned,
                source=source.argument,
            )

    def _skip(self, event: Skipped) -> None:
        if self._strict:
            raise UserError(
                f"{event.id}: {event.reason}: {event.detail} (only counted without --strict)"
            )
        if self._writing is not None:  # what came of it before the fault is no whole document
            self._writer(self._writing).drop_document()
            self._writing = None
        self._tally.add_skipped(event)

    def _split(self, below: str) -> str:
        held_out = is_validation(below, self._settings.seed, self._settings.validation)
        return prepared.VALIDATION if held_out else prepared.TRAIN

    def _writer(self, split: str) -> ShardWriter:
        if split not in self._open:
            # A split's shards are numbered by step, so a step in which it has no document has none.
            self._open[split] = ShardWriter(
                self._data / split, self._index, self._dtype, masked=self._settings.masked
            )
        return self._open[split]

    def _tokens_open(self) -> int:
        return sum(writer.tokens for writer in self._open.values())

    def _commit(self, place: _Place) -> None:
        files: dict[str, tuple[int, str]] = {}
        for split, writer in self._open.items():
            if not writer.documents:
                writer.discard()
                continue
            for path in writer.close():
                files[f"{split}/{path.name}"] = (path.stat().st_size, sha256(path))
        self._open = {}
        step = Step(file=place.file, events=place.events, files=files, tally=self._tally)
        write_json(self._step_path(), step.model_dump(mode="json"))
        self._count(step)
        self._tally = Tally()
        self._index += 1

    def _say(self, last: "_Placed", resumed: int, started: float) -> None:
        if self._report is None:
            return
        counts = [*self._done.splits.values(), *self._tally.splits.values()]
        self._report(
            Progress(
                bytes_read=last.bytes_read,
                bytes_total=int(self._starts[-1]),
                resumed_bytes=resumed,
                documents=sum(split.documents for split in counts),
                tokens=sum(split.tokens for split in counts),
                skipped=sum(
                    facts.count
                    for tally in (self._done, self._tally)
                    for facts in tally.skipped.values()
                ),
                seconds=time.monotonic() - started,
            )
        )

    def finish(self) -> Facts:
        """Write what the directory says of itself, and its manifest."""
        if not self._done.splits:
            shutil.rmtree(self._steps.parent)
            raise UserError(self._done.why_empty())
        facts = Facts(
            settings=self._settings,
            vocab_size=self._vocab_size,
            dtype=self._dtype.name,  # type: ignore[arg-type]
            source_files=len(self._files),
            source_bytes=int(self._starts[-1]),
            splits={
                name: Split(
                    documents=counts.documents,
                    tokens=counts.tokens,
                    bytes=counts.bytes,
                    learned=counts.learned if self._settings.masked else None,
                    sources=self._documents_by_source(name),
                    shards=self._shards[name],
                )
                for name, counts in sorted(self._done.splits.items())
            },
            lengths=dict(sorted(self._done.lengths.items(), key=lambda entry: int(entry[0]))),
            skipped=dict(sorted(self._done.skipped.items())),
        )
        write_json(self._data / prepared.FACTS, facts.model_dump())
        write_manifest(self._data)
        return facts

    def _documents_by_source(self, split: str) -> list[int] | None:
        """How many of a split's documents are of each source; None where a step did not count."""
        found = self._done.sources.get(split, {})
        if sum(found.values()) != self._done.splits[split].documents:
            return None
        return [found.get(str(source), 0) for source in range(len(self._settings.sources))]


@dataclass(frozen=True)
class _Placed:
    """An event, where the reading stands after it, and the bytes of all sources read so far."""

    event: Event
    place: _Place
    bytes_read: int


def _batches(events: Iterable[_Placed]) -> Iterator[Batch[list[_Placed]]]:
    """Put events together until their texts are worth a worker's while."""
    batch: list[_Placed] = []
    size = 0
    for placed in events:
        batch.append(placed)
        size += len(placed.event.text) if isinstance(placed.event, Document) else 0
        if size >= _BATCH_BYTES or len(batch) >= _BATCH_DOCUMENTS:
            yield _batch(batch)
            batch, size = [], 0
    if batch:
        yield _batch(batch)


def _batch(placed: list[_Placed]) -> Batch[list[_Placed]]:
    return Batch([one.event for one in placed if isinstance(one.event, Document)], placed)
