"""What many ranks write is what one writes, and nobody is left waiting when one cannot."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from armillary import Decoder, DecoderConfig
from armillary.checkpoints import open_checkpoint, save_armillary, write_huggingface
from armillary.errors import ConfigError, UserError
from armillary.files import verify_manifest, write_atomically
from armillary.training.lora import LoraConfig, add_lora, merge_lora
from armillary.training.objective import Objective
from armillary.training.parallel.config import Sizes
from armillary.training.parallel.export import export_armillary, export_huggingface
from armillary.training.parallel.ranks import start_ranks
from armillary.training.parallel.sharding import parallelise
from armillary.weights import to_write
from support.models import VARIANTS, build
from support.ranks import on_ranks

LLAMA = DecoderConfig.uniform(
    vocab_size=61, d_model=48, n_layers=3, n_heads=6, n_kv_heads=2, d_head=10, d_ff=24,
    max_positions=64, tie_head=True,
)  # fmt: skip
OTHER = VARIANTS["parallel sandwich"]
GENERATION = {"eos_token_id": (3,)}


def llama() -> Decoder:
    return build(LLAMA, dtype=torch.float32)


def _export_all(out: Path) -> list[str]:
    """Exports of every kind, and what was said where one rank could not write."""
    said = []
    with start_ranks(Sizes(tensor=2)) as ranks:
        objective = Objective(llama())
        parallelise(objective, ranks)
        export_huggingface(out / "tensor", objective.decoder, generation=GENERATION)
    with start_ranks(Sizes(shard=2)) as ranks:
        objective = Objective(llama())
        parallelise(objective, ranks)
        decoder = objective.decoder
        export_huggingface(out / "shard", decoder, generation=GENERATION)
        export_huggingface(out / "small", decoder, max_shard_bytes=9000)
        export_huggingface(out / "half", decoder, dtype=torch.bfloat16)
        adapted = Objective(llama())
        add_lora(adapted.decoder, LoraConfig(targets=("*.attention.q",), rank=2))
        with torch.no_grad():
            for layer in adapted.decoder.layers:
                layer.attention.q.lora_b.fill_(0.5)
                layer.attention.q.lora_a.copy_(torch.arange(96.0).reshape(2, 48))
        parallelise(adapted, ranks)
        merge_lora(adapted.decoder)
        export_huggingface(out / "merged", adapted.decoder)
        other = Objective(build(OTHER))
        parallelise(other, ranks)
        export_armillary(out / "own", other.decoder)
        with pytest.raises(ConfigError, match="cannot express"):
            export_huggingface(out / "inexpressible", other.decoder)
        for failing in (0, 1):
            said.append(_refused(out / f"failing-{failing}", decoder, ranks.rank == failing))
        (out / "in-the-way").mkdir(exist_ok=True)
        (out / "in-the-way" / "file").touch()
        ranks.barrier()
        said.append(_refused(out / "in-the-way", decoder, False))
    return said


def _refused(path: Path, decoder: Decoder, full: bool) -> str:
    """The error of an export, perhaps with a disk that is full after some of its tensors."""
    writing = _nearly_full if full else write_atomically
    with (
        mock.patch("armillary.files.write_atomically", writing),
        pytest.raises(UserError) as error,
    ):
        export_huggingface(path, decoder)
    return str(error.value)


@contextmanager
def _nearly_full(path: Path) -> Iterator[Any]:
    with write_atomically(path) as file:
        room = iter(range(4))

        def write(data: bytes) -> int:
            if next(room, None) is None:
                raise OSError(28, "No space left on device")
            return file.write(data)

        yield mock.Mock(write=write)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[str]]]:
    out = tmp_path_factory.mktemp("exported")
    return out, on_ranks(2, _export_all, out)


def assert_equal(one: Path, other: Path) -> None:
    mine, theirs = open_checkpoint(one), open_checkpoint(other)
    assert mine.config == theirs.config
    assert mine.generation == theirs.generation
    assert mine.tensors.keys() == theirs.tensors.keys()
    for name, tensor in theirs.tensors.items():
        assert mine.tensors[name].encoding == tensor.encoding
        assert mine.tensors[name].data.tobytes() == tensor.data.tobytes(), name


@pytest.mark.parametrize("kind", ["shard", "tensor"])
def test_it_is_what_one_process_writes(kind, exported, tmp_path):
    out, _ = exported
    write_huggingface(tmp_path / "one", LLAMA, to_write(llama()), generation=GENERATION)
    assert_equal(out / kind, tmp_path / "one")
    verify_manifest(out / kind, checksums=True)
    for name in ("config.json", "generation_config.json"):
        assert (out / kind / name).read_bytes() == (tmp_path / "one" / name).read_bytes()


def test_each_rank_writes_about_half(exported):
    out, _ = exported
    sizes = [file.stat().st_size for file in sorted((out / "shard").glob("*.safetensors"))]
    assert len(sizes) == 2
    assert max(sizes) < 0.6 * sum(sizes)
    assert len(list((out / "small").glob("*.safetensors"))) > 5


def test_numbers_are_rounded_where_another_type_is_asked_for(exported, tmp_path):
    out, _ = exported
    half = llama().bfloat16()
    write_huggingface(tmp_path / "one", LLAMA, to_write(half))
    assert_equal(out / "half", tmp_path / "one")


def test_adapters_that_were_merged_are_written_with_their_weights(exported, tmp_path):
    out, _ = exported
    decoder = llama()
    with torch.no_grad():
        for layer in decoder.layers:
            layer.attention.q.weight += 8 * 0.5 * torch.arange(96.0).reshape(2, 48).sum(0)
    write_huggingface(tmp_path / "one", LLAMA, to_write(decoder))
    mine, theirs = open_checkpoint(out / "merged"), open_checkpoint(tmp_path / "one")
    for name, tensor in theirs.tensors.items():
        np.testing.assert_allclose(
            mine.tensors[name].to_float32(), tensor.to_float32(), rtol=1e-6, err_msg=name
        )


def test_any_decoder_is_written_in_our_own_format(exported, tmp_path):
    out, _ = exported
    save_armillary(tmp_path / "one", OTHER, to_write(build(OTHER)))
    assert_equal(out / "own", tmp_path / "one")


def test_a_rank_that_cannot_write_ends_all_and_leaves_nothing(exported):
    out, said = exported
    assert said[0] == said[1]
    for message in said[0][:2]:
        assert "No space left" in message
    assert "was not saved by armillary" in said[0][2]
    left = {path.name for path in out.iterdir()}
    assert left == {"tensor", "shard", "small", "half", "merged", "own", "in-the-way"}


@pytest.mark.peer
def test_it_loads_in_transformers(exported):
    import transformers

    out, _ = exported
    model = transformers.AutoModelForCausalLM.from_pretrained(out / "small").double().eval()
    ids = torch.arange(12).reshape(1, 12)
    with torch.no_grad():
        theirs, ours = model(ids).logits, llama().double()(ids)
    torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-5)
