"""Models in a Hub repository, through huggingface_hub: its cache, its token, its resuming.

Only data at the top of the repository is fetched: safetensors with JSON, templates and tokenizer
files, or one GGUF file. Pickles and Python files are never asked for.
"""

import difflib
import glob
import threading
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from armillary.checkpoints.download import Progress
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
    from huggingface_hub.hf_api import RepoFile

    try:
        tree = HfApi().list_repo_tree(repository, revision=revision)
        sizes = {entry.path: entry.size for entry in tree if isinstance(entry, RepoFile)}
    except (RepositoryNotFoundError, RevisionNotFoundError):
        raise
    except Exception:
        return _locate_offline(repository, revision, file)
    wanted = _choose(repository, list(sizes), file)
    folder = snapshot_download(
        repository,
        revision=revision,
        allow_patterns=[glob.escape(name) for name in wanted],
        ignore_patterns=_BELOW_THE_TOP,
        tqdm_class=_counting_bar(repository, sum(sizes[name] for name in wanted), progress),
    )
    return _weights_in(Path(folder), repository, wanted[0] if len(wanted) == 1 else "")


def _locate_offline(repository: str, revision: str | None, file: str) -> Path:
    """Return what an earlier run has fetched; raises the client's error when that is not whole."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    def cached(*patterns: str) -> Path:
        folder = snapshot_download(
            repository,
            revision=revision,
            allow_patterns=list(patterns),
            ignore_patterns=_BELOW_THE_TOP,
            local_files_only=True,
        )
        return _weights_in(Path(folder), repository, file)

    if file:
        return cached(glob.escape(file))
    try:
        return cached(_SAFETENSORS, *_BESIDE_SAFETENSORS)
    except LocalEntryNotFoundError:
        return cached("*.gguf")


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


def _counting_bar(what: str, total: int, progress: Progress | None) -> type[Any]:
    """Return a class of bars that draw nothing and report the bytes that they count.

    The client keeps several bars over the same bytes (what came over the network, what is on the
    disk); the furthest one is reported.
    """
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

    lock = threading.Lock()
    furthest = 0

    class CountingBar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._counts_bytes = kwargs.get("unit") == "B"
            super().__init__(*args, **{**kwargs, "disable": True})  # type: ignore[no-untyped-call]

        def update(self, n: float | None = 1) -> None:
            nonlocal furthest
            if not self._counts_bytes or progress is None:
                return
            with lock:
                self.n += n or 0
                furthest = max(furthest, int(self.n))
                progress(what, min(furthest, total), total)

    return CountingBar


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
