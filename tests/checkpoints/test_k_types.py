"""Super-blocks that we write: read by the gguf library, and near to what was meant."""

import gguf
import numpy as np
import pytest

from armillary.checkpoints.k_types import K_TYPES, SUPER
from armillary.checkpoints.tensors import decode, encode
from armillary.engine.repacking import _READERS as OUR_READERS
from support.quantised import numbers

# Of the root mean square of Gaussian numbers: what ggml's reference quantisers come to, and 5 %.
ERRORS = {"Q4_K": 0.0715 * 1.05, "Q5_K": 0.0362 * 1.05, "Q6_K": 0.0178 * 1.05}


def gaussian(n: int = 64) -> np.ndarray:
    return np.random.default_rng(0).normal(0, 0.02, (n, 2 * SUPER)).astype(np.float32)


def brought(x: np.ndarray, kind: str) -> np.ndarray:
    return decode(encode(x, kind).reshape(len(x), -1), kind).reshape(x.shape)


@pytest.mark.parametrize("kind", K_TYPES)
def test_the_error_on_gaussian_numbers_is_that_of_the_reference_quantiser(kind):
    x = gaussian()
    off = brought(x, kind) - x
    assert np.sqrt(np.mean(off**2)) <= ERRORS[kind] * np.sqrt(np.mean(x**2))


@pytest.mark.parametrize("kind", K_TYPES)
def test_the_engine_reads_the_numbers_of_the_gguf_library_bit_for_bit(kind):
    rows = encode(gaussian(), kind).reshape(64, -1)
    size, read = OUR_READERS[kind]
    d, m, q = read(rows.reshape(-1, size))
    per = q.size // d.size
    ours = d.reshape(-1, 1) * q.reshape(-1, per).astype(np.float32) + m.reshape(-1, 1)
    theirs = gguf.dequantize(rows, gguf.GGMLQuantizationType[kind])
    np.testing.assert_array_equal(ours.reshape(theirs.shape), theirs)
    np.testing.assert_array_equal(numbers(kind, rows), theirs)


@pytest.mark.parametrize("kind", K_TYPES)
@pytest.mark.parametrize("value", [0.0, 0.5, -0.3, 1e-30, -1e-42, 60000.0])
def test_a_super_block_of_one_number_is_that_number(kind, value):
    """Where the least squares of a line have no answer."""
    found = brought(np.full((1, SUPER), value, np.float32), kind)
    assert np.abs(found - value).max() <= 2e-3 * abs(value) + 1e-8


@pytest.mark.parametrize("kind", K_TYPES)
def test_groups_of_unequal_size_share_a_super_block(kind):
    """Zeros beside ones beside small numbers: each group is off by a small part of the largest."""
    x = gaussian(1)[:, :SUPER]
    x[0, :32], x[0, 32:64], x[0, 64] = 0.0, 1.0, -1.0
    found = brought(x, kind)
    assert np.abs(found - x).max() <= 1 / 15
    if kind == "Q6_K":
        np.testing.assert_array_equal(found[0, :32], 0)


@pytest.mark.parametrize("kind", K_TYPES)
def test_a_row_is_encoded_the_same_alone_and_among_others(kind):
    x = gaussian(3)
    together = encode(x, kind).reshape(3, -1)
    np.testing.assert_array_equal(encode(x[1:2], kind), together[1])


@pytest.mark.parametrize("kind", K_TYPES)
def test_rows_that_are_no_super_blocks_are_refused(kind):
    with pytest.raises(ValueError, match="no blocks of 256"):
        encode(np.zeros((8, 160), np.float32), kind)
