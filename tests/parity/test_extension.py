"""What `extend apply` writes gives transformers the logits that it gives us."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from armillary.checkpoints import open_checkpoint
from armillary.extension.apply import apply
from armillary.extension.rules import RuleOptions
from armillary.weights import build_filled
from support.checks import gap
from support.downloads import smollm2_gguf
from support.peer_llama import (
    WINDOW,
    build_peer,
    config_entries,
    in_float64,
    load_peer,
    save_peer,
    whole_pass,
)

pytestmark = pytest.mark.peer

TOLERANCE = 1e-11  # float64
TARGET = 4 * WINDOW
LISTS = RuleOptions(short_factors=(1.0, 1.1, 1.2, 1.3, 1.4), long_factors=(1.0, 1.5, 2.0, 3.0, 4.0))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Path]:
    """A model that transformers saved, with a window of 16."""
    entries = config_entries("default", max_position_embeddings=WINDOW)
    with in_float64():
        yield save_peer(build_peer(entries, torch.float64), tmp_path / "source")


@pytest.mark.parametrize(
    ("rule", "options"),
    [
        ("none", None),
        ("linear", None),
        ("ntk", None),
        ("dynamic", None),
        ("yarn", RuleOptions(beta_fast=2.0)),
        ("yarn", RuleOptions(beta_fast=2.0, truncate=False, attention_factor=0.7)),
        ("llama3", RuleOptions(low=0.5, high=2.0)),
        ("longrope", LISTS),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("length", [WINDOW - 3, TARGET], ids=["short", "long"])
def test_logits_under_the_rule_are_transformers(source, tmp_path, rule, options, length):
    """Short texts, within the original window, and ones that fill the new one."""
    out = tmp_path / "out"
    apply(open_checkpoint(source), out, to=TARGET, rule=rule, options=options, format="huggingface")
    read = open_checkpoint(out)
    ours = build_filled(read.config, read.tensors, dtype=torch.float64)
    tokens = torch.randint(0, 61, (2, length), generator=torch.Generator().manual_seed(1))
    theirs = whole_pass(load_peer(out, torch.float64), tokens)
    with torch.no_grad():
        logits = ours(tokens)
        assert gap(logits, theirs) < TOLERANCE
        before = open_checkpoint(source)
        plain = build_filled(before.config, before.tensors, dtype=torch.float64)(tokens)
    # A rule that left no trace would pass too. The dynamic one leaves short texts alone.
    unchanged = rule == "none" or (rule == "dynamic" and length < WINDOW)
    assert (gap(logits, plain) < TOLERANCE) == unchanged


@pytest.mark.download
def test_smollm2_under_yarn_is_transformers_past_its_window(tmp_path):
    """16,384 is twice its window; only the last positions are compared, of a short text there."""
    out = tmp_path / "out"
    applied = apply(open_checkpoint(smollm2_gguf()), out, to=16384, rule="yarn")
    assert [(each.pairs, each.difference) for each in applied.verified] == [(32, 0.0)]
    read = open_checkpoint(out)
    assert (read.format, read.config.max_positions) == ("huggingface", 16384)
    assert read.tokenizer.chat_template == open_checkpoint(smollm2_gguf()).tokenizer.chat_template
    ours = build_filled(read.config, read.tensors, dtype=torch.float32)
    tokens = torch.tensor([read.tokenizer.encode("The capital of France is Paris, and")])
    peer = load_peer(out, torch.float32)
    for start in (0, 16384 - tokens.shape[1]):
        positions = torch.arange(start, start + tokens.shape[1])
        with torch.no_grad():
            logits = ours(tokens, positions=positions)
        theirs = whole_pass(peer, tokens, position_ids=positions[None])
        assert gap(logits, theirs) < 2e-4
