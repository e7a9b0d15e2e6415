"""Tokens that stand farther apart than a model ever saw them are found without a long text."""

import pytest
import torch

from armillary.diagnosis.distance import far_apart
from armillary.diagnosis.patient import read_patient
from armillary.diagnosis.probe_text import built_in_texts, probe_text


def quiet(*_):
    pass


def test_a_window_beyond_what_was_trained_is_found(learned):
    """Trained on 96 positions; those beyond were never turned to."""
    wide = learned.config.model_copy(update={"max_positions": 64 * 96})
    patient = read_patient(learned).with_config(wide)
    text = probe_text(learned.tokenizer, built_in_texts(), wide.max_positions)
    found = far_apart(patient, text, text.prefix, quiet)
    assert list(found.losses) == sorted(found.losses)
    assert found.leap > 0.5
    assert found.sound_to < 64 * 96 / 2


def test_a_window_too_small_for_it_is_not_judged(learned):
    text = probe_text(learned.tokenizer, built_in_texts(), learned.config.max_positions)
    assert far_apart(read_patient(learned), text, text.prefix, quiet) is None


@pytest.mark.parametrize("length", [40, 96])
def test_rows_fit_the_window_with_what_begins_a_text(learned, length):
    text = probe_text(learned.tokenizer, built_in_texts(), length)
    for rows in (text.brief, text.short, text.long, text.far):
        assert rows.shape[1] + len(text.prefix) <= length
        assert rows.dtype == torch.int64
