"""A file over HTTP comes whole, or says why not; a broken connection costs only what was lost."""

import hashlib
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from armillary.checkpoints.download import FRUITLESS_TRIES, DownloadRefusedError, download
from armillary.errors import UserError
from support.web_server import Answer, WebServer, web_server

BODY = random.Random(1).randbytes(700_001)  # several chunks, the last of them short
SUM = hashlib.sha256(BODY).hexdigest()


@pytest.fixture
def web() -> Iterator[WebServer]:
    with web_server() as server:
        server.file("/file", BODY)
        yield server


def fetch(web: WebServer, part: Path, sha256: str = SUM) -> list[tuple[str, int, int | None]]:
    told: list[tuple[str, int, int | None]] = []

    def tell(what: str, done: int, total: int | None) -> None:
        told.append((what, done, total))

    download(f"{web.url}/file", part, sha256, what="it", progress=tell, pause=0.0)
    return told


def ranges(web: WebServer) -> list[str | None]:
    return [request.range for request in web.asked("/file")]


def test_a_file_comes_whole_and_its_progress_is_told(web, tmp_path):
    told = fetch(web, tmp_path / "part")
    assert (tmp_path / "part").read_bytes() == BODY
    assert told[-1] == ("it", len(BODY), len(BODY))
    assert [done for _, done, _ in told] == sorted(done for _, done, _ in told)


def test_a_broken_connection_is_gone_on_with(web, tmp_path):
    web.cut["/file"] = 300_000
    fetch(web, tmp_path / "part")
    assert (tmp_path / "part").read_bytes() == BODY
    assert ranges(web) == [None, "bytes=300000-"]


def test_what_an_earlier_run_left_is_gone_on_with(web, tmp_path):
    (tmp_path / "part").write_bytes(BODY[:12_345])
    told = fetch(web, tmp_path / "part")
    assert (tmp_path / "part").read_bytes() == BODY
    assert ranges(web) == ["bytes=12345-"]
    assert told[-1] == ("it", len(BODY), len(BODY))


def test_a_whole_file_asks_nothing(web, tmp_path):
    (tmp_path / "part").write_bytes(BODY)
    fetch(web, tmp_path / "part")
    assert web.requests == []


def test_a_server_without_ranges_starts_over(web, tmp_path):
    web.answers["/file"].ranges = False
    (tmp_path / "part").write_bytes(BODY[:12_345])
    fetch(web, tmp_path / "part")
    assert (tmp_path / "part").read_bytes() == BODY
    assert len(web.requests) == 1, "the answer was to be used as it came"


def test_a_length_that_is_not_told_is_no_hindrance(web, tmp_path):
    web.answers["/file"].sized = False
    told = fetch(web, tmp_path / "part")
    assert (tmp_path / "part").read_bytes() == BODY
    assert told[-1] == ("it", len(BODY), None)


@pytest.mark.parametrize(
    "beginning",
    [bytes(5_000), BODY + b"more", bytes(len(BODY))],
    ids=["other bytes", "too long", "full length of other bytes"],
)
def test_a_part_that_is_not_the_files_beginning_is_fetched_again(web, tmp_path, beginning):
    (tmp_path / "part").write_bytes(beginning)
    fetch(web, tmp_path / "part")
    assert (tmp_path / "part").read_bytes() == BODY


def test_another_file_than_promised_is_refused_and_not_kept(web, tmp_path):
    with pytest.raises(UserError, match="checksum"):
        fetch(web, tmp_path / "part", sha256="0" * 64)
    assert not (tmp_path / "part").exists()


def test_an_answer_that_is_final_is_not_asked_for_again(web, tmp_path):
    web.answers["/file"] = Answer(b"no", 403)
    with pytest.raises(DownloadRefusedError, match="403"):
        fetch(web, tmp_path / "part")
    assert len(web.requests) == 1


def test_a_server_in_trouble_is_asked_again(web, tmp_path):
    troubles = [Answer(b"later", 503)] * (FRUITLESS_TRIES - 1)
    web.refuses = lambda request: troubles.pop() if troubles else None
    fetch(web, tmp_path / "part")
    assert (tmp_path / "part").read_bytes() == BODY


def test_tries_that_bring_nothing_come_to_an_end_and_keep_what_there_is(web, tmp_path):
    web.refuses = lambda request: Answer(b"later", 503)
    (tmp_path / "part").write_bytes(BODY[:100])
    with pytest.raises(UserError, match="503.*kept"):
        fetch(web, tmp_path / "part")
    assert len(web.requests) == FRUITLESS_TRIES
    assert (tmp_path / "part").read_bytes() == BODY[:100]


def test_a_server_that_is_not_there_is_named(tmp_path):
    with web_server() as server:
        url = server.url
    with pytest.raises(UserError, match="could not be fetched.*refused"):
        download(f"{url}/file", tmp_path / "part", SUM, what="it", pause=0.0)


def test_credentials_are_for_the_server_that_was_asked_alone(web, tmp_path):
    with web_server() as elsewhere:
        elsewhere.file("/stored", BODY)
        web.answers["/file"] = Answer(status=302, headers={"Location": f"{elsewhere.url}/stored"})
        url = f"{web.url}/file"
        (tmp_path / "part").write_bytes(BODY[:10])
        download(url, tmp_path / "part", SUM, what="it", credentials="Bearer secret", pause=0.0)
        assert (tmp_path / "part").read_bytes() == BODY
        assert [r.credentials for r in web.requests] == ["Bearer secret"]
        assert [(r.credentials, r.range) for r in elsewhere.requests] == [(None, "bytes=10-")]
