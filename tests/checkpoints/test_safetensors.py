"""Damaged files are named errors without large allocations; whole ones read and write exactly."""

import contextlib
import json
import struct

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import safetensors.torch
import torch

from armillary.checkpoints.safetensors import (
    read_metadata,
    read_safetensors,
    read_sharded,
    write_safetensors,
    write_sharded,
)
from armillary.checkpoints.tensors import TensorToWrite, encode
from armillary.errors import CheckpointError
from armillary.files import Writer
from support.memory import allocates_less_than


def tensor(dtype="F32", shape=(2, 3), begin=0, end=24):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def file_of(header, body=b"\0" * 24):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


WHOLE = file_of({"a": tensor()})

# Every fault of cases.md 77, and what the message must say.
FAULTS = {
    "empty": (b"", "0 bytes, 8 at least"),
    "seven bytes": (b"\0" * 7, "7 bytes, 8 at least"),
    "eight bytes": (b"\0" * 8, "is not JSON"),
    "a header of 2^60": (struct.pack("<Q", 2**60) + b"{}", "a header of 1152921504606846976 bytes"),
    "a header of 2^64 - 1": (b"\xff" * 16, "a header of 18446744073709551615"),
    "a header past the end": (struct.pack("<Q", 99) + b"{}", "is cut off: the header takes 99"),
    "no JSON": (file_of(b"hello"), "is not JSON: line 1 column 1"),
    "no object": (file_of(b"[1]"), "must hold a JSON object"),
    "no UTF-8": (file_of(b'{"\xff": 1}'), "utf-8"),
    "deep nesting": (file_of(b"[" * 100_000), "nested too deep"),
    "overlap": (
        file_of({"a": tensor(), "b": tensor(shape=[2], begin=16, end=24)}),
        "'b' overlaps the one before it, at byte 16",
    ),
    "same bytes twice": (file_of({"a": tensor(), "b": tensor()}), "overlaps"),
    "gap": (
        file_of({"a": tensor(shape=[2], end=8), "b": tensor(shape=[2], begin=16)}),
        "'b' leaves a gap before it, at byte 8",
    ),
    "gap at the start": (file_of({"a": tensor(shape=[2], begin=16)}), "'a' leaves a gap"),
    "past the end": (file_of({"a": tensor(shape=[8], end=32)}), "ends at byte 32, the file's data"),
    "far past the end": (
        file_of({"a": tensor(shape=[2**40], end=2**42)}),
        "ends at byte 4398046511104",
    ),
    "begin after end": (file_of({"a": tensor(begin=24, end=0)}), "begins at 24, after its end"),
    "too few bytes for the shape": (file_of({"a": tensor(shape=[7])}), "takes 24 bytes, which is"),
    "product that wraps": (
        file_of({"a": tensor(shape=[2**33, 2**31], end=0)}, b""),
        r"takes 0 bytes, which is not what \[8589934592, 2147483648\]",
    ),
    "trailing byte": (file_of({"a": tensor()}, b"\0" * 25), "1 bytes follow the last tensor"),
    "missing bytes": (file_of({"a": tensor()}, b"\0" * 23), "ends at byte 24"),
    "duplicate key": (
        file_of(b'{"a": %s, "a": %s}' % ((json.dumps(tensor()).encode(),) * 2)),
        "key 'a' stands there twice",
    ),
    "NaN in a shape": (
        file_of(b'{"a": {"dtype": "F32", "shape": [NaN], "data_offsets": [0, 24]}}'),
        "NaN is no number",
    ),
    "a number too long": (
        file_of(b'{"a": {"dtype": "F32", "shape": [%s], "data_offsets": [0, 24]}}' % (b"9" * 5000)),
        "is not JSON",
    ),
    "negative shape": (file_of({"a": tensor(shape=[-2, -3])}), "shape must be a list of whole"),
    "boolean shape": (file_of({"a": tensor(shape=[True, 6])}), "shape must be a list of whole"),
    "fractional shape": (file_of({"a": tensor(shape=[6.0])}), "shape must be a list of whole"),
    "a million dimensions": (file_of({"a": tensor(shape=[1] * 10**5)}), "shape must be a list"),
    "shape that is no list": (
        file_of({"a": {"dtype": "F32", "shape": 6, "data_offsets": [0, 24]}}),
        "shape must be a list",
    ),
    "three offsets": (
        file_of({"a": {"dtype": "F32", "shape": [6], "data_offsets": [0, 24, 24]}}),
        "data_offsets must be two",
    ),
    "missing dtype": (file_of({"a": {"shape": [6], "data_offsets": [0, 24]}}), "must have dtype"),
    "extra entry": (file_of({"a": {**tensor(), "order": "C"}}), "and only these"),
    "entry that is no object": (file_of({"a": 3}), "must have dtype"),
    "unknown dtype": (file_of({"a": tensor(dtype="F32x")}), "has dtype 'F32x'; supported are F64"),
    "dtype of another kind": (file_of({"a": tensor(dtype=[1])}), r"has dtype \[1\]"),
    "integers": (file_of({"a": tensor(dtype="I32")}), "has dtype 'I32'"),
    "metadata of numbers": (
        file_of({"__metadata__": {"a": 1}, "a": tensor()}),
        "__metadata__ must map names to strings",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_damaged_file_is_one_line_that_names_it(tmp_path, fault):
    content, message = FAULTS[fault]
    path = tmp_path / "m.safetensors"
    path.write_bytes(content)
    with (
        allocates_less_than(3 << 20),
        pytest.raises(CheckpointError, match=message) as caught,
    ):
        read_safetensors(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_a_file_cut_anywhere_is_an_error(tmp_path):
    path = tmp_path / "m.safetensors"
    path.write_bytes(WHOLE)
    assert set(read_safetensors(path)) == {"a"}
    for length in range(len(WHOLE)):
        path.write_bytes(WHOLE[:length])
        with pytest.raises(CheckpointError):
            read_safetensors(path)


def test_one_wrong_byte_in_the_header_never_escapes_as_another_error(tmp_path):
    """Whatever a byte becomes: read, or a CheckpointError."""
    path = tmp_path / "m.safetensors"
    for place in range(len(WHOLE) - 24):
        for value in (0, 0x22, 0x2D, 0x39, 0x5B, 0x7D, 0xFF):
            path.write_bytes(WHOLE[:place] + bytes([value]) + WHOLE[place + 1 :])
            with contextlib.suppress(CheckpointError):
                read_safetensors(path)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_what_the_library_writes_is_read_exactly(tmp_path, dtype):
    torch.manual_seed(0)
    written = {
        "a": torch.randn(5, 7).to(dtype),
        "b": torch.randn(3).to(dtype),
        "s": torch.tensor(2.5).to(dtype),
        "empty": torch.zeros(0, 4, dtype=dtype),
    }
    safetensors.torch.save_file(written, tmp_path / "m.safetensors", metadata={"format": "pt"})
    found = read_safetensors(tmp_path / "m.safetensors")
    assert set(found) == set(written)
    for name, expected in written.items():
        assert found[name].shape == tuple(expected.shape)
        np.testing.assert_array_equal(found[name].to_float32(), expected.float().numpy())


def test_a_tensor_of_odd_alignment_is_read(tmp_path):
    header = {"h": tensor("F16", [1], 0, 2), "a": tensor("F32", [2], 2, 10)}
    body = np.float16(1.5).tobytes() + np.array([2.5, 3.5], np.float32).tobytes()
    (tmp_path / "m.safetensors").write_bytes(file_of(header, body))
    assert read_safetensors(tmp_path / "m.safetensors")["a"].to_float32().tolist() == [2.5, 3.5]


def to_write(name, array, encoding="F32", step=None):
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    step = step or data.size
    chunks = (data[start : start + step] for start in range(0, data.size, step))
    return TensorToWrite(name, encoding, array.shape, chunks)


def test_what_is_written_is_read_by_the_library(tmp_path):
    a, b = np.arange(6, dtype=np.float32).reshape(2, 3), np.arange(5, dtype=np.float16)
    path = tmp_path / "m.safetensors"
    tensors = [to_write("b", b, "F16"), to_write("a", a, step=5)]
    write_safetensors(path, tensors, {"step": "7", "place": "é"})
    found = safetensors.numpy.load_file(path)
    np.testing.assert_array_equal(found["a"], a)
    np.testing.assert_array_equal(found["b"], b)
    with safetensors.safe_open(path, framework="np") as file:
        assert file.metadata() == {"format": "pt", "step": "7", "place": "é"}
    assert read_metadata(path) == {"format": "pt", "step": "7", "place": "é"}


def test_every_tensor_lies_at_a_multiple_of_its_number_s_size(tmp_path):
    """Readers that map the file want that; an odd count of halves must not come first."""
    odd, a = np.arange(5, dtype=np.float16), np.arange(6, dtype=np.float32)
    path = tmp_path / "m.safetensors"
    write_safetensors(path, [to_write("odd", odd, "F16"), to_write("a", a)])
    found = read_safetensors(path)
    start = np.memmap(path, dtype=np.uint8, mode="r").size - a.nbytes - odd.nbytes
    assert start % 8 == 0
    assert found["a"].data.tobytes() == path.read_bytes()[start : start + a.nbytes]


def test_writing_holds_one_chunk_at_a_time(tmp_path):
    """Cases.md 81: less than twice the largest tensor, and here far less."""
    size, count = 4 << 20, 8

    def chunks():
        for _ in range(size // (1 << 18)):
            yield np.ones(1 << 16, np.float32)

    tensors = [TensorToWrite(f"w{i}", "F32", (size // 4,), chunks()) for i in range(count)]
    with allocates_less_than(size):
        write_safetensors(tmp_path / "m.safetensors", tensors)
    assert (tmp_path / "m.safetensors").stat().st_size > size * count


def test_a_write_that_fails_leaves_nothing(tmp_path):
    short = TensorToWrite("a", "F32", (4,), [b"\0" * 12])
    with pytest.raises(ValueError, match="a: 12 bytes were given, 16 needed"):
        write_safetensors(tmp_path / "m.safetensors", [short])
    twice = [to_write("a", np.zeros(2, np.float32)) for _ in range(2)]
    with pytest.raises(ValueError, match="'a' comes twice"):
        write_safetensors(tmp_path / "m.safetensors", twice)
    blocks = TensorToWrite("a", "Q4_0", (32,), [])
    with pytest.raises(ValueError, match="cannot be stored as Q4_0"):
        write_safetensors(tmp_path / "m.safetensors", [blocks])
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def sharded(tmp_path):
    """Three shards of 24 bytes or less: a, b | c | d."""
    sizes = {"a": 2, "b": 4, "c": 6, "d": 3}
    tensors = [to_write(name, np.full(n, ord(name), np.float32)) for name, n in sizes.items()]
    write_sharded(tmp_path, tensors, max_shard_bytes=24)
    return tmp_path


def test_shards_are_filled_in_order_and_read_back(sharded):
    assert sorted(path.name for path in sharded.iterdir()) == [
        "model-00001-of-00003.safetensors",
        "model-00002-of-00003.safetensors",
        "model-00003-of-00003.safetensors",
        "model.safetensors.index.json",
    ]
    found, notices = read_sharded(sharded)
    assert notices == []
    assert {name: found[name].to_float32()[0] for name in found} == {n: ord(n) for n in "abcd"}
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 60


def test_a_tensor_larger_than_a_shard_has_one_to_itself(tmp_path):
    tensors = [to_write(name, np.zeros(n, np.float32)) for name, n in [("a", 1), ("b", 99)]]
    write_sharded(tmp_path, tensors, max_shard_bytes=8)
    assert len(list(tmp_path.glob("*.safetensors"))) == 2
    assert set(read_sharded(tmp_path)[0]) == {"a", "b"}


@pytest.mark.parametrize("limit", [None, 100])
def test_several_writers_write_what_one_does_each_about_as_much(tmp_path, limit):
    """Each asks for the bytes of its own tensors alone, in their order."""
    arrays = {f"t{i}": np.full((i % 3 + 1, 4), i, dtype=np.float32) for i in range(12)}
    asked = []

    def chunks(writer, name):
        asked.append((writer, name))
        yield arrays[name].view(np.uint8).reshape(-1)

    for number in range(3):
        tensors = [TensorToWrite(n, "F32", a.shape, chunks(number, n)) for n, a in arrays.items()]
        write_sharded(tmp_path, tensors, limit, Writer(number, 3))
    assert [name for _, name in asked] == list(arrays)
    found, notices = read_sharded(tmp_path)
    assert not notices
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name].to_float32(), array)
    written = [sum(arrays[name].nbytes for w, name in asked if w == number) for number in range(3)]
    assert max(written) <= sum(written) / 3 + 48
    files = list(tmp_path.glob("*.safetensors"))
    assert len(files) == 3 if limit is None else len(files) > 3


def test_a_writer_for_whom_nothing_is_left_writes_nothing(tmp_path):
    one = TensorToWrite("t", "F32", (2,), [np.zeros(8, dtype=np.uint8)])
    for number in range(2):
        write_sharded(tmp_path, [one], writer=Writer(number, 2))
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_an_absent_shard_is_named_with_the_remedy(sharded):
    """Cases.md 72."""
    (sharded / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(
        CheckpointError,
        match=r"index\.json: shard model-00002-of-00003\.safetensors is named but not there; "
        r"fetch it beside the index, or load what is there with allow_missing=True",
    ):
        read_sharded(sharded)
    found, notices = read_sharded(sharded, allow_missing=True)
    assert set(found) == {"a", "b", "d"}
    assert notices == [
        "shard model-00002-of-00003.safetensors is not there; its weights stay unset"
    ]


def test_a_shard_that_the_index_does_not_name_is_noticed_and_not_loaded(sharded):
    write_safetensors(sharded / "extra.safetensors", [to_write("e", np.zeros(1, np.float32))])
    found, notices = read_sharded(sharded)
    assert set(found) == set("abcd")
    assert notices == ["extra.safetensors is not in the index and was not loaded"]


def test_the_single_file_wins_over_the_index(sharded):
    write_safetensors(sharded / "model.safetensors", [to_write("e", np.zeros(1, np.float32))])
    found, notices = read_sharded(sharded)
    assert set(found) == {"e"}
    assert "index.json is not used, since model.safetensors is there" in notices[-1]
    assert len(notices) == 4
    assert notices[0].endswith("is not model.safetensors and was not loaded")


def rewrite_index(directory, **changes):
    path = directory / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"].update(changes)
    index["weight_map"] = {k: v for k, v in index["weight_map"].items() if v is not None}
    path.write_text(json.dumps(index))


SECOND = "model-00002-of-00003.safetensors"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"e": SECOND}, f"{SECOND}: lacks tensor 'e', which .* places there"),
        ({"b": SECOND}, "holds tensor 'b', but .* places it in model-00002"),
        ({"a": SECOND, "b": SECOND}, f"{SECOND}: lacks tensor 'a'"),
        ({"b": None}, "holds tensor 'b', but .* does not name it"),
        ({"e": "../outside.safetensors"}, "'../outside.safetensors' does not name a file inside"),
        ({"e": "/etc/passwd"}, "does not name a file inside"),
        ({"e": 3}, "the shard of 'e' must be a file's name"),
    ],
)
def test_an_index_that_disagrees_with_the_shards_is_an_error(sharded, changes, message):
    rewrite_index(sharded, **changes)
    with pytest.raises(CheckpointError, match=message):
        read_sharded(sharded)


def test_a_tensor_in_two_shards_is_an_error(sharded):
    write_safetensors(
        sharded / SECOND,
        [to_write("c", np.zeros(6, np.float32)), to_write("a", np.zeros(2, np.float32))],
    )
    with pytest.raises(CheckpointError, match=f"{SECOND}: tensor 'a' is in model-00001-of-00003"):
        read_sharded(sharded)


@pytest.mark.parametrize("text", ["{}", '{"weight_map": {}}', '{"weight_map": []}', "["])
def test_an_index_without_a_map_is_an_error(tmp_path, text):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json"):
        read_sharded(tmp_path)


def test_a_directory_without_weights_is_an_error(tmp_path):
    with pytest.raises(CheckpointError, match=r"holds neither model\.safetensors nor"):
        read_sharded(tmp_path)


def blocks_to_write(name, shape, encoding, seed=0):
    numbers = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
    return TensorToWrite(name, encoding, shape, [encode(numbers, encoding)])


def test_blocks_are_read_back_in_place_with_their_encoding_and_shape(tmp_path):
    """Unequal sizes: 5 rows of 96 in blocks of 34, 18 and 20 bytes; numbers keep their places."""
    path = tmp_path / "m.safetensors"
    tensors = [
        blocks_to_write("q8", (5, 96), "Q8_0"),
        blocks_to_write("q40", (5, 96), "Q4_0"),
        blocks_to_write("q41", (2, 5, 32), "Q4_1"),
        to_write("norm", np.arange(7, dtype=np.float32)),
    ]
    write_safetensors(path, tensors, {"more": "said"}, blocks=True)
    found = read_safetensors(path, blocks=True)
    assert {name: (t.encoding, t.shape) for name, t in found.items()} == {
        tensor.name: (tensor.encoding, tensor.shape) for tensor in tensors
    }
    np.testing.assert_array_equal(found["norm"].to_float32(), np.arange(7))
    for tensor in tensors[:3]:
        data = found[tensor.name].data
        (chunk,) = tensor.chunks
        np.testing.assert_array_equal(data, np.frombuffer(memoryview(chunk).cast("B"), np.uint8))
        assert isinstance(data, np.memmap)
    assert read_metadata(path)["more"] == "said"
    address = found["norm"].data.ctypes.data
    assert address % 4 == 0
    with safetensors.safe_open(path, "np") as theirs:  # any reader sees bytes
        assert theirs.get_tensor("q8").shape == (5, 102)


def test_blocks_are_neither_written_nor_read_where_they_are_not_asked_for(tmp_path):
    path = tmp_path / "m.safetensors"
    tensor = blocks_to_write("w", (5, 96), "Q8_0")
    with pytest.raises(ValueError, match="tensor 'w' cannot be stored as Q8_0"):
        write_safetensors(path, [tensor])
    write_safetensors(path, [tensor], blocks=True)
    with pytest.raises(CheckpointError, match="'w' has dtype 'U8'; supported are F64, F32, F16"):
        read_safetensors(path)


@pytest.mark.parametrize(
    ("metadata", "entry", "message"),
    [
        ({}, tensor("U8", (2, 12)), "has dtype 'U8'; supported are"),
        ({"encoding.b": "Q8_0"}, tensor("U8", (2, 12)), "has an encoding of 'b', no tensor"),
        ({"encoding.a": "Q9"}, tensor("U8", (2, 12)), "encoding Q9 cannot be read"),
        ({"encoding.a": "F32"}, tensor("U8", (2, 12)), "the encoding 'F32'; blocks are held as"),
        ({"encoding.a": "Q8_0"}, tensor("F32"), "has dtype F32 and the encoding 'Q8_0'; blocks"),
        (
            {"encoding.a": "Q8_0"},
            tensor("U8", (2, 12)),
            r"rows of \(12,\) bytes are no blocks of 34",
        ),
        (
            {"encoding.a": "Q8_0"},
            tensor("U8", (), end=1),
            r"rows of \(\) bytes are no blocks of 34",
        ),
        ({"encoding.a": 3}, tensor("U8", (2, 12)), "__metadata__ must map names to strings"),
    ],
)
def test_bytes_whose_encoding_does_not_fit_are_refused(tmp_path, metadata, entry, message):
    path = tmp_path / "m.safetensors"
    end = entry["data_offsets"][1]
    path.write_bytes(file_of({"__metadata__": metadata, "a": entry}, b"\0" * end))
    with pytest.raises(CheckpointError, match=message) as caught:
        read_safetensors(path, blocks=True)
    assert "\n" not in str(caught.value)
