"""Models in a Hub repository, through huggingface_hub: its names, its cache, its token.

Only data at the top of the repository is fetched: safetensors with JSON, templates and tokenizer
files, or one GGUF file. Pickles and Python files are never asked for.
"""

import difflib
import glob
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from filelock import FileLock

from armillary.checkpoints.download import DownloadRefusedError, Progress, download
from armillary.errors import UserError

_SAFETENSORS = "*.safetensors"
_BESIDE_SAFETENSORS = ("*.json", "*.jinja", "*.model", "merges.txt")
_BELOW_THE_TOP = "*/*"  # a pattern's * matches slashes too


def locate_on_hub(name: str, progress: Progress | None = None) -> Path:
    """Return the snapshot directory, or its .gguf file, of `owner/name[/file.gguf][@revision]`.

    What the Hub's cache holds already is not fetched again, a file that has come in part is gone on
    with, and what is there complete is used when the Hub cannot be reached.
    Raises UserError when the repository, the revision or weights of a kind that we read are not
    there, may not be read, or cannot be fetched.
    """
    path, _, revision = name.partition("@")
    owner, repository, *file = path.split("/")
    try:
        return _locate(f"{owner}/{repository}", revision or None, "".join(file), progress)
    except UserError:
        raise
    except Exception as error:  # its own kinds, and its HTTP library's, which changes with versions
        raise UserError(_explain(error, f"{owner}/{repository}", revision)) from error


def _locate(repository: str, revision: str | None, file: str, progress: Progress | None) -> Path:
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    try:
        facts = HfApi().model_info(repository, revision=revision, files_metadata=True)
    except (RepositoryNotFoundError, RevisionNotFoundError):
        raise
    except Exception:
        cached = _find_cached(repository, revision, file)
        if cached is None:
            raise
        return cached
    entries = {entry.rfilename: entry for entry in facts.siblings or []}
    wanted = _choose(repository, [name for name in entries if "/" not in name], file)
    for name in wanted:
        stored_apart = entries[name].lfs  # so are all but small files, under their SHA-256
        if stored_apart is not None and facts.sha is not None:
            _fetch_blob(repository, name, facts.sha, stored_apart.sha256, progress)
    folder = snapshot_download(
        repository,
        revision=revision,
        allow_patterns=[glob.escape(name) for name in wanted],
        tqdm_class=_bars_that_draw_nothing(),
    )
    return _weights_in(Path(folder), repository, wanted[0] if len(wanted) == 1 else "")


def _fetch_blob(
    repository: str, name: str, commit: str, sha256: str, progress: Progress | None
) -> None:
    """Put a large file where the client's cache keeps it, so that the client only has to link it.

    The client itself throws away what has come of a file when it is interrupted, and does not
    compare checksums. Its cache is `models--OWNER--NAME/blobs/SHA256`, locked by `.locks/…`.
    """
    from huggingface_hub import constants, hf_hub_url
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    cache, folder = Path(constants.HF_HUB_CACHE), f"models--{repository.replace('/', '--')}"
    blob = cache / folder / "blobs" / sha256
    lock = cache / ".locks" / folder / f"{sha256}.lock"
    blob.parent.mkdir(parents=True, exist_ok=True)
    lock.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(lock):
        if blob.exists():
            return
        part = blob.with_name(f"{sha256}.part")
        url = hf_hub_url(repository, name, revision=commit)
        credentials = build_hf_headers().get("authorization")
        try:
            download(url, part, sha256, what=name, progress=progress, credentials=credentials)
        except DownloadRefusedError:
            return  # the client tries, and knows the Hub's ways to say why not
        part.replace(blob)


def _find_cached(repository: str, revision: str | None, file: str) -> Path | None:
    """Return what an earlier run has fetched completely, asking nobody."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    kinds = [[glob.escape(file)]] if file else [[_SAFETENSORS, *_BESIDE_SAFETENSORS], ["*.gguf"]]
    for patterns in kinds:
        try:
            folder = snapshot_download(
                repository,
                revision=revision,
                allow_patterns=patterns,
                ignore_patterns=_BELOW_THE_TOP,
                local_files_only=True,
            )
        except LocalEntryNotFoundError:
            continue
        return _weights_in(Path(folder), repository, file)
    return None


def _choose(repository: str, names: list[str], file: str) -> list[str]:
    """Return the names to fetch of those at the top of a repository."""
    if file:
        if file in names:
            return [file]
        near = difflib.get_close_matches(file, names, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UserError(f"{repository}: holds no {file}{hint}")
    safetensors = [name for name in names if fnmatch(name, _SAFETENSORS)]
    # Beside model*.safetensors some repositories hold the same weights once more in another naming.
    weights = [name for name in safetensors if name.startswith("model")] or safetensors
    if weights:
        beside = [n for n in names if any(fnmatch(n, pattern) for pattern in _BESIDE_SAFETENSORS)]
        return beside + weights
    ggufs = sorted(name for name in names if name.endswith(".gguf"))
    if len(ggufs) == 1:
        return ggufs
    raise UserError(_no_single_file(repository, ggufs))


def _weights_in(folder: Path, repository: str, file: str) -> Path:
    if file.endswith(".gguf"):
        return folder / file
    if any(folder.glob(_SAFETENSORS)):
        return folder
    ggufs = sorted(folder.glob("*.gguf"))
    if len(ggufs) == 1:
        return ggufs[0]
    raise UserError(_no_single_file(repository, [path.name for path in ggufs]))


def _no_single_file(repository: str, ggufs: list[str]) -> str:
    if not ggufs:
        return f"{repository}: holds neither safetensors nor GGUF weights; pickles are never read"
    return (
        f"{repository}: holds {len(ggufs)} GGUF files; name one of them, as in "
        f"{repository}/{ggufs[0]} ({', '.join(ggufs)})"
    )


def _bars_that_draw_nothing() -> type[Any]:
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

    class Hidden(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "disable": True})  # type: ignore[no-untyped-call]

    return Hidden


def _explain(error: Exception, repository: str, revision: str) -> str:
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return (
            f"{repository}: is gated; ask for access on its page, then log in (`hf auth login`, or "
            "set HF_TOKEN)"
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"{repository}: is neither a path here nor a repository on the Hub that may be read; "
            "check the name, or log in for a private one (`hf auth login`, or set HF_TOKEN)"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{repository}: has no revision {revision}; leave @{revision} off for its main one"
    if isinstance(error, errors.HFValidationError):
        return f"{repository}: is neither a path here nor the name of a Hub repository"
    reason = (str(error).splitlines() or [""])[0]
    return (
        f"{repository}: could not be fetched from the Hub ({type(error).__name__}: {reason}); what "
        "has come is kept, so run it again when the network is back"
    )
