"""A Hub on this machine: the routes that huggingface_hub asks when it fetches a model."""

import hashlib
from pathlib import Path

from support.web_server import Answer, WebServer

LARGE = (".safetensors", ".gguf")  # these the Hub stores elsewhere, under their SHA-256
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def serve_repository(
    web: WebServer, repository: str, files: dict[str, bytes], revisions: tuple[str, ...] = ("main",)
) -> None:
    """Let `web` serve the files of a repository under its revisions and its commit."""
    tree = []
    siblings = []
    for path, body in files.items():
        entry: dict[str, object] = {"size": len(body)}
        if path.endswith(LARGE):
            digest = _sum(path, body)
            entry["lfs"] = {"oid": digest, "sha256": digest, "size": len(body), "pointerSize": 130}
        tree.append({"type": "file", "path": path, "oid": _sum(path, body), **entry})
        siblings.append({"rfilename": path, **entry})
    facts = {"id": repository, "sha": COMMIT, "siblings": siblings}
    web.json(f"/api/models/{repository}", facts)
    web.json(f"/api/models/{repository}/tree/{COMMIT}", tree)
    for revision in (*revisions, COMMIT):
        web.json(f"/api/models/{repository}/revision/{revision}", facts)
    for path, body in files.items():
        web.file(
            file_path(repository, path), body, ETag=f'"{_sum(path, body)}"', X_Repo_Commit=COMMIT
        )


def file_path(repository: str, path: str) -> str:
    return f"/{repository}/resolve/{COMMIT}/{path}"


def refuse_repository(
    web: WebServer, repository: str, status: int, code: str, revision: str
) -> None:
    """Let asking for a repository give an error as the Hub words it."""
    answer = Answer(b"{}", status, {"X-Error-Code": code, "X-Error-Message": code})
    web.answers[f"/api/models/{repository}/revision/{revision}"] = answer


def hub_settings(web: WebServer, home: Path) -> dict[str, str]:
    """Return the environment under which huggingface_hub knows this server alone."""
    return {
        "HF_ENDPOINT": web.url,
        "HF_HOME": str(home),
        "HF_TOKEN": "",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_OFFLINE": "0",
    }


def _sum(path: str, body: bytes) -> str:
    return (hashlib.sha256 if path.endswith(LARGE) else hashlib.sha1)(body).hexdigest()
