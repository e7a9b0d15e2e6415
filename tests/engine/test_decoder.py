"""The engine against the float64 specification and the torch decoder, and its cache's cases."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from armillary import reference
from armillary.checkpoints.tensors import StoredTensor
from armillary.config import DecoderConfig, LatentConfig
from armillary.engine.cache import CacheFullError, TextCache
from armillary.engine.cache_formats import CACHE_FORMATS
from armillary.engine.decoder import EngineDecoder
from armillary.engine.kv_layout import Stored
from armillary.errors import CheckpointError
from armillary.weights import build_filled
from support.cached_text import kept, poison
from support.engine import engine, in_chunks, stored_tensors, text, weights_of
from support.models import EVERY_VARIANT, ORIGINAL_WINDOW, VARIANTS, config, layer, mixture
from support.quantised import IN_FILES, meant

EXACT = 1e-4
"""Logits in float32, which reach 50, from those of the specification."""
SAME = 1e-4
"""The same in another order of sums."""
LENGTH = 40
"""Three passes: two full ones, one of half their rows."""
CHUNKINGS = {
    "one by one": [1] * LENGTH,
    "1 + 4 + 3 + 32": [1, 4, 3, 32],
    "8 + 32": [8, 32],
    "5 + 1 + 2 + 32": [5, 1, 2, 32],
    "17 + 22 + 1": [17, 22, 1],
}
VARYING = ("rope dynamic", "rope longrope")
MORE = {
    "odd head": config(*[layer(rotary={"d_rotary": 6}, attention={"d_head": 7})] * 2),
    "head of 64": config(*[layer(rotary={"d_rotary": 64}, attention={"d_head": 64})] * 2),
    "windows over chunks": config(layer(attention={"window": 20}), layer()),
}
CONFIGS = EVERY_VARIANT | MORE
EACH_CACHE = pytest.mark.parametrize("stored", CACHE_FORMATS)
MIXED = VARIANTS["mixed layers"]


def specification(of: DecoderConfig, ids: Sequence[int], **arguments: object) -> np.ndarray:
    """Logits (T, V) in float64 for `weights_of` a configuration."""
    return reference.forward(of.to_dict(), weights_of(of), np.array([ids]), **arguments)[0]  # type: ignore[arg-type]


def gap(ours: np.ndarray, theirs: np.ndarray) -> float:
    """The greatest difference of two arrays of one shape."""
    assert ours.shape == theirs.shape
    return float(np.abs(ours - theirs).max())


def exact(of: DecoderConfig, **options: object) -> EngineDecoder:
    """An engine that keeps everything in float32."""
    return engine(of, width="float32", threads=1, **options)


# --- The same logits ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_the_specification_and_of_torch(name: str) -> None:
    of, ids = CONFIGS[name], text(LENGTH)
    logits = in_chunks(exact(of), ids, [LENGTH])
    assert logits.dtype == np.float32
    assert gap(logits, specification(of, ids)) <= EXACT
    peer = build_filled(of, stored_tensors(weights_of(of)))
    with torch.no_grad():
        assert gap(logits, peer(torch.tensor([ids]))[0].numpy()) <= EXACT


@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in VARYING])
def test_the_size_of_the_chunks_does_not_show(name: str) -> None:
    """Case 57."""
    decoder, ids = exact(CONFIGS[name]), text(LENGTH)
    whole = in_chunks(decoder, ids, [LENGTH])
    for chunking, sizes in CHUNKINGS.items():
        assert gap(in_chunks(decoder, ids, sizes), whole) <= SAME, chunking


@pytest.mark.parametrize("name", VARYING)
def test_a_rule_that_varies_sees_the_text_so_far(name: str) -> None:
    """Across the length at which frequencies change, keys are computed anew (case 39)."""
    of, ids = CONFIGS[name], text(20)
    decoder = exact(of)
    for sizes in ([1] * 20, [ORIGINAL_WINDOW, 1, 11], [ORIGINAL_WINDOW - 1, 2, 11], [3, 17]):
        cache, end = decoder.new_cache(), 0
        for size in sizes:
            (logits,) = decoder.take([cache], [ids[end : end + size]], every=True)
            whole = specification(of, ids[: end + size])[end:]
            end += size
            assert gap(logits, whole) <= EXACT, (sizes, end)


@pytest.mark.parametrize("name", VARYING)
def test_keeping_keys_across_a_change_of_frequencies_would_be_wrong(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison above must notice it."""
    of, ids = CONFIGS[name], text(20)
    decoder = exact(of)
    cache = decoder.new_cache()
    decoder.take([cache], [ids[:ORIGINAL_WINDOW]])
    cache.filled_at = len(ids)
    (logits,) = decoder.take([cache], [ids[ORIGINAL_WINDOW:]], every=True)
    assert gap(logits, specification(of, ids)[ORIGINAL_WINDOW:]) > 1e-2


@pytest.mark.parametrize("length", [5, 30])
@pytest.mark.parametrize("name", VARYING)
def test_a_fixed_rotary_length_is_that_of_the_specification(name: str, length: int) -> None:
    of, ids = CONFIGS[name], text(20)
    whole = specification(of, ids, rotary_length=length)
    for sizes in ([20], [7, 1, 12]):
        assert gap(in_chunks(exact(of), ids, sizes, rotary_length=length), whole) <= EXACT


def test_cached_tokens_are_computed_anew_only_when_the_frequencies_change() -> None:
    decoder, ids = exact(CONFIGS["rope longrope"]), text(20)
    cache, rows = decoder.new_cache(), []
    run = decoder._team.run

    class Counting:
        def run(self, program: object) -> None:
            rows.append(int(decoder._plan.inputs.rows[0]))
            run(program)  # type: ignore[arg-type]

    decoder._team = Counting()  # type: ignore[assignment]
    for token in ids[: ORIGINAL_WINDOW + 3]:
        decoder.take([cache], [[token]])
    assert rows == [1] * ORIGINAL_WINDOW + [ORIGINAL_WINDOW + 1] + [1, 1]


def test_only_the_last_logits_are_given_unless_all_are_wanted() -> None:
    decoder, ids = exact(VARIANTS["final soft cap"]), text(LENGTH)
    (last,) = decoder.take([decoder.new_cache()], [ids])
    assert last.shape == (1, 61)
    assert gap(last, in_chunks(decoder, ids, [LENGTH])[-1:]) <= SAME


@pytest.mark.parametrize("threads", [2, 3, 4])
def test_the_count_of_threads_does_not_show(threads: int) -> None:
    for name in ("plain", "parallel sandwich", "fused glu", "q/k layer norm", "one kv head"):
        of, ids = CONFIGS[name], text(LENGTH)
        decoder = engine(of, width="float32", threads=threads)
        one = in_chunks(exact(of), ids, [LENGTH])
        assert gap(in_chunks(decoder, ids, [LENGTH]), one) <= SAME, name
        assert gap(in_chunks(decoder, ids, [30] + [1] * 10), one) <= SAME, name


# --- Number formats ----------------------------------------------------------------------------


def wide(feedforward: dict[str, object], **attention: object) -> DecoderConfig:
    """Sizes that are whole blocks of 32."""
    one = layer(
        rotary={"d_rotary": 16},
        attention=attention or {"d_head": 16, "qkv_bias": True},
        feedforward=feedforward,
    )
    return config(one, one, d_model=64)


EXPERT = {"d_ff": 32, "bias": True}
WIDE = {
    "dense": wide({"d_ff": 96}),
    "experts": wide(mixture(expert=EXPERT, shared={"d_ff": 64}, shared_gate=True)),
    "latent": wide(
        {"d_ff": 96},
        n_kv_heads=6,
        d_head=48,
        latent=LatentConfig(kv_rank=32, q_rank=64, d_rope=16, d_value=64),
    ),
}
EACH = pytest.mark.parametrize("of", WIDE.values(), ids=WIDE)


def rounding_reference(monkeypatch: pytest.MonkeyPatch, *, int8: bool, cache: Stored) -> None:
    """Let the specification round what the engine rounds, where it does."""
    linear, attention = reference.linear, reference.attention

    def product(weights: object, name: str, x: np.ndarray, bias: bool) -> np.ndarray:
        if int8 and not name.endswith(".router"):
            x = meant(x.reshape(-1, x.shape[-1])).reshape(x.shape)
        return linear(weights, name, x, bias)  # type: ignore[arg-type]

    def rounded(x: np.ndarray) -> np.ndarray:
        return x if cache == "F32" else kept(x.astype(np.float32), cache).astype(float)

    def head(of: object, weights: object, x: np.ndarray) -> np.ndarray:
        normed = reference.norm(of["final_norm"], weights, "final_norm", x)  # type: ignore[index,arg-type]
        return product(weights, "head", normed, False)

    def latent(
        config: Any,
        weights: Any,
        name: str,
        x: np.ndarray,
        *,
        angles: np.ndarray,
        may_read: np.ndarray,
        cached: object,
    ) -> tuple[np.ndarray, None]:
        """Queries brought to the vectors, and the sum of these to values, as the engine has it."""
        assert cached is None
        of, h, turned = config["latent"], config["n_heads"], (angles, config["rotary"]["layout"])
        rank, d_key = of["kv_rank"], config["d_head"] - of["d_rope"]

        def down(which: str, rank: int) -> tuple[np.ndarray, np.ndarray]:
            both = product(weights, f"{name}.{which}_down", x, bias=False)
            normed = reference.norm(of["norm"], weights, f"{name}.{which}_norm", both[..., :rank])
            return normed, both[..., rank:]

        q = product(weights, f"{name}.q_up", down("q", of["q_rank"])[0], bias=False)
        q = q.reshape(*x.shape[:2], h, -1).transpose(0, 2, 1, 3)
        up = weights[f"{name}.kv_up.weight"].astype(float).reshape(h, -1, rank)
        q = [q[..., :d_key] @ up[:, :d_key], reference.rotate(q[..., d_key:], *turned, 1.0)]
        c, key = down("kv", rank)
        k = [c[:, None], reference.rotate(key[:, None], *turned, 1.0)]
        found = reference.attention(
            *(np.concatenate(both, axis=-1) for both in (q, k)),
            c[:, None],
            may_read,
            scale=config["d_head"] ** -0.5,
            soft_cap=None,
            sinks=None,
        )
        if int8:
            found = meant(found.reshape(-1, rank)).reshape(found.shape)
        heads = found @ up[:, d_key:].swapaxes(1, 2)
        joined = heads.transpose(0, 2, 1, 3).reshape(*x.shape[:2], -1)
        return product(weights, f"{name}.out", joined, bias=False), None

    monkeypatch.setattr(reference, "linear", product)
    monkeypatch.setattr(reference, "latent_attention", latent)
    monkeypatch.setattr(reference, "project_to_vocabulary", head)
    monkeypatch.setattr(
        reference,
        "attention",
        lambda q, k, v, *more, **options: attention(q, rounded(k), rounded(v), *more, **options),
    )


@EACH
@EACH_CACHE
@pytest.mark.parametrize("encoding", ["F16", "BF16", *IN_FILES])
def test_logits_are_those_of_the_dequantised_weights_with_the_same_rounding(
    encoding: str, stored: str, of: DecoderConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts are short and many: a number half way between two steps may go to either.

    Such a one, which float32 and float64 round apart, moves the logits of its text by about as much
    as all rounding does; the others agree as if there were none.
    """
    tensors = stored_tensors(weights_of(of), encoding)
    weights = {name: tensor.to_float32() for name, tensor in tensors.items()}
    decoder = EngineDecoder(of, tensors, cache=stored, threads=1)  # type: ignore[arg-type]
    texts = [text(1 + seed % 4, seed) for seed in range(32)]
    ours = decoder.take([decoder.new_cache() for _ in texts], texts)

    def theirs() -> list[np.ndarray]:
        return [reference.forward(of.to_dict(), weights, np.array([ids]))[0, -1:] for ids in texts]

    unrounded = theirs()
    rounding_reference(monkeypatch, int8=encoding in IN_FILES, cache=stored)  # type: ignore[arg-type]
    rounded = theirs()
    gaps = np.array([gap(*pair) for pair in zip(ours, rounded, strict=True)])
    steps = max(gap(*pair) for pair in zip(rounded, unrounded, strict=True))
    # A cache in int8 lets queries and weights be rounded too, to 15 bits.
    near = 10 * EXACT if stored == "int8" else EXACT
    # What such a cache gives is rounded once more where vectors are brought to values.
    again = stored == "int8" and encoding in IN_FILES and of is WIDE["latent"]
    assert (gaps <= near).mean() >= (0.25 if again else 0.75), gaps
    # One token reads itself alone, whatever its query is rounded to.
    assert (gaps[::4] <= near).mean() >= 0.75, gaps
    assert gaps.max() <= max(near, steps), (gaps, steps)


@EACH
@pytest.mark.parametrize("encoding", ["F16", "BF16", *IN_FILES])
@pytest.mark.parametrize("width", ["float32", "bfloat16"])
def test_weights_are_brought_to_a_width(width: str, encoding: str, of: DecoderConfig) -> None:
    """All but a router's and biases, which stay as they are."""
    ids = text(20)
    tensors = stored_tensors(weights_of(of), encoding)
    decoder = EngineDecoder(of, tensors, width=width, cache="F32", threads=1)  # type: ignore[arg-type]
    weights = {name: tensor.to_float32() for name, tensor in tensors.items()}
    if width == "bfloat16":
        weights = {
            name: torch.from_numpy(w).bfloat16().float().numpy()
            if w.ndim > 1 and not name.endswith((".bias", ".router.weight"))
            else w
            for name, w in weights.items()
        }
    whole = reference.forward(of.to_dict(), weights, np.array([ids]))[0]
    # In passes of few rows, where activations are not rounded.
    assert gap(in_chunks(decoder, ids, [12, 8]), whole) <= EXACT


@pytest.mark.parametrize(
    "name", ["fused glu", "tied head", "interleaved", "experts, fused", "latent"]
)
def test_rows_that_a_file_has_in_another_order_are_taken_in_ours(name: str) -> None:
    of, ids, generator = CONFIGS[name], text(20), np.random.default_rng(5)
    tensors = stored_tensors(weights_of(of))
    moved = {}
    for key, tensor in tensors.items():
        order = generator.permutation(tensor.shape[0])
        rows = tensor.data.reshape(tensor.shape[0], -1)[np.argsort(order)]
        moved[key] = type(tensor)(key, tensor.shape, "F32", rows.reshape(-1), "test")
        moved[key] = moved[key].reordered(order)
    decoder = EngineDecoder(of, moved, cache="F32", threads=2)
    assert gap(in_chunks(decoder, ids, [20]), specification(of, ids)) <= EXACT


def test_formats_without_kernels_are_held_as_float32_and_told() -> None:
    """F64 here."""
    of, ids, told = WIDE["dense"], text(9), list[str]()
    tensors = {
        name: StoredTensor(name, array.shape, "F64", array.astype("f8").reshape(-1).view("u1"), "")
        for name, array in weights_of(of).items()
    }
    decoder = EngineDecoder(of, tensors, cache="F32", threads=1, notice=told.append)
    assert gap(in_chunks(decoder, ids, [9]), specification(of, ids)) <= EXACT
    assert told == ["no kernels for F64: these weights are held as float32"]


# --- Batches -----------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", ["plain", "mixed layers", "window", "learned", "latent", *VARYING])
def test_texts_of_a_batch_are_as_each_alone(name: str, threads: int) -> None:
    """Cases 54, 65 and 125: of any lengths, more than one pass; none sees another."""
    decoder = engine(CONFIGS[name], width="float32", threads=threads)
    texts = [text(length, length) for length in (3, 1, 7, 20, 2, 16, 5, 1)]
    alone = [in_chunks(decoder, ids, [len(ids)]) for ids in texts]
    caches = [decoder.new_cache() for _ in texts]
    for ours, theirs in zip(decoder.take(caches, texts, every=True), alone, strict=True):
        assert gap(ours, theirs) <= SAME
    steps = [[each] for each in text(8, 9)]
    for ours, ids, step in zip(decoder.take(caches, steps), texts, steps, strict=True):
        assert gap(ours, in_chunks(decoder, ids + step, [len(ids) + 1])[-1:]) <= SAME


def test_eight_texts_have_the_greedy_tokens_of_each_alone() -> None:
    decoder = engine(VARIANTS["plain"], width="float32", threads=2)
    prompts = [text(3 + seed, seed) for seed in range(8)]

    def greedy(prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        caches = [decoder.new_cache() for _ in prompts]
        chosen: list[list[int]] = [[] for _ in prompts]
        new = [list(prompt) for prompt in prompts]
        for _ in range(20):
            logits = decoder.take(caches, new)
            new = [[int(each[0].argmax())] for each in logits]
            for row, (token,) in zip(chosen, new, strict=True):
                row.append(token)
        return chosen

    together = greedy(prompts)
    assert together == [greedy([prompt])[0] for prompt in prompts]
    assert len({tuple(row) for row in together}) > 4


def test_no_texts_have_no_logits() -> None:
    assert exact(VARIANTS["plain"]).take([], []) == []


# --- The cache ---------------------------------------------------------------------------------


@EACH_CACHE
def test_nan_in_unused_places_never_shows(stored: str) -> None:
    """Case 48: not at the start, nor after a trim left old entries behind."""
    decoder = engine(MIXED, cache=stored, threads=2)
    ids = text(30)
    cache = decoder.new_cache()
    plain = decoder.new_cache()
    poison(cache, 0)
    for each in (cache, plain):
        decoder.take([each], [ids[:20]])
        each.trim(3)
    poison(cache, 17)
    ours, theirs = (decoder.take([each], [ids[17:]], every=True)[0] for each in (cache, plain))
    assert np.isfinite(ours).all()
    assert gap(ours, theirs) == 0


@EACH_CACHE
def test_poisoning_what_is_used_does_show(stored: str) -> None:
    """Otherwise the test above would hold for a poison that goes nowhere."""
    decoder = engine(MIXED, cache=stored, threads=1)
    cache = decoder.new_cache()
    decoder.take([cache], [text(20)])
    poison(cache, 19)
    assert np.isnan(decoder.take([cache], [[1]])[0]).any()


@EACH_CACHE
def test_stored_keys_are_turned_once(stored: str) -> None:
    """Case 10: five steps leave what one chunk of five leaves."""
    decoder, ids = engine(VARIANTS["plain"], cache=stored, threads=1), text(5)
    whole, stepped = decoder.new_cache(), decoder.new_cache()
    decoder.take([whole], [ids])
    for token in ids:
        decoder.take([stepped], [[token]])
    for ours, theirs in zip(
        (*whole.keys, *whole.values), (*stepped.keys, *stepped.values), strict=True
    ):
        if stored == "F32":
            np.testing.assert_allclose(ours, theirs, atol=SAME)
        else:
            assert (np.abs(ours.astype(int) - theirs.astype(int)) <= 1).all()


def test_an_edited_prompt_is_as_if_new() -> None:
    """Case 58, and with a layer whose window has been passed."""
    decoder = exact(MIXED)
    cache = decoder.new_cache()
    decoder.take([cache], [[1, 2, 3, 4, 5]])
    for same, rest in ((2, [9, 4]), (2, [3]), (3, text(20)), (0, [7]), (1, [8, 8])):
        whole = [*cache.tokens[:same], *rest]
        cache.trim(cache.length - same)
        (logits,) = decoder.take([cache], [rest])
        assert cache.tokens == whole
        assert gap(logits, in_chunks(decoder, whole, [len(whole)])[-1:]) <= SAME


@pytest.mark.parametrize("name", VARYING)
def test_trimming_back_below_the_window_brings_the_short_frequencies_back(name: str) -> None:
    of, ids = CONFIGS[name], text(20)
    decoder = exact(of)
    cache = decoder.new_cache()
    decoder.take([cache], [ids])
    cache.trim(16)
    (logits,) = decoder.take([cache], [[7, 8]])
    assert gap(logits, specification(of, [*ids[:4], 7, 8])[-1:]) <= EXACT


def test_trimming_everything_and_going_on() -> None:
    decoder = exact(VARIANTS["rope dynamic"])
    cache = decoder.new_cache()
    decoder.take([cache], [text(20)])
    cache.trim(20)
    (logits,) = decoder.take([cache], [[3, 4]])
    assert gap(logits, specification(VARIANTS["rope dynamic"], [3, 4])[-1:]) <= EXACT


def test_a_copy_goes_its_own_way() -> None:
    decoder, ids = exact(MIXED), text(30)
    cache = decoder.new_cache()
    decoder.take([cache], [ids[:20]])
    other = cache.copy()
    decoder.take([other], [[1, 2, 3]])
    decoder.take([cache], [ids[20:29]])
    for ours, whole in ((cache, ids), (other, [*ids[:20], 1, 2, 3, ids[29]])):
        (logits,) = decoder.take([ours], [[ids[29]]])
        assert gap(logits, in_chunks(decoder, whole, [len(whole)])[-1:]) <= SAME


def test_a_text_seen_before_leaves_no_trace() -> None:
    """Case 40: a short text after a long one, for each rule."""
    for name in (name for name in VARIANTS if name.startswith("rope")):
        decoder = exact(VARIANTS[name])
        short = in_chunks(decoder, text(5), [5])
        in_chunks(decoder, text(60), [60])
        assert gap(in_chunks(decoder, text(5), [5]), short) == 0, name


def state(cache: TextCache) -> tuple[object, ...]:
    return (
        list(cache.tokens),
        cache.filled_at,
        [part.tobytes() for part in (*cache.keys, *cache.values)],
    )


def test_a_full_cache_refuses_and_keeps_what_it_has() -> None:
    """Case 60: capacity 8, prompt 6, 4 new."""
    decoder, ids = exact(VARIANTS["plain"]), text(10)
    cache = decoder.new_cache(capacity=8)
    decoder.take([cache], [ids[:6]])
    before = state(cache)
    with pytest.raises(CacheFullError, match="6 cached and 4 new tokens need 10 places"):
        decoder.take([cache], [ids[6:]])
    assert state(cache) == before
    (logits,) = decoder.take([cache], [ids[6:8]])
    assert gap(logits, in_chunks(decoder, ids[:8], [8])[-1:]) <= SAME
    with pytest.raises(CacheFullError, match="need 9 places, but the capacity is 8"):
        decoder.take([cache], [ids[8:9]])


REFUSED: dict[str, tuple[Callable[[EngineDecoder, TextCache], object], str]] = {
    "no tokens": (lambda d, c: d.take([d.new_cache(), c], [[1], []]), "no new tokens"),
    "unknown token": (lambda d, c: d.take([d.new_cache(), c], [[1], [2, 61]]), "token 61 is none"),
    "negative token": (lambda d, c: d.take([c], [[-1]]), "token -1 is none of 0 to 60"),
    "one cache twice": (lambda d, c: d.take([c, c], [[1], [2]]), "give each its own"),
    "too few caches": (lambda d, c: d.take([c], [[1], [2]]), "2 texts for 1 caches"),
    "another model": (
        lambda d, c: d.take([c, exact(MIXED).new_cache()], [[1], [2]]),
        "made for another decoder",
    ),
    "another number type": (
        lambda d, c: d.take([c, TextCache(d.config, "BF16")], [[1], [2]]),
        "made for another decoder",
    ),
    "second one full": (
        lambda d, c: d.take([c, d.new_cache(capacity=2)], [[1] * 60, [2] * 3]),
        "capacity is 2",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_changes_nothing(name: str) -> None:
    call, message = REFUSED[name]
    decoder = exact(VARIANTS["plain"])
    cache = decoder.new_cache()
    decoder.take([cache], [[5, 6, 7]])
    before = state(cache)
    with pytest.raises(ValueError, match=message):
        call(decoder, cache)
    assert state(cache) == before


def test_a_learned_table_has_no_position_beyond_its_size() -> None:
    decoder = exact(VARIANTS["learned"])
    cache = decoder.new_cache()
    decoder.take([cache], [text(64)])
    with pytest.raises(ValueError, match="position 64 is outside the learned table"):
        decoder.take([cache], [[1]])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("layers.1.norm2.weight"), "1 of .* have no tensor: layers.1.norm2.weight"),
        (lambda w: w.update(extra=np.zeros(3)), "tensor extra fills extra"),
        (
            lambda w: w.update({"head.weight": w["head.weight"][:, :39]}),
            r"head.weight has shape \(61, 39\), but the configuration needs \(61, 40\)",
        ),
        (lambda w: w.update({"final_norm.weight": np.ones(39)}), r"has shape \(39,\)"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    change: Callable[[dict[str, np.ndarray]], object], message: str
) -> None:
    """Kernels would read past their ends."""
    weights = weights_of(VARIANTS["plain"])
    change(weights)
    with pytest.raises(CheckpointError, match=message):
        engine(VARIANTS["plain"], weights)


def test_a_cache_is_of_a_type_that_there_is() -> None:
    with pytest.raises(ValueError, match="cache is 'Q8'; known are F32, BF16, int8"):
        engine(VARIANTS["plain"], cache="Q8", threads=1)


def test_heads_of_an_odd_size_are_kept_in_float32_and_who_asked_is_told() -> None:
    told: list[str] = []
    for cache in (None, "int8"):
        decoder = engine(CONFIGS["odd head"], cache=cache, threads=1, notice=told.append)
        assert decoder.stored == "F32"
    assert told == ["heads of an odd size: their keys and values are kept in float32"]


@pytest.mark.parametrize("threads", [0, -1])
def test_there_is_at_least_one_thread(threads: int) -> None:
    with pytest.raises(ValueError, match=f"threads is {threads}"):
        engine(VARIANTS["plain"], threads=threads)
