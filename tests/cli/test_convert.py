"""`armillary convert`: one line of proof, or one line of why not, with nothing left."""

import json

import pytest

from armillary.checkpoints import open_checkpoint
from armillary.cli import main
from armillary.cli._converting import size_of
from armillary.errors import UserError
from support.tiny_model import tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("convert")
    tiny_model(directory / "parts").save(directory / "m")
    return directory / "m"


def test_a_model_goes_out_as_gguf_and_comes_back(model, tmp_path, capsys):
    assert main(["convert", str(model), str(tmp_path / "m.gguf"), "--to", "gguf"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{tmp_path / 'm.gguf'}: 21 F32; read back: frequencies within ")
    assert out.count("\n") == 1
    back = ["convert", str(tmp_path / "m.gguf"), str(tmp_path / "b"), "--to", "huggingface"]
    assert main([*back, "--shard-size", "20KB", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["format"] == "huggingface"
    assert facts["manifest"] == str(tmp_path / "b" / "manifest.json")
    assert facts["proof"]["positions"] == [0, 255, 256, 257]
    assert (tmp_path / "b" / "model.safetensors.index.json").is_file()
    assert open_checkpoint(tmp_path / "b").config == open_checkpoint(model).config


def test_refusals_are_one_line(model, tmp_path, capsys):
    for arguments, said in [
        (["m2", "--to", "huggingface", "--dtype", "q4_0"], "hold blocks"),
        (["m2", "--to", "gguf"], "ends in .gguf"),
        (["m2", "--to", "huggingface", "--shard-size", "lots"], "say it as 5GB or 500MB"),
    ]:
        name, *rest = arguments
        assert main(["convert", str(model), str(tmp_path / name), *rest]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith("armillary: ")
        assert said in captured.err
        assert captured.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_an_interruption_says_how_to_go_on(model, tmp_path, capsys, monkeypatch):
    from armillary.conversion import convert as module

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(module, "prove", interrupted)
        command = ["convert", str(model), str(tmp_path / "out"), "--to", "armillary"]
        assert main(command) == 130
    assert "the same command goes on from it" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert main(command) == 0


@pytest.mark.parametrize(
    ("text", "size"),
    [("5GB", 5 * 10**9), ("500 mb", 5 * 10**8), ("2GiB", 2 << 30), ("1.5kB", 1500), ("7B", 7)],
)
def test_sizes(text, size):
    assert size_of(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "0MB", "5 apples"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(UserError, match="is no size"):
        size_of(text)
