"""Compiled kernels are kept, checked when they are read, and made anew where they are not whole."""

import hashlib
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from armillary.checkpoints.locate import cache_directory
from armillary.engine import library as module
from armillary.engine.library import library
from armillary.engine.machine import host


class Compiler:
    """Stands for the compiler: gives what the real one gave before, and counts."""

    def __init__(self, made: bytes) -> None:
        self.made, self.count = made, 0

    def __call__(self, machine: object) -> bytes:
        assert machine == host()
        self.count += 1
        return self.made


@pytest.fixture(scope="module")
def real() -> bytes:
    """What the compiler gave, from where it is kept."""
    library()
    kept = module._read(kept_file(cache_directory()))
    return module._compiled(host()) if kept is None else kept


def kept_file(cache: Path) -> Path:
    return cache / "kernels" / f"{module._key(host())}.o"


@pytest.fixture
def compiler(real: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    """A machine on which nothing has been compiled yet."""
    monkeypatch.setenv("ARMILLARY_CACHE", str(tmp_path))
    compiler = Compiler(real)
    monkeypatch.setattr(module, "_compiled", compiler)
    monkeypatch.setattr(module, "_library", None)
    return compiler


def in_a_new_process(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Load as if for the first time; what was told."""
    monkeypatch.setattr(module, "_library", None)
    told: list[str] = []
    assert library(told.append).address("run")
    return told


def test_kernels_are_compiled_once_with_a_notice(
    compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = ["compiling the kernels for this machine, once; this takes some seconds"]
    assert in_a_new_process(monkeypatch) == told
    assert kept_file(tmp_path).is_file()
    for _ in range(2):
        assert in_a_new_process(monkeypatch) == []
    assert compiler.count == 1
    assert library() is library()


def test_a_file_that_is_not_whole_is_made_anew(
    compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut anywhere, or with a bit changed in its digest, head or code: it is never run."""
    in_a_new_process(monkeypatch)
    path = kept_file(tmp_path)
    whole = path.read_bytes()
    changed = [whole[:end] for end in (0, 1, 31, 32, 33, len(whole) // 2, len(whole) - 1)]
    for place in (0, 40, len(whole) // 2, len(whole) - 1):
        other = bytearray(whole)
        other[place] ^= 1
        changed.append(bytes(other))
    changed.append(whole + b"\0")
    for number, content in enumerate(changed, start=2):
        path.write_bytes(content)
        assert in_a_new_process(monkeypatch), len(content)
        assert compiler.count == number
        assert path.read_bytes() == whole


def test_where_nothing_can_be_kept_they_are_compiled_each_time(
    compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kernels").write_text("no folder")
    for number in (1, 2):
        assert in_a_new_process(monkeypatch)
        assert compiler.count == number
    assert (tmp_path / "kernels").read_text() == "no folder"


def test_a_folder_in_the_files_place_is_no_obstacle(
    compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept_file(tmp_path).mkdir(parents=True)
    assert in_a_new_process(monkeypatch)
    assert compiler.count == 1


def test_others_may_not_write_where_code_is_kept(
    compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_a_new_process(monkeypatch)
    assert kept_file(tmp_path).parent.stat().st_mode & 0o077 == 0


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
        library().address("no_such")


def test_kept_code_needs_neither_numba_nor_torch() -> None:
    library()
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
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["llvmlite"]


def test_what_is_kept_is_checked_by_its_digest(
    compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_a_new_process(monkeypatch)
    content = kept_file(tmp_path).read_bytes()
    assert content[:32] == hashlib.sha256(content[32:]).digest()
