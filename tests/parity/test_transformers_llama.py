"""Our decoder on checkpoints that transformers wrote, against transformers.

Random models of unequal sizes whose every parameter is large, read from their files; positions go
past the original window of every scaled rule.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from armillary.checkpoints import open_checkpoint
from armillary.decoder import Decoder
from armillary.parts.kv_cache import KVCache
from armillary.torch_engine import left_padded
from armillary.weights import build_filled
from support import models
from support.peer_llama import (
    ROPES,
    WINDOW,
    build_peer,
    config_entries,
    in_float64,
    save_peer,
    whole_pass,
)

pytestmark = pytest.mark.peer

TOLERANCE = 1e-11  # float64; logits reach 9, and rounding alone gives 1e-13
LENGTH = 36  # more than two original windows
ALL_BIASES = {"attention_bias": True, "mlp_bias": True}
VARIANTS: dict[str, dict[str, Any]] = {
    "no biases": {},
    "heads as wide as the model": {"hidden_size": 60},
    "heads wider than the model": {"head_dim": 14},
    "attention biases": {"attention_bias": True},
    "feed-forward biases": {"mlp_bias": True},
    "tied head": {"tie_word_embeddings": True},
    "tied head and biases": {"tie_word_embeddings": True} | ALL_BIASES,
    "one kv head": {"num_key_value_heads": 1},
    "large eps": {"rms_norm_eps": 0.1},
    "gelu": {"hidden_act": "gelu"},
}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tensors this small only wait for other threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def peer_in_float64() -> Iterator[None]:
    with in_float64():
        yield


def ours_from(directory: Path, dtype: torch.dtype = torch.float64) -> Decoder:
    checkpoint = open_checkpoint(directory)
    return build_filled(checkpoint.config, checkpoint.tensors, dtype=dtype)


@pytest.fixture
def pair(tmp_path: Path, peer_in_float64: None) -> Callable[..., tuple[Decoder, Any]]:
    """Build a peer, save it, read it: (ours, theirs)."""

    def build(rope: str, **entries: Any) -> tuple[Decoder, Any]:
        peer = build_peer(config_entries(rope, **entries), torch.float64)
        return ours_from(save_peer(peer, tmp_path)), peer

    return build


def tokens(batch: int = 2, length: int = LENGTH) -> Tensor:
    return models.tokens(batch, length)


def gap(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).detach().abs().max())


@torch.no_grad()
def stepped(decoder: Decoder, ids: Tensor, *counts: int) -> Tensor:
    """The logits of all tokens, taken into a cache in parts of these counts."""
    cache = KVCache(decoder.config, batch=ids.shape[0])
    return torch.cat([decoder(part, cache=cache) for part in ids.split(counts, dim=1)], dim=1)


@pytest.mark.parametrize("rope", ROPES)
def test_logits_of_every_rope_type(pair, rope):
    ours, theirs = pair(rope, **ALL_BIASES)
    ids = tokens()
    assert gap(ours(ids), whole_pass(theirs, ids)) <= TOLERANCE


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_of_every_option(pair, name):
    ours, theirs = pair("default", **VARIANTS[name])
    ids = tokens()
    assert gap(ours(ids), whole_pass(theirs, ids)) <= TOLERANCE


@pytest.mark.parametrize("rope", [name for name in ROPES if name not in {"dynamic", "longrope"}])
def test_logits_step_by_step_with_both_caches(pair, rope):
    from transformers import DynamicCache

    ours, theirs = pair(rope)
    ids = tokens()
    counts = [WINDOW - 3, 1, 1, 1, 1, 1, 8, *[1] * (LENGTH - WINDOW - 10)]
    cache = DynamicCache(config=theirs.config)
    with torch.no_grad():
        expected = [theirs(part, cache=cache).logits for part in ids.split(counts, dim=1)]
    assert gap(stepped(ours, ids, *counts), torch.cat(expected, dim=1)) <= TOLERANCE


@pytest.mark.parametrize("rope", ["dynamic", "longrope"])
def test_a_cached_step_is_their_whole_pass_where_frequencies_vary(pair, rope):
    """Their cache keeps keys that were rotated for a shorter text (cases 39 and 42)."""
    ours, theirs = pair(rope)
    ids = tokens()
    start = WINDOW - 2
    steps = stepped(ours, ids, start, *[1] * (LENGTH - start))
    for length in range(start, LENGTH + 1):
        expected = whole_pass(theirs, ids[:, :length])[:, -1]
        assert gap(steps[:, length - 1], expected) <= TOLERANCE


@pytest.mark.parametrize("rope", ROPES)
def test_each_row_of_a_left_padded_batch_is_theirs_alone(pair, rope):
    """Rows on both sides of the original window, the longest last: dynamic never forgets a base."""
    ours, theirs = pair(rope)
    lengths = [5, WINDOW + 3, LENGTH]
    rows = [tokens(1, length)[0].tolist() for length in lengths]
    ids, mask = left_padded(rows)
    cache = KVCache(ours.config, batch=len(rows))
    with torch.no_grad():
        whole = ours(ids, mask=mask)
        cached = torch.cat([ours(ids[:, :-1], mask=mask[:, :-1], cache=cache),
                            ours(ids[:, -1:], cache=cache)], dim=1)  # fmt: skip
    for row, (length, own) in enumerate(zip(lengths, rows, strict=True)):
        expected = whole_pass(theirs, torch.tensor([own]))[0]
        assert gap(whole[row, -length:], expected) <= TOLERANCE
        assert gap(cached[row, -1], expected[-1]) <= TOLERANCE


def test_a_left_padded_batch_is_their_left_padded_batch(pair):
    ours, theirs = pair("yarn")
    ids, mask = left_padded([tokens(1, length)[0].tolist() for length in (5, LENGTH)])
    assert mask is not None
    positions = (mask.long().cumsum(-1) - 1).clamp(min=0)
    expected = whole_pass(theirs, ids, attention_mask=mask.long(), position_ids=positions)
    assert gap(ours(ids, mask=mask)[mask], expected[mask]) <= TOLERANCE


@pytest.mark.parametrize("rope", ROPES)
def test_the_old_schema_of_the_rotary_keys_says_the_same(tmp_path, peer_in_float64, rope):
    """rope_theta and rope_scaling on the top level, and the old name of the type."""
    peer = build_peer(config_entries(rope), torch.float64)
    save_peer(peer, tmp_path)
    new = open_checkpoint(tmp_path).config
    path = tmp_path / "config.json"
    entries = json.loads(path.read_text())
    scaling = entries.pop("rope_parameters")
    entries["rope_theta"] = scaling.pop("rope_theta")
    scaling["type"] = scaling.pop("rope_type")
    entries["rope_scaling"] = None if rope == "default" else scaling
    entries["torch_dtype"] = entries.pop("dtype")
    path.write_text(json.dumps(entries))

    assert open_checkpoint(tmp_path).config == new
    ids = tokens()
    assert gap(ours_from(tmp_path)(ids), whole_pass(peer, ids)) <= TOLERANCE


@pytest.mark.parametrize("rope", ROPES)
def test_every_rope_type_makes_a_difference(pair, tmp_path, rope):
    """Otherwise the comparisons above would hold for a rule that is passed over."""
    ours, _ = pair(rope)
    other = build_filled(
        config_with(ours, "linear" if rope == "default" else "default"),
        open_checkpoint(tmp_path).tensors,
        dtype=torch.float64,
    )
    ids = tokens()
    assert gap(ours(ids), other(ids)) > 0.1


def config_with(decoder: Decoder, rope: str) -> Any:
    layer = decoder.config.layers[0]
    assert layer.attention.rotary is not None
    rotary = layer.attention.rotary.model_copy(update={"scaling": models.SCALINGS[rope]})
    attention = layer.attention.model_copy(update={"rotary": rotary})
    changed = layer.model_copy(update={"attention": attention})
    return decoder.config.model_copy(update={"layers": (changed,) * decoder.config.n_layers})


@pytest.mark.parametrize("rope", ROPES)
def test_logits_in_float32_of_transformers_as_it_is(tmp_path, rope):
    """Nothing patched; in float32 rounding alone gives 3e-5 where logits reach 9."""
    peer = build_peer(config_entries(rope, **ALL_BIASES), torch.float32)
    ours = ours_from(save_peer(peer, tmp_path), torch.float32)
    ids = tokens()
    assert gap(ours(ids), whole_pass(peer, ids)) <= 1e-4
