"""One file over HTTP, resumable: what has come is kept and only the rest is asked for.

Knows nothing of models or indexes. The checksum is the judge: the pieces that several runs fetched
are one file when they have it.
"""

import errno
import http
import http.client
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from functools import partial
from pathlib import Path

from armillary.errors import UserError
from armillary.files import sha256 as sha256_of

# Called with what is being fetched, the bytes that are here, and how many there will be (None
# while that is not known).
Progress = Callable[[str, int, int | None], None]

TIMEOUT_SECONDS = 30.0
FRUITLESS_TRIES = 4
_CHUNK = 1 << 18
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_Tell = Callable[[int, int | None], None]


class DownloadRefusedError(UserError):
    """The server does not give us the file, or we do not trust it; another client may do better."""


def download(
    url: str,
    part: Path,
    sha256: str,
    *,
    what: str,
    progress: Progress | None = None,
    pause: float = 1.0,
) -> None:
    """Bring `part` to be the whole file at `url`, going on from the bytes that it holds.

    A connection that breaks is taken up again after `pause` seconds (longer each time) for as long
    as tries bring bytes. A `part` that turns out not to be the file's beginning is fetched again
    from its start, once.
    `progress` is told of the bytes under the name `what`.
    Raises DownloadRefusedError on an answer that another try would not change, UserError when the
    file does not come or is not the one with the checksum.
    """
    resumed = _size(part) > 0
    if resumed and sha256_of(part) == sha256:
        return
    _fetch(url, part, partial(progress, what) if progress else None, pause)
    if sha256_of(part) == sha256:
        return
    part.unlink()
    if not resumed:
        raise UserError(f"{url}: what came does not have the checksum {sha256}; try again later")
    download(url, part, sha256, what=what, progress=progress, pause=pause)


def _fetch(url: str, part: Path, tell: _Tell | None, pause: float) -> None:
    fruitless = 0
    while True:
        before = _size(part)
        try:
            if _fetch_rest(url, part, tell):
                return
            reason = "the connection ended early"
        except urllib.error.HTTPError as error:
            if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE and before:
                part.unlink()  # longer than the file: not the beginning of it
            elif error.code < http.HTTPStatus.INTERNAL_SERVER_ERROR:
                raise DownloadRefusedError(f"{url}: {error.code} {error.reason}") from error
            reason = f"{error.code} {error.reason}"
        except (OSError, http.client.HTTPException) as error:
            if getattr(error, "errno", None) in _NO_ROOM:
                raise UserError(f"{part}: cannot be written: {error}") from error
            cause = getattr(error, "reason", error)
            if isinstance(cause, ssl.SSLCertVerificationError):
                raise DownloadRefusedError(f"{url}: {cause.verify_message}") from error
            reason = str(cause) or type(cause).__name__
        fruitless = 0 if _size(part) > before else fruitless + 1
        if fruitless == FRUITLESS_TRIES:
            raise UserError(
                f"{url}: could not be fetched ({reason}); what has come is kept, so run it again "
                "when the network is back"
            )
        time.sleep(pause * (1 + fruitless))


def _fetch_rest(url: str, part: Path, tell: _Tell | None) -> bool:
    """Append what `part` lacks; return whether everything that the server promised has come."""
    have = _size(part)
    # Identity, since a range of a compressed answer would be a range of something else.
    headers = {"Accept-Encoding": "identity", "User-Agent": "armillary"}
    if have:
        headers["Range"] = f"bytes={have}-"
    request = urllib.request.Request(url, headers=headers)
    with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as answer:
        if answer.status != http.HTTPStatus.PARTIAL_CONTENT:
            have = 0  # the server sends the whole file
        length = answer.headers.get("Content-Length")
        total = None if length is None else have + int(length)
        # Unbuffered, so that a process that is killed has kept what it was given.
        with part.open("ab" if have else "wb", buffering=0) as file:
            while chunk := answer.read(_CHUNK):
                file.write(chunk)
                have += len(chunk)
                if tell is not None:
                    tell(have, total)
    return total is None or have == total


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
