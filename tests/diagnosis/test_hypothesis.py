"""A change that would undo a fault undoes it exactly, and every change makes a model that runs."""

import pytest
import torch

from armillary.diagnosis.conventions import conventions
from armillary.diagnosis.hypothesis import applied
from armillary.diagnosis.misplaced import (
    exchange,
    exchanged_layers,
    misplaced,
    reordered_rows,
    transposition,
)
from armillary.diagnosis.patient import Course, losses, read_patient
from support import faults

LAYERS = (0, 1, 2)


def all_hypotheses(patient):
    return [*misplaced(patient), *conventions(patient)]


@pytest.fixture
def patient(learned):
    return read_patient(learned)


def same(one, other):
    return one.config == other.config and all(
        torch.equal(one.tensors[name], other.tensors[name]) for name in one.tensors
    )


def test_changing_twice_is_changing_back(patient):
    """The two orders of rows undo each other; an exchange and a transposition undo themselves."""
    there = reordered_rows(patient, "qk", "interleaved", LAYERS)
    assert not same(there, patient)
    assert same(reordered_rows(there, "qk", "half_split", LAYERS), patient)
    for change in (
        exchange("attention.k", "attention.v", LAYERS),
        transposition("attention.q", (1,)),
        exchanged_layers(patient, 0, 2),
    ):
        once = applied(patient, [change])
        assert not same(once, patient)
        assert same(applied(once, [change]), patient)


def test_every_change_makes_a_decoder_that_runs(patient):
    tokens = torch.arange(24).view(1, -1) + 65
    for hypothesis in all_hypotheses(patient):
        changed = applied(patient, [hypothesis])
        assert losses(changed.decoder(), tokens).isfinite().all(), hypothesis.fault


def test_every_change_of_the_table_has_a_code_of_its_order(patient):
    from armillary.diagnosis.doctor import _ORDER

    assert {hypothesis.code for hypothesis in all_hypotheses(patient)} <= set(_ORDER)


def test_a_course_from_a_layer_gives_what_the_whole_pass_gives(patient):
    """Trials of one layer begin there; what came before is taken from the first pass."""
    tokens = torch.arange(48).view(2, -1) + 65
    course = Course(patient.decoder(), tokens)
    changed = applied(patient, [exchange("norm1", "norm2", (1,), " of layer 1")])
    decoder = changed.decoder()
    torch.testing.assert_close(
        course.losses_with({1: decoder.layers[1]}), losses(decoder, tokens), atol=1e-6, rtol=0
    )


def test_head_counts_are_tried_with_rows_brought_to_order_anew(learned, tmp_path):
    """A GGUF reader reorders rows by the counts that the file states, wrong or not."""
    from armillary.checkpoints import open_checkpoint

    path = faults.wrong_head_count(learned, tmp_path, faults.as_gguf)
    wrong = read_patient(open_checkpoint(path))
    right = read_patient(learned)
    made = [applied(wrong, [h]) for h in all_hypotheses(wrong) if h.code == "head-count"]
    assert any(same(each, right.with_config(each.config)) for each in made if each)
