"""The cache alone and under a decoder: what it holds, refuses, forgets, undoes and writes down."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from armillary.config import DecoderConfig, LayerConfig, NormConfig, RotaryConfig
from armillary.decoder import Decoder
from armillary.errors import CheckpointError
from armillary.parts.kv_cache import KVCache
from armillary.parts.layer_store import CacheError
from armillary.rope_scaling import Unscaled
from support.checks import CACHE, gap
from support.models import ORIGINAL_WINDOW, SCALINGS, VARIANTS, build, config, layer, tokens

KINDS = ["fixed", "growing", "windowed"]
CAPACITY = 16
# One layer of each sort, so that a cache with `windowed` holds both kinds of store.
MIXED = config(layer(attention={"window": 3}), layer())


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let windows wrap and memory grow within a few tokens."""
    monkeypatch.setattr("armillary.parts.layer_store.WINDOW_SLACK", 2)
    monkeypatch.setattr("armillary.parts.layer_store._GROWTH", 2)


@pytest.fixture(autouse=True)
def unused_memory_is_nan() -> Iterator[None]:
    """Case 48: whatever is read before it was written turns up as NaN, in every test here."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


def make(kind: str, of: DecoderConfig = MIXED, batch: int = 1, **options: Any) -> KVCache:
    capacity = CAPACITY if kind == "fixed" else None
    return KVCache(of, batch, capacity, windowed=kind == "windowed", **options)


def state(cache: KVCache) -> list[Any]:
    """Everything that a step could change."""
    held = [
        (store.total, store.held, *([store.k.clone(), store.v.clone()] if store.total else []))
        for store in cache.layers
    ]
    return [cache.length, cache.counts, cache._filled_at, cache._tokens, cache._readable, *held]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and torch.equal(one, other)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def run(decoder: Decoder, cache: KVCache, ids: Tensor, *sizes: int) -> Tensor:
    """The last logits after ids in chunks; a last chunk takes what is left."""
    for part in ids.split([*sizes, ids.shape[1] - sum(sizes)], dim=1):
        logits = decoder(part, cache=cache)
    return logits[:, -1]


# --- What is held -----------------------------------------------------------------------------


def test_unused_memory_is_indeed_nan() -> None:
    """Otherwise the fixture would make every test here weaker, without notice."""
    decoder = build(MIXED)
    for kind in KINDS:
        cache = make(kind)
        run(decoder, cache, tokens(1, 3), 2)
        tail = cache.layers[1]._k[:, :, cache.layers[1].held :]
        assert tail.isnan().all()
        assert tail.numel() > 0


@pytest.mark.parametrize("kind", KINDS)
def test_nan_in_unused_slots_never_shows(kind: str) -> None:
    """Case 48: not at allocation, nor after a trim left old entries behind."""
    decoder, ids = build(MIXED), tokens(1, 9)
    cache = make(kind)
    run(decoder, cache, ids[:, :5], 4)
    cache.trim(1)
    for store in cache.layers:
        store._k[:, :, store.held :] = float("nan")
        store._v[:, :, store.held :] = float("nan")
    assert gap(run(decoder, cache, ids[:, 4:], 1, 1), decoder(ids)[:, -1]) <= CACHE


@pytest.mark.parametrize("kind", KINDS)
def test_stored_keys_are_rotated_once(kind: str) -> None:
    """Case 10: five steps leave the keys that one chunk of five leaves."""
    decoder, ids = build(VARIANTS["plain"]), tokens(1, 5)
    stepped, whole = (make(kind, decoder.config) for _ in range(2))
    run(decoder, stepped, ids, 1, 1, 1, 1)
    run(decoder, whole, ids)
    for ours, theirs in zip(stepped.layers, whole.layers, strict=True):
        assert gap(ours.k, theirs.k) <= CACHE
        assert gap(ours.v, theirs.v) <= CACHE


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_its_size_is_that_of_the_key_value_heads(dtype: torch.dtype) -> None:
    """Case 63: 2 · layers · kv heads · d_head · slots · bytes of a number; never h for h_kv."""
    decoder = build(VARIANTS["plain"], dtype=dtype)
    cache = make("fixed", decoder.config)
    assert cache.nbytes == 0
    decoder(tokens(1, 3), cache=cache)
    assert cache.nbytes == 2 * 2 * 2 * 10 * CAPACITY * dtype.itemsize
    cache.clear()
    assert cache.nbytes == 0


def test_a_fixed_cache_is_allocated_once() -> None:
    decoder, cache = build(MIXED), make("fixed")
    decoder(tokens(1, 1), cache=cache)
    places = [store._k.data_ptr() for store in cache.layers]
    run(decoder, cache, tokens(1, CAPACITY - 1), 7, 1, 1)
    assert [store._k.data_ptr() for store in cache.layers] == places


def test_a_growing_cache_at_most_doubles_and_keeps_what_it_has() -> None:
    decoder, cache, ids = build(MIXED), make("growing"), tokens(1, 30)
    for end in range(1, 31):
        decoder(ids[:, end - 1 : end], cache=cache)
        assert end <= cache.layers[1]._k.shape[2] <= max(2, 2 * end)
    whole = KVCache(MIXED, capacity=30)
    decoder(ids, cache=whole)
    assert gap(cache.layers[1].k, whole.layers[1].k) <= CACHE


def test_a_windowed_layer_holds_what_its_window_reaches() -> None:
    """However long the text; the layer without a window holds all."""
    decoder, cache = build(MIXED), make("windowed")
    run(decoder, cache, tokens(1, 40), 9, *[1] * 30)
    windowed, whole = cache.layers
    assert (windowed.total, whole.held) == (40, 40)
    assert 2 <= windowed.held <= windowed._k.shape[2] == 3 + 2


def test_a_windowed_layer_needs_no_more_room_than_the_capacity() -> None:
    decoder = build(config(layer(attention={"window": 30})))
    cache = KVCache(decoder.config, capacity=4, windowed=True)
    decoder(tokens(1, 4), cache=cache)
    assert cache.layers[0]._k.shape[2] == 4


# --- Refusals ---------------------------------------------------------------------------------


def test_a_full_cache_refuses_and_keeps_what_it_has() -> None:
    """Case 60: capacity 8, prompt 6, 4 new: refused as a whole, with all three numbers."""
    decoder, ids = build(VARIANTS["plain"]), tokens(1, 8)
    cache = KVCache(decoder.config, capacity=8)
    run(decoder, cache, ids[:, :6])
    before, memory = state(cache), [store._k.clone() for store in cache.layers]
    with pytest.raises(CacheError, match="6 cached and 4 new tokens need 10 .* capacity is 8"):
        decoder(tokens(1, 4), cache=cache)
    assert same(state(cache), before)
    for store, old in zip(cache.layers, memory, strict=True):
        assert torch.equal(store._k.nan_to_num(7), old.nan_to_num(7))
    logits = run(decoder, cache, ids[:, 6:])
    assert gap(logits, decoder(ids)[:, -1]) <= CACHE
    with pytest.raises(CacheError, match="8 cached and 1 new"):
        decoder(tokens(1, 1), cache=cache)


def changed(of: DecoderConfig, number: int, **attention: Any) -> DecoderConfig:
    layers = list(of.layers)
    new = layers[number].attention.model_copy(update=attention)
    layers[number] = layers[number].model_copy(update={"attention": new})
    return of.model_copy(update={"layers": tuple(layers)})


TURN = RotaryConfig(d_rotary=10, base=100.0)


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (changed(MIXED, 1, rotary=TURN.model_copy(update={"base": 5e5})), "in layer 1 rotary was"),
        (changed(MIXED, 0, rotary=None), "in layer 0 rotary was"),
        (
            changed(MIXED, 1, rotary=TURN.model_copy(update={"scaling": SCALINGS["linear"]})),
            "linear",
        ),
        (
            changed(MIXED, 1, rotary=TURN.model_copy(update={"layout": "interleaved"})),
            "interleaved",
        ),
        (changed(MIXED, 0, window=4), "in layer 0 window was 3, the decoder's is 4"),
        (changed(MIXED, 1, qk_norm=NormConfig()), "in layer 1 qk_norm was None"),
        (config(layer(attention={"window": 3})), "it has 2 layers, the decoder 1"),
        (MIXED.model_copy(update={"position_table": "sinusoidal"}), "position_table was None"),
        (MIXED.model_copy(update={"embedding_scale": 2.0}), "embedding_scale was 1.0"),
        (
            config(MIXED.layers[0], layer(norm_placement="post")),
            "in layer 1 norm_placement was pre",
        ),
    ],
)
def test_other_settings_are_refused_by_name(other: DecoderConfig, named: str) -> None:
    """Keys of one setting under queries of another would be fluent nonsense."""
    decoder, cache = build(MIXED), make("growing")
    decoder(tokens(1, 3), cache=cache)
    before = state(cache)
    with pytest.raises(CacheError, match="made for other settings") as refused:
        build(other)(tokens(1, 1), cache=cache)
    assert named in str(refused.value)
    assert "\n" not in str(refused.value)
    assert same(state(cache), before)


def test_equal_settings_are_the_same_settings() -> None:
    decoder, ids = build(MIXED), tokens(1, 5)
    cache = KVCache(DecoderConfig.from_dict(MIXED.to_dict()))
    assert gap(run(decoder, cache, ids, 3), decoder(ids)[:, -1]) <= CACHE


def test_another_batch_is_refused() -> None:
    decoder, cache = build(MIXED), make("growing", batch=2)
    with pytest.raises(CacheError, match="3 rows of tokens for a batch of 2"):
        decoder(tokens(3, 2), cache=cache)


def test_another_number_type_is_refused() -> None:
    """Written into the old memory, the new keys would be cast without notice."""
    cache = make("growing")
    build(MIXED)(tokens(1, 3), cache=cache)
    before = state(cache)
    with pytest.raises(
        CacheError, match=r"holds torch.float64 on cpu, the new keys are torch.float32"
    ):
        build(MIXED, dtype=torch.float32)(tokens(1, 1), cache=cache)
    assert same(state(cache), before)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch": 0}, "batch 0 and capacity None must be at least 1"),
        ({"capacity": 0}, "batch 1 and capacity 0 must be at least 1"),
        ({"batch": 2, "rotary_length": [4]}, "1 rotary lengths for a batch of 2"),
    ],
)
def test_impossible_caches_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(CacheError, match=message):
        KVCache(MIXED, **arguments)


def test_an_empty_cache_has_nothing_to_show() -> None:
    cache = make("growing")
    assert (cache.length, cache.counts, cache.nbytes) == (0, [0], 0)
    for read in (
        lambda: cache.tokens,
        lambda: cache.readable,
        lambda: cache.layers[0].k,
        lambda: cache.layers[0].v,
        lambda: cache.save("nowhere"),
    ):
        with pytest.raises(CacheError, match="the cache is empty"):
            read()


@pytest.mark.parametrize("name", ["positions", "documents", "rotary_length"])
def test_what_the_cache_owns_cannot_be_given_beside_it(name: str) -> None:
    with pytest.raises(ValueError, match="a cache sets positions, documents and rotary_length"):
        build(MIXED)(tokens(1, 3), cache=make("growing"), **{name: torch.zeros(1, 3).long()})


def test_a_mask_of_another_shape_changes_nothing() -> None:
    """(B, S) over all slots is no mask over the new tokens."""
    decoder, cache = build(MIXED), make("growing", batch=2)
    decoder(tokens(2, 3), cache=cache)
    before = state(cache)
    for shape in ((2, 5), (1, 2), (2, 2, 2)):
        with pytest.raises(ValueError, match=r"\(B, T, S\) = \(2, 2, 5\)"):
            decoder(tokens(2, 2), cache=cache, mask=torch.ones(shape))
    assert same(state(cache), before)


@pytest.mark.parametrize(
    "bad", [torch.zeros(1, 0).long(), torch.zeros(1, 2), torch.zeros(3).long()]
)
def test_prefill_takes_tokens_only(bad: Tensor) -> None:
    with pytest.raises(ValueError, match="tokens must be integers of shape"):
        build(MIXED).prefill(bad, make("growing"))


# --- Positions and masks ----------------------------------------------------------------------


def test_a_cache_knows_its_tokens_and_positions() -> None:
    decoder, cache, ids = build(MIXED), make("growing", batch=2), tokens(2, 5)
    mask = torch.tensor([[True] * 3, [False, True, True]])
    decoder(ids[:, :3], cache=cache, mask=mask)
    assert torch.equal(cache.tokens, ids[:, :3])
    assert torch.equal(cache.readable, mask)
    assert (cache.length, cache.counts) == (3, [3, 2])
    decoder(ids[:, 3:], cache=cache)
    assert (cache.length, cache.counts) == (5, [5, 4])
    assert torch.equal(cache.readable[:, 3:], torch.ones(2, 2, dtype=torch.bool))
    with cache.step(cache.config, ids[:, :1]) as step:
        assert step.positions.tolist() == [[5], [4]]
        for store in cache.layers:
            store.append(torch.zeros(2, 2, 1, 10).double(), torch.zeros(2, 2, 1, 10).double())


@pytest.mark.parametrize("sizes", [(1, 4), (), (5, 1)])
@pytest.mark.parametrize("kind", KINDS)
def test_the_size_of_the_chunks_does_not_show(kind: str, sizes: tuple[int, ...]) -> None:
    """Case 57: chunks (1, 4, 3), (8), (5, 1, 2)."""
    decoder, ids = build(MIXED), tokens(1, 8)
    assert gap(run(decoder, make(kind), ids, *sizes), decoder(ids)[:, -1]) <= CACHE


@pytest.mark.parametrize("kind", KINDS)
def test_padded_prompts_go_on_as_each_alone(kind: str) -> None:
    """Case 54: prompts of 3 and 7, padded to 7, five greedy steps in float32."""
    decoder = build(MIXED, dtype=torch.float32)
    ids = tokens(2, 7)
    mask = torch.ones(2, 7, dtype=torch.bool)
    mask[0, :4] = False

    def greedy(prompt: Tensor, mask: Tensor | None) -> Tensor:
        cache = make(kind, batch=len(prompt))
        chosen = [decoder(prompt, cache=cache, mask=mask)[:, -1].argmax(-1, keepdim=True)]
        for _ in range(4):
            chosen.append(decoder(chosen[-1], cache=cache)[:, -1].argmax(-1, keepdim=True))
        return torch.cat(chosen, dim=1)

    together = greedy(ids, mask)
    assert torch.equal(together[:1], greedy(ids[:1, 4:], None))
    assert torch.equal(together[1:], greedy(ids[1:], None))


@pytest.mark.parametrize("kind", KINDS)
def test_what_stands_in_the_padding_does_not_matter(kind: str) -> None:
    """Case 55: huge embeddings there change nothing, not even the last bit."""
    decoder = build(VARIANTS["plain"])
    decoder.embedding.weight.data[60] = 1e6
    ids = tokens(2, 8) % 60
    mask = torch.ones(2, 5, dtype=torch.bool)
    mask[1, :3] = False
    results = []
    for filler in (0, 60):
        ids[1, :3] = filler
        cache = make(kind, decoder.config, batch=2)
        decoder(ids[:, :5], cache=cache, mask=mask)
        results.append(run(decoder, cache, ids[:, 5:], 1))
    assert torch.equal(*results)


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_gives_each_row_what_it_gets_alone(kind: str) -> None:
    """Case 65: in float32, 8 rows and 1 agree to 1e-4."""
    decoder, ids = build(MIXED, dtype=torch.float32), tokens(8, 9)
    together = run(decoder, make(kind, batch=8), ids, 4, 1)
    alone = [run(decoder, make(kind), row[None], 4, 1) for row in ids]
    assert gap(together, torch.cat(alone)) < 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_a_mask_over_pairs_counts_the_cached_tokens(kind: str) -> None:
    decoder, ids = build(MIXED), tokens(2, 7)
    pairs = torch.rand(2, 7, 7, generator=torch.Generator().manual_seed(5)) < 0.7
    whole = decoder(ids, mask=pairs)
    cache = make(kind, batch=2)
    first = decoder(ids[:, :4], cache=cache, mask=pairs[:, :4, :4])
    second = decoder(ids[:, 4:], cache=cache, mask=pairs[:, None, 4:])
    assert gap(torch.cat([first, second], 1), whole) <= CACHE


def test_no_gradients_are_recorded() -> None:
    decoder, cache = build(MIXED), make("growing")
    hidden = decoder._hidden_with_cache(tokens(1, 3), cache, None)
    assert not hidden.requires_grad
    assert not cache.layers[0].k.requires_grad


# --- Trimming ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_an_edited_prompt_is_as_if_new(kind: str) -> None:
    """Case 58: [1 2 3 4 5], then [1 2 9 4], then [1 2 3], of which one token is evaluated."""
    decoder, cache = build(MIXED), make(kind)
    run(decoder, cache, torch.tensor([[1, 2, 3, 4, 5]]))
    for kept, text in ((2, [1, 2, 9, 4]), (2, [1, 2, 3]), (1, [1, 7, 7, 7, 7, 7])):
        ids = torch.tensor([text])
        cache.trim(cache.length - kept)
        assert torch.equal(cache.tokens, ids[:, :kept])
        assert gap(run(decoder, cache, ids[:, kept:]), decoder(ids)[:, -1]) <= CACHE
        assert {store.total for store in cache.layers} == {len(text)}


def test_a_wrapped_layer_is_trimmed_exactly_or_not_at_all() -> None:
    """Case 58: refused as a whole where a window would miss what it needs."""
    decoder, ids, new = build(MIXED), tokens(1, 12), tokens(1, 3, seed=2)
    cache, refused = make("windowed"), []
    for length in range(1, 13):
        decoder(ids[:, length - 1 : length], cache=cache)
        before = state(cache)
        for count in range(length):
            trimmed = cache.copy()
            try:
                trimmed.trim(count)
            except CacheError:
                assert same(state(trimmed), before)
                refused.append((length, count))
                continue
            text = torch.cat([ids[:, : length - count], new], 1)
            assert gap(run(decoder, trimmed, new, 1), decoder(text)[:, -1]) <= CACHE
    # Room for 5: at the 6th token two stay beside it, which are what one more token reads.
    assert min(refused) == (6, 2)


@pytest.mark.parametrize("kind", KINDS)
def test_trimming_keeps_count_of_the_padding(kind: str) -> None:
    decoder, cache, ids = build(MIXED), make(kind, batch=2), tokens(2, 6)
    mask = torch.tensor([[True] * 4, [False, True, True, True]])
    decoder(ids[:, :4], cache=cache, mask=mask)
    cache.trim(2)
    assert (cache.length, cache.counts) == (2, [2, 1])
    logits = run(decoder, cache, ids[:, 4:])
    text = torch.cat([ids[:, :2], ids[:, 4:]], 1)
    whole = decoder(text, mask=torch.cat([mask[:, :2], torch.ones(2, 2).bool()], 1))
    assert gap(logits, whole[:, -1]) <= CACHE


def test_trimming_nothing_or_everything() -> None:
    decoder, cache = build(MIXED), make("windowed")
    run(decoder, cache, tokens(1, 12), 9)
    before = state(cache)
    cache.trim(0)
    assert same(state(cache), before)
    for count in (-1, 13):
        with pytest.raises(CacheError, match=f"cannot trim {count} of 12 slots"):
            cache.trim(count)
    cache.clear()
    cache.trim(0)
    decoder(tokens(1, 3), cache=cache)
    cache.trim(3)
    assert (cache.length, cache.counts, cache.nbytes) == (0, [0], 0)
    assert gap(run(decoder, cache, tokens(1, 4)), decoder(tokens(1, 4))[:, -1]) <= CACHE


@pytest.mark.parametrize("name", ["rope dynamic", "rope longrope"])
def test_trimming_back_below_the_window_brings_the_short_frequencies_back(name: str) -> None:
    """Case 40: keys of a longer text are not kept for a shorter one."""
    decoder, ids = build(VARIANTS[name]), tokens(1, 12)
    cache = make("growing", decoder.config)
    run(decoder, cache, ids)
    for length in (11, 5):
        cache.trim(cache.length - length + 1)
        logits = run(decoder, cache, ids[:, length - 1 : length])
        assert gap(logits, decoder(ids[:, :length])[:, -1]) <= CACHE


# --- Copies and rows --------------------------------------------------------------------------


@pytest.mark.parametrize("length", [3, 4, 9])
@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_goes_its_own_way(kind: str, length: int) -> None:
    decoder, ids = build(MIXED), tokens(1, length)
    cache = make(kind)
    run(decoder, cache, ids)
    before = state(cache)
    copy = cache.copy()
    assert same(state(copy), before)
    one, other = tokens(1, 3, seed=7), tokens(1, 3, seed=8)
    ours = run(decoder, copy, one, 1)
    assert same(state(cache), before)
    theirs = run(decoder, cache, other, 1)
    assert gap(ours, decoder(torch.cat([ids, one], 1))[:, -1]) <= CACHE
    assert gap(theirs, decoder(torch.cat([ids, other], 1))[:, -1]) <= CACHE


def test_a_copy_has_the_same_options() -> None:
    cache = KVCache(MIXED, 2, 5, windowed=True, rotary_length=[3, 4])
    copy = cache.copy()
    assert (copy.batch, copy.capacity, copy.windowed, copy._fixed) == (2, 5, True, [3, 4])


@pytest.mark.parametrize("rows", [[2, 0], [1, 1, 1, 0], [0]])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_can_be_kept_dropped_and_doubled(kind: str, rows: list[int]) -> None:
    decoder, ids = build(MIXED), tokens(3, 9)
    mask = torch.ones(3, 9, dtype=torch.bool)
    mask[1, :2] = False
    cache = make(kind, batch=3)
    decoder(ids[:, :7], cache=cache, mask=mask[:, :7])
    cache.reorder(rows)
    assert (cache.batch, cache.counts) == (len(rows), [[7, 5, 7][row] for row in rows])
    new = tokens(len(rows), 2, seed=4)
    whole = decoder(torch.cat([ids[rows, :7], new], 1), mask=mask[rows])
    assert gap(run(decoder, cache, new, 1), whole[:, -1]) <= CACHE


@pytest.mark.parametrize("rows", [[], [3], [-1, 0]])
def test_rows_that_are_not_there_are_refused(rows: list[int]) -> None:
    cache = make("growing", batch=3)
    build(MIXED)(tokens(3, 2), cache=cache)
    before = state(cache)
    with pytest.raises(CacheError, match="not all within a batch of 3"):
        cache.reorder(rows)
    assert same(state(cache), before)


# --- Rules that vary with the length ----------------------------------------------------------


def widths(decoder: Decoder, cache: KVCache, ids: Tensor, monkeypatch: Any) -> list[int]:
    """How many tokens are computed when one after the other is taken in."""
    seen = []
    plain = decoder._run
    monkeypatch.setattr(decoder, "_run", lambda *a: (seen.append(a[0].shape[1]), plain(*a))[1])
    run(decoder, cache, ids, *[1] * (ids.shape[1] - 1))
    return seen


def test_cached_tokens_are_computed_anew_only_when_the_frequencies_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Longrope changes once, past its window of 8; dynamic with every token from there on."""
    ids = tokens(1, ORIGINAL_WINDOW + 3)
    before = [1] * ORIGINAL_WINDOW
    longrope, dynamic = build(VARIANTS["rope longrope"]), build(VARIANTS["rope dynamic"])
    assert widths(longrope, make("growing", longrope.config), ids, monkeypatch) == [
        *before,
        9,
        1,
        1,
    ]
    assert widths(dynamic, make("growing", dynamic.config), ids, monkeypatch) == [
        *before,
        9,
        10,
        11,
    ]
    fixed = make("growing", dynamic.config, rotary_length=30)
    assert widths(dynamic, fixed, ids, monkeypatch) == [1] * 11


@pytest.mark.parametrize("name", ["rope dynamic", "rope longrope"])
def test_rows_keep_their_fixed_lengths_when_reordered(name: str) -> None:
    decoder, ids = build(VARIANTS[name]), tokens(2, 6)
    cache = make("growing", decoder.config, batch=2, rotary_length=[8, 30])
    run(decoder, cache, ids[:, :4])
    cache.reorder([1, 0, 1])
    rows = ids[[1, 0, 1]]
    whole = decoder(rows, rotary_length=[30, 8, 30])
    assert gap(run(decoder, cache, rows[:, 4:], 1), whole[:, -1]) <= CACHE
    assert gap(whole[:1], decoder(rows[:1], rotary_length=8)) > 1e-3


def test_a_mask_over_pairs_cannot_be_applied_to_tokens_computed_anew() -> None:
    decoder, ids = build(VARIANTS["rope dynamic"]), tokens(1, 10)
    cache = make("growing", decoder.config)
    run(decoder, cache, ids[:, :8])
    before = state(cache)
    with pytest.raises(CacheError, match="fix rotary_length"):
        decoder(ids[:, 8:], cache=cache, mask=torch.ones(1, 2, 10))
    assert same(state(cache), before)


# --- Interrupted steps ------------------------------------------------------------------------


class InterruptionError(Exception):
    pass


@pytest.mark.parametrize("name", ["mixed", "rope dynamic"])
@pytest.mark.parametrize("count", [1, 2, 9])
@pytest.mark.parametrize("length", [0, 2, 4, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_that_fails_half_way_leaves_the_cache_as_it_was(
    kind: str, length: int, count: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layer 0 has taken the tokens in, layer 1 has not: grown, wrapped, passed through or not."""
    decoder = build(MIXED if name == "mixed" else VARIANTS[name])
    cache = KVCache(
        decoder.config, capacity=20 if kind == "fixed" else None, windowed=kind == "windowed"
    )
    ids = tokens(1, length + count)
    if length:
        run(decoder, cache, ids[:, :length], length - 1)
    before = state(cache)

    def fail(*arguments: object) -> None:
        assert not same(state(cache), before)
        raise InterruptionError

    with monkeypatch.context() as patch:
        patch.setattr(decoder.layers[1], "forward", fail)
        with pytest.raises(InterruptionError):
            decoder(ids[:, length:], cache=cache)
    assert same(state(cache), before)
    logits = run(decoder, cache, ids[:, length:])
    assert gap(logits, decoder(ids)[:, -1]) <= CACHE


@pytest.mark.parametrize("error", [InterruptionError, KeyboardInterrupt])
def test_so_does_a_block_that_raises(error: type[BaseException]) -> None:
    decoder, cache = build(MIXED), make("windowed")
    run(decoder, cache, tokens(1, 9))
    before = state(cache)

    def taken_back() -> None:
        with cache.step(cache.config, tokens(1, 1)):
            for store in cache.layers:
                store.append(store.k[:, :, :1], store.v[:, :, :1])
            raise error

    with pytest.raises(error):
        taken_back()
    assert same(state(cache), before)


# --- Branches ---------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [0, 2, 4, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_branches_leave_the_cache_as_it_was(kind: str, length: int) -> None:
    """Grown, wrapped, passed through or not."""
    decoder, cache = build(MIXED), make(kind)
    ids = tokens(1, length + 7)
    if length:
        run(decoder, cache, ids[:, :length], length - 1)
    before = state(cache)
    decoder.branches(ids[:, length:], [-1, 0, -1, 2, 3, 4, -1], cache)
    assert same(state(cache), before)

    def fail_half_way() -> None:
        with cache.branches(MIXED, ids[:, :1], [-1]):
            cache.layers[0].append(*[torch.ones(1, 2, 1, 10, dtype=torch.float64)] * 2)
            raise InterruptionError

    with pytest.raises(InterruptionError):
        fail_half_way()
    assert same(state(cache), before)
    assert gap(run(decoder, cache, ids[:, length:]), decoder(ids)[:, -1]) <= CACHE


def test_branches_that_do_not_fit_change_nothing() -> None:
    decoder, cache = build(MIXED), make("fixed")
    run(decoder, cache, tokens(1, 10))
    before = state(cache)
    for count, parents, message in (
        (7, [-1] * 7, "capacity"),
        (3, [-1] * 2, "2 parents for 3 tokens"),
        (2, [-1, 1], "cannot follow"),
    ):
        with pytest.raises(ValueError, match=message):
            decoder.branches(tokens(1, count), parents, cache)
        assert same(state(cache), before)


@pytest.mark.parametrize("name", ["rope dynamic", "rope longrope"])
@pytest.mark.parametrize("length", [0, ORIGINAL_WINDOW - 2])
def test_branches_across_a_change_of_frequencies_are_refused(name: str, length: int) -> None:
    """A way has the frequencies of another's length only where they are fixed."""
    decoder, ids = build(VARIANTS[name]), tokens(1, ORIGINAL_WINDOW + 1)
    cache = make("growing", decoder.config)
    if length:
        run(decoder, cache, ids[:, :length])
    few = ORIGINAL_WINDOW - length
    decoder.branches(ids[:, :few], list(range(-1, few - 1)), cache)
    with pytest.raises(CacheError, match="fix rotary_length"):
        decoder.branches(ids[:, : few + 1], list(range(-1, few)), cache)


# --- Turning the keys to other settings -------------------------------------------------------


def turn_all(of: DecoderConfig, **entries: Any) -> DecoderConfig:
    layers = []
    for one in of.layers:
        rotary = one.attention.rotary.model_copy(update=entries)
        attention = one.attention.model_copy(update={"rotary": rotary})
        layers.append(one.model_copy(update={"attention": attention}))
    return of.model_copy(update={"layers": tuple(layers)})


def with_settings(decoder: Decoder, of: DecoderConfig) -> Decoder:
    other = Decoder(of).double().eval()
    other.load_state_dict(decoder.state_dict())
    return other


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_one_layers_keys_become_those_of_the_new_settings(kind: str, name: str) -> None:
    """From unscaled to each rule and back, with padding, past the original window."""
    decoder = build(config(layer(attention={"window": 6})))
    other = with_settings(decoder, turn_all(decoder.config, base=300.0, scaling=SCALINGS[name]))
    ids = tokens(2, 11)
    mask = torch.ones(2, 11, dtype=torch.bool)
    mask[1, :2] = False
    cache = make(kind, decoder.config, batch=2, rotary_length=[11, 12])
    fresh = make(kind, other.config, batch=2, rotary_length=[11, 12])
    decoder(ids[:, :10], cache=cache, mask=mask[:, :10])
    other(ids[:, :10], cache=fresh, mask=mask[:, :10])
    original = cache.layers[0].k.clone()
    assert gap(original, fresh.layers[0].k) > 1e-2
    cache.rerotate(other.config)
    assert gap(cache.layers[0].k, fresh.layers[0].k) <= CACHE
    assert torch.equal(cache.layers[0].v, fresh.layers[0].v)
    whole = other(ids, mask=mask, rotary_length=[11, 12])
    assert gap(other(ids[:, 10:], cache=cache)[:, -1], whole[:, -1]) <= CACHE
    cache.trim(1)
    cache.rerotate(decoder.config)
    assert gap(cache.layers[0].k, original[:, :, -cache.layers[0].held :]) <= CACHE


@pytest.mark.parametrize(
    "entries",
    [{"layout": "interleaved"}, {"d_rotary": 4}, {"base": 5e5, "scaling": SCALINGS["yarn"]}],
)
def test_layout_width_and_base_can_be_turned_to_too(entries: dict[str, Any]) -> None:
    decoder = build(config(layer(rotary={"scaling": SCALINGS["yarn"]})))
    other = with_settings(decoder, turn_all(decoder.config, **({"scaling": Unscaled()} | entries)))
    ids, cache = tokens(1, 6), make("growing", decoder.config)
    run(decoder, cache, ids[:, :5])
    cache.rerotate(other.config)
    assert gap(run(other, cache, ids[:, 5:]), other(ids)[:, -1]) <= CACHE


def test_a_rule_that_varies_can_be_turned_to_without_a_fixed_length() -> None:
    decoder = build(config(layer()))
    other = with_settings(decoder, turn_all(decoder.config, scaling=SCALINGS["dynamic"]))
    ids, cache, fresh = (
        tokens(1, 12),
        make("growing", decoder.config),
        make("growing", other.config),
    )
    run(decoder, cache, ids[:, :11])
    run(other, fresh, ids[:, :11])
    cache.rerotate(other.config)
    assert gap(cache.layers[0].k, fresh.layers[0].k) <= CACHE
    assert gap(run(other, cache, ids[:, 11:]), other(ids)[:, -1]) <= CACHE


def test_from_the_second_layer_on_it_is_not_the_text_computed_again() -> None:
    """As documented: what layer 1 projects was computed under the old settings of layer 0."""
    decoder = build(config())
    other = with_settings(decoder, turn_all(decoder.config, scaling=SCALINGS["linear"]))
    ids, cache, fresh = tokens(1, 9), make("growing", decoder.config), make("growing", other.config)
    run(decoder, cache, ids)
    run(other, fresh, ids)
    cache.rerotate(other.config)
    assert gap(cache.layers[0].k, fresh.layers[0].k) <= CACHE
    assert gap(cache.layers[1].k, fresh.layers[1].k) > 1e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_turning_is_computed_wide_and_kept_in_the_caches_type(dtype: torch.dtype) -> None:
    decoder, cache = build(config(layer()), dtype=dtype), make("growing", config(layer()))
    run(decoder, cache, tokens(1, 9))
    before = cache.layers[0].k.clone()
    cache.rerotate(turn_all(decoder.config, scaling=SCALINGS["ntk"]))
    assert cache.layers[0].k.dtype == dtype
    assert not torch.equal(cache.layers[0].k, before)
    cache.rerotate(decoder.config)
    assert torch.allclose(cache.layers[0].k, before, rtol=2 * torch.finfo(dtype).eps, atol=1e-2)


def test_an_empty_cache_takes_new_rotary_settings() -> None:
    decoder, cache = build(turn_all(MIXED, base=300.0)), make("growing")
    cache.rerotate(decoder.config)
    assert gap(run(decoder, cache, tokens(1, 4)), decoder(tokens(1, 4))[:, -1]) <= CACHE


def test_the_model_may_be_meant_for_longer_texts() -> None:
    """An extension changes the rule and the window together."""
    cache = make("growing")
    build(MIXED)(tokens(1, 3), cache=cache)
    longer = turn_all(MIXED, scaling=SCALINGS["yarn"]).model_copy(update={"max_positions": 256})
    cache.rerotate(longer)
    assert cache.config == longer


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (changed(turn_all(MIXED, base=7.0), 1, rotary=None), "cannot begin or cease to rotate"),
        (changed(turn_all(MIXED, base=7.0), 1, scale=0.5), "in layer 1 scale was None"),
        (MIXED.model_copy(update={"embedding_scale": 2.0}), "embedding_scale was 1.0"),
    ],
)
def test_other_changes_are_refused_and_no_key_is_turned(other: DecoderConfig, message: str) -> None:
    """Not even those of the layers before the one that cannot be."""
    cache = make("growing")
    build(MIXED)(tokens(1, 3), cache=cache)
    before = state(cache)
    with pytest.raises(CacheError, match=message):
        cache.rerotate(other)
    assert same(state(cache), before)
    assert cache.config == MIXED


# --- Saved caches -----------------------------------------------------------------------------


def filled(kind: str, batch: int = 2) -> KVCache:
    """Nine slots, wrapped, padded."""
    cache = make(kind, batch=batch, rotary_length=[20] * batch)
    mask = torch.ones(batch, 9, dtype=torch.bool)
    mask[-1, :3] = False
    decoder = build(MIXED)
    for part in (slice(0, 4), slice(4, 9)):
        decoder(tokens(batch, 9)[:, part], cache=cache, mask=mask[:, part])
    return cache


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_cache_goes_on_where_it_stopped(kind: str, tmp_path: Path) -> None:
    """Bit by bit, with its options."""
    cache = filled(kind)
    cache.save(tmp_path / "cache")
    loaded = KVCache.load(tmp_path / "cache", MIXED)
    assert same(state(loaded), state(cache))
    for option in ("batch", "capacity", "windowed", "_fixed"):
        assert getattr(loaded, option) == getattr(cache, option)
    new = tokens(2, 3, seed=9)
    assert torch.equal(run(build(MIXED), loaded, new, 1), run(build(MIXED), cache, new, 1))
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_saved_cache_keeps_its_number_type(dtype: torch.dtype, tmp_path: Path) -> None:
    decoder, cache = build(MIXED, dtype=dtype), make("growing")
    run(decoder, cache, tokens(1, 4))
    cache.save(tmp_path / "cache")
    assert same(state(KVCache.load(tmp_path / "cache", MIXED)), state(cache))


def test_a_window_of_one_holds_nothing_and_can_be_saved(tmp_path: Path) -> None:
    of = config(layer(attention={"window": 1}))
    decoder, cache = build(of), make("windowed", of)
    run(decoder, cache, tokens(1, 9))
    assert cache.layers[0].held == 0
    cache.save(tmp_path / "cache")
    loaded = KVCache.load(tmp_path / "cache", of)
    text = torch.cat([tokens(1, 9), tokens(1, 2, seed=3)], 1)
    assert gap(run(decoder, loaded, text[:, 9:], 1), decoder(text)[:, -1]) <= CACHE


def test_a_cache_of_another_configuration_is_refused(tmp_path: Path) -> None:
    filled("growing").save(tmp_path / "cache")
    with pytest.raises(CacheError, match="in layer 0 window was 3, the decoder's is 5"):
        KVCache.load(tmp_path / "cache", changed(MIXED, 0, window=5))


def test_an_old_file_stays_when_saving_fails(tmp_path: Path) -> None:
    path = tmp_path / "cache"
    path.write_text("old")
    with pytest.raises(CacheError, match="the cache is empty"):
        make("growing").save(path)
    assert path.read_text() == "old"


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as refused:
        KVCache.load(path, MIXED)
    message = str(refused.value)
    assert message.startswith(str(path))
    assert "\n" not in message
    return message


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cache"
    filled("windowed").save(path)
    whole = path.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    cuts = [*range(16), *range(16, header, 97), *range(header, len(whole), 211), len(whole) - 1]
    for cut in cuts:
        path.write_bytes(whole[:cut])
        refusal(path)
    path.write_bytes(whole + b"\0")
    refusal(path)


def test_files_that_are_something_else_are_refused(tmp_path: Path) -> None:
    refusal(tmp_path / "absent")
    refusal(tmp_path)
    (tmp_path / "text").write_text("{}" * 100)
    refusal(tmp_path / "text")
    save_file({"tokens": torch.zeros(1, 2)}, tmp_path / "weights")
    assert "is no saved cache" in refusal(tmp_path / "weights")


def rewritten(path: Path, change: Callable[[dict[str, Any], dict[str, Tensor]], None]) -> None:
    """The saved cache with its description and tensors changed."""
    with safe_open(path, framework="pt") as file:
        metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    about = json.loads(metadata["about"])
    change(about, tensors)
    save_file(tensors, path, metadata | {"about": json.dumps(about)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda about, _: about.pop("filled_at"), "about.filled_at"),
        (lambda about, _: about.update(windowed="yes"), "about.windowed"),
        (lambda about, _: about.update(capacity=4), "9 tokens in a capacity of 4"),
        (lambda about, _: about.update(rotary_length=[1]), "1 entries of rotary_length for 2 rows"),
        (lambda about, _: about.update(filled_at=[1, 2, 3]), "3 entries of filled_at for 2 rows"),
        (lambda about, _: about["config"].update(vocab_size=0), "about.config.vocab_size"),
        (lambda about, _: about.update(new_key=1), "about.new_key"),
        (lambda _, t: t.pop("layers.1.v"), "layers.1.v has shape None, not (2, 2, 9, 10)"),
        (lambda _, t: t.update(more=torch.zeros(1)), "more has shape (1,), not None"),
        (lambda _, t: t.pop("tokens"), "tokens has shape None"),
        (lambda _, t: t.update(tokens=t["tokens"][0].clone()), "tokens has shape (9,)"),
        (lambda _, t: t.update(tokens=t["tokens"][:, :0].clone()), "tokens has shape (2, 0)"),
        (lambda _, t: t.update(readable=t["readable"][:, 1:].clone()), "readable has shape (2, 8)"),
        (
            lambda _, t: t.update({"layers.1.k": t["layers.1.k"][:, :, 1:].clone()}),
            "layers.1.k has shape (2, 2, 8, 10), not (2, 2, 9, 10)",
        ),
        (
            lambda _, t: t.update({"layers.0.v": t["layers.0.v"][:, :1].clone()}),
            "layers.0.v has shape (2, 1, 2, 10), not (2, 2, 2, 10)",
        ),
        (
            lambda _, t: t.update(
                {f"layers.0.{n}": t[f"layers.0.{n}"][:, :, :1].clone() for n in "kv"}
            ),
            "layers.0.k has shape (2, 2, 1, 10), not (2, 2, 2, 10)",
        ),
    ],
)
def test_a_file_whose_parts_do_not_fit_is_refused(
    change: Callable[[dict[str, Any], dict[str, Tensor]], None], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "cache"
    filled("windowed").save(path)
    rewritten(path, lambda *_: None)
    KVCache.load(path, MIXED)
    rewritten(path, change)
    assert message in refusal(path)


# --- Layers of different sorts -----------------------------------------------------------------


def test_layers_of_any_sort_have_their_own_store() -> None:
    of: list[LayerConfig] = [
        layer(attention={"window": 3}),
        layer(),
        layer(attention={"window": 1}),
    ]
    cache = make("windowed", config(*of))
    run(build(cache.config), cache, tokens(1, 12), 10)
    assert [store.held for store in cache.layers] == [4, 12, 2]
    assert [store.total for store in cache.layers] == [12] * 3
    with pytest.raises(CacheError, match="cannot trim 3"):
        cache.trim(3)
