import json

import pytest

from armillary.cli import main
from support import faults
from support.llama_files import write_huggingface_directory
from support.tiny_model import tiny_model


@pytest.fixture(autouse=True)
def no_terminal(monkeypatch):
    for name in ("COLUMNS", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def doctor(capsys):
    """Run the command and give its exit code, standard output and standard error."""

    def run(*arguments: object) -> tuple[int, str, str]:
        code = main(["doctor", *map(str, arguments)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_a_healthy_model_is_told_in_the_first_line_with_code_0(doctor, tmp_path):
    """Files without a tokenizer: what can be read off them is sound, and no text is tried."""
    code, out, _ = doctor(write_huggingface_directory(tmp_path / "model"))
    assert code == 0
    assert out.splitlines()[0] == "healthy"
    assert "looked at" in out
    assert "there is no tokenizer" in out


def test_a_truncated_file_is_a_finding_with_code_1(doctor, tmp_path):
    target = write_huggingface_directory(tmp_path / "model")
    file = target / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    code, out, _ = doctor(target)
    assert code == 1
    assert out.startswith("the file is truncated: ")


@pytest.mark.parametrize("arguments", [["no-such-model"], ["."]])
def test_what_is_no_model_is_an_error_with_code_2(doctor, tmp_path, monkeypatch, arguments):
    monkeypatch.chdir(tmp_path)
    code, out, err = doctor(*arguments)
    assert code == 2
    assert out == ""
    assert len(err.strip().splitlines()[-1]) > 0
    assert "Traceback" not in err


def test_findings_are_told_with_measurement_remedy_and_patch(doctor, tmp_path):
    """An untrained model, whose text is as dear as by guessing."""
    tiny_model(tmp_path / "tokenizer").save(tmp_path / "model")
    code, out, _ = doctor(tmp_path / "model")
    assert code == 1
    first = out.splitlines()[0]
    assert "as dear as by guessing" in first
    assert "   measured: " in out
    assert "   remedy: " in out


def test_json_has_the_same_facts_in_one_object(doctor, tmp_path):
    tiny_model(tmp_path / "tokenizer").save(tmp_path / "model")
    code, out, _ = doctor(tmp_path / "model", "--json")
    facts = json.loads(out)
    assert code == 1
    assert facts["healthy"] is False
    assert facts["findings"][0]["code"] == "implausible"
    assert facts["diagnosis"].startswith(facts["findings"][0]["fault"])
    assert {check["name"] for check in facts["checks"]} >= {"file", "numbers", "text"}
    assert facts["loss"] > 0.9 * facts["chance"]


def test_a_text_of_ones_own_is_tried_and_a_short_one_refused(doctor, tmp_path):
    tiny_model(tmp_path / "tokenizer").save(tmp_path / "model")
    own = tmp_path / "text.txt"
    own.write_text("abcdefghij" * 30)
    assert doctor(tmp_path / "model", "--text", own)[0] == 1
    own.write_text("abc")
    code, _, err = doctor(tmp_path / "model", "--text", own)
    assert code == 2
    assert "3 tokens" in err
    code, _, err = doctor(tmp_path / "model", "--text", tmp_path / "none.txt")
    assert code == 2
    assert "none.txt" in err


def test_an_unknown_key_is_a_finding_that_the_option_passes_over(doctor, tmp_path):
    """Every key is read or told (cases.md 24, 30)."""
    target = write_huggingface_directory(tmp_path / "model")
    faults.changed_json(target / "config.json", lambda entries: entries.update(rope_thata=5e5))
    code, out, _ = doctor(target)
    assert code == 1
    assert "rope_thata" in out.splitlines()[0]
    assert doctor(target, "--ignore-key", "rope_thata")[0] == 0
