"""safetensors files: a JSON header, then the bytes of the tensors without a gap.

Reading is a parser of our own: the safetensors library checks offsets as strictly, but passes
duplicate keys and gives NumPy no BF16, and mapping needs the offsets that it keeps to itself.
Sizes are held against the file's before anything is allocated. Source: safetensors' README,
"Format".

The format has no types of quantised blocks. Our own directories hold such a tensor as bytes (U8),
its last dimension that of a row's bytes, beside an entry `encoding.NAME` of the metadata that names
the encoding; the tensor's shape follows from both.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from armillary.checkpoints.tensors import (
    RAW,
    StoredTensor,
    TensorToWrite,
    block_size,
    encoded_bytes,
)
from armillary.errors import CheckpointError, TruncatedError
from armillary.files import (
    ALONE,
    Opener,
    Writer,
    inside_directory,
    map_file,
    parse_json,
    read_json,
    write_json,
    write_whole,
)

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

# The safetensors library's own limit.
_HEADER_LIMIT = 100_000_000
_MAX_DIMENSIONS = 16
_ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_READ_BYTES = {**_ITEM_BYTES, "F8_E4M3": 1}
_ENCODING = "encoding."


def read_safetensors(
    path: Path, *, blocks: bool = False, raw: bool = False
) -> dict[str, StoredTensor]:
    """Map the tensors of one file, by name, in the order of the header.

    Raises CheckpointError for every way in which header and file disagree, and for a tensor of a
    type that is not F64, F32, F16, BF16 or F8_E4M3, or with `blocks` one of bytes whose encoding is
    named, or with `raw` one of bytes that something else says how to read.
    """
    data = map_file(path)
    header, start = _header(data, path)
    metadata = _metadata(header, path)
    encodings = _encodings(metadata, header, path) if blocks else {}
    tensors = {}
    spans: list[tuple[int, int, str]] = []
    body = data.size - start
    for name, entry in header.items():
        where = f"{path}: tensor {name!r:.80}"
        encoding, shape, begin, end = _entry(where, entry, body, bytes_too=raw or name in encodings)
        if name in encodings:
            encoding, shape = _of_blocks(where, encodings[name], encoding, shape)
        spans.append((begin, end, name))
        chunk = data[start + begin : start + end]
        tensors[name] = StoredTensor(name, shape, encoding, chunk, str(path))
    _check_cover(spans, body, path)
    return tensors


def read_metadata(path: Path) -> dict[str, str]:
    """The strings that a file's header holds beside its tensors. Raises as `read_safetensors`."""
    header, _ = _header(map_file(path), path)
    return _metadata(header, path)


def _metadata(header: dict[str, Any], path: Path) -> dict[str, str]:
    """Take the metadata out of a header."""
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CheckpointError(f"{path}: __metadata__ must map names to strings")
    return metadata


def _header(data: NDArray[np.uint8], path: Path) -> tuple[dict[str, Any], int]:
    if data.size < 8:
        raise CheckpointError(f"{path}: is no safetensors file: {data.size} bytes, 8 at least")
    length = int.from_bytes(data[:8].tobytes(), "little")
    if length > _HEADER_LIMIT:
        raise CheckpointError(
            f"{path}: is no safetensors file: a header of {length} bytes, "
            f"{_HEADER_LIMIT} are allowed"
        )
    if 8 + length > data.size:
        raise TruncatedError(
            f"{path}: is cut off: the header takes {length} bytes, {data.size - 8} are there; "
            "fetch the file again"
        )
    return parse_json(data[8 : 8 + length].tobytes(), f"{path} (header)"), 8 + length


def _encodings(
    metadata: Mapping[str, str], header: Mapping[str, Any], path: Path
) -> dict[str, str]:
    """The encodings of the tensors that hold blocks, by their names."""
    encodings = {
        key.removeprefix(_ENCODING): value
        for key, value in metadata.items()
        if key.startswith(_ENCODING)
    }
    for name in encodings:
        if name not in header:
            raise CheckpointError(
                f"{path}: __metadata__ has an encoding of {name!r:.80}, no tensor"
            )
    return encodings


def _of_blocks(
    where: str, named: str, dtype: str, stored: tuple[int, ...]
) -> tuple[str, tuple[int, ...]]:
    """The encoding and the shape of a tensor of blocks, of which the file says bytes."""
    try:
        elements, size = block_size(named)
    except CheckpointError as error:
        raise CheckpointError(f"{where}: {error}") from error
    if dtype != RAW or elements == 1:
        raise CheckpointError(
            f"{where} has dtype {dtype} and the encoding {named!r:.40}; blocks are held as {RAW}"
        )
    if not stored or stored[-1] % size:
        raise CheckpointError(
            f"{where}: rows of {stored[-1:]} bytes are no blocks of {size} bytes in {named}"
        )
    return named, (*stored[:-1], stored[-1] // size * elements)


def _entry(
    where: str, entry: object, body: int, *, bytes_too: bool
) -> tuple[str, tuple[int, ...], int, int]:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{where} must have dtype, shape and data_offsets, and only these")
    encoding, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    item_bytes = _READ_BYTES | ({RAW: 1} if bytes_too else {})
    if not isinstance(encoding, str) or encoding not in item_bytes:
        raise CheckpointError(
            f"{where} has dtype {encoding!r:.80}; supported are {', '.join(item_bytes)}"
        )
    if not _are_sizes(shape):
        raise CheckpointError(f"{where}: shape must be a list of whole numbers, not {shape!r:.80}")
    if not _are_sizes(offsets) or len(offsets) != 2:
        raise CheckpointError(f"{where}: data_offsets must be two whole numbers")
    begin, end = offsets
    if begin > end:
        raise CheckpointError(f"{where} begins at {begin}, after its end at {end}")
    if end > body:
        raise TruncatedError(
            f"{where} ends at byte {end}, the file's data at {body}; fetch it again"
        )
    if end - begin != math.prod(shape) * item_bytes[encoding]:
        raise CheckpointError(
            f"{where} takes {end - begin} bytes, which is not what {shape} of {encoding} needs"
        )
    return encoding, tuple(shape), begin, end


def _are_sizes(values: object) -> bool:
    if not isinstance(values, list) or len(values) > _MAX_DIMENSIONS:
        return False
    return all(type(value) is int and 0 <= value < 2**63 for value in values)


def _check_cover(spans: list[tuple[int, int, str]], body: int, path: Path) -> None:
    """Every byte after the header belongs to one tensor."""
    reached = 0
    for begin, end, name in sorted(spans):
        if begin != reached:
            fault = "overlaps the one before it" if begin < reached else "leaves a gap before it"
            raise CheckpointError(
                f"{path}: tensor {name!r:.80} {fault}, at byte {min(begin, reached)}"
            )
        reached = end
    if reached != body:
        raise CheckpointError(f"{path}: {body - reached} bytes follow the last tensor")


def read_sharded(
    directory: Path, allow_missing: bool = False, *, blocks: bool = False, raw: bool = False
) -> tuple[dict[str, StoredTensor], list[str]]:
    """Map the tensors of a directory, and return with them notices about what was left out.

    `model.safetensors` is taken when it is there, as transformers does, else the shards that
    `model.safetensors.index.json` names. `allow_missing` loads the shards that are there; `blocks`
    and `raw` as in `read_safetensors`.
    Raises CheckpointError when the index and the shards disagree.
    """
    if (directory / SINGLE).is_file():
        notices = _unlisted(directory, {SINGLE}, f"is not {SINGLE}")
        if (directory / INDEX).is_file():
            notices.append(f"{INDEX} is not used, since {SINGLE} is there")
        return read_safetensors(directory / SINGLE, blocks=blocks, raw=raw), notices
    index = directory / INDEX
    if not index.is_file():
        raise CheckpointError(f"{directory}: holds neither {SINGLE} nor {INDEX}")
    placed = _weight_map(index)
    tensors: dict[str, StoredTensor] = {}
    notices = _unlisted(directory, set(placed.values()), "is not in the index")
    for shard in dict.fromkeys(placed.values()):
        path = directory / shard
        if not path.is_file():
            if not allow_missing:
                raise CheckpointError(
                    f"{INDEX}: shard {shard} is named but not there; fetch it beside the index, "
                    "or load what is there with allow_missing=True in Python (weights stay unset)"
                )
            notices.append(f"shard {shard} is not there; its weights stay unset")
            continue
        found = read_safetensors(path, blocks=blocks, raw=raw)
        _check_shard(found, shard, placed, tensors)
        tensors.update(found)
    return tensors, notices


def _weight_map(index: Path) -> dict[str, str]:
    placed = read_json(index).get("weight_map")
    if not isinstance(placed, dict) or not placed:
        raise CheckpointError(f"{index}: weight_map must name the shard of each tensor")
    for name, shard in placed.items():
        if not isinstance(shard, str):
            raise CheckpointError(f"{index}: the shard of {name!r:.80} must be a file's name")
        inside_directory(shard, f"{index}: the shard of {name!r:.80}")
    return placed


def _check_shard(
    found: dict[str, StoredTensor],
    shard: str,
    placed: dict[str, str],
    tensors: dict[str, StoredTensor],
) -> None:
    for name in found:
        if name in tensors:
            first = Path(tensors[name].where).name
            raise CheckpointError(f"{shard}: tensor {name!r:.80} is in {first} as well")
        if placed.get(name) != shard:
            there = f"places it in {placed[name]}" if name in placed else "does not name it"
            raise CheckpointError(f"{shard}: holds tensor {name!r:.80}, but {INDEX} {there}")
    for name, home in placed.items():
        if home == shard and name not in found:
            raise CheckpointError(f"{shard}: lacks tensor {name!r:.80}, which {INDEX} places there")


def _unlisted(directory: Path, listed: set[str], why: str) -> list[str]:
    extra = sorted({path.name for path in directory.glob("*.safetensors")} - listed)
    return [f"{name} {why} and was not loaded" for name in extra]


def write_safetensors(
    path: Path,
    tensors: Iterable[TensorToWrite],
    metadata: Mapping[str, str] | None = None,
    *,
    blocks: bool = False,
    file: Opener = write_whole,
) -> None:
    """Write tensors to one file, atomically, holding one chunk at a time.

    Wider numbers come first, so that each tensor lies at a multiple of its number's size; blocks,
    which `blocks` allows, come last. `metadata` goes into the header, for `read_metadata`.
    `file` opens it.
    Raises ValueError for a name that comes twice, an encoding that cannot be stored, and chunks
    that do not add up to the tensor.
    """
    ordered = sorted(tensors, key=lambda tensor: -_ITEM_BYTES.get(tensor.encoding, 0))
    encodings: dict[str, str] = {}
    entries: dict[str, Any] = {}
    offset = 0
    for name, encoding, shape, _ in ordered:
        plain = encoding in _ITEM_BYTES
        if name in entries or not (plain or blocks):
            fault = "comes twice" if name in entries else f"cannot be stored as {encoding}"
            raise ValueError(f"{path}: tensor {name!r:.80} {fault}")
        end = offset + encoded_bytes(shape, encoding)
        dtype, stored = (encoding, shape) if plain else (RAW, _byte_shape(shape, encoding))
        if not plain:
            encodings[f"{_ENCODING}{name}"] = encoding
        entries[name] = {"dtype": dtype, "shape": list(stored), "data_offsets": [offset, end]}
        offset = end
    header = {"__metadata__": {"format": "pt", **(metadata or {}), **encodings}, **entries}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with file(path) as segments:
        segments.put("the header", 8 + len(text), [len(text).to_bytes(8, "little") + text])
        for name, encoding, shape, chunks in ordered:
            segments.put(name, encoded_bytes(shape, encoding), chunks)


def _byte_shape(shape: tuple[int, ...], encoding: str) -> tuple[int, ...]:
    elements, size = block_size(encoding)
    return (*shape[:-1], shape[-1] // elements * size)


def write_sharded(
    directory: Path,
    tensors: Sequence[TensorToWrite],
    max_shard_bytes: int | None = None,
    writer: Writer = ALONE,
    *,
    blocks: bool = False,
) -> None:
    """Write `model.safetensors`, or shards of at most `max_shard_bytes` and their index.

    A tensor that is larger than a shard may be has one to itself. Of several processes each
    writes about as much, in shards of its own, and the first the index; each is given all
    tensors, and asked for the chunks of those that it writes. `blocks` as in `write_safetensors`.
    """
    total = sum(encoded_bytes(tensor.shape, tensor.encoding) for tensor in tensors)
    shards = [
        (number, shard)
        for number, group in enumerate(_groups(tensors, total, writer.count))
        for shard in _shards(group, max_shard_bytes)
    ]
    names = [SINGLE] if len(shards) == 1 else list(_shard_names(len(shards)))
    for name, (number, shard) in zip(names, shards, strict=True):
        if number == writer.number:
            write_safetensors(directory / name, shard, blocks=blocks, file=writer.file)
    if len(shards) > 1 and writer.number == 0:
        placed = {
            tensor.name: name
            for name, (_, shard) in zip(names, shards, strict=True)
            for tensor in shard
        }
        write_json(directory / INDEX, {"metadata": {"total_size": total}, "weight_map": placed})


def _groups(tensors: Sequence[TensorToWrite], total: int, count: int) -> list[list[TensorToWrite]]:
    """Tensors in their order, in groups of about as many bytes; those that stay empty left out."""
    groups: list[list[TensorToWrite]] = [[] for _ in range(count)]
    before = 0
    for tensor in tensors:
        size = encoded_bytes(tensor.shape, tensor.encoding)
        # By where its middle lies.
        groups[min((2 * before + size) * count // max(2 * total, 1), count - 1)].append(tensor)
        before += size
    return [group for group in groups if group]


def _shard_names(count: int) -> Iterator[str]:
    for number in range(1, count + 1):
        yield f"model-{number:05}-of-{count:05}.safetensors"


def _shards(tensors: Sequence[TensorToWrite], limit: int | None) -> Iterator[list[TensorToWrite]]:
    shard: list[TensorToWrite] = []
    size = 0
    for tensor in tensors:
        more = encoded_bytes(tensor.shape, tensor.encoding)
        if shard and limit is not None and size + more > limit:
            yield shard
            shard, size = [], 0
        shard.append(tensor)
        size += more
    yield shard
