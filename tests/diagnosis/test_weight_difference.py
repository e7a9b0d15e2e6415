"""Weights of two files differ by what their encodings do to numbers, or something is wrong."""

import numpy as np
import pytest

from armillary.checkpoints.tensors import StoredTensor, decode, encode
from armillary.diagnosis.weight_difference import first_unexplained, weight_differences

ROWS, COLUMNS, NAME = 24, 64, "layers.1.attention.v.weight"


def stored(numbers, encoding):
    data = encode(np.ascontiguousarray(numbers, np.float32), encoding)
    return {NAME: StoredTensor(NAME, numbers.shape, encoding, data.reshape(-1).view(np.uint8), "")}


@pytest.fixture
def numbers():
    return np.random.default_rng(7).normal(0, 0.3, (ROWS, COLUMNS)).astype(np.float32)


@pytest.mark.parametrize("encoding", ["F16", "Q8_0", "Q4_0", "Q4_1"])
def test_a_file_and_what_it_was_made_into_are_the_same(numbers, encoding):
    plain = stored(numbers, "BF16")
    narrow = stored(plain[NAME].to_float32(), encoding)
    found = weight_differences(plain, narrow)
    assert found is not None
    assert first_unexplained(found) is None
    if encoding.startswith("Q4"):
        assert found[0].relative > 0.05


def test_a_row_scaled_by_a_twentieth_is_named_beside_the_dequantised_file(numbers):
    """One row of a Q4_1 file: both of its blocks' scales and least numbers, 5 % too large."""
    sound = stored(numbers, "Q4_1")
    plain = stored(sound[NAME].to_float32(), "BF16")
    assert first_unexplained(weight_differences(plain, sound)) is None
    scaled = sound[NAME].to_float32()
    scaled[5] *= 1.05
    found = first_unexplained(weight_differences(plain, stored(scaled, "Q4_1")))
    assert found is not None
    assert (found.name, found.row) == (NAME, 5)
    assert found.relative == pytest.approx(0.05, abs=0.01)


def test_numbers_that_are_none_part(numbers):
    broken = numbers.copy()
    broken[3, 1] = np.nan
    found = weight_differences(stored(numbers, "F32"), stored(broken, "F16"))
    assert first_unexplained(found).row == 3


def test_an_encoding_keeps_its_own_numbers(numbers):
    kept = decode(encode(numbers, "BF16"), "BF16")
    assert weight_differences(stored(kept, "F32"), stored(kept, "BF16"))[0].relative == 0.0


def test_a_tensor_in_an_encoding_that_is_only_read_hides_no_other(numbers):
    blocks = StoredTensor("b", (2, 256), "Q3_K", np.zeros(2 * 110, np.uint8), "")
    one = {"b": blocks, **stored(numbers, "F16")}
    found = weight_differences(one, {"b": blocks, **stored(1.5 * numbers, "F16")})
    assert [(each.name, each.parts) for each in found] == [(NAME, True)]
