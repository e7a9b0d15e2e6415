"""Torch as generation's engine: padding, chunks, the cache's prefix, number types."""

import numpy as np
import pytest
import torch

from armillary import torch_engine
from armillary.parts.kv_cache import KVCache
from armillary.torch_engine import TorchEngine, left_padded
from support.models import VARIANTS, build

SHORT, LONG = [5, 17, 40], [9, 3, 33, 21, 8, 54, 12]


class Spy:
    """Records the shape of the tokens of every pass through the decoder."""

    def __init__(self, decoder):
        self.shapes = []
        decoder.embedding.register_forward_pre_hook(
            lambda _, arguments: self.shapes.append(tuple(arguments[0].shape))
        )


def run(decoder, prompts, cache=None):
    """The logits after the prompts and after one more token of each, (2, B, V)."""
    texts = TorchEngine(decoder).texts([20] * len(prompts), cache)
    return np.array([texts.begin(prompts), texts.step([7] * len(prompts))])


def alone(decoder, prompts):
    return np.concatenate([run(decoder, [prompt]) for prompt in prompts], axis=1)


def assert_close(ours, theirs):
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-10)


def test_padding_is_on_the_left_and_masked():
    tokens, mask = left_padded([[7, 8], [1, 2, 3]])
    assert tokens.tolist() == [[7, 7, 8], [1, 2, 3]]
    assert mask.tolist() == [[False, True, True], [True, True, True]]
    assert left_padded([[7, 8], [1, 2]])[1] is None


def test_what_stands_in_the_padding_does_not_matter(monkeypatch):
    """Huge embeddings on the padding's id (case 55); no mask at all must show the difference."""
    decoder = build(VARIANTS["plain"])
    prompts = [SHORT, LONG]
    expected = alone(decoder, prompts)
    with torch.no_grad():
        decoder.embedding.weight[1] *= 1e6

    def padded_with_1(rows):
        tokens, mask = left_padded(rows)
        return (tokens if mask is None else torch.where(mask, tokens, 1)), mask

    monkeypatch.setattr(torch_engine, "left_padded", padded_with_1)
    assert_close(run(decoder, prompts), expected)
    monkeypatch.setattr(torch_engine, "left_padded", lambda rows: (padded_with_1(rows)[0], None))
    with pytest.raises(AssertionError):
        assert_close(run(decoder, prompts), expected)


def test_rows_are_kept_in_the_order_asked_for():
    decoder = build(VARIANTS["plain"])
    prompts = [SHORT, LONG, [1]]
    texts = TorchEngine(decoder).texts([20] * 3)
    texts.begin(prompts)
    texts.keep([2, 0])
    assert_close(texts.step([7, 7]), alone(decoder, [[1], SHORT])[1])


@pytest.mark.parametrize("chunk", [1, 3, 7])
@pytest.mark.parametrize("name", ["plain", "window", "rope dynamic", "rope longrope"])
def test_a_prefill_in_chunks_is_a_whole_one(name, chunk, monkeypatch):
    decoder = build(VARIANTS[name])
    prompts = [SHORT, LONG * 2]
    whole = run(decoder, prompts)
    spy = Spy(decoder)
    monkeypatch.setitem(torch_engine._PREFILL, "cpu", chunk)
    assert_close(run(decoder, prompts), whole)
    assert spy.shapes[0] == (2, chunk)


def test_only_the_last_position_is_projected_to_the_vocabulary(monkeypatch):
    decoder = build(VARIANTS["plain"])
    shapes = []
    decoder.head.register_forward_pre_hook(lambda _, given: shapes.append(tuple(given[0].shape)))
    monkeypatch.setitem(torch_engine._PREFILL, "cpu", 3)
    run(decoder, [LONG])
    assert shapes == [(1, 1, 40)] * 2


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (torch.bfloat16, np.float32),
        (torch.float16, np.float32),
        (torch.float32, np.float32),
        (torch.float64, np.float64),
    ],
)
def test_logits_are_float32_at_least(dtype, expected):
    decoder = build(VARIANTS["plain"], dtype=dtype)
    logits = run(decoder, [LONG])
    assert logits.dtype == expected
    whole = decoder.prefill(torch.tensor([LONG]), KVCache(decoder.config))[0, -1]
    assert np.array_equal(
        logits[0, 0], whole.detach().to(torch.promote_types(dtype, torch.float32)).numpy()
    )


# --- steps of fixed shapes -------------------------------------------------------------------


def greedy(decoder, prompts, count, **options):
    """So many likeliest tokens after each prompt, (B, count), and the logits of each step."""
    texts = TorchEngine(decoder, **options).texts([len(prompt) + count for prompt in prompts])
    steps = [np.array(texts.begin(prompts))]
    tokens = [steps[0].argmax(-1)]
    for _ in range(count - 1):
        steps.append(np.array(texts.step(tokens[-1].tolist())))
        tokens.append(steps[-1].argmax(-1))
    return np.stack(tokens, 1).tolist(), np.stack(steps, 1)


@pytest.mark.parametrize(
    "name", ["plain", "window", "mixed layers", "learned", "rope dynamic", "rope longrope"]
)
def test_steps_of_fixed_shapes_write_the_same_text(name, device, monkeypatch):
    """A batch of unequal lengths, whose memory grows on the way; on a GPU they are recorded."""
    monkeypatch.setattr("armillary.parts.layer_store._GROWTH", 4)
    decoder = build(VARIANTS[name]).to(device)
    text, logits = greedy(decoder, [SHORT, LONG], 20, fixed_steps=True)
    usual, expected = greedy(decoder, [SHORT, LONG], 20, fixed_steps=False)
    assert text == usual
    assert_close(logits, expected)


def test_on_a_cpu_steps_read_what_is_there_alone(monkeypatch):
    """Slots that hold nothing yet cost time there, and no graph makes up for it."""
    decoder = build(VARIANTS["plain"])
    monkeypatch.setattr(decoder, "next", None)
    run(decoder, [LONG])
    texts = TorchEngine(decoder, fixed_steps=True).texts([9])
    texts.begin([LONG])
    with pytest.raises(TypeError):
        texts.step([7])


def test_texts_that_leave_a_batch_of_fixed_steps_change_no_other(device):
    decoder = build(VARIANTS["plain"]).to(device)
    results = []
    for fixed in (True, False):
        texts = TorchEngine(decoder, fixed_steps=fixed).texts([30] * 3)
        logits = [*texts.begin([SHORT, LONG, [1]]), *texts.step([7, 8, 9]), *texts.step([1, 2, 3])]
        texts.keep([2, 0])
        logits += [*texts.step([4, 5]), *texts.step([6, 7]), *texts.step([8, 9])]
        results.append(np.array(logits))
    assert_close(*results)


def test_guesses_between_fixed_steps_change_nothing(device):
    """Several tokens at once, of which some are taken back, in the memory that steps go on with."""
    decoder = build(VARIANTS["plain"]).to(device)
    results = []
    for fixed in (True, False):
        texts = TorchEngine(decoder, fixed_steps=fixed).texts([40])
        logits = [*texts.begin([LONG]), *texts.step([7])]
        for guesses in ([3, 4, 5], [6, 7, 8, 9]):
            logits += texts.steps(guesses)
            texts.take_back(2)
            logits += [*texts.step([10]), *texts.step([11])]
        results.append(np.array(logits))
    assert_close(*results)


def test_fixed_steps_go_on_from_a_windowed_cache_as_they_can(device):
    decoder = build(VARIANTS["window"]).to(device)
    results = []
    for fixed in (True, False):
        cache = KVCache(decoder.config, windowed=True)
        texts = TorchEngine(decoder, fixed_steps=fixed).texts([20], cache)
        results.append(np.array([*texts.begin([LONG]), *texts.step([7]), *texts.step([8])]))
    assert_close(*results)


# --- a cache to go on from ------------------------------------------------------------------


def test_what_a_cache_shares_with_a_prompt_is_not_computed_again():
    decoder = build(VARIANTS["plain"])
    cache = TorchEngine(decoder).new_cache()
    run(decoder, [LONG], cache)
    assert cache.tokens.tolist() == [[*LONG, 7]]
    expected = run(decoder, [[*LONG, 7, 4, 4, 2]])
    spy = Spy(decoder)
    assert_close(run(decoder, [[*LONG, 7, 4, 4, 2]], cache), expected)
    assert spy.shapes == [(1, 3), (1, 1)]


def test_a_windowed_cache_that_cannot_go_back_is_computed_again():
    """Case 58: a layer of window 3 has forgotten what the first tokens were."""
    decoder = build(VARIANTS["window"])
    cache = KVCache(decoder.config, windowed=True)
    run(decoder, [LONG], cache)
    assert_close(run(decoder, [[9, 3, 1]], cache), run(decoder, [[9, 3, 1]]))


def test_a_cache_that_holds_padding_is_not_taken_for_a_prompt():
    """A row is padded with its own first token, so tokens alone cannot tell the two apart."""
    decoder = build(VARIANTS["plain"])
    cache = KVCache(decoder.config)
    padded = torch.tensor([[5, 5, 17]])
    decoder.prefill(padded, cache, mask=torch.tensor([[False, True, True]]))
    assert_close(run(decoder, [[5, 5, 17, 40]], cache), run(decoder, [[5, 5, 17, 40]]))


# --- faults ---------------------------------------------------------------------------------


def test_what_does_not_fit_is_refused():
    decoder = build(VARIANTS["plain"])
    with pytest.raises(ValueError, match="a cache of 2 rows for one prompt"):
        TorchEngine(decoder).texts([9], KVCache(decoder.config, 2))
    with pytest.raises(ValueError, match="training mode"):
        TorchEngine(decoder.train()).texts([9])


def test_the_callers_gradient_mode_is_left_alone():
    decoder = build(VARIANTS["plain"])
    modes = []
    decoder.head.register_forward_hook(lambda *_: modes.append(torch.is_grad_enabled()))
    run(decoder, [SHORT])
    assert torch.is_grad_enabled()
    assert modes == [False] * 2
