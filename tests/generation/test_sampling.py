"""Sampling against hand-worked values, transformers' processors and the statistics of draws."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from armillary.errors import UserError
from armillary.generation import sampling
from armillary.generation.sampling import SamplingConfig, choose, generator

INF = math.inf
# Probabilities 0.4, 0.3, 0.2, 0.1 in an order that is not that of the ids.
SHARES = np.array([0.2, 0.4, 0.1, 0.3])
MIXED = np.log(SHARES).astype(np.float32)


# --- each step, by hand ---------------------------------------------------------------------


def test_penalty_shrinks_positive_and_grows_negative_logits_of_seen_tokens_only():
    for logits, seen, expected in (
        ([2.0, -2.0, 0.0, 3.0], [True, True, True, False], [1.0, -4.0, 0.0, 3.0]),
        ([2.0, -2.0, -INF, 3.0], [False, False, True, True], [2.0, -2.0, -INF, 1.5]),
    ):
        given = np.float32(logits)
        got = sampling.repetition_penalty(given, np.array(seen), 2.0)
        assert got.tolist() == expected
        assert given.tolist() == logits, "the model's logits are left as they were"


def test_temperature_divides_differences():
    given = np.float32([1.0, 3.0, -INF])
    assert sampling.temperature(given, 0.5).tolist() == [math.exp(-4), 1.0, 0.0]
    assert given.tolist() == [1.0, 3.0, -INF]


@pytest.mark.parametrize("value", [1e-300, 1e-30, 1e-8])
def test_a_tiny_temperature_is_greedy_and_finite(value):
    config = SamplingConfig(temperature=value)
    assert all(choose(MIXED, config, draw) == 1 for draw in (0.0, 0.5, 1 - 2**-53))


def test_top_k_keeps_exactly_k_and_the_lower_ids_of_equals():
    assert sampling.top_k(MIXED, 2).tolist() == [1, 3]
    equal = np.zeros(3000, np.float32)  # large enough for an unstable sort to show
    assert sampling.top_k(equal, 2).tolist() == [0, 1]
    assert sampling.top_k(np.float32([1.0, 2.0, 1.0, 1.0, 3.0]), 4).tolist() == [0, 1, 2, 4]
    assert sampling.top_k(np.float32([-INF, -INF, 1.0]), 2).tolist() == [0, 2]


@pytest.mark.parametrize("k", [0, 4, 5, 1000])
def test_top_k_of_zero_or_of_the_vocabulary_or_more_keeps_all(k):
    assert sampling.top_k(MIXED, k).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("p", "expected"),
    [
        (1e-300, [1]),
        (0.39, [1]),
        (0.41, [1, 3]),
        (0.69, [1, 3]),
        (0.71, [0, 1, 3]),
        (0.91, [0, 1, 2, 3]),
        (1.0, [0, 1, 2, 3]),
    ],
)
def test_top_p_keeps_the_fewest_that_reach_p(p, expected):
    assert sampling.top_p(SHARES, p).tolist() == expected
    assert sampling.top_p(7 * SHARES, p).tolist() == expected, "whatever the weights sum to"


@given(
    logits=st.lists(st.integers(-4, 4).map(float) | st.just(-INF), min_size=1, max_size=12),
    p=st.sampled_from([1e-300, 0.05, 0.3, 0.77, 0.999]),
)
def test_top_p_equals_sorting_everything(logits, p):
    """Only the contenders are ranked, and equal ones count; both must leave no trace."""
    weights = np.exp([*logits, 0.0])
    order = sorted(range(len(weights)), key=lambda i: (-weights[i], i))
    mass, expected = 0.0, set()
    for i in order:
        if mass < p and weights[i] > 0:
            expected.add(i)
        mass += float(weights[i] / weights.sum())
    assert sampling.top_p(weights, p).tolist() == sorted(expected)


@pytest.mark.parametrize("spread", [0.01, 1.0, 5.0])
@pytest.mark.parametrize("equals", [False, True])
def test_filters_of_a_large_vocabulary_are_those_of_sorting(spread, equals):
    """Large enough for groups and bins of many tokens, and for bins of one; equals on request."""
    logits = (spread * np.random.default_rng(3).standard_normal(5003)).astype(np.float32)
    if equals:
        logits = np.round(logits, 2 if spread < 1 else 1)
    order = np.argsort(-logits, kind="stable")
    for k in (1, 2, 40, 77, 78, 1000):
        assert sampling.top_k(logits, k).tolist() == sorted(order[:k])
    assert sampling.likeliest(logits, 20).tolist() == order[:20].tolist()
    weights = sampling.temperature(logits, 1.0)
    before = np.cumsum(weights[order]) - weights[order]
    for p in (1e-300, 0.01, 0.3, 0.9, 0.999):
        assert sampling.top_p(weights, p).tolist() == sorted(order[before < p * weights.sum()])


def test_top_p_takes_the_lower_ids_of_equals():
    assert sampling.top_p(np.ones(4), 0.5).tolist() == [0, 1]


@pytest.mark.parametrize(
    ("p", "expected"),
    [(0.0, [0, 1, 2, 3]), (0.26, [0, 1, 3]), (0.51, [1, 3]), (0.76, [1]), (1.0, [1])],
)
def test_min_p_drops_what_is_below_its_share_of_the_likeliest(p, expected):
    assert sampling.min_p(SHARES, p).tolist() == expected


def test_steps_keep_impossible_tokens_out_and_always_one():
    logits = np.float32([-INF, 1.0, -INF, -INF])
    for config in (SamplingConfig(top_k=3), SamplingConfig(top_p=0.01), SamplingConfig(min_p=1.0)):
        assert all(choose(logits, config, draw) == 1 for draw in (0.0, 0.5, 1 - 2**-53))


def test_steps_are_taken_in_the_stated_order():
    """Hot temperature first flattens, so that top-p keeps more than it would before it."""
    config = SamplingConfig(temperature=100.0, top_p=0.6)
    assert {choose(MIXED, config, draw) for draw in np.linspace(0, 0.999, 50)} == {0, 1, 3}
    # top-k first: of the two left 4/7 alone reaches 0.5; without top-k 0.4 does not.
    both = SamplingConfig(top_k=2, top_p=0.5)
    assert {choose(MIXED, both, draw) for draw in np.linspace(0, 0.999, 50)} == {1}
    # The penalty comes before all: it can take the lead from a token.
    seen = np.array([False, True, False, False])
    penalised = SamplingConfig(temperature=0, repetition_penalty=4.0)
    assert choose(MIXED, penalised, 0.0, seen) == 3


def test_filters_one_after_another_lead_back_to_the_tokens_ids():
    """Places after a filter are no longer ids: of ids 1, 3, 0 (by rank) each draw finds its own."""
    config = SamplingConfig(top_k=3, top_p=0.95, min_p=0.1)
    assert [choose(MIXED, config, draw) for draw in (0.1, 0.5, 0.9)] == [0, 1, 3]


def test_log_probabilities_and_ranks():
    assert np.allclose(np.exp(sampling.log_probabilities(MIXED)), SHARES)
    assert sampling.likeliest(MIXED, 3).tolist() == [1, 3, 0]
    assert sampling.likeliest(np.zeros(4, np.float32), 2).tolist() == [0, 1]
    assert sampling.likeliest(MIXED, 20).tolist() == [1, 3, 0, 2]
    assert sampling.likeliest(MIXED, 0).tolist() == []
    assert sampling.log_probabilities(np.float32([0.0, -INF])).tolist() == [0.0, -INF]


# --- the draw -------------------------------------------------------------------------------


def test_greedy_takes_the_lowest_id_of_equals_whatever_is_drawn():
    config = SamplingConfig(temperature=0)
    assert [choose(np.zeros(300, np.float32), config, draw) for draw in (0.0, 0.9)] == [0, 0]
    assert choose(np.float32([-1.0, 2.0, 2.0, -INF]), config, 0.99) == 1


def test_the_draw_picks_the_place_in_the_distribution():
    """Cumulative in id order: 0.2, 0.6, 0.7, 1.0."""
    config = SamplingConfig()
    draws = [0.0, 0.1999, 0.2001, 0.5999, 0.6001, 0.6999, 0.7001, 1 - 2**-53]
    assert [choose(MIXED, config, draw) for draw in draws] == [0, 0, 1, 1, 2, 2, 3, 3]


@given(
    logits=st.lists(st.floats(-30, 30) | st.just(-INF), min_size=1, max_size=9),
    draw=st.sampled_from([0.0, 2**-53, 0.25, 0.5, 1 - 2**-53]),
)
def test_no_draw_picks_an_impossible_token(logits, draw):
    given = np.float32([-INF, *logits, 0.0, -INF])
    assert given[choose(given, SamplingConfig(), draw)] > -INF


@pytest.mark.parametrize("size", [1, 63, 64, 65, 1000])
def test_of_many_tokens_the_draw_picks_the_first_that_passes_it(size):
    """With a draw inside each token's share, and where long stretches are impossible."""
    random = np.random.default_rng(size)
    weights = random.random(size) * (random.random(size) < 0.3)
    weights[size // 2] = 1.0
    with np.errstate(divide="ignore"):
        logits = np.log(weights)
    ends = np.cumsum(weights) / weights.sum()
    inside = np.concatenate([ends - weights / weights.sum() / 2, [0.0, 1 - 2**-53]])
    possible = np.flatnonzero(weights)
    expected = [*np.arange(size), possible[0], possible[-1]]
    for draw, place in zip(inside, expected, strict=True):
        if weights[place]:
            assert choose(logits, SamplingConfig(), draw) == place


def test_draws_follow_the_distribution():
    """Chi-square with 3 degrees of freedom; 16.27 is exceeded once in a thousand seeds."""
    random, n = generator(5), 6000
    counts = np.zeros(4)
    for _ in range(n):
        counts[choose(MIXED, SamplingConfig(), random.random())] += 1
    expected = n * SHARES
    assert ((counts - expected) ** 2 / expected).sum() < 16.27
    tilted = n * np.array([0.23, 0.37, 0.1, 0.3])  # the same test notices a tilt of 3 in 100
    assert ((counts - tilted) ** 2 / tilted).sum() > 16.27


def test_a_token_of_probability_one_in_a_billion_can_be_drawn():
    logits = np.float32([0.0, math.log(2**-30)])
    assert [choose(logits, SamplingConfig(), 1 - 2.0**-n) for n in (29, 31)] == [0, 1]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_logits_are_drawn_from_in_float64(dtype):
    """In float32 a thousand tokens of 2⁻²⁵ each would add nothing to the one of 1."""
    logits = np.array([0.0] + 1000 * [-25 * math.log(2)], dtype=dtype)
    assert choose(logits, SamplingConfig(), 1 - 2**-53) == 1000


@pytest.mark.parametrize("bad", [math.nan, INF, -INF])
def test_logits_without_a_finite_maximum_are_refused(bad):
    logits = np.full(5, -INF, np.float32)
    logits[2] = bad
    with pytest.raises(UserError, match="no finite maximum"):
        choose(logits, SamplingConfig(), 0.5)


def test_a_penalty_without_seen_tokens_is_a_fault():
    with pytest.raises(TypeError, match="seen"):
        choose(MIXED, SamplingConfig(repetition_penalty=1.1), 0.5)


def test_a_seed_gives_its_own_sequence():
    first, again, other = (generator(seed).random(5).tolist() for seed in (3, 3, 4))
    assert first == again != other
    assert generator(None).random() != generator(None).random()


# --- options --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "value", "allowed"),
    [
        ("max_tokens", 0, "1 or more"),
        ("max_tokens", -5, "1 or more"),
        ("max_tokens", 2.0, "whole number"),
        ("max_tokens", True, "whole number"),
        ("max_tokens", None, "whole number"),
        ("temperature", math.nan, "from 0 to 100"),
        ("temperature", INF, "from 0 to 100"),
        ("temperature", 1e9, "from 0 to 100"),
        ("temperature", -0.1, "from 0 to 100"),
        ("temperature", "hot", "from 0 to 100"),
        ("temperature", True, "from 0 to 100"),
        ("top_k", -1, "0 or more"),
        ("top_k", 1.5, "whole number"),
        ("top_p", 0, "above 0 and at most 1"),
        ("top_p", -1, "above 0 and at most 1"),
        ("top_p", 1.0001, "above 0 and at most 1"),
        ("top_p", math.nan, "above 0 and at most 1"),
        ("min_p", -0.1, "from 0 to 1"),
        ("min_p", 1.1, "from 0 to 1"),
        ("repetition_penalty", 0, "from 0.01 to 100"),
        ("repetition_penalty", -1.0, "from 0.01 to 100"),
        ("repetition_penalty", INF, "from 0.01 to 100"),
        ("seed", -1, "0 or more"),
        ("seed", 0.5, "whole number"),
        ("logprobs", -1, "from 0 to 20"),
        ("logprobs", 21, "from 0 to 20"),
        ("stop", ("",), "non-empty"),
        ("stop", "", "non-empty"),
        ("stop", ("a", 1), "non-empty"),
        ("stop", 7, "non-empty"),
        ("stop", "a\udcff", "must be valid Unicode"),
        ("stop", None, "non-empty"),
        ("ignore_eos", 1, "true or false"),
    ],
)
def test_an_option_out_of_range_is_named_with_its_value_and_range(option, value, allowed):
    with pytest.raises(UserError) as raised:
        SamplingConfig(**{option: value})
    message = str(raised.value)
    assert message.startswith(f"{option} is {value!r};")
    assert allowed in message
    assert "\n" not in message


@pytest.mark.parametrize(
    "options",
    [
        {"max_tokens": 1, "temperature": 0, "top_k": 0, "top_p": 1, "min_p": 0, "seed": 0},
        {"max_tokens": 10**9, "temperature": 100, "top_k": 10**6, "top_p": 1e-9, "min_p": 1},
        {"max_tokens": np.int64(3), "temperature": np.float32(0.5), "seed": 2**64, "logprobs": 0},
        {"repetition_penalty": 0.01, "logprobs": 20, "stop": ("a", "\n")},
    ],
)
def test_the_ends_of_the_ranges_are_allowed(options):
    config = SamplingConfig(**options)
    assert all(getattr(config, name) == value for name, value in options.items())


def test_one_stop_string_or_a_list_becomes_a_tuple():
    assert SamplingConfig(stop="END").stop == ("END",)
    assert SamplingConfig(stop=["a", "b"]).stop == ("a", "b")


# --- the reference library ------------------------------------------------------------------


@pytest.mark.peer
@pytest.mark.parametrize("seed", range(3))
def test_each_step_equals_transformers(seed):
    from transformers.generation import logits_process as peer

    g = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(4, 61, generator=g, dtype=torch.float64)
    ids = torch.randint(0, 61, (4, 7), generator=g)
    chain = {
        "top k": (sampling.top_k, 5, peer.TopKLogitsWarper(5)),
        "top p": (lambda row, p: sampling.top_p(np.exp(row), p), 0.8, peer.TopPLogitsWarper(0.8)),
        "min p": (lambda row, p: sampling.min_p(np.exp(row), p), 0.05, peer.MinPLogitsWarper(0.05)),
    }
    for name, (step, value, theirs) in chain.items():
        for row, kept in zip(logits.numpy(), theirs(ids, logits).isfinite(), strict=True):
            assert step(row, value).tolist() == kept.nonzero()[:, 0].tolist(), name
    penalised = peer.RepetitionPenaltyLogitsProcessor(1.3)(ids, logits)
    cooled = peer.TemperatureLogitsWarper(0.7)(ids, logits).softmax(-1)
    seen = torch.zeros(4, 61, dtype=torch.bool).scatter(1, ids, True)
    for n, row in enumerate(logits.numpy()):
        ours = sampling.repetition_penalty(row, seen[n].numpy(), 1.3)
        assert np.array_equal(ours, penalised[n].numpy())
        weights = sampling.temperature(row, 0.7)
        assert np.allclose(weights / weights.sum(), cooled[n].numpy(), rtol=0, atol=1e-15)


@pytest.mark.peer
def test_the_whole_chain_is_that_of_transformers_generate():
    """The tokens that can be drawn and their shares, from the list that `generate` builds."""
    from transformers import GenerationConfig, GPT2Config, GPT2LMHeadModel

    tiny = GPT2LMHeadModel(GPT2Config(vocab_size=61, n_embd=8, n_layer=1, n_head=1))
    options = {"temperature": 1.7, "top_k": 30, "top_p": 0.85, "min_p": 0.08}
    penalty = 1.4
    chain = tiny._get_logits_processor(
        GenerationConfig(do_sample=True, repetition_penalty=penalty, **options),
        input_ids_seq_length=5,
    )
    g = torch.Generator().manual_seed(1)
    logits = 3 * torch.randn(61, generator=g, dtype=torch.float64)
    ids = torch.tensor([[3, 4, 4, 5, int(logits.argmax())]])
    expected = chain(ids, logits[None]).softmax(-1)[0]
    seen = torch.zeros(61, dtype=torch.bool).scatter(0, ids[0], True).numpy()
    config = SamplingConfig(repetition_penalty=penalty, **options)
    n = 4000
    grid = (np.arange(n) + 0.5) / n
    chosen = torch.tensor([choose(logits.numpy(), config, float(draw), seen) for draw in grid])
    shares = torch.bincount(chosen, minlength=61) / n
    assert 1 < int((expected > 0).sum()) < 30
    assert torch.allclose(shares.double(), expected, rtol=0, atol=1.01 / n)
