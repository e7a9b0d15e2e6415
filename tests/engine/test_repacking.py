"""Blocks that are repacked for the kernels say the same weights, number for number."""

import gguf
import numpy as np
import pytest

from armillary.checkpoints.tensors import StoredTensor
from armillary.engine import repacking
from armillary.engine.formats.affine import A4

TYPES = ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q5_0", "Q5_1", "MXFP4"]


def stored(encoding, rows=6, width=512):
    """Random blocks whose scales, wherever they lie, are numbers of a sensible size."""
    kind = gguf.GGMLQuantizationType[encoding]
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(3)
    blocks = random.integers(0, 256, (rows * width // elements, size), dtype=np.uint8)
    places = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "Q5_0": (0,), "MXFP4": ()}.get(
        encoding, (0, 2)
    )
    for place in places:
        halves = random.normal(0, 0.1, len(blocks)).astype("<f2")
        blocks[:, place : place + 2] = halves[:, None].view(np.uint8)
    if encoding == "MXFP4":
        blocks[:, 0] = random.integers(118, 130, len(blocks))
    data = blocks.reshape(-1)
    return StoredTensor("w", (rows, width), encoding, data, "test"), gguf.quants.dequantize(
        blocks.reshape(rows, -1), kind
    )


def read(form, packed):
    """Blocks of A4 or A8 as float32, (N, 32)."""
    blocks = packed.reshape(-1, form.nbytes)
    if form.name == "A4":
        d, m = blocks[:, :8].copy().view("<f4").T
        q = np.concatenate([blocks[:, 8:] & 15, blocks[:, 8:] >> 4], -1)
        return q * d[:, None] + m[:, None]
    numbers = blocks[:, :16].copy().view("<f4")
    d, m = (np.repeat(numbers[:, at : at + 2], 16, axis=-1) for at in (0, 2))
    return blocks[:, 16:].view(np.int8) * d + m


@pytest.mark.parametrize("encoding", TYPES)
def test_every_weight_is_what_ggml_reads(encoding):
    tensor, expected = stored(encoding)
    form = repacking.target(encoding)
    packed = np.concatenate(list(repacking.repacked(tensor)))
    np.testing.assert_allclose(read(form, packed).reshape(expected.shape), expected, rtol=2e-6)


@pytest.mark.parametrize("encoding", TYPES)
def test_rows_come_in_the_order_of_the_tensor(encoding):
    tensor, expected = stored(encoding)
    order = np.array([3, 0, 5, 1, 4, 2])
    packed = np.concatenate(list(repacking.repacked(tensor.reordered(order))))
    found = read(repacking.target(encoding), packed).reshape(expected.shape)
    np.testing.assert_allclose(found, expected[order], rtol=2e-6)


def test_what_has_no_repacking_says_so():
    assert repacking.target("IQ4_XS") is None
    assert repacking.target("Q4_K").nbytes == A4.nbytes
