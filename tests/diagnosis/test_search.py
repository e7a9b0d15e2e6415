"""Faults that are planted in the files of a small trained model are named in the first line.

None is recognised by how it was planted: the layers, formats and kinds are others than those of
benchmarks/doctor.py, which plants them in SmolLM2.
"""

from dataclasses import replace

import pytest

from armillary.diagnosis import search
from armillary.diagnosis.doctor import examine
from armillary.diagnosis.probe_text import built_in_texts
from support import faults
from support.faults import Fault


def look(path):
    return examine(path, built_in_texts(), lambda *_: None)


def as_float32(checkpoint, folder):
    return faults.as_huggingface(checkpoint, folder, "F32")


def with_config(change, write=as_float32):
    return lambda checkpoint, folder: write(
        replace(checkpoint, config=change(checkpoint.config)), folder
    )


def without_beginning(checkpoint, folder):
    target = as_float32(checkpoint, folder)
    faults.changed_json(
        target / "tokenizer_config.json", lambda entries: entries.update(add_bos_token=False)
    )
    return target


PLANTED = [
    Fault("layout in GGUF", "layout", ("half-split",), faults.unpermuted_gguf),
    Fault("layout", "layout", ("interleaved",), faults.unpermuted_huggingface),
    Fault(
        "base",
        "rotary-base",
        ("base is 500,000",),
        with_config(lambda config: faults.with_rotary(config, base=5e5)),
    ),
    Fault(
        "epsilon",
        "epsilon",
        ("epsilon is 1,",),
        with_config(lambda config: faults.with_norms(config, eps=1.0), faults.as_ours),
    ),
    Fault("gate and up", "swapped-gate-up", ("gate and up",), faults.swapped_gate_and_up),
    Fault("head of zeros", "untied-head", ("zeros",), faults.head_of_zeros),
    Fault(
        "tensors of a layer",
        "swapped-tensors",
        ("K and V", "layer 1"),
        faults.swapped_in_layer("attention.k", "attention.v", 1, faults.as_ours),
    ),
    Fault(
        "norms of a layer",
        "swapped-tensors",
        ("norm 1 and norm 2", "layer 0"),
        faults.swapped_in_layer("norm1", "norm2", 0),
    ),
    Fault("layers", "swapped-layers", ("layers 1 and 2",), faults.swapped_layers(1, 2, as_float32)),
    Fault(
        "transposed",
        "transposed",
        ("attention.out", "layer 0"),
        faults.transposed_matrix("layers.0.attention.out.weight", faults.as_gguf),
    ),
    Fault("norm offset", "norm-offset", ("1 is added",), faults.one_added_twice),
    Fault("head count", "head-count", ("4 and 2 of 12",), faults.wrong_head_count),
    Fault(
        "head count in GGUF",
        "head-count",
        ("4 and 2 of 12",),
        lambda checkpoint, folder: faults.wrong_head_count(checkpoint, folder, faults.as_gguf),
    ),
    Fault("no beginning", "bos", ("BOS is missing",), without_beginning),
    Fault("number that is none", "not-finite", ("norm2",), faults.one_nan("layers.2.norm2.weight")),
    Fault("truncated", "unreadable", ("truncated",), faults.truncated(faults.as_ours, 0.5)),
]


@pytest.mark.parametrize("fault", PLANTED, ids=lambda fault: fault.name)
def test_the_first_line_names_the_fault(learned, tmp_path, fault):
    report = look(fault.plant(learned, tmp_path))
    first = report.findings[0]
    assert first.code == fault.code
    assert report.diagnosis.startswith(first.fault)
    assert all(word in first.fault for word in fault.words), first.fault


def test_neighbours_that_changed_places_are_found_though_neither_is_suspected(
    learned, tmp_path, monkeypatch
):
    """In a deep model each does the other's work nearly as well: others can be missed more."""
    monkeypatch.setattr(search, "_SUSPECTS", 0)
    path = faults.swapped_layers(1, 2, as_float32)(learned, tmp_path)
    assert look(path).findings[0].layers == (1, 2)
