"""`armillary extend` prints what a plan says, and writes what apply was asked for."""

import json
import sys

import pytest
import yaml

from armillary import cli
from armillary.checkpoints import open_checkpoint
from armillary.rope_scaling import LongRoPE, YaRN
from support.adaptations import entries, prepare_directory
from support.llama_files import write_huggingface_directory
from support.models import config, layer


@pytest.fixture
def here(tmp_path, monkeypatch):
    for name in ("COLUMNS", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    write_huggingface_directory(tmp_path / "tiny")
    return tmp_path


@pytest.fixture
def run(capsys, here):
    def command(*arguments):
        code = cli.main(["extend", *map(str, arguments)])
        output, errors = capsys.readouterr()
        return code, output, errors

    return command


def rows(output, heading):
    """The cells of the table below a heading, row by row."""
    lines = output.split(f"{heading}\n", 1)[1].split("\n\n", 1)[0].splitlines()
    return [line.split() for line in lines if line.strip() and "─" not in line]


def test_a_plan_shows_pairs_rules_needs_and_advice(run):
    code, output, errors = run("plan", "tiny", "--to", 256)
    assert (code, errors) == (0, "")
    first, note, *_ = output.splitlines()
    assert first == "tiny: window 64 → 256"
    assert note == "note: there is no tokenizer.json; only token ids can be given"
    *_, one, two, three, four, five = rows(
        output, "channel pairs of layers 0–1, before and after yarn, factor 4"
    )
    pairs = [one, two, three, four, five]
    assert [row[0] for row in pairs] == ["0", "1", "2", "3", "4"]
    assert pairs[0][:5] == ["0", "6.283", "10.2", "6.283", "40.7"]
    # Without a rule the two slowest meet new angles, with it none does.
    assert [row[-2:] for row in pairs] == [["–", "–"]] * 3 + [["yes", "–"]] * 2
    _, _, *rules = rows(output, "rules")
    names = ["none", "linear", "ntk", "dynamic", "yarn", "llama3"]
    assert [row[0].rstrip(",") for row in rules] == names
    assert [row[-1] == "←" for row in rules] == [name == "yarn" for name in names]
    assert "\nnote: longrope: the rule longrope needs a divisor for each channel pair" in output
    assert "weights in float32" in output
    assert "fits into" in output
    assert "\nrecommended: yarn, factor 4\n2 of 5 channel pairs complete no turn" in output
    assert output.endswith("to beat: the same text cropped to its last 64 tokens\n")


def test_a_plan_of_one_rule_shows_that_one(run):
    code, output, _ = run("plan", "tiny", "--to", 256, "--rule", "ntk", "--factor", 8)
    assert code == 0
    *_, only = rows(output, "rules")
    assert only[:3] == ["ntk,", "factor", "8"]
    assert "factor 8 × 64 positions is 512, not the target 256" in output


def test_the_same_facts_come_as_json(run):
    code, output, _ = run("plan", "tiny", "--to", 256, "--json", "--dtype", "bfloat16")
    assert (code, output.count("\n")) == (0, 1)
    facts = json.loads(output)
    assert (facts["window"], facts["target"], facts["carries"]) == (64, 256, None)
    assert facts["recommended"] == {"rule": "yarn", "over": None}
    rules = {each["rule"]: each for each in facts["rules"]}
    assert rules["none"]["unseen_pairs"] == 2
    assert rules["yarn"]["settings"]["factor"] == 4.0
    (group,) = rules["linear"]["layers"]
    assert (group["layers"], group["d_rotary"], group["base"]) == ([0, 1], 10, 100.0)
    assert [pair["unseen"] for pair in group["pairs"]] == [False] * 5
    assert group["pairs"][0]["new_frequency"] == 0.25
    assert facts["needs"]["dtype"] == "bfloat16"
    assert facts["needs"]["fits"] is True
    assert facts["needs"]["seconds"] > 0
    assert facts["base_bounds"][0]["base"] == 100.0


def test_a_configuration_alone_can_be_planned(run, here):
    yarn = layer(rotary={"scaling": YaRN(4.0, 16)})
    (here / "model.yaml").write_text(config(yarn, yarn).to_yaml())
    code, output, _ = run("plan", "model.yaml", "--to", 256)
    assert code == 0
    assert "yarn, replace, factor 16" in output
    assert "yarn, multiply, factor 16" in output
    assert "\nThe model carries yarn already. " in output


def test_apply_writes_a_model_and_says_what_reading_it_back_has_shown(run, here):
    code, output, errors = run("apply", "tiny", "--to", 256, "--rule", "yarn", "--out", "long")
    assert (code, errors) == (0, "")
    assert output.splitlines() == [
        "long",
        "  window      256",
        "  rule        yarn, factor 4",
        "  format      huggingface",
        "  read back   layers 0–1: the frequencies of 5 pairs are exactly the planned ones, for "
        "texts of 64 and 256",
        "  note        there is no tokenizer.json; only token ids can be given",
    ]
    read = open_checkpoint(here / "long").config
    assert read.max_positions == 256
    assert read.layers[1].attention.rotary.scaling == YaRN(4.0, 64)


def test_every_option_reaches_its_rule(run, here):
    (here / "short.json").write_text("[1, 1.1, 1.2, 1.3, 1.4]")
    (here / "long.json").write_text("[1, 1.5, 2, 3, 4]")
    lists = ("--short-factors", "short.json", "--long-factors", "long.json")
    code, output, _ = run(
        *("apply", "tiny", "--to", 256, "--rule", "longrope", "--out", "long", *lists),
        *("--factor", 3, "--original-window", 32, "--attention-factor", 1.5, "--json"),
        *("--format", "armillary", "--dtype", "bfloat16"),
    )
    assert code == 0
    facts = json.loads(output)
    assert facts["format"] == "armillary"
    assert facts["changed_layers"] == [0, 1]
    assert facts["verified"][0]["difference"] == 0
    read = open_checkpoint(here / "long")
    rotary = read.config.layers[0].attention.rotary
    assert rotary.scaling == LongRoPE(
        (1.0, 1.1, 1.2, 1.3, 1.4), (1.0, 1.5, 2.0, 3.0, 4.0), 3.0, 32, 1.5
    )
    assert {tensor.encoding for tensor in read.tensors.values()} == {"BF16"}
    yarn = ("--beta-fast", 8, "--beta-slow", 2, "--no-truncate", "--over", "replace")
    code, output, _ = run(
        "apply", "long", "--to", 512, "--rule", "yarn", "-o", "longer", *yarn, "--json"
    )
    settings = json.loads(output)["rule"]
    assert (settings["factor"], settings["original_window"]) == (16.0, 32)
    assert (settings["beta_fast"], settings["beta_slow"], settings["truncate"]) == (8, 2, False)
    code, output, _ = run(
        *("apply", "tiny", "--to", 256, "--rule", "llama3", "-o", "l3", "--low", 0.5, "--high", 2),
        "--json",
    )
    settings = json.loads(output)["rule"]
    assert (settings["low_freq_factor"], settings["high_freq_factor"]) == (0.5, 2)


PLAN, APPLY, SEARCH = ((action, "tiny", "--to", 256) for action in ("plan", "apply", "search"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((*PLAN, "--out", "x"), "--out and --format go with extend apply"),
        ((*PLAN, "--factor", 2), "options of a rule go with one; say which"),
        ((*PLAN, "--rule", "yarn", "--low", 1), "--low: the rule yarn has no such option"),
        ((*APPLY, "--rule", "yarn"), "extend apply needs --out DIR"),
        ((*APPLY, "--out", "x"), "extend apply needs --rule RULE (extend plan recommends one)"),
        ((*APPLY, "--rule", "yarn", "-o", "x", "--figure", "x.svg"), "--figure goes with"),
        (("apply", "tiny", "--to", 64, "--rule", "yarn", "-o", "x"), "the target 64 is not above"),
        ((*APPLY, "--rule", "longrope", "-o", "x"), "the rule longrope needs a divisor"),
        (
            (*PLAN, "--rule", "longrope", "--short-factors", "numbers.json"),
            "numbers.json: must be a JSON list of numbers",
        ),
        (
            (*PLAN, "--rule", "longrope", "--long-factors", "broken.json"),
            "broken.json: is not JSON",
        ),
        ((*PLAN, "--rule", "rope"), "Invalid value for '--rule'"),
        (("plan",), "extend plan needs a MODEL"),
        (("apply", "tiny"), "extend apply needs --to N"),
        ((*PLAN, "--adapt", "run.yaml"), "--out and --format go with extend apply, and so does"),
        ((*APPLY, "--set", "train.lr=1"), "--set replaces settings of a file; say which"),
        ((*APPLY, "--rule", "yarn", "-o", "x", "--adapt", "no.yaml"), "no.yaml: cannot be read"),
        ((*PLAN, "--seed", "0"), "--seed goes with extend search"),
        ((*SEARCH, "-o", "x"), "extend search needs --text FILE"),
        ((*SEARCH, "--text", "x"), "extend search needs --out FILE"),
        ((*SEARCH, "--rule", "yarn"), "extend search is for the rule longrope"),
        ((*SEARCH, "--text", "broken.json", "-o", "x"), "tiny: has no tokenizer"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_writes_nothing(run, here, arguments, message):
    (here / "numbers.json").write_text('[1, "2"]')
    (here / "broken.json").write_text("[1,")
    code, output, errors = run(*arguments)
    assert (code, output) == (2, "")
    assert errors.startswith(f"armillary: {message}")
    assert errors.count("\n") == 1
    assert not (here / "x").exists()


def test_a_figure_without_its_library_says_how_to_get_it(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, output, errors = run(*PLAN, "--figure", "pairs.svg")
    assert (code, output) == (2, "")
    assert "install it with: pip install 'armillary[figures]'" in errors


# Adapting


@pytest.fixture
def adaptable(here):
    """A model with a tokenizer, texts, and an adaptation's file."""
    prepare_directory(here)
    (here / "run.yaml").write_text(yaml.safe_dump(entries(here)))
    return here


ADAPT = ("apply", "model", "--to", 256, "--rule", "yarn", "-o", "long", "--adapt", "run.yaml")


def test_an_adaptation_prints_the_model_and_what_its_gates_have_shown(run, adaptable):
    code, output, errors = run(*ADAPT, "--set", "gates.short_texts=4")
    assert code == 0
    lines = output.splitlines()
    assert lines[:3] == ["long", "  window      256", "  rule        yarn, factor 4"]
    assert "  stage 1     128 after 4 steps: passed" in lines
    assert "  stage 2     256 after 4 steps: passed" in lines
    assert any("short loss, holds: " in line and "on 4 short texts" in line for line in lines)
    assert lines[-1] == "  in between  long.adaptation"
    assert "stage 1 of 2: 4 steps to 128 positions" in errors
    assert open_checkpoint(adaptable / "long").config.max_positions == 256

    code, output, errors = run(*ADAPT, "--set", "gates.short_texts=4", "--json")
    assert code == 0  # what is done is told again
    facts = [json.loads(line) for line in output.splitlines()]
    assert facts[0]["window"] == 256
    stages = [fact for fact in facts if fact.get("kind") == "stage"]
    assert [(stage["length"], stage["passed"]) for stage in stages] == [(128, True), (256, True)]
    assert "stage 1: passed before" in errors


def test_a_gate_that_does_not_hold_is_an_exit_code_and_advice(run, adaptable):
    code, output, errors = run(*ADAPT, "--set", "train.lr=1.0")
    assert code == 3
    assert "128 after 4 steps: not passed" in output
    last = errors.splitlines()[-1]
    assert last.startswith("armillary: stage 1 does not hold to short loss; nothing is lost: raise")
    assert "(now 4)" in last
    assert not (adaptable / "long").exists()


def test_every_key_of_an_adaptation_is_explained(run):
    code, output, _ = run("apply", "--explain")
    assert code == 0
    assert "  stages[].length  (whole number, must be given)" in output
    code, output, _ = run("apply", "--explain", "--json")
    keys = {fact["key"]: fact for fact in map(json.loads, output.splitlines())}
    assert keys["mixture.short_share"]["default"] == "0.25"


# Searching


def test_what_is_found_is_what_apply_reads(run, adaptable):
    (adaptable / "text.txt").write_text("every sphere has its own time to come back\n" * 20)
    arguments = ("search", "model", "--to", 256, "--text", "text.txt", "-o", "factors.json")
    code, output, errors = run(*arguments, "--evaluations", 12, "--population", 4)
    assert code == 0
    assert output.startswith("factors.json\n  loss        ")
    assert "nats per token, of 12" in output
    assert "1 of 12 (linear), loss" in errors
    code, again, _ = run(*arguments, "--evaluations", 12, "--population", 4, "--json")
    facts = json.loads(again)
    assert facts["factors"] == json.loads((adaptable / "factors.json").read_text())
    assert facts["loss"] <= min(facts["starts"].values())
    command = output.splitlines()[-1].split()[2:]
    command[-1] = "found"
    assert command[0] == "extend"
    code, output, _ = run(*command[1:])
    assert code == 0
    rule = open_checkpoint(adaptable / "found").config.layers[0].attention.rotary.scaling
    assert rule.long_factor == tuple(facts["factors"])
    assert rule.short_factor == (1.0,) * 5
