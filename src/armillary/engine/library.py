"""Compiled kernels: each made once on a machine, kept as an object file, loaded without Numba."""

import hashlib
import json
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path

import llvmlite.binding as llvm

from armillary.checkpoints.locate import cache_directory
from armillary.engine.kernel import Kernel, Kind
from armillary.engine.machine import Machine, host
from armillary.errors import UserError
from armillary.files import write_atomically

_DIGEST = 32
_DAY = 24 * 60 * 60.0
_UNUSED = 30 * _DAY
"""Seconds after which code that nobody has loaded is removed."""
_PATIENCE = 10.0
"""Seconds of compiling after which it is said again."""


@dataclass(frozen=True)
class Loaded:
    """Where the entry of a kernel lies, and its arguments. See `engine/compiler.py`."""

    address: int
    arguments: dict[str, Kind]


class Library:
    """The kernels for a machine: each is loaded when it is first asked for, or then compiled.

    `notice` is told when the first is compiled, and now and then while that goes on.
    """

    def __init__(self, machine: Machine, notice: Callable[[str], None] | None = None) -> None:
        self.notice = notice
        self._machine = machine
        self._folder = cache_directory() / "kernels" / _key(machine)
        self._loaded: dict[str, Loaded] = {}
        self._engines: list[llvm.ExecutionEngine] = []
        self._lock = threading.Lock()
        self._compiled = 0
        self._told = 0.0
        _mark_as_used(self._folder)

    def kernel(self, name: str) -> Loaded:
        """A kernel by its name. Raises KeyError when there is none."""
        with self._lock:
            if name not in self._loaded:
                self._loaded[name] = self._load(name)
            return self._loaded[name]

    def _load(self, name: str) -> Loaded:
        kept = _read(self._folder / f"{name}.o")
        if kept is None:
            kernel = self._kernels[name]
            self._tell()
            kept = _compiled(kernel, self._machine)
            self._compiled += 1
            _write(self._folder / f"{name}.o", kept)
        head, _, code = kept.partition(b"\n")
        engine = _engine(code, self._machine)
        self._engines.append(engine)
        # Who asks for an address has the code made ready. To ask for that alone would also have
        # the empty module compiled, which takes longer than all the rest.
        return Loaded(engine.get_function_address(f"armillary_{name}"), json.loads(head))

    def _tell(self) -> None:
        now = time.monotonic()
        if self.notice is None or (self._compiled and now - self._told < _PATIENCE):
            return
        self._told = now
        if self._compiled:
            self.notice(f"still compiling kernels for this machine; {self._compiled} done")
        else:
            self.notice("compiling the kernels for this machine, once; this takes some seconds")

    @cached_property
    def _kernels(self) -> dict[str, Kernel]:
        """All that there are. To know them takes Numba."""
        from armillary.engine.kernels import all_kernels

        return {each.name: each for each in all_kernels(self._machine)}


_library: Library | None = None


def library(notice: Callable[[str], None] | None = None) -> Library:
    """The kernels for this machine. From now on `notice`, if there is one, hears of compiling."""
    global _library  # noqa: PLW0603 — one for the process: nothing is loaded twice
    if _library is None:
        _library = Library(host())
    if notice is not None:
        _library.notice = notice
    return _library


def _engine(code: bytes, machine: Machine) -> llvm.ExecutionEngine:
    """Memory with an object file's code, which lies there as long as this is kept.

    Of one file: with several, LLVM's loader takes the constants of one for another's.
    """
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    target = llvm.Target.from_triple(machine.triple).create_target_machine(
        cpu=machine.cpu, features=machine.features, codemodel="jitdefault", jit=True
    )
    # An engine needs a module of its own, however empty.
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), target)
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    return engine


def _read(path: Path) -> bytes | None:
    """What was kept, unless it was cut short or changed."""
    try:
        kept = path.read_bytes()
    except OSError:
        return None
    rest = kept[_DIGEST:]
    return rest if hashlib.sha256(rest).digest() == kept[:_DIGEST] else None


def _write(path: Path, content: bytes) -> None:
    """Keep it for the next process; where nothing can be kept, that one compiles again."""
    try:
        for folder in (path.parent.parent, path.parent):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with write_atomically(path) as file:
            file.write(hashlib.sha256(content).digest() + content)
        _remove_unused(path.parent)
    except (OSError, UserError):
        return


def _mark_as_used(folder: Path) -> None:
    """A folder's time tells when it was last used, to the day."""
    with suppress(OSError):
        if time.time() - folder.stat().st_mtime > _DAY:
            folder.touch()


def _remove_unused(folder: Path) -> None:
    """Remove what lies beside a folder and was made, or used, long ago."""
    for other in folder.parent.iterdir():
        if other == folder or time.time() - other.stat().st_mtime < _UNUSED:
            continue
        if other.is_dir() and not other.is_symlink():
            shutil.rmtree(other, ignore_errors=True)
        else:
            other.unlink(missing_ok=True)


def _compiled(kernel: Kernel, machine: Machine) -> bytes:
    """A line that tells the kernel's arguments, and the object file."""
    from armillary.engine.compiler import object_code

    return json.dumps(kernel.arguments).encode() + b"\n" + object_code([kernel], machine)


def _key(machine: Machine) -> str:
    """A name for all that the code depends on: the machine, the compiler and the kernels' text."""
    versions = [version(name) for name in ("numba", "llvmlite")]
    digest = hashlib.sha256(repr((machine, versions)).encode())
    folder = Path(__file__).parent
    parts = ["emit.py", "compiler.py", "kernel.py", "gate.py", "kv_layout.py", "tiling.py"]
    files = [folder / part for part in parts]
    for file in [
        *files,
        *sorted(folder.glob("cache_formats/*.py")),
        *sorted(folder.glob("formats/*.py")),
        *sorted(folder.glob("kernels/*.py")),
    ]:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:32]
