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
from dataclasses import dataclass
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


class DownloadRefusedError(UserError):
    """The server does not give us the file, or we do not trust it; another client may do better."""


def download(
    url: str,
    part: Path,
    sha256: str,
    *,
    what: str,
    progress: Progress | None = None,
    credentials: str | None = None,
    pause: float = 1.0,
) -> None:
    """Bring `part` to be the whole file at `url`, going on from the bytes that it holds.

    A connection that breaks is taken up again after `pause` seconds (longer each time) for as long
    as tries bring bytes. A `part` that turns out not to be the file's beginning is fetched again
    from its start, once.
    `progress` is told of the bytes under the name `what`. `credentials` is an Authorization header
    for the server of the URL; one that it sends us on to does not get it.
    Raises DownloadRefusedError on an answer that another try would not change, UserError when the
    file does not come or is not the one with the checksum.
    """
    resumed = _size(part) > 0
    if resumed and sha256_of(part) == sha256:
        return
    source = _Source(url, credentials, partial(progress, what) if progress else None)
    _fetch(source, part, pause)
    if resumed and sha256_of(part) != sha256:
        part.unlink()
        _fetch(source, part, pause)
    if sha256_of(part) != sha256:
        part.unlink()
        raise UserError(f"{url}: what came does not have the checksum {sha256}; try again later")


@dataclass(frozen=True)
class _Source:
    url: str
    credentials: str | None
    tell: Callable[[int, int | None], None] | None

    def request(self, offset: int) -> urllib.request.Request:
        """Return the request for what follows `offset` bytes."""
        # Identity, since a range of a compressed answer would be a range of something else.
        headers = {"Accept-Encoding": "identity", "User-Agent": "armillary"}
        if offset:
            headers["Range"] = f"bytes={offset}-"
        request = urllib.request.Request(self.url, headers=headers)
        if self.credentials is not None:
            request.add_unredirected_header("Authorization", self.credentials)
        return request


def _fetch(source: _Source, part: Path, pause: float) -> None:
    fruitless = 0
    while True:
        before = _size(part)
        try:
            if _fetch_rest(source, part):
                return
            reason = "the connection ended early"
        except urllib.error.HTTPError as error:
            if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE and before:
                part.unlink()  # longer than the file: not the beginning of it
            elif error.code < http.HTTPStatus.INTERNAL_SERVER_ERROR:
                raise DownloadRefusedError(f"{source.url}: {error.code} {error.reason}") from error
            reason = f"{error.code} {error.reason}"
        except (OSError, http.client.HTTPException) as error:
            if getattr(error, "errno", None) in _NO_ROOM:
                raise UserError(f"{part}: cannot be written: {error}") from error
            cause = getattr(error, "reason", error)
            if isinstance(cause, ssl.SSLCertVerificationError):
                raise DownloadRefusedError(f"{source.url}: {cause.verify_message}") from error
            reason = str(cause) or type(cause).__name__
        fruitless = 0 if _size(part) > before else fruitless + 1
        if fruitless == FRUITLESS_TRIES:
            raise UserError(
                f"{source.url}: could not be fetched ({reason}); what has come is kept, so run it "
                "again when the network is back"
            )
        time.sleep(pause * (1 + fruitless))


def _fetch_rest(source: _Source, part: Path) -> bool:
    """Append what `part` lacks; return whether everything that the server promised has come."""
    have = _size(part)
    with urllib.request.urlopen(source.request(have), timeout=TIMEOUT_SECONDS) as answer:
        if answer.status != http.HTTPStatus.PARTIAL_CONTENT:
            have = 0  # the server sends the whole file
        length = answer.headers.get("Content-Length")
        total = None if length is None else have + int(length)
        # Unbuffered, so that a process that is killed has kept what it was given.
        with part.open("ab" if have else "wb", buffering=0) as file:
            while chunk := answer.read(_CHUNK):
                file.write(chunk)
                have += len(chunk)
                if source.tell is not None:
                    source.tell(have, total)
    return total is None or have == total


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
