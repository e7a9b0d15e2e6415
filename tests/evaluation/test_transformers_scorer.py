"""A scorer over transformers' models: its shared context gives what whole passes give."""

from typing import Any

import numpy as np
import pytest
import torch

from armillary.evaluation.scoring import Continuation
from armillary.evaluation.transformers_scorer import TransformersScorer
from support.peer_llama import ROPES, build_peer, config_entries, whole_pass

pytestmark = pytest.mark.peer

CONTEXT = [7, 3, 55, 20, 20, 8, 41, 2, 19, 33, 1, 60, 5, 9, 18, 27, 36, 45, 54, 2]
CONTINUATIONS = [
    Continuation((5,), 1),
    Continuation((11, 30, 4, 4, 58), 5),
    Continuation((11, 30, 7), 1),
]


def peer_of(rope: str) -> Any:
    return build_peer(config_entries(rope), torch.float32)


def expected(peer: Any, context: list[int], each: Continuation) -> tuple[np.ndarray, np.ndarray]:
    """Log-probabilities and greedy flags by a whole pass over everything."""
    whole_pass(peer, torch.tensor([[1]]))  # what it keeps of a longer text, it lets go
    ids = torch.tensor([[*context, *each.tokens]])
    logits = whole_pass(peer, ids)[0, -each.scored - 1 : -1].double()
    wanted = ids[0, -each.scored :]
    logprobs = logits.log_softmax(-1)[torch.arange(each.scored), wanted]
    return logprobs.numpy(), (logits.argmax(-1) == wanted).numpy()


@pytest.mark.parametrize("rope", ROPES)
def test_shared_contexts_give_what_whole_passes_give(rope):
    """20 tokens are past the original window of 16, where dynamic and longrope turn otherwise."""
    peer = peer_of(rope)
    scorer = TransformersScorer(peer, window=64)
    for context in (CONTEXT, CONTEXT[:14], CONTEXT[:1], CONTEXT):
        for each, scored in zip(CONTINUATIONS, scorer.score(context, CONTINUATIONS), strict=True):
            logprobs, likeliest = expected(peer, context, each)
            np.testing.assert_allclose(scored.logprobs, logprobs, atol=5e-5)
            assert scored.likeliest.tolist() == likeliest.tolist()


def test_the_greedy_token_is_flagged():
    peer = peer_of("default")
    best = int(whole_pass(peer, torch.tensor([CONTEXT]))[0, -1].argmax())
    (scored,) = TransformersScorer(peer).score(CONTEXT, [Continuation((best,), 1)])
    assert scored.exact


class Counting(torch.nn.Module):
    """A model whose calls are noted, with their tokens and whether a cache came with them."""

    def __init__(self, peer: Any) -> None:
        super().__init__()
        self.peer, self.config = peer, peer.config
        self.calls: list[tuple[int, bool]] = []

    def forward(self, input_ids: Any, past_key_values: Any = None, **more: Any) -> Any:
        self.calls.append((input_ids.shape[1], past_key_values is not None))
        output = self.peer(input_ids=input_ids, cache=past_key_values, **more)
        output.past_key_values = output.cache
        return output


@pytest.mark.parametrize(
    ("rope", "calls"),
    [
        ("yarn", [(19, False), (2, True), (6, True), (4, True)]),
        ("dynamic", [(n, False) for n in (1, 21, 1, 25, 1, 23)]),
        ("longrope", [(n, False) for n in (1, 21, 1, 25, 1, 23)]),
    ],
)
def test_a_context_is_computed_once_unless_frequencies_move(rope, calls):
    """Also under the name that older models give the cache."""
    model = Counting(peer_of(rope))
    scorer = TransformersScorer(model, window=64)
    scorer.score(CONTEXT, CONTINUATIONS)
    assert model.calls == calls


def test_a_context_is_kept_until_the_next_beginning():
    """A single continuation is run whole, unless its context is there already."""
    model = Counting(peer_of("yarn"))
    scorer = TransformersScorer(model)
    scorer.score(CONTEXT, CONTINUATIONS[:1])
    assert model.calls == [(21, False)]
    scorer.score(CONTEXT, CONTINUATIONS[:2])
    scorer.score(CONTEXT, CONTINUATIONS[:1])
    assert model.calls[1:] == [(19, False), (2, True), (6, True), (2, True)]
    scorer.begin()
    scorer.score(CONTEXT, CONTINUATIONS[:1])
    assert model.calls[5:] == [(21, False)]


class Uncached(torch.nn.Module):
    """A model that knows of no cache."""

    def __init__(self, peer: Any) -> None:
        super().__init__()
        self.peer, self.config = peer, peer.config

    def forward(self, input_ids: Any, use_cache: bool = False) -> Any:
        return self.peer(input_ids=input_ids, use_cache=False)


def test_a_model_without_a_cache_is_run_whole():
    peer = peer_of("default")
    ours = TransformersScorer(Uncached(peer)).score(CONTEXT, CONTINUATIONS)
    for each, scored in zip(CONTINUATIONS, ours, strict=True):
        np.testing.assert_allclose(scored.logprobs, expected(peer, CONTEXT, each)[0], atol=5e-5)


def test_a_failed_context_is_computed_again(monkeypatch):
    """Otherwise the next question of the same context would be asked of an empty cache."""
    peer = peer_of("default")
    scorer = TransformersScorer(peer)
    scorer.score(CONTEXT[:5], CONTINUATIONS)
    with monkeypatch.context() as patched:
        patched.setattr(scorer, "_call", failing)
        with pytest.raises(RuntimeError, match="out of memory"):
            scorer.score(CONTEXT, CONTINUATIONS)
    for each, scored in zip(CONTINUATIONS, scorer.score(CONTEXT, CONTINUATIONS), strict=True):
        np.testing.assert_allclose(scored.logprobs, expected(peer, CONTEXT, each)[0], atol=5e-5)


def failing(*_: Any, **__: Any) -> Any:
    raise RuntimeError("out of memory")


def test_sizes_are_the_configurations_and_what_is_too_long_is_refused():
    scorer = TransformersScorer(peer_of("default"))
    assert (scorer.window, scorer.vocab_size) == (64, 61)
    with pytest.raises(ValueError, match=r"60 tokens of context and 5 .* window of 64"):
        scorer.score([1] * 60, CONTINUATIONS)
    with pytest.raises(ValueError, match="a context needs a token at least"):
        scorer.score([], CONTINUATIONS)
    assert scorer.score([1], []) == []
