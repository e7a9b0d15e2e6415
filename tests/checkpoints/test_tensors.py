"""Every encoding reads as the gguf library says, by blocks of rows, in any row order."""

import gguf
import numpy as np
import pytest
import torch

from armillary.checkpoints.tensors import (
    QUANTIZED,
    StoredTensor,
    encode,
    encoded_bytes,
    to_write,
)
from armillary.errors import CheckpointError

K_TYPES = ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]
BLOCKS = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", *K_TYPES]
PLAIN = ["F64", "F32", "F16", "BF16"]


def stored(encoding, shape=(6, 512), seed=0):
    """Return random numbers, or random bytes small enough that the scales of blocks are finite."""
    rng = np.random.default_rng(seed)
    if encoding in PLAIN:
        numbers = rng.normal(size=shape).astype(np.float32)
        return StoredTensor("w", shape, encoding, encode(numbers, encoding), "f.gguf")
    data = rng.integers(0, 0x78, encoded_bytes(shape, encoding), dtype=np.uint8)
    return StoredTensor("w", shape, encoding, data, "f.gguf")


@pytest.mark.parametrize("encoding", BLOCKS)
def test_blocks_read_as_the_gguf_library_reads_them(encoding):
    tensor = stored(encoding)
    kind = gguf.GGMLQuantizationType[encoding]
    expected = gguf.quants.dequantize(tensor.data.reshape(6, -1), kind)
    assert tensor.to_float32().dtype == np.float32
    np.testing.assert_array_equal(tensor.to_float32(), expected)


@pytest.mark.parametrize("encoding", PLAIN + BLOCKS)
def test_rows_in_another_order_are_the_same_rows(encoding):
    tensor = stored(encoding)
    order = np.array([3, 0, 5, 1, 4, 2])
    whole = tensor.to_float32()
    assert not np.array_equal(whole, whole[order])
    np.testing.assert_array_equal(tensor.reordered(order).to_float32(), whole[order])
    np.testing.assert_array_equal(tensor.reordered(order).rows(1, 4), whole[order[1:4]])


def test_reordering_twice_composes():
    tensor, first, second = (
        stored("F32"),
        np.array([3, 0, 5, 1, 4, 2]),
        np.array([1, 2, 3, 4, 5, 0]),
    )
    twice = tensor.reordered(first).reordered(second)
    np.testing.assert_array_equal(twice.to_float32(), tensor.to_float32()[first][second])


@pytest.mark.parametrize("encoding", PLAIN)
@pytest.mark.parametrize("shape", [(), (7,), (3, 5), (2, 3, 5)])
def test_plain_numbers_have_any_number_of_dimensions(encoding, shape):
    tensor = stored(encoding, shape)
    result = tensor.to_float32()
    assert result.shape == shape
    np.testing.assert_array_equal(encode(result, encoding), tensor.data)
    if shape:
        np.testing.assert_array_equal(tensor.rows(1, 2), result[1:2])


def test_a_vector_stored_in_blocks_is_read_whole():
    tensor = stored("Q8_0", (64,))
    assert tensor.to_float32().shape == (64,)
    with pytest.raises(CheckpointError, match="has 1 rows in Q8_0, 64 are to change places"):
        tensor.reordered(np.arange(64))


def test_a_tensor_larger_than_a_block_of_rows_is_read_whole():
    tensor = stored("BF16", (700, 1000))
    assert len(list(tensor.row_blocks())) > 1
    np.testing.assert_array_equal(encode(tensor.to_float32(), "BF16"), tensor.data)


def test_bfloat16_is_rounded_as_torch_rounds_it():
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**32, 100_000, dtype=np.uint64).astype(np.uint32)
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 3.4028235e38, 1e-45], np.float32)
    numbers = np.concatenate([bits.view(np.float32), special])
    ours = encode(numbers, "BF16").view(np.uint16)
    theirs = torch.from_numpy(numbers).bfloat16()
    finite = ~np.isnan(numbers)
    np.testing.assert_array_equal(ours[finite], theirs.view(torch.uint16).numpy()[finite])
    halves = StoredTensor("w", numbers.shape, "BF16", ours.view(np.uint8), "f")
    np.testing.assert_array_equal(halves.to_float32(), theirs.float().numpy())


def test_chunks_for_writing_are_the_tensor():
    tensor = stored("Q4_1", (600, 1024)).reordered(np.arange(600)[::-1])
    name, encoding, shape, chunks = to_write(tensor, "F32")
    assert (name, encoding, shape) == ("w", "F32", (600, 1024))
    written = np.concatenate(list(chunks)).view(np.float32).reshape(shape)
    np.testing.assert_array_equal(written, tensor.to_float32())


def awkward_numbers(rows=40, width=192):
    """Rows of all sizes, with ties, zeros, blocks of one number, and extremes of either sign."""
    rng = np.random.default_rng(1)
    numbers = rng.normal(size=(rows, width)) * 10.0 ** rng.integers(-9, 3, (rows, 1))
    numbers[0], numbers[1], numbers[2, :32] = 0, 0.25, -3
    numbers[3] = np.arange(width) - 90  # halves of steps
    numbers[4, 7], numbers[5, 9], numbers[6] = 65504, -65504, 1e-40
    return numbers.astype(np.float32)


BY_THE_LIBRARY = [encoding for encoding in QUANTIZED if encoding not in K_TYPES]


@pytest.mark.parametrize("encoding", BY_THE_LIBRARY)
def test_quantised_numbers_are_those_of_the_gguf_library_whatever_the_blocks_of_rows(encoding):
    numbers = np.tile(awkward_numbers(), (1, 9))[:, :1600].repeat(9, axis=0)
    kind = gguf.GGMLQuantizationType[encoding]
    with np.errstate(over="ignore", invalid="ignore"):
        expected = gguf.quants.quantize(numbers, kind)
    data = np.ascontiguousarray(numbers).reshape(-1).view(np.uint8)
    tensor = StoredTensor("w", numbers.shape, "F32", data, "f")
    assert len(list(tensor.row_blocks())) > 2
    order = np.arange(len(numbers))[::-1]
    for wanted, source in ((expected, tensor), (expected[::-1], tensor.reordered(order))):
        written = np.concatenate(list(to_write(source, encoding).chunks))
        np.testing.assert_array_equal(written, wanted.reshape(-1))


@pytest.mark.parametrize(
    ("encoding", "steps"),
    [("Q8_0", 254.0), ("Q5_0", 32.0), ("Q5_1", 62.0), ("Q4_0", 16.0), ("Q4_1", 30.0)],
    ids=BY_THE_LIBRARY,
)
def test_quantised_numbers_are_off_by_half_a_step_at_most(encoding, steps):
    """A step is the range over their number; Q4_0's eighth step up is cut off, and Q5_0's."""
    numbers = np.random.default_rng(2).normal(size=(64, 96)).astype(np.float32)
    tensor = StoredTensor("w", numbers.shape, encoding, encode(numbers, encoding), "f")
    blocks, found = numbers.reshape(-1, 32), tensor.to_float32().reshape(-1, 32)
    widest = 2 * np.abs(blocks).max(1, keepdims=True) / steps
    if encoding in ("Q4_1", "Q5_1"):
        widest = np.ptp(blocks, axis=1, keepdims=True) / (steps / 2)
    allowed = 1.0 if encoding in ("Q4_0", "Q5_0") else 0.5
    off = np.abs(found - blocks) / widest
    assert off.max() <= allowed + 0.07  # the scale itself is a half-precision number
    assert off.max() > 0.45


def test_blocks_that_are_there_already_are_copied():
    tensor = stored("Q4_0", (9, 64))
    np.testing.assert_array_equal(next(iter(tensor.encoded("Q4_0"))), tensor.data)


@pytest.mark.parametrize("number", [np.nan, np.inf, 7e4])
@pytest.mark.parametrize("encoding", QUANTIZED)
def test_a_number_that_no_block_holds_is_refused_with_its_place(encoding, number):
    numbers = np.ones((3, 256), np.float32)
    numbers[1, 5] = number
    tensor = StoredTensor("w", (3, 256), "F32", numbers.reshape(-1).view(np.uint8), "m.gguf")
    with pytest.raises(CheckpointError, match=r"m\.gguf: w holds a number .* in rows 0 to 2; .*"):
        list(tensor.encoded(encoding))
    list(tensor.encoded("F32"))


def test_numbers_of_no_whole_blocks_are_a_programming_error():
    with pytest.raises(ValueError, match=r"rows of \(33,\) are no blocks of 32 in Q8_0"):
        encode(np.zeros((2, 33), np.float32), "Q8_0")
    with pytest.raises(ValueError, match="not Q3_K"):
        encode(np.zeros((2, 256), np.float32), "Q3_K")


@pytest.mark.parametrize("encoding", ["I32", "Q8_K", "F8_E5M2", "nonsense"])
def test_an_encoding_that_holds_no_weights_is_refused_by_name(encoding):
    with pytest.raises(CheckpointError, match=f"encoding {encoding} cannot be read"):
        StoredTensor("w", (1,), encoding, np.zeros(4, np.uint8), "f")


def test_sizes_that_disagree_are_programming_errors_with_both_numbers():
    with pytest.raises(ValueError, match="8 bytes given, 12 needed"):
        StoredTensor("w", (3,), "F32", np.zeros(8, np.uint8), "f")
    with pytest.raises(ValueError, match="rows 2 to 9 of 6"):
        stored("F32").rows(2, 9)
    with pytest.raises(CheckpointError, match="a row of 33 is no multiple of the 32"):
        encoded_bytes((2, 33), "Q8_0")


def resident_file_pages():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssFile")) * 1024


def test_pages_that_were_read_are_given_back(tmp_path):
    """Otherwise a model counts twice: once in the file's pages, once in its new type."""
    (tmp_path / "w").write_bytes(b"\1" * (32 << 20))
    mapped = np.memmap(tmp_path / "w", dtype=np.uint8, mode="r")
    tensor = StoredTensor("w", (1024, 8192), "F32", mapped[: 32 << 20], "w")
    before = resident_file_pages()
    int(tensor.data.sum())
    if resident_file_pages() - before < 30 << 20:
        pytest.skip("this system does not count mapped pages")
    assert tensor.to_float32()[5, 5] == np.frombuffer(b"\1\1\1\1", np.float32)[0]
    assert resident_file_pages() - before < 4 << 20
