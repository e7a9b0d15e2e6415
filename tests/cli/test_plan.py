"""`armillary train --plan` as a person and as a program read it."""

import json
from pathlib import Path

import pytest
import torch
import yaml

from armillary.cli import main
from armillary.cli._plan import parse_bytes
from armillary.errors import UserError
from armillary.training.memory import ITEMS, MOMENTS
from support.runs import entries

SEVENTY = str(Path(__file__).parents[2] / "examples" / "llama-70b.yaml")


@pytest.fixture
def command(capsys):
    """Run `armillary train … --plan` and give its standard output."""

    def run(*arguments: object) -> str:
        code = main(["train", *map(str, arguments), "--plan"])
        captured = capsys.readouterr()
        assert (code, captured.err) == (0, "")
        return captured.out

    return run


@pytest.fixture
def tiny(tmp_path):
    """A run's file; its texts are not there, and need not be."""
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(entries(tmp_path)))
    return path


def test_seventy_billion_on_sixty_four_of_eighty_gigabytes(command):
    out = command(SEVENTY, "--ranks", 64, "--memory", "80GB")
    assert "processes 64 = shard 64\n70,553,706,496 parameters, products in bfloat16\n" in out
    assert "1,048,576 tokens a step, of a process 2 × 1 rows of 8,192" in out
    assert "599 GFLOP to train on a token" in out
    rows = {line.split("  ")[0]: line.split()[-4:] for line in out.splitlines() if line}
    assert rows["optimiser"] == ["8.82"] * 4
    assert "  inputs of layers                        21.47        21.47            –" in out
    total = [float(number) for number in rows["sum"]]
    assert max(total) == pytest.approx(65.9, abs=0.05)
    assert "\nfits: 65.9 GB of 80.0 GB, 14.1 GB are left\nnot counted: " in out


def test_what_does_not_fit_comes_with_what_would(command):
    out = command(SEVENTY, "--ranks", 64, "--memory", "60GB")
    assert "does not fit: 65.9 GB of 60.0 GB, 5.9 GB too much\n  --set parallel.tensor=2" in out
    setting, peak = out.split("too much\n  ")[1].split("\n")[0].split(" makes it ")
    again = command(SEVENTY, "--ranks", 64, "--memory", "60GB", *setting.split())
    assert f"fits: {peak} of 60.0 GB" in again
    assert "no setting makes it fit" in command(SEVENTY, "--ranks", 1, "--memory", "1GB")


def test_json_has_every_term(command, tiny):
    facts = json.loads(command(tiny, "--json", "--memory", "1MB"))
    assert (facts["ranks"], facts["parallel"]["shard"]) == (1, 1)
    assert facts["rows"] * facts["micro_batches"] == 8
    assert list(facts["items"]) == list(ITEMS)
    for moment in MOMENTS:
        items = facts["items"].values()
        assert facts["sum"][moment] == sum(item[moment] for item in items)
        assert all(item[moment] == sum(term[moment] for term in item["terms"]) for item in items)
    assert facts["peak"] == max(facts["sum"].values()) == facts["sum"][facts["moment"]]
    assert facts["fits"] is (facts["peak"] <= 1_000_000)
    for change in facts["changes"]:
        assert change["peak"] <= 1_000_000


def test_without_sizes_it_is_about_this_machine(command, tiny, monkeypatch):
    monkeypatch.setattr("armillary.cli._plan._memory_here", lambda config: 3_000_000_000)
    facts = json.loads(command(tiny, "--json", "--set", "train.precision=auto"))
    assert facts["memory"] == 3_000_000_000
    built = torch.cpu.get_capabilities()
    narrow = any(built.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))
    assert facts["precision"] == ("bfloat16" if narrow else "float32")
    there = command(tiny, "--json", "--memory", "1GB", "--set", "train.precision=auto")
    assert json.loads(there)["precision"] == "bfloat16"
    assert json.loads(command(tiny, "--json", "--set", "parallel.shard=4"))["ranks"] == 4


def test_nothing_is_prepared_or_written(command, tiny):
    command(tiny, "--memory", "1GB")
    assert [path.name for path in tiny.parent.iterdir()] == ["run.yaml"]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--plan", "--memory", "80"], "--memory 80: must be a number and its unit"),
        (["--plan", "--ranks", "3"], "8 rows a step do not divide by the 6 taken at once"),
        (["--plan", "--set", "parallel.tensor=4"], "has n_heads 6, which"),
        (["--plan", "--set", "train.device=nonsense"], "say --memory 80GB"),
        (["--ranks", "8"], "add --plan"),
        (["--memory", "80GB"], "add --plan"),
    ],
)
def test_what_cannot_be_planned_is_said_in_one_line(arguments, error, tiny, capsys):
    assert main(["train", str(tiny), *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert error in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("80GB", 80 * 10**9),
        ("80 GiB", 80 * 2**30),
        ("1.5tb", 1_500_000_000_000),
        ("512MB", 512_000_000),
        ("4kib", 4096),
    ],
)
def test_sizes_are_read(text, count):
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "80", "GB", "-1GB", "0GB", "8 0GB", "1e3GB", "80GBB", "1PB"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(UserError, match=r"must be a number and its unit"):
        parse_bytes(text)
