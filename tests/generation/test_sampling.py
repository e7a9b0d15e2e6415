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
MIXED = torch.tensor([0.2, 0.4, 0.1, 0.3], dtype=torch.float64).log()


def kept(logits):
    return torch.isfinite(logits).tolist()


def probabilities(logits):
    return logits.double().softmax(-1)


# --- each step, by hand ---------------------------------------------------------------------


def test_penalty_shrinks_positive_and_grows_negative_logits_of_seen_tokens_only():
    logits = torch.tensor([[2.0, -2.0, 0.0, 3.0], [2.0, -2.0, -INF, 3.0]])
    seen = torch.tensor([[True, True, True, False], [False, False, True, True]])
    got = sampling.repetition_penalty(logits, seen, 2.0)
    assert got.tolist() == [[1.0, -4.0, 0.0, 3.0], [2.0, -2.0, -INF, 1.5]]


def test_temperature_divides_differences():
    got = sampling.temperature(torch.tensor([1.0, 3.0, -INF]), 0.5)
    assert got.tolist() == [-4.0, 0.0, -INF]


@pytest.mark.parametrize("value", [1e-300, 1e-30, 1e-8])
def test_a_tiny_temperature_is_greedy_and_finite(value):
    config = SamplingConfig(temperature=value)
    assert all(choose(MIXED, config, draw) == 1 for draw in (0.0, 0.5, 1 - 2**-53))


def test_top_k_keeps_exactly_k_and_the_lower_ids_of_equals():
    assert kept(sampling.top_k(MIXED, 2)) == [False, True, False, True]
    equal = torch.zeros(2, 3000)  # large enough for an unstable sort to show
    assert kept(sampling.top_k(equal, 2)) == [[True] * 2 + [False] * 2998] * 2
    assert kept(sampling.top_k(torch.tensor([1.0, 2.0, 1.0, 1.0, 3.0]), 4)) == [True] * 3 + [
        False,
        True,
    ]


@pytest.mark.parametrize("k", [0, 4, 5, 1000])
def test_top_k_of_zero_or_of_the_vocabulary_or_more_keeps_all(k):
    assert torch.equal(sampling.top_k(MIXED, k), MIXED)


@pytest.mark.parametrize(
    ("p", "expected"),
    [
        (1e-300, [False, True, False, False]),
        (0.39, [False, True, False, False]),
        (0.41, [False, True, False, True]),
        (0.69, [False, True, False, True]),
        (0.71, [True, True, False, True]),
        (0.91, [True, True, True, True]),
        (1.0, [True, True, True, True]),
    ],
)
def test_top_p_keeps_the_fewest_that_reach_p(p, expected):
    assert kept(sampling.top_p(MIXED, p)) == expected
    assert kept(sampling.top_p(MIXED.expand(3, 4), p)) == [expected] * 3


@given(
    logits=st.lists(st.integers(-4, 4).map(float) | st.just(-INF), min_size=1, max_size=12),
    p=st.sampled_from([1e-300, 0.05, 0.3, 0.77, 0.999]),
)
def test_top_p_equals_sorting_everything(logits, p):
    """Only the contenders are ranked, and equal ones count; both must leave no trace."""
    tensor = torch.tensor([*logits, 0.0], dtype=torch.float64)
    order = sorted(range(len(tensor)), key=lambda i: (-tensor[i], i))
    mass, expected = 0.0, set()
    for i in order:
        if mass < p and tensor[i] > -INF:
            expected.add(i)
        mass += float(tensor.softmax(-1)[i])
    got = {i for i, keep in enumerate(kept(sampling.top_p(tensor, p))) if keep}
    assert got == expected


def test_top_p_takes_the_lower_ids_of_equals():
    assert kept(sampling.top_p(torch.zeros(4), 0.5)) == [True, True, False, False]


@pytest.mark.parametrize(
    ("p", "expected"),
    [
        (0.0, [True, True, True, True]),
        (0.26, [True, True, False, True]),
        (0.51, [False, True, False, True]),
        (0.76, [False, True, False, False]),
        (1.0, [False, True, False, False]),
    ],
)
def test_min_p_drops_what_is_below_its_share_of_the_likeliest(p, expected):
    assert kept(sampling.min_p(MIXED, p)) == expected


def test_steps_keep_minus_infinity_and_always_one_token():
    logits = torch.tensor([-INF, 1.0, -INF, -INF])
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
    seen = torch.tensor([False, True, False, False])
    penalised = SamplingConfig(temperature=0, repetition_penalty=4.0)
    assert choose(MIXED, penalised, 0.0, seen) == 3


def test_log_probabilities_and_ranks():
    assert torch.allclose(sampling.log_probabilities(MIXED).exp(), probabilities(MIXED))
    assert sampling.likeliest(MIXED, 3).tolist() == [1, 3, 0]
    assert sampling.likeliest(torch.zeros(2, 4), 2).tolist() == [[0, 1], [0, 1]]
    assert sampling.likeliest(MIXED, 20).tolist() == [1, 3, 0, 2]
    assert sampling.log_probabilities(torch.tensor([0.0, -INF])).tolist() == [0.0, -INF]


# --- the draw -------------------------------------------------------------------------------


def test_greedy_takes_the_lowest_id_of_equals_whatever_is_drawn():
    config = SamplingConfig(temperature=0)
    assert [choose(torch.zeros(300), config, draw) for draw in (0.0, 0.9)] == [0, 0]
    assert choose(torch.tensor([-1.0, 2.0, 2.0, -INF]), config, 0.99) == 1


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
    tensor = torch.tensor([-INF, *logits, 0.0, -INF])
    assert tensor[choose(tensor, SamplingConfig(), draw)] > -INF


def test_draws_follow_the_distribution():
    """Chi-square with 3 degrees of freedom; 16.27 is exceeded once in a thousand seeds."""
    random, n = generator(5), 6000
    counts = np.zeros(4)
    for _ in range(n):
        counts[choose(MIXED, SamplingConfig(), random.random())] += 1
    expected = n * probabilities(MIXED).numpy()
    assert ((counts - expected) ** 2 / expected).sum() < 16.27
    tilted = n * np.array([0.23, 0.37, 0.1, 0.3])  # the same test notices a tilt of 3 in 100
    assert ((counts - tilted) ** 2 / tilted).sum() > 16.27


def test_a_token_of_probability_one_in_a_billion_can_be_drawn():
    logits = torch.tensor([0.0, math.log(2**-30)])
    assert [choose(logits, SamplingConfig(), 1 - 2.0**-n) for n in (29, 31)] == [0, 1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_low_precision_logits_are_drawn_from_in_float64(dtype):
    """A thousand equal bfloat16 tokens: summed in that type the distribution ends at 0.25."""
    logits = torch.zeros(1000, dtype=dtype)
    assert choose(logits, SamplingConfig(), 0.9995) == 999
    assert choose(logits, SamplingConfig(), 0.5005) == 500


@pytest.mark.parametrize("bad", [math.nan, INF, -INF])
def test_logits_without_a_finite_maximum_are_refused(bad):
    logits = torch.full((5,), -INF)
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
    seen = torch.zeros(4, 61, dtype=torch.bool).scatter(1, ids, True)
    pairs = [
        (
            sampling.repetition_penalty(logits, seen, 1.3),
            peer.RepetitionPenaltyLogitsProcessor(1.3)(ids, logits),
        ),
        (sampling.top_k(logits, 5), peer.TopKLogitsWarper(5)(ids, logits)),
        (sampling.top_p(logits, 0.8), peer.TopPLogitsWarper(0.8)(ids, logits)),
        (sampling.min_p(logits, 0.05), peer.MinPLogitsWarper(0.05)(ids, logits)),
    ]
    for ours, theirs in pairs:
        assert torch.equal(ours, theirs)
    cooled = sampling.temperature(logits, 0.7)
    theirs = peer.TemperatureLogitsWarper(0.7)(ids, logits)
    assert torch.allclose(probabilities(cooled), probabilities(theirs), rtol=0, atol=1e-15)


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
    expected = probabilities(chain(ids, logits[None]))[0]
    seen = torch.zeros(61, dtype=torch.bool).scatter(0, ids[0], True)
    config = SamplingConfig(repetition_penalty=penalty, **options)
    n = 4000
    grid = (np.arange(n) + 0.5) / n
    chosen = torch.tensor([choose(logits, config, float(draw), seen) for draw in grid])
    shares = torch.bincount(chosen, minlength=61) / n
    assert 1 < int((expected > 0).sum()) < 30
    assert torch.allclose(shares.double(), expected, rtol=0, atol=1.01 / n)
