"""`armillary generate` on a tiny saved model: what it prints, and every refusal in one line."""

import io
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from armillary.cli import main
from armillary.config import FeedForwardConfig
from armillary.engine import coverage
from armillary.engine.coverage import COMPUTED
from armillary.errors import UserError
from armillary.generation.decode import TokenEvent
from armillary.language_model import LanguageModel, load
from armillary.tokenizer import Tokenizer
from support.tiny_model import tiny_model

pytestmark = pytest.mark.usefixtures("kernels")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("models")
    tiny_model(directory / "tokenizer").save(directory / "tiny")
    return str(directory / "tiny")


@pytest.fixture(scope="module")
def lm(model: str) -> LanguageModel:
    return load(model)


@pytest.mark.parametrize("engine", ["auto", "torch", "numba"])
def test_the_completion_alone_goes_to_standard_output(
    engine: str, model: str, lm: LanguageModel, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--engine", engine, "--max-tokens", "9", "--temperature", "0"]
    assert main(["generate", model, "Hello", *options]) == 0
    out, err = capsys.readouterr()
    assert out == lm.generate("Hello", max_tokens=9, temperature=0).text + "\n"
    assert err == ""


@pytest.mark.parametrize("engine", ["torch", "numba"])
@pytest.mark.parametrize("how", ["--speculate", "--draft"])
def test_guesses_leave_the_text_as_it_is(
    how: str, engine: str, model: str, lm: LanguageModel, capsys: pytest.CaptureFixture[str]
) -> None:
    guesses = [how, model] if how == "--draft" else [how]
    options = ["--engine", engine, "--max-tokens", "30", "--seed", "4", "--dtype", "float32"]
    assert main(["generate", model, "ab ab ab ab", *options, *guesses]) == 0
    expected = lm.generate("ab ab ab ab", max_tokens=30, seed=4).text
    assert capsys.readouterr().out == expected + "\n"


def test_a_draft_with_other_tokens_is_refused(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tiny_model(tmp_path / "tokenizer")
    other.tokenizer = Renamed(other.tokenizer)
    lm = load(model)
    with pytest.raises(UserError, match="another vocabulary"):
        lm.generate("Hello", draft=other)


class Renamed:
    """A tokenizer one of whose tokens stands for something else."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self.vocab_size = tokenizer, tokenizer.vocab_size

    def token_bytes(self, token_id: int) -> bytes:
        return b"?" if token_id == 7 else self._tokenizer.token_bytes(token_id)


@pytest.mark.parametrize(
    ("options", "engine"),
    [
        (["--device", "cpu"], "numba"),
        (["--device", "cpu", "--engine", "torch"], "torch"),
        (["--device", "cpu", "--dtype", "float64"], "torch"),
        (["--engine", "numba", "--dtype", "bfloat16"], "numba"),
    ],
)
def test_a_terminal_is_told_which_engine_computed(
    options: list[str],
    engine: str,
    model: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    greedy = ["--max-tokens", "2", "--temperature", "0"]
    assert main(["generate", model, "Hello", *greedy, *options]) == 0
    assert f"ended by length; {engine} engine" in capsys.readouterr().err


def test_a_part_without_a_kernel_is_computed_with_torch_or_refused(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    known = {**COMPUTED[FeedForwardConfig], "kind": ("mlp",)}
    monkeypatch.setattr(coverage, "COMPUTED", {**COMPUTED, FeedForwardConfig: known})
    what = "layers 0-1: feedforward.kind glu has no kernel in the numba engine"
    options = ["generate", model, "Hello", "--max-tokens", "3", "--device", "cpu"]
    greedy = ["--temperature", "0"]
    assert main([*options, *greedy, "--engine", "torch"]) == 0
    by_torch = capsys.readouterr().out
    assert main([*options, *greedy]) == 0
    output = capsys.readouterr()
    assert output.out == by_torch
    assert output.err == f"note: {what}; torch computes instead\n"
    assert main([*options, "--engine", "numba"]) == 2
    assert capsys.readouterr().err == f"armillary: {what}; take --engine torch\n"


@pytest.mark.parametrize("options", [[], ["--engine", "numba", "--chat", "--json"]])
def test_a_prompt_is_continued_without_torch(model: str, options: list[str]) -> None:
    program = "import sys; from armillary.cli import main; main(sys.argv[1:]); print(*sys.modules)"
    command = ["generate", model, "Hello", "--device", "cpu", "--max-tokens", "2", *options]
    done = subprocess.run(
        [sys.executable, "-c", program, *command], capture_output=True, text=True, check=True
    )
    modules = done.stdout.splitlines()[-1].split()
    assert "armillary.engine.decoder" in modules
    assert "torch" not in modules
    assert done.stderr == ""


def test_a_long_prompt_is_computed_once_unless_that_is_not_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ARMILLARY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    tiny_model(tmp_path / "tokenizer", max_positions=1024).save(tmp_path / "tiny")
    (tmp_path / "long.txt").write_text("All work and no play. " * 20)
    model, file = str(tmp_path / "tiny"), str(tmp_path / "long.txt")
    options = ["--max-tokens", "5", "--temperature", "0", "--engine", "numba"]
    texts = []
    for how, said in [
        (["--no-prompt-cache"], "440 prompt tokens, first token"),
        (["--prompt-cache"], "440 prompt tokens, first token"),
        (["--prompt-cache"], "440 prompt tokens (439 of them known), first token"),
        (["--no-prompt-cache"], "440 prompt tokens, first token"),
    ]:
        assert main(["generate", model, "-f", file, *options, *how]) == 0
        out, err = capsys.readouterr()
        assert said in err
        texts.append(out)
    assert len(set(texts)) == 1
    monkeypatch.setenv("ARMILLARY_PROMPT_CACHE", "1")
    assert main(["generate", model, "-f", file, *options]) == 0
    assert "439 of them known" in capsys.readouterr().err


def test_json_has_the_facts_of_each_prompt(
    model: str, lm: LanguageModel, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--json", "--logprobs", "2", "--max-tokens", "5", "--seed", "3"]
    assert main(["generate", model, "Hello", "Good evening", *options]) == 0
    objects = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    expected = [
        lm.generate(text, max_tokens=5, seed=3, logprobs=2) for text in ("Hello", "Good evening")
    ]
    assert [one["prompt"] for one in objects] == ["Hello", "Good evening"]
    for found, wanted in zip(objects, expected, strict=True):
        assert found["text"] == wanted.text
        assert found["token_ids"] == list(wanted.token_ids)
        assert found["finish_reason"] == wanted.finish_reason
        assert found["prompt_tokens"] == wanted.prompt_tokens
        assert [entry["token"] for entry in found["logprobs"]] == list(wanted.token_ids)
        assert all(len(entry["top"]) == 2 for entry in found["logprobs"])


def test_prompts_come_from_a_file_and_from_standard_input(
    model: str,
    lm: LanguageModel,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "prompt.txt").write_text("Grüße", encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("früh".encode())))
    arguments = ["--prompt-file", str(tmp_path / "prompt.txt"), "--json", "--temperature", "0"]
    assert main(["generate", model, "-", *arguments, "--max-tokens", "4"]) == 0
    texts = [json.loads(line)["text"] for line in capsys.readouterr().out.splitlines()]
    assert texts == [lm.generate(p, max_tokens=4, temperature=0).text for p in ("früh", "Grüße")]


def test_chat_puts_the_prompt_through_the_template(
    model: str, lm: LanguageModel, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--chat", "--system", "Be brief.", "--temperature", "0", "--max-tokens", "6"]
    assert main(["generate", model, "Why?", *arguments]) == 0
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
    expected = lm.chat(messages, temperature=0, max_tokens=6).text
    assert capsys.readouterr().out == expected + "\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([""], "the prompt is empty"),
        ([], "no prompt"),
        (["x", "--temperature", "-1"], "temperature"),
        (["x", "--temperature", "nan"], "temperature"),
        (["x", "--top-p", "1.5"], "top_p"),
        (["x", "--top-p", "0"], "top_p"),
        (["x", "--top-k", "-3"], "top_k"),
        (["x", "--min-p", "2"], "min_p"),
        (["x", "--repetition-penalty", "0"], "repetition_penalty"),
        (["x", "--max-tokens", "0"], "max_tokens"),
        (["x", "--seed", "-1"], "seed"),
        (["x", "--stop", ""], "stop"),
        (["x", "--logprobs", "3"], "--json"),
        (["x", "--logprobs", "99", "--json"], "logprobs"),
        (["x", "--system", "y"], "--chat"),
        (["x", "y", "--speculate"], "for one prompt"),
        (["x", "--dtype", "float8"], "float8"),
        (["x", "--device", "abacus"], "abacus"),
        (["x", "--engine", "llama"], "llama"),
        (["x", "--engine", "numba", "--dtype", "float16"], "--engine torch"),
        (["x", "--engine", "numba", "--device", "cuda"], "--engine torch"),
        (["x", "--engine", "torch", "--cache-type", "int8"], "--engine numba"),
        (["x", "--cache-type", "q8_0"], "float32, bfloat16, int8"),
        (["x" * 300], "window of 256"),
        (["x" * 200, "--max-tokens", "100"], "room for 56"),
        (["\udcff\udcfe"], "Unicode"),
        (["x", "--prompt-file", "/does/not/exist"], "/does/not/exist"),
    ],
)
def test_bad_input_gets_one_line_and_code_2(
    model: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", model, *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("armillary: ")
    assert message in err
    assert err.count("\n") == 1
    assert "Traceback" not in err


def test_a_file_that_is_no_utf8_is_named_with_the_byte(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "latin1.txt").write_bytes("Grüße".encode("latin-1"))
    assert main(["generate", model, "-f", str(tmp_path / "latin1.txt")]) == 2
    assert "latin1.txt: byte 2 is no valid UTF-8" in capsys.readouterr().err


def test_a_model_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "smolm2-135m", "x"]) == 2
    assert "smollm2-135m" in capsys.readouterr().err


def test_nothing_is_written_when_the_first_token_cannot_be_had(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stream(*_: object, **__: object) -> Iterator[TokenEvent]:
        raise UserError("the logits are nan")
        yield

    monkeypatch.setattr(LanguageModel, "stream", stream)
    assert main(["generate", model, "Hello"]) == 2
    assert capsys.readouterr() == ("", "armillary: the logits are nan\n")


def test_a_notice_shows_no_control_characters_of_a_file(
    model: str,
    lm: LanguageModel,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def load(*_: object, notice: Callable[[str], None], **__: object) -> LanguageModel:
        notice("shard \x1b[31m\nx is not there")
        return lm

    monkeypatch.setattr("armillary.language_model.load", load)
    assert main(["generate", model, "Hello", "--max-tokens", "1"]) == 0
    assert capsys.readouterr().err == "note: shard \\x1b[31m x is not there\n"
