"""The compiled kernels: made once on a machine, kept as an object file, loaded without Numba."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import llvmlite
import llvmlite.binding as llvm

from armillary.checkpoints.locate import cache_directory
from armillary.engine.kernel import Kind
from armillary.engine.machine import Machine, host
from armillary.errors import UserError
from armillary.files import write_atomically

_DIGEST = 32


class Library:
    """An object file in memory. Source of the calling convention: `engine/compiler.py`."""

    def __init__(
        self, code: bytes, arguments: dict[str, dict[str, Kind]], machine: Machine
    ) -> None:
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        target = llvm.Target.from_triple(machine.triple).create_target_machine(
            cpu=machine.cpu, features=machine.features, codemodel="jitdefault", jit=True
        )
        # An engine needs a module of its own, however empty.
        self._engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), target)
        self._engine.add_object_file(llvm.ObjectFileRef.from_data(code))
        self._engine.finalize_object()
        self.arguments = arguments
        """Of each kernel, by its name."""

    def address(self, name: str) -> int:
        """Where the entry of a kernel lies. Raises KeyError when there is none."""
        address: int = self._engine.get_function_address(f"armillary_{name}")
        if not address:
            raise KeyError(name)
        return address


_library: Library | None = None


def library(notice: Callable[[str], None] | None = None) -> Library:
    """The kernels for this machine, compiled if that has not been done before."""
    global _library  # noqa: PLW0603 — one for the process: code cannot be unloaded
    if _library is None:
        machine = host()
        path = cache_directory() / "kernels" / f"{_key(machine)}.o"
        kept = _read(path)
        if kept is None:
            if notice is not None:
                notice("compiling the kernels for this machine, once; this takes some seconds")
            kept = _compiled(machine)
            _write(path, kept)
        head, _, code = kept.partition(b"\n")
        _library = Library(code, json.loads(head), machine)
    return _library


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
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with write_atomically(path) as file:
            file.write(hashlib.sha256(content).digest() + content)
    except (OSError, UserError):
        return


def _compiled(machine: Machine) -> bytes:
    """A line that tells the kernels' arguments, and the object file."""
    from armillary.engine.compiler import object_code
    from armillary.engine.kernels import all_kernels

    kernels = all_kernels(machine)
    arguments = {each.name: each.arguments for each in kernels}
    return json.dumps(arguments).encode() + b"\n" + object_code(kernels, machine)


def _key(machine: Machine) -> str:
    """A name for all that the code depends on: the machine, the compiler and the kernels' text."""
    digest = hashlib.sha256(repr((machine, llvmlite.__version__)).encode())
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
