"""A key/value cache as one safetensors file, whose contents are checked against each other.

Tensors: tokens and readable (B, length); layers.{i}.k and .v (B, h_kv, held, d_h), held being the
length, or less in a layer that forgets what its window cannot reach. What the cache says of itself
stands in the metadata.
"""

from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from armillary.config import DecoderConfig
from armillary.errors import CheckpointError
from armillary.files import write_atomically

_FORMAT = "armillary-kv-cache"
Shape = tuple[int, ...]


class SavedCache(BaseModel):
    """What a cache says of itself beside its tensors; `KVCache` explains each entry."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    config: DecoderConfig
    capacity: int | None
    windowed: bool
    rotary_length: list[int] | None
    filled_at: list[int]


def write_saved(path: Path, about: SavedCache, tensors: dict[str, Tensor]) -> None:
    """Write the file whole or not at all."""
    with write_atomically(path) as file:
        file.write(save(tensors, {"format": _FORMAT, "about": about.model_dump_json()}))


def read_saved(path: Path, device: str) -> tuple[SavedCache, dict[str, Tensor]]:
    """The description and the tensors, each of the shape that the others ask for.

    Raises CheckpointError for a file that is damaged or is something else.
    """
    try:
        with safe_open(path, framework="pt", device=device) as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot be read as a saved cache: {error}") from error
    if metadata.get("format") != _FORMAT:
        raise CheckpointError(f"{path}: is no saved cache")
    try:
        about = SavedCache.model_validate_json(metadata.get("about", ""))
    except ValidationError as error:
        problem = error.errors()[0]
        key = ".".join(map(str, ("about", *problem["loc"])))
        raise CheckpointError(f"{path}: {key}: {problem['msg']}") from error
    _check(path, about, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
    return about, tensors


def _check(path: Path, about: SavedCache, found: dict[str, Shape]) -> None:
    rows, length = _rows_and_length(path, found)
    if about.capacity is not None and about.capacity < length:
        raise CheckpointError(f"{path}: {length} tokens in a capacity of {about.capacity}")
    for name in ("rotary_length", "filled_at"):
        entries = getattr(about, name)
        if entries is not None and len(entries) != rows:
            raise CheckpointError(f"{path}: {len(entries)} entries of {name} for {rows} rows")
    expected: dict[str, Shape] = {"tokens": (rows, length), "readable": (rows, length)}
    for number, layer in enumerate(about.config.layers):
        attention, key = layer.attention, f"layers.{number}.k"
        held = length
        if about.windowed and attention.window is not None and len(found.get(key, ())) == 4:
            held = min(length, max(attention.window - 1, found[key][2]))
        (k_heads, k_width), (v_heads, v_width) = attention.kept
        expected[key] = (rows, k_heads, held, k_width)
        expected[f"layers.{number}.v"] = (rows, v_heads, held, v_width)
    for name in sorted(expected.keys() | found.keys()):
        if found.get(name) != expected.get(name):
            raise CheckpointError(
                f"{path}: {name} has shape {found.get(name)}, not {expected.get(name)}"
            )


def _rows_and_length(path: Path, found: dict[str, Shape]) -> tuple[int, int]:
    match found.get("tokens"):
        case (int(rows), int(length)) if rows and length:
            return rows, length
        case other:
            raise CheckpointError(f"{path}: tokens has shape {other}, not (rows, length)")
