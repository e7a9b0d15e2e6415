"""Each check of an invariant fails when what it checks is broken (spec §2, §3)."""

import pytest
import torch

from armillary.diagnosis import invariants
from armillary.diagnosis.invariants import check_invariants
from armillary.parts import attention
from support.models import build, config, layer

TOKENS = torch.arange(12).view(1, -1) + 3


def outcome(decoder):
    return {check.name: check.holds for check in check_invariants(decoder, TOKENS)[0]}


@pytest.fixture
def decoder():
    return build(config(), dtype=torch.float32)


def test_all_hold_of_a_sound_decoder(decoder):
    assert set(outcome(decoder).values()) == {True}


def test_a_rotation_that_stretches_is_found(decoder, monkeypatch):
    monkeypatch.setattr(invariants, "rotate", lambda x, _turn: 1.001 * x)
    assert outcome(decoder)["rotation keeps norms"] is False


def test_single_tokens_that_are_not_rotated_are_found(decoder, monkeypatch):
    """cases.md 57: steps of one token that pass over positions; longer chunks do not."""
    real = attention.rotate
    monkeypatch.setattr(
        attention, "rotate", lambda x, turn: x if x.shape[2] == 1 else real(x, turn)
    )
    held = outcome(decoder)
    assert held["cache = whole pass"] is False
    assert held["padding changes nothing"] is True


def test_padding_that_is_read_is_found(decoder, monkeypatch):
    def unmasked(decoder, tokens):
        padded = torch.cat([torch.zeros(1, 3, dtype=tokens.dtype), tokens], dim=1)
        return decoder(padded)[:, 3:]

    monkeypatch.setattr(invariants, "_padded", unmasked)
    assert outcome(decoder)["padding changes nothing"] is False


def test_what_is_added_at_a_position_is_not_shifted():
    table = build(config(layer(), position_table="sinusoidal"), dtype=torch.float32)
    assert outcome(table)["a shift changes nothing"] is None
