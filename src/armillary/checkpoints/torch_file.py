"""Tensors out of the files that torch saves (.pth), without unpickling them.

Such a file is a ZIP archive, uncompressed: a pickle that describes the tensors, and their bytes, a
member for each storage. A pickle is a program that may call anything. The few instructions that
describe tensors are carried out here, by an interpreter that can call nothing: what the program
names beside torch's own tensors and storages is refused by its name.
Source: torch/serialization.py; pickletools, for the instructions.
"""

import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from armillary.checkpoints.tensors import StoredTensor, encoded_bytes
from armillary.errors import CheckpointError
from armillary.files import map_file

_PICKLE_LIMIT = 64 << 20
_STORAGES = {
    "torch.DoubleStorage": "F64",
    "torch.FloatStorage": "F32",
    "torch.HalfStorage": "F16",
    "torch.BFloat16Storage": "BF16",
}
_REBUILD_TENSOR = "torch._utils._rebuild_tensor_v2"
_REBUILD_PARAMETER = "torch._utils._rebuild_parameter"
_ORDERED = "collections.OrderedDict"
_NAMES = frozenset({*_STORAGES, _REBUILD_TENSOR, _REBUILD_PARAMETER, _ORDERED})
_ITEM = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_LOCAL_HEADER = struct.Struct("<4s22xHH")


def read_torch_file(path: Path) -> dict[str, StoredTensor]:
    """Map the tensors of a file by name.

    Raises CheckpointError for a file that is damaged, or that holds anything but named tensors of
    F64, F32, F16 or BF16 whose numbers lie in their order.
    """
    data = map_file(path)
    members = _members(path, data)
    program = [name for name in members if name.rpartition("/")[2] == "data.pkl"]
    if len(program) != 1:
        raise CheckpointError(f"{path}: is no file that torch saved: it holds no data.pkl")
    folder = program[0].removesuffix("data.pkl")
    order = members.get(f"{folder}byteorder")
    if order is not None and order.tobytes() != b"little":
        raise CheckpointError(f"{path}: was saved on a big-endian machine, which is not read")
    if members[program[0]].size > _PICKLE_LIMIT:
        raise CheckpointError(f"{path}: its data.pkl is larger than {_PICKLE_LIMIT} bytes")
    described = _Machine(members[program[0]].tobytes(), str(path)).run()
    if not isinstance(described, dict) or not described:
        raise CheckpointError(f"{path}: holds no tensors by name")
    tensors = {}
    for name, entry in described.items():
        if not isinstance(name, str) or not isinstance(entry, _Tensor):
            raise CheckpointError(f"{path}: entry {name!r:.80} is no tensor with a name")
        tensors[name] = _mapped(name, entry, members.get(f"{folder}data/{entry.storage.key}"), path)
    return tensors


def _members(path: Path, data: NDArray[np.uint8]) -> dict[str, NDArray[np.uint8]]:
    """The bytes of each member of the archive, where they lie."""
    if data[:1].tobytes() == b"\x80":
        raise CheckpointError(
            f"{path}: is a bare pickle, as torch saved before 1.6, and nothing is unpickled; save "
            "it again with a newer torch, or as safetensors"
        )
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        raise CheckpointError(f"{path}: is no file that torch saved: {error}") from error
    members: dict[str, NDArray[np.uint8]] = {}
    for entry in entries:
        where = f"{path}: member {entry.filename!r:.80}"
        if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1:
            raise CheckpointError(f"{where} is compressed or encrypted, as torch saves none")
        if entry.filename in members:
            raise CheckpointError(f"{where} stands there twice")
        header = data[entry.header_offset : entry.header_offset + _LOCAL_HEADER.size].tobytes()
        if len(header) < _LOCAL_HEADER.size:
            raise CheckpointError(f"{where} lies beyond the end; fetch the file again")
        magic, name, extra = _LOCAL_HEADER.unpack(header)
        begin = entry.header_offset + _LOCAL_HEADER.size + name + extra
        member = data[begin : begin + entry.file_size]
        if magic != b"PK\3\4" or member.size != entry.file_size:
            raise CheckpointError(f"{where} is damaged or cut off; fetch the file again")
        members[entry.filename] = member
    return members


@dataclass(frozen=True)
class _Global:
    """A name that the program asks for."""

    name: str


@dataclass(frozen=True)
class _Storage:
    encoding: str
    key: str
    count: int


@dataclass(frozen=True)
class _Tensor:
    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def _mapped(
    name: str, tensor: _Tensor, stored: NDArray[np.uint8] | None, path: Path
) -> StoredTensor:
    where, storage = f"{path}: tensor {name!r:.80}", tensor.storage
    if stored is None:
        raise CheckpointError(f"{where}: its storage {storage.key!r:.40} is not in the file")
    item = _ITEM[storage.encoding]
    if stored.size != storage.count * item:
        raise CheckpointError(f"{where}: its storage has {stored.size} bytes, not what it says")
    step = 1
    for size, stride in zip(tensor.shape[::-1], tensor.strides[::-1], strict=True):
        if size > 1 and stride != step:
            raise CheckpointError(f"{where}: its numbers lie in another order than its shape's")
        step *= size
    size = encoded_bytes(tensor.shape, storage.encoding)
    begin = tensor.offset * item
    if begin + size > stored.size:
        raise CheckpointError(f"{where}: reaches beyond its storage")
    part = stored[begin : begin + size]
    return StoredTensor(name, tensor.shape, storage.encoding, part, str(path))


class _Machine:
    """Carries out a pickle's instructions on values that can do nothing."""

    def __init__(self, program: bytes, where: str) -> None:
        self._program, self._where = program, where
        self._at = 0
        self._stack: list[Any] = []
        self._marks: list[list[Any]] = []
        self._memo: dict[int, Any] = {}

    def run(self) -> Any:
        """What the program leaves. Raises CheckpointError for what it must not do."""
        try:
            while True:
                code = self._take(1)
                if code == b".":
                    return self._stack.pop()
                step = _STEPS.get(code)
                if step is None:
                    raise self._fault(f"has the instruction {code!r}, which describes no tensor")
                step(self)
        except (IndexError, KeyError, TypeError, ValueError, struct.error) as error:
            if isinstance(error, CheckpointError):
                raise
            raise self._fault("is damaged") from error

    def _fault(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self._where}: its pickle {what}; nothing but tensors is read, and nothing is run"
        )

    def _take(self, size: int) -> bytes:
        part = self._program[self._at : self._at + size]
        if len(part) < size:
            raise self._fault("is cut off")
        self._at += size
        return part

    def _line(self) -> str:
        end = self._program.index(b"\n", self._at)
        return self._take(end + 1 - self._at)[:-1].decode()

    def number(self, size: int, *, signed: bool = False) -> int:
        """Read a number of the program."""
        return int.from_bytes(self._take(size), "little", signed=signed)

    def push(self, value: Any) -> None:
        """Put a value on the stack."""
        self._stack.append(value)

    def text(self, size: int) -> None:
        """Push a text whose length is a number of `size` bytes."""
        self.push(self._take(self.number(size)).decode())

    def real(self) -> None:
        """Push a float."""
        self.push(struct.unpack(">d", self._take(8))[0])

    def mark(self) -> None:
        """Begin a group."""
        self._marks.append(self._stack)
        self._stack = []

    def group(self) -> list[Any]:
        """End a group: what came since the mark."""
        items, self._stack = self._stack, self._marks.pop()
        return items

    def tuple_of(self, count: int) -> None:
        """Push the last values as a tuple."""
        items = [self._stack.pop() for _ in range(count)][::-1]
        self.push(tuple(items))

    def remember(self, index: int) -> None:
        """Keep the last value under a number."""
        self._memo[index] = self._stack[-1]

    def remember_next(self) -> None:
        """Keep the last value under the next number."""
        self.remember(len(self._memo))

    def recall(self, index: int) -> None:
        """Push what was kept."""
        self.push(self._memo[index])

    def ask(self, module: str, name: str) -> None:
        """Push one of the names that describe tensors."""
        full = f"{module}.{name}"
        if full not in _NAMES:
            raise self._fault(f"asks for {full:.80}")
        self.push(_Global(full))

    def ask_lines(self) -> None:
        """The name stands in the program."""
        module = self._line()
        self.ask(module, self._line())

    def ask_stack(self) -> None:
        """The name stands on the stack."""
        name = self._stack.pop()
        self.ask(str(self._stack.pop()), str(name))

    def append(self, items: list[Any]) -> None:
        """Add to a list."""
        target = self._stack[-1]
        if not isinstance(target, list):
            raise self._fault("adds to what is no list")
        target.extend(items)

    def set_items(self, items: list[Any]) -> None:
        """Add keys and values to a mapping."""
        target = self._stack[-1]
        if not isinstance(target, dict) or len(items) % 2:
            raise self._fault("adds to what is no mapping")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if key in target:
                raise self._fault(f"gives {key!r:.80} twice")
            target[key] = value

    def one_item(self) -> None:
        """Add one key and value to a mapping."""
        value = self._stack.pop()
        self.set_items([self._stack.pop(), value])

    def storage(self) -> None:
        """Push the storage that a persistent id names."""
        kind, storage, key, _, count = self._stack.pop()
        if kind != "storage" or not isinstance(storage, _Global) or storage.name not in _STORAGES:
            raise self._fault(f"names a storage of {storage!r:.80}")
        self.push(_Storage(_STORAGES[storage.name], str(key), _count(count)))

    def call(self) -> None:
        """Carry out one of the three calls that describe tensors."""
        arguments, of = self._stack.pop(), self._stack.pop()
        name = of.name if isinstance(of, _Global) else None
        if name == _ORDERED and arguments == ():
            self.push({})
        elif name == _REBUILD_PARAMETER and isinstance(arguments[0], _Tensor):
            self.push(arguments[0])
        elif name == _REBUILD_TENSOR and isinstance(arguments[0], _Storage):
            storage, offset, shape, strides = arguments[:4]
            sizes = (tuple(map(_count, part)) for part in (shape, strides))
            self.push(_Tensor(storage, _count(offset), *sizes))
        else:
            raise self._fault(f"calls {name or of!r:.80}")

    def build(self) -> None:
        """Drop the attributes of a mapping: torch's version numbers of modules."""
        self._stack.pop()
        if not isinstance(self._stack[-1], dict):
            raise self._fault("sets attributes of what is no mapping")


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{value!r:.40} is no count")
    return value


_STEPS: dict[bytes, Callable[[_Machine], Any]] = {
    b"\x80": lambda m: m.number(1),  # the protocol
    b"\x95": lambda m: m.number(8),  # a frame's length
    b"(": lambda m: m.mark(),
    b"}": lambda m: m.push({}),
    b"]": lambda m: m.push([]),
    b")": lambda m: m.push(()),
    b"N": lambda m: m.push(None),
    b"\x88": lambda m: m.push(True),
    b"\x89": lambda m: m.push(False),
    b"K": lambda m: m.push(m.number(1)),
    b"M": lambda m: m.push(m.number(2)),
    b"J": lambda m: m.push(m.number(4, signed=True)),
    b"\x8a": lambda m: m.push(m.number(m.number(1), signed=True)),
    b"G": lambda m: m.real(),
    b"X": lambda m: m.text(4),
    b"\x8c": lambda m: m.text(1),
    b"t": lambda m: m.push(tuple(m.group())),
    b"\x85": lambda m: m.tuple_of(1),
    b"\x86": lambda m: m.tuple_of(2),
    b"\x87": lambda m: m.tuple_of(3),
    b"q": lambda m: m.remember(m.number(1)),
    b"r": lambda m: m.remember(m.number(4)),
    b"\x94": lambda m: m.remember_next(),
    b"h": lambda m: m.recall(m.number(1)),
    b"j": lambda m: m.recall(m.number(4)),
    b"c": lambda m: m.ask_lines(),
    b"\x93": lambda m: m.ask_stack(),
    b"e": lambda m: m.append(m.group()),
    b"u": lambda m: m.set_items(m.group()),
    b"s": lambda m: m.one_item(),
    b"Q": lambda m: m.storage(),
    b"R": lambda m: m.call(),
    b"b": lambda m: m.build(),
}
"""What each instruction that torch writes for tensors does."""
