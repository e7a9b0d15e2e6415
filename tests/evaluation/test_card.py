"""The card is Markdown whose tables hold the summaries' numbers, and whose text is text."""

from dataclasses import replace

from armillary.evaluation.card import card, write_card
from armillary.evaluation.summary import Summary
from armillary.evaluation.verdict import verdict
from support.page import HOSTILE
from support.summaries import comparison, summaries


def test_the_card_says_verdict_models_numbers_commands_and_limits(tmp_path):
    path = tmp_path / "card.md"
    write_card(path, summaries(), comparison(), commands=["armillary evaluate runs/yarn"])
    text = path.read_text("utf-8")
    heads = [line for line in text.splitlines() if line.startswith("#")]
    assert heads == [
        "## Context window",
        "### What it is",
        "### In short",
        "### Loss of the same text under growing context",
        "### Effective length",
        "### Short texts",
        "### How to reproduce",
        "### Limits",
    ]
    assert all(sentence in text for sentence in verdict(summaries(), comparison()))
    assert "- yarn: its window of 256 tokens extended to 1,024; weights " in text
    entry = summaries()[3].by_context[-1]
    assert f"| 1,024 | yarn | {entry.loss.value:.3f} (" in text
    assert "\n    armillary evaluate runs/yarn\n" in text


def assert_rectangular(text):
    for block in text.split("\n\n"):
        rows = [line for line in block.splitlines() if line.startswith("|")]
        assert len({line.replace("\\|", "").count("|") for line in rows}) <= 1


def test_tables_are_rectangular():
    assert_rectangular(card(summaries(), comparison()))


def test_what_was_not_measured_is_not_told():
    text = card([Summary(replace(summaries()[0].run, window=256))])
    assert "a window of 256 tokens" in text
    assert "### Loss" not in text
    assert "### Effective length" not in text
    assert "- What became of short texts was not measured." in text


def test_hostile_names_stay_text():
    run = replace(summaries()[0].run, name="a|b\n# <script>", model={"rule": HOSTILE})
    text = card([replace(summaries()[0], run=run)])
    assert not any(line.startswith("# ") for line in text.splitlines())
    assert "<script>" not in text
    assert not set("\x1b\ud800\u202e") & set(text)
    assert "| a\\|b \\# &lt;script> |" in text
    assert_rectangular(text)
