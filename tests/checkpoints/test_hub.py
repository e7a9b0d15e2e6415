"""A repository of a Hub comes here: the files that are wanted, and no others, resumed and checked.

The Hub is a server on this machine, set as HF_ENDPOINT, and each fetch is a real `armillary pull`.
"""

import json
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from armillary.checkpoints.hub import _choose
from armillary.errors import UserError
from support.hub_server import (
    file_path,
    hub_settings,
    refuse_repository,
    serve_repository,
)
from support.web_server import WebServer, web_server

LARGE = random.Random(3).randbytes(900_001)
SAFETENSORS = {
    "config.json": b"{}",
    "tokenizer.json": b"{ }",
    "chat_template.jinja": b"{{ messages }}",
    "model.safetensors": b"weights",
    "consolidated.safetensors": b"the same once more",
    "pytorch_model.bin": b"a pickle",
    "original/consolidated.00.pth": b"a pickle",
    "onnx/model.safetensors": b"elsewhere",
    "modeling_name.py": b"raise SystemExit",
    "README.md": b"words",
}
WANTED = ["chat_template.jinja", "config.json", "model.safetensors", "tokenizer.json"]


@pytest.fixture
def web() -> Iterator[WebServer]:
    with web_server() as server:
        yield server


def start(web: WebServer, home: Path, name: str, **settings: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "armillary", "pull", name, "--json"],
        env=os.environ | hub_settings(web, home) | settings,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def pull(web: WebServer, home: Path, name: str, **settings: str) -> Path:
    process = start(web, home, name, **settings)
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    return Path(json.loads(output)["path"])


def fail(web: WebServer, home: Path, name: str, **settings: str) -> str:
    process = start(web, home, name, **settings)
    output, errors = process.communicate()
    assert (process.returncode, output) == (2, "")
    told, _, message = errors.rpartition("armillary: ")
    assert message.count("\n") == 1, errors
    assert "Traceback" not in told
    return message


def names_in(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


def test_only_data_at_the_top_is_fetched_and_works_offline_afterwards(web, tmp_path):
    serve_repository(web, "owner/name", SAFETENSORS)
    folder = pull(web, tmp_path, "owner/name")
    assert names_in(folder) == WANTED
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    fetched = [request.path for request in web.requests if "/resolve/" in request.path]
    assert {path.rpartition("/")[2] for path in fetched} == set(WANTED)

    before = len(fetched)
    assert pull(web, tmp_path, "owner/name") == folder
    assert len([r for r in web.requests if "/resolve/" in r.path]) == before
    assert pull(web, tmp_path, "owner/name", HF_HUB_OFFLINE="1") == folder


def test_the_only_gguf_file_is_meant_and_works_offline_afterwards(web, tmp_path):
    serve_repository(web, "owner/name", {"one.gguf": b"GGUF", "README.md": b"", "config.json": b""})
    path = pull(web, tmp_path, "owner/name")
    assert path.name == "one.gguf"
    assert path.read_bytes() == b"GGUF"
    assert pull(web, tmp_path, "owner/name", HF_HUB_OFFLINE="1") == path


def test_one_of_several_gguf_files_is_named_and_at_a_revision(web, tmp_path):
    files = {"a.gguf": b"A", "b.gguf": b"B", "model.safetensors": b"S"}
    serve_repository(web, "owner/name", files, revisions=("v2",))
    path = pull(web, tmp_path, "owner/name/b.gguf@v2")
    assert path.read_bytes() == b"B"
    assert names_in(path.parent) == ["b.gguf"]
    settings = {"HF_HUB_OFFLINE": "1"}
    assert pull(web, tmp_path, "owner/name/b.gguf@v2", **settings) == path


def test_a_pull_that_was_killed_goes_on_when_run_again(web, tmp_path):
    serve_repository(web, "owner/name", SAFETENSORS | {"model.safetensors": LARGE})
    large = file_path("owner/name", "model.safetensors")
    web.hold[large] = 400_000

    def kept() -> int:
        return sum(part.stat().st_size for part in tmp_path.rglob("*.part"))

    first = start(web, tmp_path, "owner/name")
    try:
        for _ in range(3000):
            if kept() > 0:
                break
            time.sleep(0.01)
        else:
            pytest.fail("the other process never came so far")
    finally:
        first.kill()
        first.communicate()
    there = kept()
    web.release.set()
    folder = pull(web, tmp_path, "owner/name")
    assert (folder / "model.safetensors").read_bytes() == LARGE
    assert [request.range for request in web.asked(large)] == [None, f"bytes={there}-"]
    assert kept() == 0


def test_a_connection_that_breaks_is_taken_up_again(web, tmp_path):
    serve_repository(web, "owner/name", SAFETENSORS | {"model.safetensors": LARGE})
    large = file_path("owner/name", "model.safetensors")
    web.cut[large] = 400_000
    process = start(web, tmp_path, "owner/name")
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    assert (Path(json.loads(output)["path"]) / "model.safetensors").read_bytes() == LARGE
    assert [request.range for request in web.asked(large)] == [None, "bytes=400000-"]
    assert "model.safetensors: 900.0 kB of 900.0 kB" in errors


def test_a_file_that_came_damaged_is_not_kept(web, tmp_path):
    serve_repository(web, "owner/name", SAFETENSORS)
    web.answers[file_path("owner/name", "model.safetensors")].body = b"WEIGHTS"
    assert "does not have the checksum" in fail(web, tmp_path, "owner/name")
    web.answers[file_path("owner/name", "model.safetensors")].body = b"weights"
    folder = pull(web, tmp_path, "owner/name")
    assert (folder / "model.safetensors").read_bytes() == b"weights"


@pytest.mark.parametrize(
    ("status", "code", "message"),
    [
        (401, "RepoNotFound", "owner/name: is neither a path here nor a repository on the Hub"),
        (403, "GatedRepo", "owner/name: is gated; ask for access"),
        (404, "RevisionNotFound", "owner/name: has no revision v9; leave @v9 off"),
        (500, "", "owner/name: could not be fetched from the Hub .*500"),
    ],
)
def test_a_refusal_says_what_was_asked_for_and_what_helps(web, tmp_path, status, code, message):
    refuse_repository(web, "owner/name", status, code, revision="v9")
    assert re.search(message, fail(web, tmp_path, "owner/name@v9"))


def test_a_hub_that_is_not_there_is_said_in_one_line(tmp_path):
    with web_server() as gone:
        pass
    assert "refused" in fail(gone, tmp_path, "owner/name")


def test_a_name_that_no_repository_can_have_is_said_in_one_line(web, tmp_path):
    assert "neither a path here nor" in fail(web, tmp_path, "own..er/na--me")
    assert web.requests == []


@pytest.mark.parametrize(
    ("names", "file", "message"),
    [
        (["a.gguf", "b.gguf"], "", "holds 2 GGUF files; name one of them, as in o/n/a.gguf"),
        (["pytorch_model.bin"], "", "neither safetensors nor GGUF"),
        (["model-q4.gguf"], "model-q5.gguf", "holds no model-q5.gguf; did you mean model-q4.gguf"),
    ],
)
def test_a_repository_without_one_clear_choice_is_an_error(names, file, message):
    with pytest.raises(UserError, match=message):
        _choose("o/n", names, file)


def test_sharded_weights_come_with_their_index_and_other_namings_stay():
    shards = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    names = ["model.safetensors.index.json", *shards, "consolidated.safetensors", "a.gguf"]
    assert _choose("o/n", names, "") == names[:3]
    assert _choose("o/n", ["config.json", "consolidated.safetensors"], "") == [
        "config.json",
        "consolidated.safetensors",
    ]
