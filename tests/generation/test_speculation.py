"""Guesses: the text is the one that comes without them, on every engine, in fewer passes."""

import numpy as np
import pytest

from armillary.generation.batch import generate
from armillary.generation.sampling import SamplingConfig
from armillary.generation.speculation import DraftProposer, Odds, Pace, SuffixProposer, worthwhile
from support.engines import ENGINES
from support.models import VARIANTS, VOCABULARY, build

from .test_batch import Letters, ids
from .test_batch import assert_same as assert_all_same

PROMPT = [5, 17, 40, 9, 3, 5, 17, 40, 9, 33, 5, 17, 40]
GREEDY = SamplingConfig(max_tokens=40, temperature=0, logprobs=20)
SAMPLED = SamplingConfig(max_tokens=40, seed=3, temperature=0.7, top_k=12, logprobs=20)
CHAT = SamplingConfig(max_tokens=30, seed=5, repetition_penalty=1.2, min_p=0.01, logprobs=20)


@pytest.fixture(params=ENGINES)
def kind(request):
    return ENGINES[request.param]


def assert_same(ours, theirs, atol):
    assert_all_same([ours], [theirs], atol)


def run(engine, config, proposer=None, cache=None):
    return list(generate(engine, Letters(), [PROMPT], [config], proposer=proposer, cache=cache))


class Scripted:
    """Guesses what it is told to; knows how many came true."""

    def __init__(self, guesses):
        self.guesses, self.text, self.learned = guesses, [], []

    def extend(self, tokens):
        self.text += tokens

    def propose(self, most):
        return self.guesses(list(self.text))[:most]

    def learn(self, proposed, accepted):
        self.learned.append((proposed, accepted))


@pytest.mark.parametrize("config", [GREEDY, SAMPLED, CHAT])
@pytest.mark.parametrize("name", ["plain", "mixed layers"])
def test_right_wrong_and_half_right_guesses_leave_the_text_as_it_is(kind, name, config):
    engine = kind.make(build(VARIANTS[name]))
    expected = run(engine, config)
    whole = PROMPT + ids(expected)

    def right(text):
        return whole[len(text) : len(text) + 6]

    def wrong(text):
        return [(token + 1) % VOCABULARY for token in right(text)]

    def half(text):
        return right(text)[:2] + wrong(text)[2:]

    for guesses, came_true in ((right, 6), (wrong, 0), (half, 2)):
        proposer = Scripted(guesses)
        assert_same(run(engine, config, proposer), expected, kind.atol)
        assert proposer.learned[0] == (6, came_true)
        assert proposer.text == whole


def test_an_end_among_the_guesses_ends_the_text_and_the_cache_holds_what_it_should(kind):
    engine = kind.make(build(VARIANTS["plain"]))
    expected = run(engine, GREEDY)
    whole = PROMPT + ids(expected)
    eos = ids(expected)[4]
    first = ids(expected).index(eos)
    cache = engine.new_cache()
    proposer = Scripted(lambda text: whole[len(text) : len(text) + 10])
    events = list(
        generate(
            engine, Letters(), [PROMPT], [GREEDY], eos_ids=[eos], cache=cache, proposer=proposer
        )
    )
    assert ids(events) == ids(expected)[: first + 1]
    assert events[-1].finish_reason == "eos"
    held = cache.tokens if isinstance(cache.tokens, list) else cache.tokens[0].tolist()
    assert held == (PROMPT + ids(events))[:-1]


def test_a_draft_of_the_same_weights_is_always_right(kind):
    engine = kind.make(build(VARIANTS["plain"]))
    expected = run(engine, GREEDY)
    proposer = DraftProposer(engine, VOCABULARY)
    learned = []
    learn = proposer.learn
    proposer.learn = lambda proposed, accepted: (
        learned.append((proposed, accepted)),
        learn(proposed, accepted),
    )
    assert_same(run(engine, GREEDY, proposer), expected, kind.atol)
    assert all(proposed == accepted for proposed, accepted in learned[:-1])
    assert len(learned) < len(expected) / 3


def test_another_draft_changes_nothing(kind):
    engine = kind.make(build(VARIANTS["plain"]))
    draft = kind.make(build(VARIANTS["plain"], seed=9))
    assert_same(
        run(engine, SAMPLED, DraftProposer(draft, VOCABULARY)), run(engine, SAMPLED), kind.atol
    )


def test_a_draft_with_another_vocabulary_is_refused(kind):
    engine = kind.make(build(VARIANTS["plain"]))
    with pytest.raises(ValueError, match=f"knows {VOCABULARY} tokens, the model 7"):
        DraftProposer(engine, 7)


def test_sampled_tokens_keep_their_distribution():
    """The second token over 4,000 seeds, guessed to be one of the likely ones, by chi-square."""
    from scipy.stats import chi2_contingency

    engine = ENGINES["torch"].make(build(VARIANTS["plain"]))
    counts = np.zeros((2, VOCABULARY))
    for seed in range(400):
        config = SamplingConfig(max_tokens=3, seed=seed, top_k=4)
        other = SamplingConfig(max_tokens=3, seed=10_000 + seed, top_k=4)
        guess = ids(run(engine, config))
        proposer = Scripted(lambda text, guess=guess: guess[1:])
        counts[0, ids(run(engine, config))[2]] += 1
        counts[1, ids(run(engine, other, proposer))[2]] += 1
    seen = counts[:, counts.sum(0) >= 10]
    assert chi2_contingency(seen).pvalue > 1e-3


def guessing(tokens):
    """A proposer that has read a text and is sure of repeats of any length."""
    proposer = SuffixProposer()
    for length in range(1, 65):
        for _ in range(100):
            proposer._odds.learn(length, came_true=True)
    proposer.extend(tokens)
    for length in range(1, 65):
        for _ in range(100):
            proposer._odds.learn(length, came_true=True)
    return proposer


def test_the_longest_and_latest_stretch_is_continued():
    #                   after 1 2: 7 ...       after 9 1 2: 8 ...      after 1 2: 6 ...
    proposer = guessing([1, 2, 7, 7, 9, 1, 2, 8, 5, 4, 3, 1, 2, 6, 0, 9, 1, 2])
    assert proposer.propose(3) == [8, 5, 4]
    assert guessing([1, 2, 7, 7, 4, 1, 2, 6, 0, 9, 1, 2]).propose(2) == [6, 0]


def test_a_stretch_that_goes_on_is_followed():
    proposer = guessing([9, 1, 2, 8, 5, 4, 3, 1, 2, 6, 0, 9, 1, 2])
    proposer.extend([8])
    assert proposer.propose(2) == [5, 4]
    proposer.extend([7])
    assert proposer.propose(2) == []
    proposer.extend([9, 1])
    assert proposer.propose(1) == [2]


def test_guesses_end_where_the_text_does():
    assert guessing([1, 2, 3, 1, 2]).propose(8) == [3, 1, 2]


def test_a_text_without_repeats_has_no_guesses():
    assert guessing(range(50)).propose(8) == []


def test_repeats_that_come_true_make_guesses_long_and_others_none():
    again = SuffixProposer()
    again.extend([1, 2, 3, 4, 5, 6, 7, 8] * 12)
    assert len(again.propose(15)) >= 8
    other = SuffixProposer()
    # 1 2 is never followed by what followed it before.
    for token in range(10, 40):
        other.extend([1, 2, token])
    other.extend([1, 2])
    assert other.propose(15) == []


def test_as_many_guesses_are_worthwhile_as_give_the_most_for_the_time():
    """By hand: k guesses of .9 bring (1 − .9^(k+1)) / .1 tokens in 1 + k / 4 passes."""
    assert worthwhile([0.9] * 15) == 6
    assert worthwhile([0.5] * 15) == 1
    assert worthwhile([0.26] * 15) == 1
    assert worthwhile([0.24] * 15) == 0
    assert worthwhile([1.0] * 15) == 15
    assert worthwhile([0.1, 1, 1, 1, 1]) == 0
    assert worthwhile([]) == 0


def test_odds_are_learnt_for_each_length_and_forget():
    odds = Odds()
    assert odds.of(2) == odds.of(9) == 1 / 3
    for _ in range(100):
        odds.learn(9, came_true=True)
    assert odds.of(2) == 1 / 3
    assert odds.of(9) == odds.of(15) > 0.95
    for _ in range(30):
        odds.learn(9, came_true=False)
    assert odds.of(9) < 0.3


def test_failures_make_guesses_rare_and_successes_long():
    pace = Pace()
    made = []
    for _ in range(200):
        count = pace.now(15)
        made.append(count)
        pace.learn(count, 0)
    assert sum(1 for count in made if count) < 15
    pace = Pace()
    counts = []
    for _ in range(4):
        counts.append(pace.now(15))
        pace.learn(counts[-1], counts[-1])
    assert counts == [4, 8, 15, 15]
