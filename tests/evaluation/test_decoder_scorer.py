"""Our decoder as a scorer: whatever is computed once, each score is that of the whole alone."""

import weakref
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from armillary.config import DecoderConfig
from armillary.decoder import Decoder
from armillary.evaluation import decoder_scorer
from armillary.evaluation.decoder_scorer import DecoderScorer
from armillary.evaluation.scoring import Continuation, Scored
from armillary.parts.kv_cache import KVCache
from support.models import SCALINGS, VARIANTS, VOCABULARY, build, config, layer, tokens
from support.tensor_memory import TensorMemory

# Every rule (two of them change within these lengths), windows that reach less far than a
# continuation and than a piece of context, and positions that come from tables.
NAMES = [f"rope {name}" for name in SCALINGS]
NAMES += ["window", "window of one", "mixed layers", "soft cap and window", "soft cap"]
NAMES += ["learned", "sinusoidal", "no position", "tied head with bias", "final soft cap"]
CONFIGS = {name: VARIANTS[name] for name in NAMES}
TEXT = tokens(1, 60)[0].tolist()


@pytest.fixture(autouse=True)
def small_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that contexts, trees and projections all come in several pieces."""
    monkeypatch.setattr(decoder_scorer, "_TOKENS", 7)
    monkeypatch.setattr(decoder_scorer, "_BRANCHES", 7)
    monkeypatch.setattr(decoder_scorer, "_LOGITS", 3)


def whole(decoder: Decoder, context: Sequence[int], continuation: Continuation) -> Scored:
    """From one pass over everything, with nothing kept."""
    with torch.no_grad():
        logits = decoder(torch.tensor([[*context, *continuation.tokens]]))[0]
    places = range(-continuation.scored - 1, -1)
    logprobs = logits.log_softmax(-1)
    pairs = list(zip(places, continuation.tokens[-continuation.scored :], strict=True))
    return Scored(
        np.array([float(logprobs[place, token]) for place, token in pairs]),
        np.array([int(logits[place].argmax()) == token for place, token in pairs]),
    )


def check(decoder: Decoder, scorer: DecoderScorer, context, continuations) -> None:
    for ours, each in zip(scorer.score(context, continuations), continuations, strict=True):
        alone = whole(decoder, context, each)
        np.testing.assert_allclose(ours.logprobs, alone.logprobs, rtol=0, atol=1e-10)
        assert ours.likeliest.tolist() == alone.likeliest.tolist()


CONTINUATIONS = [
    Continuation((3, 4, 5), 1),
    Continuation((3, 4, 5), 3),
    Continuation((3, 4, 6, 7), 2),
    Continuation((8,), 1),
    Continuation((3, 9), 2),
    Continuation(tuple(TEXT[30:40]), 10),
    Continuation((3, 4, 5, 1, 1, 2), 4),
    Continuation((8,), 1),
]


@pytest.mark.parametrize("name", CONFIGS)
def test_scores_are_those_of_the_whole_alone(name: str) -> None:
    """Continuations of unequal lengths, among them equal ones and one longer than a pass; contexts
    that share beginnings with one another, shrink, and grow into what was a continuation."""
    decoder = build(CONFIGS[name])
    scorer = DecoderScorer(decoder)
    contexts = [TEXT[:20], [*TEXT[:13], 1, 2, *TEXT[15:20]], TEXT[:9], TEXT[:1], TEXT[:20]]
    for context in (*contexts, [*TEXT[:20], *TEXT[30:36]]):
        check(decoder, scorer, context, CONTINUATIONS)
        check(decoder, scorer, context, CONTINUATIONS[5:6])
        check(decoder, scorer, context, CONTINUATIONS[:1])
    scorer.begin()
    check(decoder, scorer, TEXT[:20], CONTINUATIONS)


@pytest.mark.parametrize("name", ["rope default", "window", "rope longrope"])
def test_a_continuation_never_sees_another(name: str) -> None:
    scorer = DecoderScorer(build(CONFIGS[name]))
    first = scorer.score(TEXT[:20], [Continuation((3, 4, 5), 3), Continuation((6, 7, 8), 3)])
    scorer.begin()
    other = scorer.score(TEXT[:20], [Continuation((3, 4, 5), 3), Continuation((9, 9, 8), 3)])
    assert first[0].logprobs.tolist() == other[0].logprobs.tolist()
    assert first[1].logprobs.tolist() != other[1].logprobs.tolist()


def test_the_same_piece_of_work_gives_the_same_numbers_after_begin() -> None:
    scorer = DecoderScorer(build(CONFIGS["mixed layers"], dtype=torch.float32))
    first = scorer.score(TEXT[:20], CONTINUATIONS)
    scorer.score(TEXT[10:33], CONTINUATIONS[:3])
    scorer.begin()
    again = scorer.score(TEXT[:20], CONTINUATIONS)
    for one, other in zip(first, again, strict=True):
        assert one.logprobs.tolist() == other.logprobs.tolist()


def computed(scorer: DecoderScorer, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each pass takes, from now on."""
    sizes: list[int] = []
    run = scorer.decoder._run

    def counted(ids, *arguments):
        sizes.append(ids.shape[1])
        return run(ids, *arguments)

    monkeypatch.setattr(scorer.decoder, "_run", counted)
    return sizes


def test_what_is_shared_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder_scorer, "_TOKENS", 16)
    scorer = DecoderScorer(build(config()))
    sizes = computed(scorer, monkeypatch)
    scorer.score(TEXT[:30], CONTINUATIONS[:5])
    assert sizes == [16, 13, 4]  # the context but for its last token; that one, 3, 4, 6
    sizes.clear()
    scorer.score([*TEXT[:20], 1, 2, 3], CONTINUATIONS[:2])
    assert sizes == [2, 3]
    sizes.clear()
    scorer.score(TEXT[:10], [Continuation(tuple(TEXT[10:30]), 20)])
    scorer.score(TEXT[:30], CONTINUATIONS[:2])
    assert sizes == [16, 4, 3]
    scorer.begin()
    sizes.clear()
    scorer.score(TEXT[:10], CONTINUATIONS[:2])
    assert sizes == [9, 3]


def test_after_long_contexts_fewer_branches_go_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their mask has a row for each of them, as long as the context."""
    monkeypatch.setattr(decoder_scorer, "_PAIRS", 60)
    decoder = build(config())
    scorer = DecoderScorer(decoder)
    check(decoder, scorer, TEXT[:20], CONTINUATIONS)
    sizes = computed(scorer, monkeypatch)
    scorer.score(TEXT[:20], CONTINUATIONS[:5])
    assert sizes == [3, 4, 2]  # the second way is too long for company
    sizes.clear()
    scorer.score(TEXT[:10], CONTINUATIONS[:5])
    assert sizes == [4]


def test_other_frequencies_compute_the_context_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamic has other ones at every length, longrope on either side of its window of 8."""
    monkeypatch.setattr(decoder_scorer, "_TOKENS", 16)
    two = [Continuation((1, 2), 1), Continuation((3, 4, 5), 1)]
    for name, context, expected in (
        ("rope dynamic", 10, [9, 2, 9, 3]),
        ("rope longrope", 10, [9, 4]),
        ("rope longrope", 6, [5, 2, 5, 3]),
        ("rope yarn", 10, [9, 4]),
    ):
        scorer = DecoderScorer(build(CONFIGS[name]))
        sizes = computed(scorer, monkeypatch)
        scorer.score(TEXT[:context], two)
        assert sizes == expected, name


def test_one_cache_is_held_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[KVCache]] = []

    def make(*arguments, **options):
        cache = KVCache(*arguments, **options)
        made.append(weakref.ref(cache))
        return cache

    scorer = DecoderScorer(build(config()))
    run = scorer.decoder._run

    def counted(*arguments):
        assert sum(cache() is not None for cache in made) == 1
        return run(*arguments)

    monkeypatch.setattr(decoder_scorer, "KVCache", make)
    monkeypatch.setattr(scorer.decoder, "_run", counted)
    for length in (3, 30, 50):
        scorer.score(TEXT[:length], CONTINUATIONS[:2])
    assert len(made) == 3
    scorer.begin()
    assert made[-1]() is None


def test_few_logits_are_held_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a vocabulary that would be most of the memory: 500 rows of it are 40 MB."""
    monkeypatch.undo()
    of = DecoderConfig(layers=(layer(),), vocab_size=10_000, d_model=40, max_positions=600)
    decoder = Decoder(of).double()
    scorer = DecoderScorer(decoder)
    with TensorMemory(decoder.parameters()) as memory:
        scorer.score(TEXT[:5], [Continuation(tuple(TEXT) * 8, 480)])
    rows = 500 * 10_000 * 8
    assert memory.peak < rows / 2


def test_what_does_not_fit_is_an_error_and_nothing_is_cut() -> None:
    """Case 108."""
    scorer = DecoderScorer(build(config(max_positions=20)))
    assert (scorer.window, scorer.vocab_size) == (20, VOCABULARY)
    assert len(scorer.score(TEXT[:17], CONTINUATIONS[:1])) == 1
    with pytest.raises(ValueError, match="18 tokens of context and 3 of continuation"):
        scorer.score(TEXT[:18], CONTINUATIONS[:2])
    with pytest.raises(ValueError, match="at least"):
        scorer.score([], CONTINUATIONS[:1])
    assert scorer.score(TEXT[:3], []) == []


def test_a_decoder_in_training_mode_is_refused() -> None:
    decoder = build(config())
    scorer = DecoderScorer(decoder)
    decoder.train()
    with pytest.raises(ValueError, match=r"decoder.eval\(\)"):
        scorer.score(TEXT[:3], CONTINUATIONS[:1])
