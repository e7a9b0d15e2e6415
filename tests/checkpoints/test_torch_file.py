"""torch's own files are read without unpickling; what is no tensor is refused, and nothing runs."""

import zipfile
from collections import OrderedDict

import numpy as np
import pytest
import torch

from armillary.checkpoints.torch_file import read_torch_file
from armillary.errors import CheckpointError

DTYPES = {
    "F32": torch.float32,
    "F64": torch.float64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


def made(path, entries):
    torch.save(entries, path)
    return path


def archive(path, program, **members):
    """A file as torch lays it out, with a pickle of one's own."""
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/data.pkl", program)
        for name, data in members.items():
            file.writestr(f"archive/data/{name}", data)
    return path


@pytest.mark.parametrize("encoding", DTYPES)
def test_tensors_are_read_as_torch_saved_them(tmp_path, encoding):
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(5, 6, generator=generator).to(DTYPES[encoding])
    entries = OrderedDict(
        {"w": whole, "part": whole[2:4], "p": torch.nn.Parameter(whole[0]), "one": whole[0, 0]}
    )
    found = read_torch_file(made(tmp_path / "m.pth", entries))
    assert list(found) == list(entries)
    for name, tensor in entries.items():
        assert found[name].encoding == encoding
        assert found[name].shape == tuple(tensor.shape)
        np.testing.assert_array_equal(
            found[name].to_float32(), tensor.detach().float().numpy(), err_msg=name
        )


def test_a_modules_state_is_read(tmp_path):
    """It is an OrderedDict with attributes, and shares a storage."""
    module = torch.nn.Linear(3, 2)
    module.twin = module.weight
    found = read_torch_file(made(tmp_path / "m.pth", module.state_dict()))
    assert set(found) == {"weight", "bias", "twin"}


class Marking:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


def test_a_reducer_is_refused_and_not_run(tmp_path):
    """Cases.md 79."""
    marker = tmp_path / "marker"
    path = made(tmp_path / "m.pth", {"w": torch.zeros(2), "x": Marking(marker)})
    with pytest.raises(CheckpointError, match="asks for .*open; nothing but tensors is read"):
        read_torch_file(path)
    assert not marker.exists()
    torch.load(path, weights_only=False)  # the file is what it is taken for
    assert marker.exists()


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (b"cposix\nsystem\n(X\x02\x00\x00\x00lstR.", "asks for posix.system"),
        (b"\x80\x04\x8c\x05posix\x8c\x06system\x93)R.", "asks for posix.system"),
        (b"ctorch._utils\n_rebuild_tensor_v2\n)R.", "is damaged"),
        (b"ccollections\nOrderedDict\n(K\x01tR.", "calls 'collections.OrderedDict'"),
        (b"}(X\x01\x00\x00\x00aK\x01X\x01\x00\x00\x00aK\x02u.", "gives 'a' twice"),
        (b"(S'text'\ni__builtin__\neval\n.", "has the instruction b'S'"),
        (b"\x80\x02}", "is cut off"),
        (b"h\x09.", "is damaged"),
        (b"K\x01.", "holds no tensors by name"),
        (b"}X\x01\x00\x00\x00aK\x01s.", "entry 'a' is no tensor"),
        (b"X\xff\xff\xff\x7f", "is cut off"),
        (b"(lp0\n.", "has the instruction b'l'"),
    ],
)
def test_programs_that_describe_no_tensors_are_refused_in_one_line(tmp_path, program, message):
    with pytest.raises(CheckpointError, match=message) as caught:
        read_torch_file(archive(tmp_path / "m.pth", program))
    assert "\n" not in str(caught.value)


TENSOR = (
    b"}X\x01\x00\x00\x00wctorch._utils\n_rebuild_tensor_v2\n("
    b"(X\x07\x00\x00\x00storagectorch\n%b\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK%btQ"
    b"K%bK\x02K\x03\x86K%bK\x01\x86\x89NtRs."
)


@pytest.mark.parametrize(
    ("kind", "count", "offset", "stride", "size", "message"),
    [
        (b"FloatStorage", 6, 0, 3, 24, None),
        (b"LongStorage", 6, 0, 3, 48, "asks for torch.LongStorage"),
        (b"FloatStorage", 6, 1, 3, 24, "reaches beyond its storage"),
        (b"FloatStorage", 6, 0, 1, 24, "in another order"),
        (b"FloatStorage", 6, 0, 3, 20, "has 20 bytes"),
        (b"FloatStorage", 6, 0, 3, None, "is not in the file"),
    ],
)
def test_tensors_that_do_not_fit_their_storage_are_refused(
    tmp_path, kind, count, offset, stride, size, message
):
    program = TENSOR % (kind, bytes([count]), bytes([offset]), bytes([stride]))
    members = {} if size is None else {"0": bytes(size)}
    path = archive(tmp_path / "m.pth", program, **members)
    if message is None:
        assert read_torch_file(path)["w"].shape == (2, 3)
        return
    with pytest.raises(CheckpointError, match=message):
        read_torch_file(path)


def test_a_file_that_is_cut_off_anywhere_is_refused(tmp_path):
    path = made(tmp_path / "m.pth", {"w": torch.zeros(3, 4)})
    data = path.read_bytes()
    for size in range(0, len(data), 17):
        path.write_bytes(data[:size])
        with pytest.raises(CheckpointError):
            read_torch_file(path)


def test_members_that_torch_does_not_write_are_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "m.pth", "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("archive/data.pkl", b"}." * 100)
    with pytest.raises(CheckpointError, match="is compressed"):
        read_torch_file(tmp_path / "m.pth")
    (tmp_path / "old.pth").write_bytes(b"\x80\x02l.")
    with pytest.raises(CheckpointError, match=r"is a bare pickle, as torch saved before 1\.6"):
        read_torch_file(tmp_path / "old.pth")
