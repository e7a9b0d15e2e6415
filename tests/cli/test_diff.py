import json

import pytest

from armillary.cli import main
from support.llama_files import (
    gguf_tensors,
    huggingface_tensors,
    write_gguf,
    write_huggingface_directory,
)
from support.tiny_model import tiny_model


@pytest.fixture(autouse=True)
def no_terminal(monkeypatch):
    for name in ("COLUMNS", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def diff(capsys):
    def run(*arguments: object) -> tuple[int, str, str]:
        code = main(["diff", *map(str, arguments)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def model(tmp_path):
    tiny_model(tmp_path / "tokenizer").save(tmp_path / "model")
    return tmp_path / "model"


def test_a_model_is_the_same_as_itself(diff, model):
    code, out, _ = diff(model, model, "--tokens", 9)
    assert code == 0
    assert out.splitlines()[0] == "the same up to rounding, in all 33 steps"
    assert "9 tokens in float32 and float32" in out


def test_another_type_parts_only_beyond_its_rounding(diff, model):
    assert diff(model, "--other-dtype", "float64")[0] == 0
    assert diff(model, "--other-dtype", "bfloat16")[0] == 0
    code, out, _ = diff(model, "--other-dtype", "bfloat16", "--tolerance", 1e-6)
    assert code == 1
    assert out.startswith("they part at embedding")


def test_the_first_step_is_named_in_text_and_json(diff, model, tmp_path):
    """A model of another seed parts at its embedding; the numbers stand in the table."""
    other = tiny_model(tmp_path / "tokenizer2")
    other.decoder.layers[1].attention.v.weight.data[3, 5] += 1.0
    other.save(tmp_path / "other")
    code, out, _ = diff(model, tmp_path / "other")
    assert code == 1
    assert out.startswith("they part at layer 1, v: ")
    code, out, _ = diff(model, tmp_path / "other", "--json")
    facts = json.loads(out)
    assert code == 1
    assert (facts["parts"]["layer"], facts["parts"]["step"]) == (1, "v")
    assert len(facts["steps"]) == 33
    assert facts["dtypes"] == ["float32", "float32"]


def test_without_a_tokenizer_it_says_what_is_missing(diff, tmp_path):
    one = write_huggingface_directory(tmp_path / "one")
    two = write_gguf(tmp_path / "two.gguf", gguf_tensors(huggingface_tensors()))
    code, out, err = diff(one, two)
    assert (code, out) == (2, "")
    assert "has no tokenizer" in err


def test_our_own_format_is_not_for_transformers(diff, model):
    code, out, err = diff(model, "--with", "transformers")
    assert (code, out) == (2, "")
    assert "convert it to huggingface" in err
