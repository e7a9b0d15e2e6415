"""`armillary quantize`: the copy, what it costs, and refusals in one line with nothing left."""

import json

import numpy as np
import pytest

import armillary
from armillary.checkpoints import open_checkpoint
from armillary.checkpoints.tensors import encode
from armillary.cli import main
from armillary.evaluation import divergence
from armillary.language_model import LanguageModel
from support.evaluations import made_up_text, worded_model
from support.models import build

TARGETS = {
    "q8_0": "Q8_0",
    "q4_0": "Q4_0",
    "q4_1": "Q4_1",
    "bf16": "BF16",
    "q6_k": "Q8_0",  # rows of 64 are no super-blocks
}


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """A model whose rows are whole blocks, and ten texts that are long to it."""
    directory = tmp_path_factory.mktemp("quantised")
    small = worded_model(directory / "parts")
    layers = [
        each.model_copy(update={"feedforward": each.feedforward.model_copy(update={"d_ff": 64})})
        for each in small.config.layers
    ]
    wide = small.config.model_copy(update={"d_model": 64, "layers": tuple(layers)})
    decoder = build(wide, std=0.1).float()
    LanguageModel(decoder, small.tokenizer, {}, small.eos_ids).save(directory / "model")
    (directory / "texts").mkdir()
    for number in range(10):
        (directory / "texts" / f"{number}.txt").write_text(made_up_text(300, number))
    return directory


def arguments(here, out, *options, to="q8_0"):
    places = ["quantize", str(here / "model"), "--to", to, "--out", str(out)]
    return [*places, "--text", str(here / "texts"), "--length", "64", *options]


@pytest.mark.parametrize("name", ["small.gguf", "small"])
@pytest.mark.parametrize("target", TARGETS)
def test_the_copy_is_the_quantised_model_and_json_has_the_facts(
    here, tmp_path, capsys, target, name
):
    out = tmp_path / name
    assert main(arguments(here, out, "--windows", "10", "--json", to=target)) == 0
    (line,) = capsys.readouterr().out.splitlines()
    facts = json.loads(line)
    before, after = open_checkpoint(here / "model"), open_checkpoint(out, verify=True)
    query = "layers.0.attention.q.weight"
    assert after.tensors[query].encoding == TARGETS[target]
    np.testing.assert_array_equal(
        after.tensors[query].stored_rows(0, 60).reshape(-1),
        encode(before.tensors[query].to_float32(), TARGETS[target]),
    )
    assert armillary.load(out).generate("a", max_tokens=3, temperature=0).token_ids
    assert facts["format"] == ("gguf" if name == "small.gguf" else "armillary")
    assert (facts["type"], facts["out"]) == (target, str(out))
    assert facts["bytes_before"] == sum(tensor.nbytes for tensor in before.tensors.values())
    assert facts["bytes_after"] == sum(tensor.nbytes for tensor in after.tensors.values())
    assert sum(facts["tensors"].values()) == len(after.tensors)
    assert (facts["windows"], facts["text"]) == (10, [str(here / "texts")])
    windows = divergence.cut_windows(*text_of(here, before.tokenizer, 64), 10)
    found = divergence.measure(before, after, windows)
    assert facts["tokens"] == found.tokens
    assert facts["loss_rise"]["value"] == pytest.approx(found.rise.value)
    assert facts["kl"]["high"] == pytest.approx(found.kl.high)
    assert facts["same_top"]["value"] == pytest.approx(found.same_top.value)
    for part in ("before", "after"):
        perplexity, nats = facts[f"perplexity_{part}"], getattr(found, part)
        for key in ("value", "low", "high"):
            assert np.log(perplexity[key]) == pytest.approx(getattr(nats, key))
    assert [path.name for path in tmp_path.iterdir()] == [name]


def text_of(here, tokenizer, length):
    """Documents, what begins a text and the length, as the command reads them."""
    from armillary.evaluation.texts import read_documents

    begin = tokenizer.begin([])
    documents, _ = read_documents([str(here / "texts")], tokenizer, least=length - len(begin))
    return documents, begin, length


def test_a_person_reads_sizes_perplexities_and_intervals(here, tmp_path, capsys):
    assert main(arguments(here, tmp_path / "m.gguf", "--windows", "10", to="q4_0")) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[0] == str(tmp_path / "m.gguf")
    starts = ["tensors", "weights", "perplexity", "loss", "KL divergence", "same top token"]
    for line, start in zip(lines[1:], starts, strict=False):
        assert line.startswith(f"  {start} ")
    assert lines[2].count(" → ") == 1
    assert lines[3].count(" to ") == 2
    assert lines[-1].endswith("tokens of " + str(here / "texts") + " in 10 windows)")
    where = "layers.0.attention.out.weight and 1 more\n"
    assert f"rows that are no multiple of 32 are written as F16, in {where}" in err


def test_nothing_is_measured_where_nothing_is_asked(here, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(divergence, "measure", None)
    assert main(arguments(here, tmp_path / "m", "--windows", "0", "--json")) == 0
    facts = json.loads(capsys.readouterr().out)
    assert "kl" not in facts
    assert open_checkpoint(tmp_path / "m").format == "armillary"


def refused(capsys, command):
    capsys.readouterr()
    assert main(command) == 2
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("armillary:")]
    assert len(said) == 1
    return said[0]


@pytest.mark.parametrize("name", ["m.gguf", "m"])
def test_a_loss_that_rises_too_much_is_refused_and_leaves_what_was_there(
    here, tmp_path, capsys, name
):
    out = tmp_path / name
    windows = ["--windows", "10"]
    said = refused(capsys, arguments(here, out, *windows, "--max-loss", "1e-9", to="q4_0"))
    assert "not written, since in q4_0 the loss rises by +" in said
    assert "more than --max-loss 1e-09" in said
    assert list(tmp_path.iterdir()) == []
    assert main(arguments(here, out, *windows, "--max-loss", "9", to="q8_0")) == 0
    refused(capsys, arguments(here, out, *windows, "--max-loss", "1e-9", to="q4_0"))
    tensors = open_checkpoint(out, verify=True).tensors
    assert tensors["layers.0.attention.q.weight"].encoding == "Q8_0"
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_loss_that_is_no_number_is_too_much(here, tmp_path, capsys, monkeypatch):
    def without_number(*arguments, **options):
        found = measure(*arguments, **options)
        nan = float("nan")
        rise = type(found.rise)(nan, nan, nan, 3)
        return type(found)(**vars(found) | {"rise": rise})

    measure = divergence.measure
    monkeypatch.setattr(divergence, "measure", without_number)
    command = arguments(here, tmp_path / "m", "--windows", "2", "--max-loss", "5")
    assert "nan" in refused(capsys, command)


@pytest.mark.parametrize("name", ["m.gguf", "m"])
def test_an_interruption_while_it_is_measured_leaves_nothing(
    here, tmp_path, capsys, monkeypatch, name
):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(divergence, "measure", interrupted)
    assert main(arguments(here, tmp_path / name, "--windows", "2")) == 130
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_is_refused_before_anything_is_written(here, tmp_path, capsys):
    model = here / "model"
    itself = arguments(here, model, "--windows", "2")
    assert "is the model itself" in refused(capsys, itself)
    blind = arguments(here, tmp_path / "m", "--windows", "0", "--max-loss", "1")
    assert "--max-loss is a rise that is measured" in refused(capsys, blind)
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "letter.txt").write_text("dear")
    theirs = arguments(here, tmp_path / "theirs", "--windows", "2")
    assert "was not saved by armillary" in refused(capsys, theirs)
    absent = arguments(here, tmp_path / "absent" / "m.gguf", "--windows", "2")
    assert "cannot be written: No such file" in refused(capsys, absent)
    short = ["quantize", str(model), "--to", "q8_0", "--out", str(tmp_path / "m")]
    (tmp_path / "short.txt").write_text("word")
    assert "no document has" in refused(capsys, [*short, "--text", str(tmp_path / "short.txt")])
    assert "q5_0" in refused(capsys, [*short[:3], "q5_0", *short[4:]])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["short.txt", "theirs"]
