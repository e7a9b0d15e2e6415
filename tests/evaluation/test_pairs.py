"""Where a text is cut into a context and what follows it, and what stands before both."""

from collections.abc import Sequence

import numpy as np
import pytest

from armillary.errors import UserError
from armillary.evaluation.pairs import encode_pair, fitted, prefix_token, score_pairs
from armillary.evaluation.scoring import Continuation, Scored
from armillary.tokenizer import Tokenizer
from support.vocabularies import byte_level


@pytest.fixture(params=[False, True], ids=["no BOS", "BOS"])
def bos(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def tokenizer(bos: bool) -> Tokenizer:
    """Bytes, and tokens for "he", "ll", "hell", "hello", " w", " hello" and others."""
    changes = {"add_bos_token": True} if bos else {"add_bos_token": False, "bos_token_id": None}
    return Tokenizer.from_gguf(byte_level(**changes))


def text_of(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    return b"".join(map(tokenizer.token_bytes, ids)).decode()


def test_one_beginning_stands_there_where_the_tokenizer_wants_one(tokenizer, bos):
    context, continuation = encode_pair(tokenizer, "x", " y")
    both = [*context, *continuation]
    assert both.count(tokenizer.bos_id) == bos
    assert (context[0] == tokenizer.bos_id) == bos
    assert both == tokenizer.encode("x y")


def test_the_continuations_tokens_are_those_of_the_whole_text(tokenizer):
    """ " hello" is one token; a space and "hello" would be two."""
    _, continuation = encode_pair(tokenizer, "x", " hello")
    assert text_of(tokenizer, continuation) == " hello"
    assert len(continuation) == 1


def test_white_space_at_the_contexts_end_begins_the_continuation(tokenizer):
    assert encode_pair(tokenizer, "x \n ", "y") == encode_pair(tokenizer, "x", " \n y")


def test_a_token_over_the_border_is_left_to_the_context_as_lm_eval_leaves_it(tokenizer, bos):
    """ "hel" are two tokens, and so are "hello" and the first z: the second z remains."""
    context, continuation = encode_pair(tokenizer, "hel", "lozz")
    assert text_of(tokenizer, context[bos:]) == "hel"
    assert text_of(tokenizer, continuation) == "z"


def test_a_continuation_that_a_token_swallows_is_refused(tokenizer):
    with pytest.raises(UserError, match=r"'lo' after …'hel' leaves no token"):
        encode_pair(tokenizer, "hel", "lo")


@pytest.mark.parametrize("context", ["", " \n"])
def test_nothing_before_is_the_prefix_alone(tokenizer, context):
    before, after = encode_pair(tokenizer, context, "y")
    assert before == (prefix_token(tokenizer),)
    assert text_of(tokenizer, after) == context + "y"


def test_the_prefix_is_bos_or_the_end_of_text(tokenizer, bos):
    expected = "<|im_start|>" if bos else "<|im_end|>"
    assert prefix_token(tokenizer) == tokenizer.special_tokens[expected]


def test_a_context_is_cut_at_its_start_and_the_cut_counted():
    assert fitted(((1, 2, 3), (4, 5)), 5) == (((1, 2, 3), (4, 5)), 0)
    assert fitted(((1, 2, 3), (4, 5)), 4) == (((2, 3), (4, 5)), 1)
    with pytest.raises(UserError, match="continuation of 2 tokens .* window of 2"):
        fitted(((1, 2, 3), (4, 5)), 2)


class Noting:
    """A scorer that notes what it is asked; a token's log-probability is minus its id."""

    window, vocab_size = 100, 61

    def __init__(self) -> None:
        self.asked: list[tuple[tuple[int, ...], int]] = []

    def begin(self) -> None: ...

    def score(self, context: Sequence[int], continuations: Sequence[Continuation]) -> list[Scored]:
        self.asked.append((tuple(context), len(continuations)))
        return [
            Scored(-np.array(each.tokens, float), np.array(each.tokens) < 4)
            for each in continuations
        ]


def test_continuations_that_share_a_context_are_asked_together():
    scorer = Noting()
    pairs = [((2, 3), (5,)), ((1,), (6,)), ((2, 3), (7, 1)), ((2,), (3,))]
    scored = dict(score_pairs(scorer, pairs))
    assert [scored[number].total for number in range(4)] == [-5, -6, -8, -3]
    assert [scored[number].exact for number in range(4)] == [False, False, False, True]
    assert scorer.asked == [((1,), 1), ((2,), 1), ((2, 3), 2)]
