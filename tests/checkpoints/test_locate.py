"""A name becomes a path here, or one line that says what was looked for and what would help."""

import os
from pathlib import Path

import pytest

from armillary.checkpoints import hub, packaged
from armillary.checkpoints.locate import cache_directory, locate
from armillary.errors import UserError
from support.tiny_package import MODEL, MODEL_BYTES


def test_a_directory_and_a_gguf_file_are_themselves(tmp_path, monkeypatch):
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    assert locate(tmp_path) == tmp_path
    assert locate(str(tmp_path / "m.gguf")) == tmp_path / "m.gguf"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert locate("~/m.gguf") == tmp_path / "m.gguf"


def test_what_a_file_holds_is_for_its_reader_to_say(tmp_path):
    (tmp_path / "weights.pth").touch()
    assert locate(tmp_path / "weights.pth") == tmp_path / "weights.pth"


def test_an_alias_is_looked_for_in_the_cache(tmp_path, monkeypatch):
    monkeypatch.setitem(packaged.ALIASES, "tiny", MODEL)
    monkeypatch.setenv("ARMILLARY_CACHE", str(tmp_path))
    cached = tmp_path / "models" / "tiny" / "tiny.gguf"
    cached.parent.mkdir(parents=True)
    cached.write_bytes(MODEL_BYTES)
    monkeypatch.chdir(tmp_path)
    assert locate("tiny") == cached


def test_what_lies_here_goes_before_an_alias_and_a_hub_id(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2-135m").mkdir()
    (tmp_path / "owner" / "name").mkdir(parents=True)
    assert locate("smollm2-135m") == Path("smollm2-135m")
    assert locate("owner/name") == Path("owner/name")


@pytest.mark.parametrize(
    "name", ["owner/name", "owner/name@v2", "owner/name@refs/pr/1", "owner/name/q8.gguf@v2"]
)
def test_a_hub_id_goes_to_the_hub(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hub, "locate_on_hub", lambda name, progress: Path("hub") / name)
    assert locate(name) == Path("hub") / name


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("smollm2-135", 'smollm2-135: no such alias.*did you mean "smollm2-135m"'),
        ("gpt", r"gpt: no such alias, directory or \.gguf file; the aliases are: smollm2-135m"),
        ("", "no model is named; give an alias"),
        ("./owner/name", r"\./owner/name: no such file or directory"),
        ("../name", r"\.\./name: no such file or directory"),
        ("/no/where", "/no/where: no such file or directory"),
        ("models/m.gguf", "models/m.gguf: no such file or directory"),
        ("here/sub/m.gguf", "here/sub/m.gguf: no such file or directory"),
        ("a/b/c", "a/b/c: no such file or directory"),
        ("owner//name", "owner//name: no such file or directory"),
        ("owner/", "owner/: no such file or directory"),
        ("m.gguf", "m.gguf: no such file or directory"),
        ("loop.gguf", r"loop\.gguf: is neither a directory nor a file that can be opened"),
        ("x" * 5000, "no such alias"),
        ("a\0b", "no such alias"),
    ],
)
def test_a_name_that_means_nothing_is_one_line_with_the_remedy(
    tmp_path, monkeypatch, name, message
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    (tmp_path / "loop.gguf").symlink_to("loop.gguf")
    monkeypatch.setattr(hub, "locate_on_hub", lambda *_: pytest.fail("the Hub was asked"))
    with pytest.raises(UserError, match=message) as caught:
        locate(name)
    assert "\n" not in str(caught.value)


def test_the_cache_is_where_the_user_keeps_caches(monkeypatch):
    monkeypatch.setenv("ARMILLARY_CACHE", "~/own")
    monkeypatch.setenv("XDG_CACHE_HOME", "/shared")
    assert cache_directory() == Path(os.path.expanduser("~/own"))
    monkeypatch.delenv("ARMILLARY_CACHE")
    assert cache_directory() == Path("/shared/armillary")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_directory() == Path.home() / ".cache" / "armillary"
