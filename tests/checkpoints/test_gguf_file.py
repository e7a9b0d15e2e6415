"""A GGUF header is never trusted; whole files read as the gguf library wrote them."""

import contextlib
import struct

import gguf
import numpy as np
import pytest

from armillary.checkpoints.gguf_file import ENCODINGS, read_gguf_file, write_gguf_file
from armillary.checkpoints.tensors import BLOCKS, TensorToWrite, encode
from armillary.errors import CheckpointError
from support.gguf_bytes import TYPES, array, entry, gguf_bytes, pair, string
from support.memory import allocates_less_than

BODY = np.arange(4, dtype="<f4").tobytes()
WHOLE = gguf_bytes(
    (
        pair("general.architecture", TYPES["str"], string("llama")),
        pair("general.alignment", TYPES["u32"], struct.pack("<I", 16)),
        pair("n", TYPES["i8"], b"\xff"),
        pair("flag", TYPES["bool"], b"\1"),
        pair("words", TYPES["arr"], array(TYPES["str"], 2, string("a") + string("é"))),
        pair("numbers", TYPES["arr"], array(TYPES["f32"], 2, struct.pack("<ff", 0.5, -2.0))),
    ),
    (entry("w"), entry("v", (2, 2), 0, 16)),
    BODY + BODY,
    alignment=16,
)


def nested(depth):
    inner = struct.pack("<IQ", TYPES["arr"], 1) * depth + struct.pack("<IQ", TYPES["u8"], 1) + b"\0"
    return pair("a", TYPES["arr"], inner)


def aligned_to(value, kind="u32", size="I"):
    return pair("general.alignment", TYPES[kind], struct.pack(f"<{size}", value))


# Every fault of cases.md 78, and what the message must say.
FAULTS = {
    "empty": (b"", "is cut off: 4 bytes are due at byte 0, 0 are left"),
    "other magic": (gguf_bytes(magic=b"GGML"), "is no GGUF file: it begins with b'GGML'"),
    "version 1": (gguf_bytes(version=b"\1\0\0\0"), "is of GGUF version 1; versions 2 and 3"),
    "version 4": (gguf_bytes(version=b"\4\0\0\0"), "is of GGUF version 4"),
    "big-endian": (gguf_bytes(version=b"\0\0\0\3"), "is a big-endian GGUF file"),
    "2^32 - 1 dimensions": (
        gguf_bytes((), (entry("w", (), n_dims=0xFFFFFFFF),)),
        "tensor 'w' has 4294967295 dimensions; 4 are read",
    ),
    "product that wraps": (
        gguf_bytes((), (entry("w", (2**33, 2**31)),), BODY),
        "tensor 'w': is cut off: 18446744073709551616 numbers",
    ),
    "string of 2^63": (
        gguf_bytes((struct.pack("<Q", 2**63) + b"abc",)),
        "is cut off: 9223372036854775808 bytes are due",
    ),
    "value of 2^63 bytes": (
        gguf_bytes((pair("k", TYPES["str"], struct.pack("<Q", 2**63)),)),
        "is cut off: 9223372036854775808",
    ),
    "array of 2^61 floats": (
        gguf_bytes((pair("k", TYPES["arr"], array(TYPES["f32"], 2**61, b"")),)),
        "is cut off: 9223372036854775808",
    ),
    "array of 2^62 strings": (
        gguf_bytes((pair("k", TYPES["arr"], array(TYPES["str"], 2**62, b"")),)),
        "is cut off: 8 bytes are due",
    ),
    "1000 arrays in each other": (gguf_bytes((nested(1000),)), "'a' is an array of arrays"),
    "unknown value type": (gguf_bytes((pair("k", 13, b"\0" * 8),)), "unknown value type 13"),
    "unknown item type": (
        gguf_bytes((pair("k", TYPES["arr"], array(99, 1, b"\0" * 8)),)),
        "unknown value type 99",
    ),
    "2^64 - 1 keys": (gguf_bytes(n_pairs=2**64 - 1), "has a key without a name"),
    "2^64 - 1 tensors": (gguf_bytes(n_tensors=2**64 - 1), "is cut off"),
    "more keys than there are": (
        gguf_bytes((pair("k", TYPES["u8"], b"\1"),), n_pairs=2),
        "has a key without a name",
    ),
    "alignment 0": (gguf_bytes((aligned_to(0),)), "general.alignment is 0"),
    "alignment 3": (gguf_bytes((aligned_to(3),)), "general.alignment is 3; it must be a power"),
    "alignment -8": (gguf_bytes((aligned_to(-8, "i32", "i"),)), "general.alignment is -8"),
    "alignment of text": (
        gguf_bytes((pair("general.alignment", TYPES["str"], string("x" * 9999)),)),
        "general.alignment is 'xxx",
    ),
    "alignment 2^31": (
        gguf_bytes((aligned_to(2**31),), (entry("w"),), BODY),
        "tensor 'w': is cut off",
    ),
    "unknown tensor type": (gguf_bytes((), (entry("w", kind=77),), BODY), "the unknown type 77"),
    "type 4, which was removed": (gguf_bytes((), (entry("w", kind=4),), BODY), "unknown type 4"),
    "integers": (gguf_bytes((), (entry("w", kind=26),), BODY), "'w': encoding I32 cannot be read"),
    "blocks that do not fit the row": (
        gguf_bytes((), (entry("w", (33,), kind=8),), BODY),
        "'w': a row of 33 is no multiple of the 32 elements in a block of Q8_0",
    ),
    "misaligned": (
        gguf_bytes((), (entry("w", offset=4),), BODY * 9),
        "'w' begins at 4, no multiple of the alignment 32",
    ),
    "past the end": (gguf_bytes((), (entry("w", offset=32),), BODY), "tensor 'w': is cut off"),
    "offset 2^63": (gguf_bytes((), (entry("w", offset=2**63),), BODY), "tensor 'w': is cut off"),
    "overlap": (
        gguf_bytes((), (entry("w", (16,)), entry("v", offset=32)), BODY * 4),
        "tensor 'v' overlaps the one before it",
    ),
    "tensor twice": (
        gguf_bytes((), (entry("w"), entry("w", offset=32)), BODY * 9),
        "tensor 'w' stands there twice",
    ),
    "key twice": (
        gguf_bytes((pair("k", TYPES["u8"], b"\1"), pair("k", TYPES["u8"], b"\1"))),
        "key 'k' stands there twice",
    ),
    "key that is no UTF-8": (gguf_bytes((pair(b"\xff", 0, b"\1"),)), "a key is not UTF-8"),
    "name that is no UTF-8": (gguf_bytes((), (entry(b"\xff"),), BODY), "name is not UTF-8"),
    "value that is no UTF-8": (
        gguf_bytes((pair("k", TYPES["str"], string(b"\xff")),)),
        "the value of 'k' is not UTF-8",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_damaged_file_is_one_line_that_names_it(tmp_path, fault):
    content, message = FAULTS[fault]
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with (
        allocates_less_than(1 << 20),
        pytest.raises(CheckpointError, match=message) as caught,
    ):
        read_gguf_file(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_a_whole_file_is_read(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(WHOLE)
    found = read_gguf_file(path)
    assert found.version == 3
    assert found.metadata == {
        "general.architecture": "llama",
        "general.alignment": 16,
        "n": -1,
        "flag": True,
        "words": ["a", "é"],
        "numbers": [0.5, -2.0],
    }
    assert found.metadata["flag"] is True
    assert found.tensors["w"].to_float32().tolist() == [0, 1, 2, 3]
    assert found.tensors["v"].to_float32().tolist() == [[0, 1], [2, 3]]


def test_a_file_cut_anywhere_is_an_error(tmp_path):
    path = tmp_path / "m.gguf"
    with allocates_less_than(1 << 20):
        for length in range(len(WHOLE)):
            path.write_bytes(WHOLE[:length])
            with pytest.raises(CheckpointError):
                read_gguf_file(path)


def test_one_wrong_byte_in_the_header_never_escapes_as_another_error(tmp_path):
    """Whatever a byte becomes: read, or a CheckpointError; and never a large allocation."""
    path = tmp_path / "m.gguf"
    with allocates_less_than(1 << 20):
        for place in range(len(WHOLE) - len(BODY) * 2):
            for value in (0, 1, 9, 0x7F, 0xFF):
                path.write_bytes(WHOLE[:place] + bytes([value]) + WHOLE[place + 1 :])
                with contextlib.suppress(CheckpointError):
                    read_gguf_file(path)


def test_version_2_is_read_as_3(tmp_path):
    (tmp_path / "m.gguf").write_bytes(WHOLE[:4] + b"\2" + WHOLE[5:])
    found = read_gguf_file(tmp_path / "m.gguf")
    assert found.version == 2
    assert set(found.tensors) == {"w", "v"}


@pytest.mark.parametrize("encoding", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_what_the_library_writes_is_read_exactly(tmp_path, encoding):
    rng = np.random.default_rng(0)
    kind = gguf.GGMLQuantizationType[encoding]
    numbers = rng.normal(size=(5, 64)).astype(np.float32)
    packed = gguf.quants.quantize(numbers, kind)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_uint32("llama.block_count", 3)
    writer.add_array("tokenizer.ggml.tokens", ["a", "b"])
    raw = packed if encoding in {"F32", "F16"} else packed.view(np.uint8)
    writer.add_tensor("w", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = read_gguf_file(tmp_path / "m.gguf")
    assert found.metadata["llama.block_count"] == 3
    assert found.metadata["tokenizer.ggml.tokens"] == ["a", "b"]
    tensor = found.tensors["w"]
    assert (tensor.encoding, tensor.shape) == (encoding, (5, 64))
    np.testing.assert_array_equal(tensor.to_float32(), gguf.quants.dequantize(packed, kind))


def test_the_commonest_types_are_those_of_the_gguf_library():
    """They stand in our own tables too, so that most files are read without it."""
    for number, name in ENCODINGS.items():
        assert gguf.GGMLQuantizationType(number).name == name
    for name, sizes in BLOCKS.items():
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]] == sizes


def random_tensor(name, shape, encoding, seed=0):
    numbers = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
    return TensorToWrite(name, encoding, shape, [encode(numbers, encoding)]), numbers


def test_what_is_written_is_read_exactly_by_the_library_and_by_us(tmp_path):
    """Unequal sizes, so that each tensor is followed by padding; and every kind of value."""
    path = tmp_path / "m.gguf"
    shapes = {"F32": (7,), "Q8_0": (3, 96), "Q4_0": (5, 32), "Q4_1": (2, 3, 64), "BF16": (3, 5)}
    written = {kind: random_tensor(f"w.{kind}", shape, kind) for kind, shape in shapes.items()}
    metadata = {
        "general.architecture": "llama",
        "whole": 4_000_000_000,
        "part": 1e-5,
        "flag": False,
        "text": "Grüße\n",
        "tokens": ["a", "", "▁é"],
        "types": [1, -2],
        "scores": [0.5, -3.0],
        "flags": [True, False],
        "merges": [],
    }
    write_gguf_file(path, metadata, [tensor for tensor, _ in written.values()])
    found = read_gguf_file(path)
    assert found.version == 3
    assert found.metadata == metadata | {"part": float(np.float32(1e-5))}
    library = gguf.GGUFReader(path)
    theirs = {tensor.name: tensor for tensor in library.tensors}
    for key, value in found.metadata.items():
        if value:  # the library has no contents of an empty list
            assert library.fields[key].contents() == value, key
    for kind, (tensor, numbers) in written.items():
        (chunk,) = tensor.chunks
        other = theirs[tensor.name]
        assert (found.tensors[tensor.name].shape, found.tensors[tensor.name].encoding) == (
            numbers.shape,
            kind,
        )
        np.testing.assert_array_equal(found.tensors[tensor.name].data, chunk)
        assert other.tensor_type.name == kind
        assert tuple(other.shape.tolist()) == numbers.shape[::-1]
        np.testing.assert_array_equal(np.asarray(other.data).reshape(-1).view(np.uint8), chunk)
        assert other.data_offset % 32 == 0


def test_values_are_carried_over_as_they_stand(tmp_path):
    """Types too: a 64-bit or a signed number stays one, which writing anew would not keep."""
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_uint64("long", 1 << 40)
    writer.add_int8("small", -3)
    writer.add_float64("precise", 0.1)
    writer.add_array("words", ["x", "yz"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    before = read_gguf_file(tmp_path / "a.gguf")
    write_gguf_file(tmp_path / "b.gguf", before.encoded, [])
    after = read_gguf_file(tmp_path / "b.gguf")
    assert after.metadata == before.metadata
    assert {k: bytes(v.data) for k, v in after.encoded.items()} == {
        k: bytes(v.data) for k, v in before.encoded.items()
    }


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (-1, "n: .*out of bounds"),
        (1 << 32, "n: .*out of bounds"),
        ([1, 2.5], "n: a list of .* cannot be written"),
        ([[1]], "n: a list of .* cannot be written"),
    ],
)
def test_values_that_cannot_be_written_are_programming_errors(tmp_path, value, message):
    with pytest.raises(ValueError, match=message):
        write_gguf_file(tmp_path / "m.gguf", {"n": value}, [])
    assert list(tmp_path.iterdir()) == []


def test_tensors_that_do_not_add_up_are_programming_errors_and_nothing_stands(tmp_path):
    tensor, _ = random_tensor("w", (3, 5), "F32")
    for tensors, message in [
        ([tensor, tensor], "'w' comes twice"),
        ([tensor._replace(shape=(4, 5))], "w: 60 bytes were given, 80 needed"),
    ]:
        with pytest.raises(ValueError, match=message):
            write_gguf_file(tmp_path / "m.gguf", {}, tensors)
        assert list(tmp_path.iterdir()) == []
