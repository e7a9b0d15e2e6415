"""The step of fixed shapes: what it computes, leaves in the cache, and never does."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from armillary.config import DecoderConfig
from armillary.decoder import Decoder
from armillary.parts.kv_cache import KVCache
from armillary.parts.layer_store import CacheError
from armillary.parts.slots import Slots
from support.checks import LENGTH, gap, padded, slot_gap
from support.models import ORIGINAL_WINDOW, VARIANTS, build, config, layer, tokens

SAME = 1e-10
VARYING = ["rope dynamic", "rope longrope"]
PROMPT = 6


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let memory grow within a few tokens."""
    monkeypatch.setattr("armillary.parts.layer_store._GROWTH", 2)


@pytest.fixture(autouse=True)
def unused_memory_is_nan() -> Iterator[None]:
    """Case 48: slots that hold nothing yet are read by every step, and must not show."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before)


def filled(decoder: Decoder, ids: Tensor, **options: Any) -> KVCache:
    """A cache that holds these tokens."""
    cache = KVCache(decoder.config, ids.shape[0], **options)
    with torch.no_grad():
        decoder(ids, cache=cache)
    return cache


def step(decoder: Decoder, cache: KVCache, new: Tensor, slots: Slots | None = None) -> Tensor:
    """The logits after one more token of each text, put into its slot."""
    assert cache.make_slot(decoder.config, new)
    if slots is None or not slots.are_of(cache):
        slots = Slots(cache)
    slots.follow(cache)
    logits = decoder.next(new, slots)
    cache.fill_slot(new)
    return logits


# --- The same logits ---------------------------------------------------------------------------


@pytest.mark.parametrize("padding", [(), (4, 0, 2)], ids=["equal", "padded"])
@pytest.mark.parametrize("name", VARIANTS)
def test_steps_in_slots_are_whole_passes(name: str, padding: tuple[int, ...], device: str) -> None:
    """Texts of unequal lengths too, each at its own positions (case 54); memory grows on the way.

    Windows read what they do elsewhere (case 52). Rules that vary with the length see it grow.
    """
    of = VARIANTS[name]
    decoder, ids = build(of).to(device), tokens(3, LENGTH).to(device)
    mask = padded(3, *padding).to(device) if padding else None
    assert slot_gap(decoder, KVCache(of, 3), ids, mask) <= SAME


@pytest.mark.parametrize("length", [5, 30])
@pytest.mark.parametrize("name", VARYING)
def test_a_fixed_rotary_length_is_seen_in_slots(name: str, length: int, device: str) -> None:
    decoder, ids = build(VARIANTS[name]).to(device), tokens(2, LENGTH).to(device)
    cache = KVCache(decoder.config, 2, rotary_length=[length, ORIGINAL_WINDOW])
    decoder(ids[:, :PROMPT], cache=cache)
    for end in range(PROMPT + 1, LENGTH + 1):
        logits = step(decoder, cache, ids[:, end - 1 : end])
        whole = decoder(ids[:, :end], rotary_length=[length, ORIGINAL_WINDOW], logits="last")
        assert gap(logits.cpu(), whole.cpu()) <= SAME


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_in_slots_keep_the_number_type(dtype: torch.dtype, device: str) -> None:
    decoder, ids = build(config(), dtype=dtype).to(device), tokens(2, LENGTH).to(device)
    cache, usual = (filled(decoder, ids[:, :PROMPT]) for _ in range(2))
    for new in ids[:, PROMPT:].split(1, dim=1):
        logits, expected = step(decoder, cache, new), decoder(new, cache=usual)
        assert logits.dtype == dtype
        torch.testing.assert_close(
            logits, expected, rtol=0, atol=1e-3 if dtype == torch.float32 else 0.6
        )


def test_the_cache_is_left_as_by_any_step(device: str) -> None:
    """So that other steps, trimming and saving go on from it; padding is known as such."""
    decoder, ids = build(config()).to(device), tokens(2, LENGTH).to(device)
    mask = torch.ones(2, PROMPT, dtype=torch.bool, device=device)
    mask[1, :3] = False
    ours, theirs = (KVCache(decoder.config, 2) for _ in range(2))
    for cache in (ours, theirs):
        decoder(ids[:, :PROMPT], cache=cache, mask=mask)
    for new in ids[:, PROMPT:].split(1, dim=1):
        step(decoder, ours, new)
        decoder(new, cache=theirs)
    assert ours.counts == theirs.counts
    assert ours._filled_at == theirs._filled_at
    assert ours.length == theirs.length == LENGTH
    assert torch.equal(ours.tokens, theirs.tokens)
    assert torch.equal(ours.readable, theirs.readable)
    for one, other in zip(ours.layers, theirs.layers, strict=True):
        assert (one.held, one.total) == (other.held, other.total)
        torch.testing.assert_close(one.k, other.k, rtol=0, atol=SAME)
        torch.testing.assert_close(one.v, other.v, rtol=0, atol=SAME)


def trimmed(decoder: Decoder, cache: KVCache, slots: Slots) -> list[int]:
    cache.trim(2)
    return [0, 1, 2]


def taken_back_with_padding(decoder: Decoder, cache: KVCache, slots: Slots) -> list[int]:
    continued(decoder, cache, slots)
    step(decoder, cache, torch.full((3, 1), 7, device=cache.tokens.device), slots)
    cache.trim(3)
    return [0, 1, 2]


def left(decoder: Decoder, cache: KVCache, slots: Slots) -> list[int]:
    cache.reorder([2, 0])
    return [2, 0]


def continued(decoder: Decoder, cache: KVCache, slots: Slots) -> list[int]:
    new = torch.full((3, 2), 7, device=cache.tokens.device)
    decoder(new, cache=cache, mask=torch.tensor([[1, 1], [0, 1], [0, 0]]).to(new.device))
    return [0, 1, 2]


def nothing_held(decoder: Decoder, cache: KVCache, slots: Slots) -> list[int]:
    held, readable = cache.tokens, cache.readable
    cache.clear()
    decoder(held[:, 1:], cache=cache, mask=readable[:, 1:])
    return [0, 1, 2]


@pytest.mark.parametrize(
    "change", [trimmed, taken_back_with_padding, left, continued, nothing_held]
)
@pytest.mark.parametrize("name", ["learned", "plain"])
def test_what_else_happens_to_the_cache_is_followed(change: Any, name: str, device: str) -> None:
    """In the same memory or another: tokens taken back, texts that leave, prompts, padding."""
    decoder, ids = build(VARIANTS[name]).to(device), tokens(3, LENGTH).to(device)
    cache = KVCache(decoder.config, 3, capacity=20)
    decoder(ids[:, :PROMPT], cache=cache, mask=padded(3, 3, 0, 1)[:, :PROMPT].to(device))
    slots = Slots(cache)
    step(decoder, cache, ids[:, PROMPT : PROMPT + 1], slots)
    rows = change(decoder, cache, slots)
    usual = cache.copy()
    for new in ids[rows, PROMPT + 1 : PROMPT + 4].split(1, dim=1):
        expected = decoder(new, cache=usual)
        assert gap(step(decoder, cache, new, slots).cpu(), expected.cpu()) <= SAME


# --- What is refused, and what takes another step ----------------------------------------------


def test_no_step_goes_past_the_end_of_a_fixed_capacity(device: str) -> None:
    """Case 60: capacity 8, a prompt of 6, 4 new tokens: the ninth is an error, nothing changes."""
    decoder, ids = build(config()).to(device), tokens(1, 10).to(device)
    cache = filled(decoder, ids[:, :6], capacity=8)
    slots = Slots(cache)
    for end in (6, 7):
        step(decoder, cache, ids[:, end : end + 1], slots)
    before = [(store.k.clone(), store.v.clone()) for store in cache.layers]
    with pytest.raises(CacheError, match="8 cached and 1 new tokens need 9 slots, but .* is 8"):
        step(decoder, cache, ids[:, 8:9], slots)
    assert cache.length == 8
    for store, (k, v) in zip(cache.layers, before, strict=True):
        assert torch.equal(store.k, k)
        assert torch.equal(store.v, v)
        assert store.memory[0].shape[2] == 8


def test_a_cache_that_holds_no_slots_in_place_takes_another_step(device: str) -> None:
    decoder = build(VARIANTS["window"]).to(device)
    new, ids = tokens(1, 1).to(device), tokens(1, PROMPT).to(device)
    windowed = filled(decoder, ids, windowed=True)
    assert not windowed.make_slot(decoder.config, new)
    assert not KVCache(decoder.config).make_slot(decoder.config, new)
    with pytest.raises(CacheError, match="windowed"):
        Slots(windowed)


@pytest.mark.parametrize(("name", "expected"), [("rope longrope", 1), ("rope dynamic", 5)])
def test_steps_that_change_frequencies_are_taken_elsewhere(
    name: str, expected: int, device: str
) -> None:
    """From 6 tokens to 13, across a window of 8: once, or at every token beyond it."""
    decoder, ids = build(VARIANTS[name]).to(device), tokens(1, LENGTH).to(device)
    cache, elsewhere = filled(decoder, ids[:, :PROMPT]), 0
    for new in ids[:, PROMPT:].split(1, dim=1):
        if cache.make_slot(decoder.config, new):
            step(decoder, cache, new)
        else:
            decoder(new, cache=cache)
            elsewhere += 1
    assert elsewhere == expected


def test_beyond_a_learned_table_the_usual_error_comes(device: str) -> None:
    of = VARIANTS["learned"].model_copy(update={"max_positions": PROMPT})
    decoder, new = build(of).to(device), tokens(1, 1).to(device)
    cache = filled(decoder, tokens(1, PROMPT).to(device))
    assert not cache.make_slot(of, new)
    with pytest.raises(ValueError, match="position 6 is outside the learned table"):
        decoder(new, cache=cache)


# --- What can be recorded and compiled ---------------------------------------------------------


class OnOneDevice(TorchDispatchMode):
    """Refuses tensors of any other device, and numbers that are brought to Python."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device, self.calls = device, 0

    def __torch_dispatch__(  # type: ignore[override]
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.calls += 1
        assert "_local_scalar_dense" not in str(func)
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, out)):
            if isinstance(leaf, Tensor):
                assert leaf.device.type == self.device, func
        return out


def empty_shapes(of: DecoderConfig, batch: int, held: int) -> KVCache:
    """A cache whose tensors have shapes and no numbers."""
    cache = KVCache(of, batch, capacity=held + 4)
    for store, each in zip(cache.layers, of.layers, strict=True):
        heads = each.attention
        part = torch.empty(batch, heads.n_kv_heads, held, heads.d_head, device="meta")
        store.append(part, part)
    cache._tokens = torch.zeros(batch, held, dtype=torch.long, device="meta")
    cache._counts = cache._filled_at = [held] * batch
    return cache


@pytest.mark.parametrize("name", VARIANTS)
def test_the_step_waits_for_nothing_and_stays_on_its_device(name: str) -> None:
    """What a CUDA graph cannot hold: numbers brought to Python, tensors made of Python's."""
    of = VARIANTS[name]
    with torch.device("meta"):
        decoder = Decoder(of).eval()
    cache = empty_shapes(of, 2, 3)
    new = torch.zeros(2, 1, dtype=torch.long, device="meta")
    slots = Slots(cache)
    slots.follow(cache)
    with OnOneDevice("meta") as watch:
        assert decoder.next(new, slots).shape == (2, 1, of.vocab_size)
    assert watch.calls > 50


def test_the_watch_notices_a_number_made_of_python() -> None:
    with pytest.raises(AssertionError), OnOneDevice("meta"):
        torch.zeros(3, device="meta") + torch.tensor([1.0, 2.0, 3.0])


@pytest.mark.parametrize("name", ["plain", "mixed layers", "learned", "rope longrope"])
def test_steps_are_compiled_once_for_each_memory(name: str, device: str) -> None:
    """Case 66: over 20 steps, in which memory grows twice; the text is that of eager steps."""
    of = VARIANTS[name]
    decoder, ids = build(of).to(device), tokens(2, PROMPT).to(device)
    torch.compiler.reset()
    counter = CompileCounter()
    compiled = torch.compile(decoder.next, backend=counter, fullgraph=True)
    texts = []
    for run in (decoder.next, compiled):
        cache, slots = filled(decoder, ids, rotary_length=30), None
        text, last, rooms = [], ids[:, -1:], set()
        for _ in range(20):
            assert cache.make_slot(of, last)
            if slots is None or not slots.are_of(cache):
                slots = Slots(cache)
            slots.follow(cache)
            logits = run(last, slots)
            cache.fill_slot(last)
            last = logits[:, -1].argmax(-1, keepdim=True)
            text.append(last.tolist())
            rooms.add(cache.layers[0].memory[0].shape[2])
        texts.append(text)
    assert len(rooms) == 3
    assert counter.frame_count - 1 == 2
    assert texts[0] == texts[1]


def test_a_position_in_python_is_compiled_again_and_again(device: str) -> None:
    """The count above must notice it."""
    decoder, ids = build(config(layer())).to(device), tokens(1, PROMPT).to(device)
    torch.compiler.reset()
    counter = CompileCounter()

    def numbered(new: Tensor, position: int) -> Tensor:
        return decoder.embedding(new) * position

    compiled = torch.compile(numbered, backend=counter, dynamic=False)
    for position, new in enumerate(ids.split(1, dim=1)):
        compiled(new, position)
    assert counter.frame_count == PROMPT
