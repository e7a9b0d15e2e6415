"""Numbers that no weight can have are found in any tensor, and those that one can are not."""

import numpy as np
import pytest

from armillary.checkpoints.tensors import StoredTensor, encode
from armillary.diagnosis.weight_checks import check_weights


def stored(name, numbers, encoding="F32"):
    numbers = np.asarray(numbers, np.float32)
    data = encode(numbers, encoding).reshape(-1)
    return StoredTensor(name, numbers.shape, encoding, data, "memory")


def tensors(**changed):
    rng = np.random.default_rng(0)
    arrays = {
        "embedding.weight": rng.normal(size=(61, 40)),
        "layers.0.norm1.weight": np.ones(40),
        "layers.0.attention.q.bias": np.zeros(60),
        "layers.0.attention.q.weight": rng.normal(size=(60, 40)),
        "layers.1.attention.q.weight": rng.normal(size=(60, 40)),
        "final_norm.weight": np.ones(40),
    }
    arrays |= {name.replace("__", "."): array for name, array in changed.items()}
    return {name: stored(name, array) for name, array in arrays.items()}


def codes(**changed):
    return [finding.code for finding in check_weights(tensors(**changed))[1]]


def test_sound_weights_pass_with_norms_of_ones_and_biases_of_zeros():
    checks, findings = check_weights(tensors())
    assert findings == []
    assert all(check.holds for check in checks)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_one_number_that_is_none_is_found_and_its_tensor_named(value):
    array = np.ones(40)
    array[17] = value
    checks, (finding,) = check_weights(tensors(final_norm__weight=array))
    assert finding.code == "not-finite"
    assert "final_norm.weight" in finding.fault
    assert [check.holds for check in checks if check.name == "numbers"] == [False]


def test_a_matrix_that_never_varies_is_dead():
    assert codes(layers__1__attention__q__weight=np.zeros((60, 40))) == ["dead"]
    assert codes(layers__1__attention__q__weight=np.full((60, 40), 0.5)) == ["dead"]
    assert codes(final_norm__weight=np.zeros(40)) == ["dead"]


def test_a_dead_head_is_told_as_the_head():
    assert codes(head__weight=np.zeros((61, 40))) == ["untied-head"]


def test_memory_that_nobody_wrote_to_is_found():
    """A tensor that was never loaded, left at 1e37 (cases.md 75)."""
    array = np.random.default_rng(1).normal(size=(60, 40))
    array[3, 5] = 1e37
    assert codes(layers__0__attention__q__weight=array) == ["never-assigned"]


def test_the_same_numbers_twice_are_found_but_not_a_head_that_repeats_the_embedding():
    array = np.random.default_rng(1).normal(size=(60, 40))
    _, (finding,) = check_weights(
        tensors(layers__0__attention__q__weight=array, layers__1__attention__q__weight=array)
    )
    assert finding.code == "duplicate"
    assert finding.layers == (0, 1)
    embedding = tensors()["embedding.weight"].to_float32()
    assert codes(head__weight=embedding) == []
