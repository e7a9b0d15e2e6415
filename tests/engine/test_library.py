"""Compiled kernels are kept, checked when they are read, and made anew where they are not whole."""

import hashlib
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from armillary.engine import library as module
from armillary.engine.kernel import Kernel
from armillary.engine.library import Library, library
from armillary.engine.machine import host

DAY = 24 * 60 * 60
TOLD = "compiling the kernels for this machine, once; this takes some seconds"


@pytest.fixture(scope="module")
def real() -> dict[str, bytes]:
    """What the compiler gives for two kernels."""
    kernels = Library(host())._kernels
    return {name: module._compiled(kernels[name], host()) for name in ("pick", "queries_F32")}


class Compiler:
    """Stands for the compiler: gives what the real one gave before, and notes for what."""

    def __init__(self, real: dict[str, bytes]) -> None:
        self.real, self.asked = real, list[str]()

    def __call__(self, kernel: Kernel, machine: object) -> bytes:
        assert machine == host()
        self.asked.append(kernel.name)
        return self.real[kernel.name]


@pytest.fixture
def compiler(real: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    """A machine on which nothing has been compiled yet."""
    monkeypatch.setenv("ARMILLARY_CACHE", str(tmp_path))
    compiler = Compiler(real)
    monkeypatch.setattr(module, "_compiled", compiler)
    return compiler


def folder(cache: Path) -> Path:
    return cache / "kernels" / module._key(host())


def told_in_a_new_process(*names: str) -> list[str]:
    """Load as if for the first time; what was told."""
    told: list[str] = []
    fresh = Library(host(), told.append)
    for name in names:
        assert fresh.kernel(name).address
    return told


def test_a_kernel_is_compiled_once_with_a_notice(compiler: Compiler, tmp_path: Path) -> None:
    assert told_in_a_new_process("queries_F32") == [TOLD]
    assert (folder(tmp_path) / "queries_F32.o").is_file()
    for _ in range(2):
        assert told_in_a_new_process("queries_F32") == []
    assert compiler.asked == ["queries_F32"]


def test_only_what_is_asked_for_is_compiled(compiler: Compiler, tmp_path: Path) -> None:
    assert told_in_a_new_process() == []
    told_in_a_new_process("queries_F32")
    assert [path.name for path in folder(tmp_path).iterdir()] == ["queries_F32.o"]
    assert told_in_a_new_process("queries_F32", "pick") == [TOLD]
    assert compiler.asked == ["queries_F32", "pick"]


def test_a_run_is_told_once_and_again_where_it_takes_long(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert told_in_a_new_process("queries_F32", "pick") == [TOLD]
    for path in folder(module.cache_directory()).iterdir():
        path.unlink()
    clock = iter((100.0, 111.0))
    monkeypatch.setattr(module.time, "monotonic", lambda: next(clock))
    later = "still compiling kernels for this machine; 1 done"
    assert told_in_a_new_process("queries_F32", "pick") == [TOLD, later]


def test_what_is_loaded_stays(compiler: Compiler) -> None:
    kept = Library(host())
    assert kept.kernel("queries_F32") is kept.kernel("queries_F32")
    assert list(kept.kernel("queries_F32").arguments) == [
        "x", "stride", "heads", "d_head", "factor", "rows"
    ]  # fmt: skip
    assert library() is library()


def test_who_loads_last_hears_of_compiling(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels for long prompts are compiled when one comes, long after loading."""
    monkeypatch.setattr(module, "_library", None)
    told: list[str] = []
    library(told.append)
    library().kernel("queries_F32")
    assert told == [TOLD]


def test_a_file_that_is_not_whole_is_made_anew(compiler: Compiler, tmp_path: Path) -> None:
    """Cut anywhere, or with a bit changed in its digest, head or code: it is never run."""
    told_in_a_new_process("queries_F32")
    path = folder(tmp_path) / "queries_F32.o"
    whole = path.read_bytes()
    changed = [whole[:end] for end in (0, 1, 31, 32, 33, len(whole) // 2, len(whole) - 1)]
    for place in (0, 40, len(whole) // 2, len(whole) - 1):
        other = bytearray(whole)
        other[place] ^= 1
        changed.append(bytes(other))
    changed.append(whole + b"\0")
    for number, content in enumerate(changed, start=2):
        path.write_bytes(content)
        assert told_in_a_new_process("queries_F32"), len(content)
        assert len(compiler.asked) == number
        assert path.read_bytes() == whole


def test_where_nothing_can_be_kept_they_are_compiled_each_time(
    compiler: Compiler, tmp_path: Path
) -> None:
    (tmp_path / "kernels").write_text("no folder")
    for number in (1, 2):
        assert told_in_a_new_process("queries_F32")
        assert len(compiler.asked) == number
    assert (tmp_path / "kernels").read_text() == "no folder"


def test_a_folder_in_the_files_place_is_no_obstacle(compiler: Compiler, tmp_path: Path) -> None:
    (folder(tmp_path) / "queries_F32.o").mkdir(parents=True)
    assert told_in_a_new_process("queries_F32")
    assert compiler.asked == ["queries_F32"]


def test_others_may_not_write_where_code_is_kept(compiler: Compiler, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        told_in_a_new_process("queries_F32")
    finally:
        os.umask(before)
    for path in (folder(tmp_path), folder(tmp_path).parent):
        assert path.stat().st_mode & 0o077 == 0


def test_threads_that_ask_at_once_share_one_kernel(compiler: Compiler) -> None:
    shared, found = Library(host()), list[int]()
    threads = [
        threading.Thread(target=lambda: found.append(shared.kernel("queries_F32").address))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert len(set(found)) == 1
    assert compiler.asked == ["queries_F32"]


def test_code_that_nobody_used_for_long_is_removed(compiler: Compiler, tmp_path: Path) -> None:
    """Files of former versions, and folders of other keys: but none that was used of late."""
    place = tmp_path / "kernels"
    place.mkdir()
    (place / "former.o").write_bytes(b"")
    for name in ("unused", "used", "new"):
        (place / name).mkdir()
        (place / name / "queries_F32.o").write_bytes(b"")
    for name, days in (("former.o", 40), ("unused", 40), ("used", 20)):
        long_ago = time.time() - days * DAY
        os.utime(place / name, (long_ago, long_ago))
    told_in_a_new_process("queries_F32")
    assert {path.name for path in place.iterdir()} == {"used", "new", folder(tmp_path).name}


def test_loading_tells_that_a_folder_is_used(compiler: Compiler, tmp_path: Path) -> None:
    told_in_a_new_process("queries_F32")
    os.utime(folder(tmp_path), (0, 0))
    told_in_a_new_process("queries_F32")
    assert time.time() - folder(tmp_path).stat().st_mtime < DAY


def test_processes_that_compile_at_once_disturb_no_other(tmp_path: Path) -> None:
    program = (
        "from armillary.engine.library import library\n"
        "assert all(library().kernel(name).address for name in ('pick', 'add'))\n"
    )
    environment = {**os.environ, "ARMILLARY_CACHE": str(tmp_path)}
    both = [subprocess.Popen([sys.executable, "-c", program], env=environment) for _ in range(2)]
    assert [each.wait() for each in both] == [0, 0]
    kept = sorted(folder(tmp_path).iterdir())
    assert [path.name for path in kept] == ["add.o", "pick.o"]
    assert all(module._read(path) for path in kept)


def test_another_machine_has_code_of_its_own() -> None:
    here = host()
    others = [
        replace(here, cpu="other"),
        replace(here, features=here.features + ",+other"),
        replace(here, triple="aarch64-unknown-linux-gnu"),
    ]
    assert len({module._key(machine) for machine in (here, *others)}) == 4


def test_every_file_that_the_code_comes_from_is_part_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What kernels, formats and the compiler import of the engine is one of the files."""
    folder = Path(module.__file__).parent
    read: set[str] = set()

    class Reading(type(folder)):  # type: ignore[misc]
        def read_bytes(self) -> bytes:
            read.add(str(self.relative_to(folder)))
            return super().read_bytes()

    monkeypatch.setattr(module, "Path", Reading)
    module._key(host())
    program = (
        "import sys, armillary.engine.compiler, armillary.engine.kernels\n"
        "print(*(m.__file__ for n, m in sys.modules.items() if n.startswith('armillary.engine.')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    imported = {str(Path(path).relative_to(folder)) for path in done.stdout.split()}
    # The machine is part of the name by what was found.
    assert imported - {"machine.py"} <= read


def test_an_unknown_kernel_has_no_address() -> None:
    with pytest.raises(KeyError, match="no_such"):
        library().kernel("no_such")


def test_kept_code_needs_neither_numba_nor_torch() -> None:
    program = """
import sys
import numpy as np
from armillary.config import DecoderConfig
from armillary.checkpoints.parameters import parameter_shapes
from armillary.checkpoints.tensors import StoredTensor
from armillary.engine.decoder import EngineDecoder

config = DecoderConfig.uniform(
    vocab_size=61, d_model=40, n_layers=1, n_heads=6, n_kv_heads=2, d_head=10, max_positions=64
)
tensors = {
    name: StoredTensor(name, shape, "F32", np.ones(shape, "f4").reshape(-1).view("u1"), "")
    for name, shape in parameter_shapes(config).items()
}
decoder = EngineDecoder(config, tensors, threads=2)
assert decoder.take([decoder.new_cache()], [[1, 2, 3]])[0].shape == (1, 61)
print(*sorted({name.partition(".")[0] for name in sys.modules} & {"numba", "torch", "llvmlite"}))
"""
    for _ in range(2):  # the first may have to compile
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True
        )
    assert done.stdout.split() == ["llvmlite"]


def test_what_is_kept_is_checked_by_its_digest(compiler: Compiler, tmp_path: Path) -> None:
    told_in_a_new_process("queries_F32")
    content = (folder(tmp_path) / "queries_F32.o").read_bytes()
    assert content[:32] == hashlib.sha256(content[32:]).digest()
