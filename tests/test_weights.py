"""A decoder filled from stored tensors: each parameter once, from its own tensor, or an error."""

import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from armillary import weights
from armillary.checkpoints import open_checkpoint, save_armillary
from armillary.checkpoints import tensors as tensors_module
from armillary.checkpoints.tensors import StoredTensor, encode
from armillary.config import DecoderConfig
from armillary.errors import CheckpointError
from armillary.weights import build_filled, read, to_write
from support.downloads import smollm2_gguf
from support.models import VARIANTS, build, config
from support.random_weights import random_weights

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
N_PARAMETERS = 21  # of two plain layers


def store(name: str, numbers: np.ndarray, encoding: str = "F64") -> StoredTensor:
    if encoding == "F64":
        data = np.frombuffer(numbers.astype("<f8").tobytes(), dtype=np.uint8)
    else:
        data = encode(numbers.astype(np.float32), encoding)
    return StoredTensor(name, numbers.shape, encoding, data, "weights.file")


def stored(config: DecoderConfig) -> dict[str, StoredTensor]:
    arrays = random_weights(config.to_dict())
    return {name: store(name, numbers) for name, numbers in arrays.items()}


@pytest.fixture
def tensors() -> dict[str, StoredTensor]:
    return stored(config())


@pytest.mark.parametrize("name", VARIANTS)
def test_every_parameter_is_filled_by_the_tensor_of_its_name(name):
    """Names and shapes are written down apart from the library, so nothing agrees with itself."""
    decoder = build_filled(VARIANTS[name], stored(VARIANTS[name]), dtype=torch.float64)
    expected = random_weights(VARIANTS[name].to_dict())
    assert decoder.state_dict().keys() == expected.keys()
    for key, value in decoder.state_dict().items():
        np.testing.assert_array_equal(value.numpy(), expected[key])
    assert not decoder.training


def test_every_parameter_is_assigned_exactly_once(tensors, monkeypatch):
    """Case 74: memory comes poisoned, and none of the poison is left."""
    filled: Counter[str] = Counter()

    def poisoned(shape: tuple[int, ...], **options: Any) -> torch.Tensor:
        return torch.full(shape, torch.nan, **options)

    def counted(tensor: StoredTensor, *options: object) -> torch.Tensor:
        filled[tensor.name] += 1
        with mock.patch.object(torch, "empty", poisoned):
            return read(tensor, *options)

    monkeypatch.setattr(weights, "read", counted)
    decoder = build_filled(config(), tensors, dtype=torch.float64)
    assert filled == dict.fromkeys(tensors, 1)
    assert len(filled) == N_PARAMETERS
    assert not any(parameter.isnan().any() for parameter in decoder.parameters())


@pytest.mark.parametrize("name", ["plain", "sinusoidal", "rope longrope"])
def test_nothing_is_left_on_the_meta_device(name):
    """Case 5: a decoder must not compute from memory that nobody filled."""
    decoder = build_filled(VARIANTS[name], stored(VARIANTS[name]))
    assert all(not value.is_meta for value in [*decoder.parameters(), *decoder.buffers()])
    assert decoder(torch.tensor([[1, 2, 3]])).isfinite().all()


def test_what_device_tensors_are_made_on_by_default_does_not_matter():
    """A caller may have set a default device; meta stands for any other than the model's."""
    with torch.device("meta"):
        decoder = build_filled(VARIANTS["plain"], stored(VARIANTS["plain"]))
    assert not any(parameter.is_meta for parameter in decoder.parameters())


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_what_is_written_fills_an_equal_decoder(dtype):
    """Through bytes, with a tied head and a bias on it."""
    original = build(VARIANTS["tied head with bias"], dtype=dtype)
    written = {
        part.name: StoredTensor(
            part.name, part.shape, part.encoding, np.concatenate(list(part.chunks)), "memory"
        )
        for part in to_write(original)
    }
    again = build_filled(original.config, written, dtype=dtype)
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    assert torch.equal(again(ids), original(ids))


@pytest.mark.parametrize("encoding", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_every_type_is_filled_from_every_encoding(encoding, dtype, monkeypatch):
    """By blocks of rows that do not divide the tensor, with rows that change places."""
    monkeypatch.setattr(tensors_module, "_BLOCK_ELEMENTS", 3 * 7)
    numbers = torch.randn(11, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    order = np.arange(11)[::-1].copy()
    tensor = store("x", numbers.numpy(), encoding).reordered(order)
    kept = numbers.to(DTYPES[encoding]).flip(0)
    assert torch.equal(read(tensor, dtype), kept.to(dtype))


def test_a_quantised_tensor_is_dequantised_into_every_type():
    """Q8_0: a float16 scale, then 32 signed bytes."""
    steps = np.arange(-16, 16, dtype=np.int8)
    block = np.float16(0.25).tobytes() + steps.tobytes()
    data = np.frombuffer(2 * block, dtype=np.uint8)
    tensor = StoredTensor("x", (2, 32), "Q8_0", data, "weights.file")
    expected = 0.25 * torch.arange(-16, 16).repeat(2, 1)
    for dtype in DTYPES.values():
        assert torch.equal(read(tensor, dtype), expected.to(dtype))


def test_progress_counts_every_parameter(tensors):
    told: list[tuple[int, int]] = []
    build_filled(config(), tensors, progress=lambda done, total: told.append((done, total)))
    assert told == [(n, N_PARAMETERS) for n in range(1, N_PARAMETERS + 1)]


# --- Errors --------------------------------------------------------------------------------------


def refusal(tensors: dict[str, StoredTensor]) -> str:
    with pytest.raises(CheckpointError) as caught:
        build_filled(config(), tensors)
    return str(caught.value)


def test_a_missing_tensor_is_named(tensors):
    del tensors["layers.1.attention.k.weight"]
    message = refusal(tensors)
    assert "1 of 21 parameters have no tensor: layers.1.attention.k.weight;" in message
    assert "allow_missing=True" in message


def test_many_missing_tensors_are_counted_and_the_first_named(tensors):
    for name in list(tensors):
        if name.startswith("layers.0"):
            del tensors[name]
    message = refusal(tensors)
    assert message.startswith("9 of 21 parameters have no tensor: layers.0.")
    assert "and 6 more" in message


def test_a_missing_parameter_is_nan_where_that_is_allowed(tensors):
    """So that nobody takes what memory held for weights."""
    del tensors["layers.1.attention.k.weight"]
    decoder = build_filled(config(), tensors, dtype=torch.bfloat16, allow_missing=True)
    for name, parameter in decoder.named_parameters():
        whole = parameter.isnan().all() if name not in tensors else parameter.isnan().any()
        assert bool(whole) == (name not in tensors)
        assert parameter.dtype == torch.bfloat16


def test_an_extra_tensor_is_named_with_the_nearest_parameter(tensors):
    tensors["layers.1.attention.kk.weight"] = store("blk.1.kk", np.zeros((20, 40)))
    message = refusal(tensors)
    assert "weights.file: tensor blk.1.kk fills layers.1.attention.kk.weight" in message
    assert "layers.1.attention.k.weight" in message


@pytest.mark.parametrize("shape", [(40, 20), (20, 39), (20,), (1, 20, 40), (800,)])
def test_a_misshapen_tensor_is_named_with_both_shapes(tensors, shape):
    """Cases 19 and 82: never skipped, transposed or reshaped."""
    name = "layers.0.attention.v.weight"
    tensors[name] = store("blk.0.v", np.zeros(shape))
    message = refusal(tensors)
    assert "weights.file: tensor blk.0.v has shape " + str(shape) in message
    assert f"needs (20, 40) for {name}" in message


def test_a_tensor_that_is_there_twice_is_named(tmp_path):
    """One name on two tensors of a file: neither is the right one."""
    decoder = build(config(), dtype=torch.float32)
    save_armillary(tmp_path / "model", decoder.config, list(to_write(decoder)))
    path = tmp_path / "model" / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data.replace(b'"layers.1.norm1.weight"', b'"layers.0.norm1.weight"'))
    with pytest.raises(CheckpointError, match=r"layers\.0\.norm1\.weight"):
        open_checkpoint(tmp_path / "model")


# --- Memory --------------------------------------------------------------------------------------

MEASURE = """
import sys, torch
from armillary.checkpoints import open_checkpoint
from armillary.config import DecoderConfig
from armillary.decoder import Decoder
from armillary.weights import build_filled

def memory(field):
    line = next(line for line in open("/proc/self/status") if line.startswith(field))
    return int(line.split()[1]) * 1024

with torch.device("meta"):  # what torch imports when it is first used
    Decoder(DecoderConfig.uniform(vocab_size=2, d_model=2, n_layers=1, n_heads=1, max_positions=2))
start = memory("VmRSS")
checkpoint = open_checkpoint(sys.argv[1])
opened = memory("VmHWM")
before = memory("VmRSS")
decoder = build_filled(checkpoint.config, checkpoint.tensors, dtype=getattr(torch, sys.argv[2]))
size = sum(parameter.nbytes for parameter in decoder.parameters())
print(opened - start, memory("VmHWM") - before, size)
"""


@pytest.mark.download
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_peak_memory_stays_under_1_3_times_the_weights(dtype):
    """Pages of the mapped file count while they are in use.

    Opening the file costs a tokenizer of 49,152 tokens and reads no weights.
    """
    command = [sys.executable, "-c", MEASURE, str(smollm2_gguf()), dtype]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    opening, peak, size = map(int, output.split())
    assert size == 134_515_008 * {"float32": 4, "bfloat16": 2}[dtype]
    assert peak < 1.3 * size
    assert opening < 100e6
