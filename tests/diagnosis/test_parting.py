"""Two models part at the step whose weights were changed, and nowhere without a change."""

from dataclasses import replace

import pytest
import torch

from armillary.diagnosis.parting import differences, first_parting, tolerance_of
from armillary.diagnosis.trace import LAYER_STEPS, places, trace_decoder
from armillary.rope_layout import interleaved_from_half_split
from armillary.weights import build_filled
from support import faults

TOKENS = torch.arange(12).view(1, -1) + 65


def traced(checkpoint, dtype=torch.float64):
    return trace_decoder(build_filled(checkpoint.config, checkpoint.tensors, dtype=dtype), TOKENS)


def parted(one, other, tolerance=1e-10):
    return first_parting(differences(one, other, tolerance))


def test_every_step_is_recorded_in_the_order_of_the_computation(learned):
    trace = traced(learned)
    assert set(trace) == set(places(3))
    found = differences(trace, trace, 1e-12)
    assert [(step.layer, step.step) for step in found] == places(3)
    assert first_parting(found) is None
    assert len(found) == 3 * len(LAYER_STEPS) + 3


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("norm1", "norm 1"),
        ("attention.q", "q"),
        ("attention.k", "k"),
        ("attention.v", "v"),
        ("attention.out", "attention"),
        ("norm2", "norm 2"),
        ("feedforward.gate", "gate"),
        ("feedforward.up", "up"),
        ("feedforward.down", "down"),
    ],
)
def test_the_first_step_is_that_of_the_changed_tensor(learned, name, step):
    name = f"layers.1.{name}.weight"
    array = learned.tensors[name].to_float32()
    array.flat[7] *= 1.01
    changed = faults.with_tensors(learned, {name: faults.stored(name, array)})
    parting = parted(traced(learned), traced(changed))
    assert (parting.layer, parting.step) == (1, step)


def test_another_base_parts_at_the_rotated_queries(learned):
    config = faults.with_rotary(learned.config, base=5e5)
    parting = parted(traced(learned), traced(replace(learned, config=config)))
    assert (parting.layer, parting.step) == (0, "q rotated")


def test_the_other_pairing_of_channels_is_the_same_model(learned):
    """Rows and rotation both interleaved: other numbers in q and k, told in one order."""
    other = faults.reordered(learned, interleaved_from_half_split)
    config = faults.with_rotary(learned.config, layout="interleaved")
    assert parted(traced(learned), traced(replace(other, config=config))) is None


def test_rounding_is_within_the_tolerance_of_its_type(learned):
    exact = traced(learned)
    wide, narrow = tolerance_of(("float64", "float32"), (set(), set())), 1e-10
    assert parted(exact, traced(learned, torch.float32), wide) is None
    assert parted(exact, traced(learned, torch.float32), narrow) is not None
    assert parted(exact, traced(learned, torch.bfloat16), wide) is not None


def test_encodings_widen_the_tolerance_only_where_files_differ():
    assert tolerance_of(("float32", "float32"), ({"BF16"}, {"BF16"})) == 1e-5
    assert tolerance_of(("float32", "float32"), ({"F32"}, {"BF16"})) == 5e-2


def test_shapes_and_numbers_that_are_none_part(learned):
    trace = traced(learned)
    place = (1, "v")
    short, none = dict(trace), dict(trace)
    short[place] = trace[place][:, :-2]
    none[place] = trace[place].clone()
    none[place][0, 0] = float("nan")
    for other in (short, none):
        parting = parted(trace, other)
        assert (parting.layer, parting.step) == place
        assert parting.to_dict()["relative"] is None


@pytest.mark.peer
def test_transformers_gives_the_same_steps_in_float64(learned, tmp_path):
    """Every step that it has a module for; its angles are in float32 whatever the type."""
    from armillary.diagnosis.peer_trace import load_peer, trace_peer

    target = faults.as_huggingface(learned, tmp_path, "F32")
    peer = trace_peer(load_peer(target, torch.float64), TOKENS)
    ours = traced(learned)
    assert set(ours) - set(peer) == {(layer, "q rotated") for layer in range(3)}
    assert parted(ours, peer, 1e-6) is None
    name = "layers.2.feedforward.down.weight"
    array = learned.tensors[name].to_float32() * 1.01
    changed = faults.with_tensors(learned, {name: faults.stored(name, array)})
    parting = parted(traced(changed), peer, 1e-6)
    assert (parting.layer, parting.step) == (2, "down")
