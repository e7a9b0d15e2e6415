"""Tensors of all ranks in files of their own, and back onto any number of ranks.

Torch's distributed checkpointing (DCP) plans who writes and reads what, for plain tensors and
DTensors alike; the files are in its safetensors layout, one a rank, with the place of each piece in
the whole in the header, so that its own `HuggingFaceStorageReader` reads them too. Writing and
reading are ours: torch's writer holds the whole file of a rank in memory before it is written, and
its reader leaves open whether the pieces that it finds make up the whole tensor.
Source: torch 2.13, torch/distributed/checkpoint/hf_storage.py and filesystem.py.
"""

import json
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from armillary.checkpoints.safetensors import read_metadata, read_safetensors, write_safetensors
from armillary.checkpoints.tensors import StoredTensor, TensorToWrite
from armillary.errors import CheckpointError
from armillary.files import parse_json
from armillary.training.ranks import is_distributed
from armillary.weights import ENCODINGS

# DCP's names in the header of a file.
_PLACES = "DCP_SHARDING_INFO"
_OFFSETS = "saved_offsets"
_VERSION = {"DCP_VERSION": "1.0"}

_DTYPES = {encoding: dtype for dtype, encoding in ENCODINGS.items()}
_Offsets = tuple[int, ...]

# No tensor is this long, and adding up does not overflow.
_FAR = 1 << 48


def write_shards(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors that the ranks have, whole or in part, each rank into a file of its own.

    Every number is written once, tensor by tensor, and nothing is gathered. All ranks call this,
    with the same names and a path of their own.
    Raises UserError on all ranks when one of them cannot write.
    """
    with _quietly(), _own_errors():
        save(
            dict(tensors),
            storage_writer=_Writer(path),
            planner=DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            no_dist=not is_distributed(),
        )


class Shards:
    """What `write_shards` wrote on all ranks, mapped; nothing but headers is read.

    `shapes` and `dtypes` are those of the whole tensors, by name.
    Raises CheckpointError for a file that is damaged, or pieces that do not make up their tensors.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        self._pieces: dict[str, dict[_Offsets, StoredTensor]] = {}
        for path in paths:
            self._add(path)
        self.shapes = {name: _whole(name, pieces) for name, pieces in self._pieces.items()}
        self.dtypes = {
            name: _DTYPES[next(iter(pieces.values())).encoding]
            for name, pieces in self._pieces.items()
        }

    def _add(self, path: Path) -> None:
        places = _places(path)
        tensors = read_safetensors(path)
        if set(places) != set(tensors):
            odd = min(set(places) ^ set(tensors))
            raise CheckpointError(f"{path}: tensor {odd!r:.80} has no place or is not there")
        for name, tensor in tensors.items():
            place, known = places[name], self._pieces.setdefault(name, {})
            if len(place) != len(tensor.shape) or place in known:
                fault = "two pieces at" if place in known else f"shape {list(tensor.shape)} and"
                raise CheckpointError(
                    f"{path}: tensor {name!r:.80} has {fault} place {list(place)!r:.80}"
                )
            known[place] = tensor

    def read_into(self, tensors: Mapping[str, Tensor]) -> None:
        """Fill tensors in place, bit for bit, each rank the part that it has.

        They have names, shapes and types of the files; the caller has seen to it.
        """
        with _quietly(), _own_errors(), torch.no_grad():
            load(
                dict(tensors),
                storage_reader=_Reader(self._pieces, self.shapes),
                planner=DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
                no_dist=not is_distributed(),
            )


def _places(path: Path) -> dict[str, _Offsets]:
    """Where each tensor of a file begins in its whole."""
    try:
        entries = parse_json(read_metadata(path)[_PLACES].encode(), f"{path} ({_PLACES})")
        places = {name: tuple(entry[_OFFSETS]) for name, entry in entries.items()}
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: does not say where its pieces belong") from error
    for name, offsets in places.items():
        if not all(type(offset) is int and 0 <= offset < _FAR for offset in offsets):
            raise CheckpointError(f"{path}: tensor {name!r:.80} lies at {list(offsets)!r:.80}")
    return places


def _whole(name: str, pieces: Mapping[_Offsets, StoredTensor]) -> tuple[int, ...]:
    """The shape that pieces make up together, without gap or overlap, in one type."""
    one = next(iter(pieces.values()))
    for piece in pieces.values():
        like = piece.encoding == one.encoding and len(piece.shape) == len(one.shape)
        if not like or max(piece.shape, default=0) >= _FAR:
            raise CheckpointError(
                f"{piece.where}: tensor {name!r:.80} is {piece.encoding} of shape "
                f"{list(piece.shape)}, but {one.encoding} of {list(one.shape)} in {one.where}"
            )
    starts = np.array(list(pieces), dtype=np.int64)
    ends = starts + np.array([piece.shape for piece in pieces.values()], dtype=np.int64)
    shape = tuple(int(size) for size in ends.max(axis=0))
    for number in range(1, len(pieces)):
        over = (starts[:number] < ends[number]) & (starts[number] < ends[:number])
        if over.all(axis=1).any():
            raise CheckpointError(f"{one.where}: pieces of tensor {name!r:.80} overlap")
    found = sum(math.prod(piece.shape) for piece in pieces.values())
    if found != math.prod(shape):
        raise CheckpointError(
            f"{one.where}: of tensor {name!r:.80}, {math.prod(shape)} numbers, {found} are there"
        )
    return shape


class _Writer(StorageWriter):
    """Writes what DCP plans for this rank."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        tensors, places, results = [], {}, []
        for item in plan.items:
            assert item.tensor_data is not None
            chunk = item.tensor_data.chunk
            name = item.index.fqn
            encoding = ENCODINGS[item.tensor_data.properties.dtype]
            data = _bytes(planner, item)
            tensors.append(TensorToWrite(name, encoding, tuple(chunk.sizes), data))
            places[name] = {_OFFSETS: list(chunk.offsets)}
            results.append(WriteResult(item.index, 0, None))
        metadata = {_PLACES: json.dumps(places), **_VERSION}
        write_safetensors(self.path, tensors, metadata)
        return _done(results)

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing is kept from one checkpoint to the next."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """The directory is there."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Every file says what it holds; there is no other index."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:  # noqa: ARG003
        return False


def _bytes(planner: SavePlanner, item: Any) -> Iterator[NDArray[np.uint8]]:
    data = planner.resolve_data(item)
    assert isinstance(data, Tensor)
    yield data.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


class _Reader(StorageReader):
    """Reads what DCP plans for this rank out of mapped files."""

    def __init__(
        self,
        pieces: Mapping[str, Mapping[_Offsets, StoredTensor]],
        shapes: Mapping[str, tuple[int, ...]],
    ) -> None:
        self.pieces = pieces
        self.shapes = shapes

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:  # noqa: ARG002
        return Metadata(
            {
                name: TensorStorageMetadata(
                    properties=TensorProperties(_DTYPES[next(iter(pieces.values())).encoding]),
                    size=torch.Size(self.shapes[name]),
                    chunks=[
                        ChunkStorageMetadata(torch.Size(offsets), torch.Size(piece.shape))
                        for offsets, piece in pieces.items()
                    ],
                )
                for name, pieces in self.pieces.items()
            }
        )

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            index = item.storage_index
            assert index.offset is not None
            piece = self.pieces[index.fqn][tuple(index.offset)]
            where = zip(item.storage_offsets, item.lengths, strict=True)
            part = tuple(slice(start, start + length) for start, length in where)
            target = planner.resolve_tensor(item)
            # As whole numbers of the same width, which nothing rounds or makes quiet.
            bits = _BITS[target.element_size()]
            numbers = piece.data.view(bits[0]).reshape(piece.shape)[part]
            target.detach().view(bits[1]).copy_(torch.from_numpy(np.array(numbers)))
            piece.release()
        return _done(None)

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing is kept from one checkpoint to the next."""

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """The files are mapped."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:  # noqa: ARG003
        return False


_BITS: dict[int, tuple[Any, torch.dtype]] = {
    2: (np.int16, torch.int16),
    4: (np.int32, torch.int32),
    8: (np.int64, torch.int64),
}


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


@contextmanager
def _own_errors() -> Iterator[None]:
    """Raise what went wrong on a rank in place of DCP's report of all of it."""
    try:
        yield
    except CheckpointException as error:
        fault, _ = next(iter(error.failures.values()))
        raise fault from error


@contextmanager
def _quietly() -> Iterator[None]:
    """One process is no reason for a warning."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is (disabled|unavailable)")
        yield
