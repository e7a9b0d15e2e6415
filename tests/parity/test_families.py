"""Every family of checkpoints against transformers: logits, the cache, the way out and back.

Random models of unequal sizes whose every parameter is large, read from the files that
transformers wrote; texts are longer than windows and past the original window of scaled rules.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from armillary.checkpoints import open_checkpoint, save_armillary
from armillary.checkpoints.checkpoint import Checkpoint
from armillary.checkpoints.families import FAMILIES
from armillary.checkpoints.families.experts import TRAINING_ONLY
from armillary.checkpoints.huggingface import read_huggingface, write_huggingface
from armillary.checkpoints.tensors import to_write
from armillary.decoder import Decoder
from armillary.engine.decoder import EngineDecoder
from armillary.parts.kv_cache import KVCache
from armillary.weights import build_filled
from support import models
from support.peer_families import (
    CASES,
    LENGTH,
    PEERS,
    WINDOW,
    build_peer,
    in_float64,
)
from support.peer_llama import load_peer, save_peer, whole_pass

pytestmark = pytest.mark.peer

TOLERANCE = 1e-9  # float64; logits reach 9
IN_FLOAT32 = 1e-3  # of logits that reach 17; rounding on both sides gives 2e-4
FAMILY = {family.name: family for family in FAMILIES}
VARYING = {("phi3", name) for name in ("longrope", "partial longrope", "tied head")}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tensors this small only wait for other threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_every_family_has_a_peer():
    assert set(FAMILY) == set(PEERS)


def built(checkpoint: Checkpoint) -> Decoder:
    return build_filled(checkpoint.config, checkpoint.tensors, dtype=torch.float64)


def gap(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).detach().abs().max())


def tokens(batch: int = 2, length: int = LENGTH) -> Tensor:
    return models.tokens(batch, length)


@torch.no_grad()
def stepped(decoder: Decoder, ids: Tensor, *counts: int) -> Tensor:
    """The logits of all tokens, taken into a cache in parts of these counts."""
    cache = KVCache(decoder.config, batch=ids.shape[0])
    return torch.cat([decoder(part, cache=cache) for part in ids.split(counts, dim=1)], dim=1)


@pytest.mark.parametrize(("name", "variant"), CASES)
def test_logits_of_a_whole_pass_and_step_by_step(tmp_path, name, variant):
    ids = tokens()
    with in_float64(name):
        peer = build_peer(name, variant)
        expected = whole_pass(peer, ids)
    ours = built(open_checkpoint(save_peer(peer, tmp_path)))
    assert gap(ours(ids), expected) <= TOLERANCE
    steps = stepped(ours, ids, 5, 1, 1, 3, *[1] * (LENGTH - 10))
    if (name, variant) not in VARYING:
        assert gap(steps, expected) <= TOLERANCE
        return
    for length in range(WINDOW - 2, LENGTH + 1, 5):
        with in_float64(name):
            expected = whole_pass(peer, ids[:, :length])[:, -1]
        assert gap(steps[:, length - 1], expected) <= TOLERANCE


def written(checkpoint: Checkpoint, directory: Path, name: str) -> Path:
    """A directory of the family, out of a checkpoint."""
    tensors = [to_write(tensor, tensor.encoding) for tensor in checkpoint.tensors.values()]
    write_huggingface(directory, checkpoint.config, tensors, family=FAMILY[name])
    return directory


def through_ours(checkpoint: Checkpoint, directory: Path) -> Checkpoint:
    """A checkpoint saved in our format and read again."""
    tensors = [to_write(tensor, tensor.encoding) for tensor in checkpoint.tensors.values()]
    save_armillary(directory, checkpoint.config, tensors)
    return open_checkpoint(directory)


def missing(before: Any, after: Any, path: str = "") -> list[str]:
    """The entries of a mapping that another does not have, or has otherwise."""
    if isinstance(before, dict) and isinstance(after, dict):
        return [line for key in before for line in missing(before[key], after.get(key), key)]
    return [] if before == after else [f"{path}: {before!r} became {after!r}"]


# What says nothing of the model, or only repeats another key.
NOT_CARRIED = {"dtype", "transformers_version", "initializer_range", "_sliding_window_pattern"}
NOT_CARRIED |= TRAINING_ONLY
NOT_CARRIED |= {"use_bidirectional_attention"}  # read only when it is false
NOT_CARRIED_OF = {
    "gpt2": {"summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj"}
    | {"summary_activation", "reorder_and_upcast_attn", "scale_attn_weights"}
    | {"scale_attn_by_inverse_layer_idx", "add_cross_attention"},
    "gpt_neox": {"classifier_dropout", "is_decoder"},
    "stablelm": {"hidden_dropout"},
    "falcon": {"alibi"},
    "llama": {"pretraining_tp"},
    "gpt-oss": {"hidden_act", "swiglu_alpha"},
    "deepseek-v3": {"pretraining_tp", "head_dim", "qk_head_dim", "intermediate_size"},
    # Which layers are dense is said in the other of two ways, the number of experts by one name.
    "qwen3-moe": {"num_local_experts", "decoder_sparse_step", "mlp_only_layers"}
    | {"intermediate_size"},
}


@pytest.mark.parametrize(("name", "variant"), CASES)
def test_out_and_back_changes_no_key_and_no_bit(tmp_path, name, variant):
    """Hugging Face → ours → Hugging Face (cases.md 13, 19, 74)."""
    with in_float64(name):
        first = save_peer(build_peer(name, variant), tmp_path / "a")
    ours = through_ours(read_huggingface(first), tmp_path / "b")
    second = written(ours, tmp_path / "c", name)
    entries = [json.loads((each / "config.json").read_text()) for each in (first, second)]
    ignored = NOT_CARRIED | NOT_CARRIED_OF.get(name, set())
    kept = {
        key: value
        for key, value in entries[0].items()
        if key not in ignored and (value is not None or key in entries[1])
    }
    assert not missing(kept, entries[1])
    before, after = (load_file(each / "model.safetensors") for each in (first, second))
    assert set(before) == set(after)
    for key, tensor in before.items():
        assert tensor.dtype == after[key].dtype
        assert torch.equal(tensor, after[key]), key
    third = written(read_huggingface(second), tmp_path / "d", name)
    for file in ("config.json", "model.safetensors"):
        assert (third / file).read_bytes() == (second / file).read_bytes()


@pytest.mark.parametrize(("name", "variant"), CASES)
def test_transformers_reads_what_we_write(tmp_path, name, variant):
    ids = tokens()
    with in_float64(name):
        peer = build_peer(name, variant)
        expected = whole_pass(peer, ids)
        save_peer(peer, tmp_path / "a")
        directory = written(read_huggingface(tmp_path / "a"), tmp_path / "b", name)
        again = load_peer(directory, torch.float64)
        again.set_attn_implementation("eager")
        again.config._experts_implementation = "eager"
        assert gap(whole_pass(again, ids), expected) <= TOLERANCE


@pytest.mark.parametrize(("name", "variant"), CASES)
def test_the_engine_computes_the_same_from_the_files(tmp_path, name, variant):
    """Views of fused and grouped rows are read in place, turned and joined ones brought to rows."""
    ids = tokens(1)
    peer = build_peer(name, variant).to(torch.float32)
    checkpoint = read_huggingface(save_peer(peer, tmp_path))
    engine = EngineDecoder(checkpoint.config, checkpoint.tensors, threads=1)
    logits = engine.take([engine.new_cache()], [ids[0].tolist()], every=True)[0]
    expected = whole_pass(peer, ids)[0]
    assert gap(torch.from_numpy(logits), expected) <= IN_FLOAT32
