"""Documents out of files of records: JSON lines, Parquet, and data sets of the Hub.

What becomes of a record's field, a text or a chat, is the `Reader`'s to say.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from armillary.data.compressed import DAMAGE
from armillary.data.documents import Event, Skipped, decoded
from armillary.errors import UserError

# What becomes of a field's value, given the record's id.
Reader = Callable[[str, object], Iterator[Event]]

LINE_LIMIT = 64 << 20  # bytes; a line of JSON can only be read whole
_ROWS = 64


def read_json_lines(stream: BinaryIO, name: str, field: str, read: Reader) -> Iterator[Event]:
    """One document a line, with the id `name:line`; lines count from 1."""
    number = 0
    while True:
        number += 1
        place = f"{name}:{number}"
        try:
            line = stream.readline(LINE_LIMIT + 1)
            if not line:
                return
            if len(line) > LINE_LIMIT and not line.endswith(b"\n"):
                _to_line_end(stream)
                yield Skipped(place, "line too long", f"over {LINE_LIMIT} bytes")
                continue
        except DAMAGE as error:
            yield Skipped(place, "damaged compression", f"nothing more is read: {error}")
            return
        yield from _from_line(line, place, field, read)


def _to_line_end(stream: BinaryIO) -> None:
    while (line := stream.readline(1 << 20)) and not line.endswith(b"\n"):
        pass


def _from_line(line: bytes, place: str, field: str, read: Reader) -> Iterator[Event]:
    text = decoded(line, place, encoding="utf-8-sig")
    if isinstance(text, Skipped):
        yield text
        return
    if not text.strip():
        yield Skipped(place, "empty", "an empty line")
        return
    try:
        record = json.loads(text)
    except RecursionError:
        yield Skipped(place, "broken JSON", "nested too deep")
    except ValueError as error:
        yield Skipped(place, "broken JSON", str(error))
    else:
        yield from _from_record(record, place, field, read)


def _from_record(record: Any, place: str, field: str, read: Reader) -> Iterator[Event]:
    if not isinstance(record, dict):
        yield Skipped(place, "broken JSON", f"an object is wanted, not {type(record).__name__}")
    elif field not in record:
        yield _no_field(place, field, record)
    else:
        yield from read(place, record[field])


def _no_field(place: str, field: str, names: Any) -> Skipped:
    there = ", ".join(map(str, names))[:200] or "none"
    return Skipped(place, f"no field {field!r}", f"the fields are: {there}")


def read_parquet(
    path: Path, name: str, field: str, read: Reader, moved: Callable[[float], None]
) -> Iterator[Event]:
    """One document a row, with the id `name:row`; rows count from 1, as lines do.

    Columns are read as streams, so that memory does not grow with the row groups.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise UserError(
            'reading Parquet needs the library pyarrow: pip install "armillary[data]"'
        ) from error
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20) as file:
            schema = file.schema_arrow
            if field not in schema.names:
                yield _no_field(name, field, schema.names)
                return
            rows = file.metadata.num_rows
            for batch in file.iter_batches(_ROWS, columns=[field], use_threads=False):
                for value in _scalars(pyarrow, batch.column(0)):
                    number += 1
                    yield from _from_value(value, f"{name}:{number}", read)
                moved(number / rows)
    except (pyarrow.ArrowException, OSError) as error:
        message = " ".join(str(error).split())
        yield Skipped(f"{name}:{number + 1}", "damaged Parquet", f"nothing more is read: {message}")


def _scalars(pyarrow: Any, column: Any) -> Iterator[Any]:
    """The column's values, not yet converted, so that one fault costs one; text as bytes."""
    kind = column.type
    if pyarrow.types.is_dictionary(kind):
        column = column.dictionary_decode()
        kind = column.type
    if pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind):
        binary = pyarrow.large_binary() if pyarrow.types.is_large_string(kind) else pyarrow.binary()
        column = column.view(binary)
    return iter(column)


def _from_value(scalar: Any, place: str, read: Reader) -> Iterator[Event]:
    try:
        value = scalar.as_py()
    except UnicodeDecodeError as error:  # of a text inside a list
        yield Skipped(place, "invalid UTF-8", f"at byte {error.start} of a text in it")
        return
    if isinstance(value, bytes):
        value = decoded(value, place)
        if isinstance(value, Skipped):
            yield value
            return
    yield from read(place, value)


def read_hub(name: str, field: str, read: Reader) -> Iterator[Event]:
    """One document a row of `hub:owner/name[/configuration][@revision]`, its training split."""
    try:
        import datasets
    except ImportError as error:
        raise UserError(
            f'{name}: data sets of the Hub need the library datasets: pip install "armillary[hub]"'
        ) from error
    repository, _, revision = name.partition(":")[2].partition("@")
    owner, _, rest = repository.partition("/")
    title, _, configuration = rest.partition("/")
    if not owner or not title:
        raise UserError(f"{name}: a data set is named hub:owner/name[/configuration][@revision]")
    try:
        rows = datasets.load_dataset(
            f"{owner}/{title}",
            configuration or None,
            split="train",
            revision=revision or None,
            streaming=True,
        )
        for number, record in enumerate(rows, 1):
            yield from _from_record(record, f"{name}:{number}", field, read)
    except (OSError, ValueError, RuntimeError) as error:
        # A stream that breaks off is not the end of the data: stop, and go on when run again.
        message = " ".join(str(error).split())
        raise UserError(f"{name}: cannot be read: {message}; run it again to go on") from error
