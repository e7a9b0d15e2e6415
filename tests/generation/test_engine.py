"""Texts that a decoder holds each by itself: what is computed, and what is kept."""

import numpy as np
import pytest

from armillary.generation.engine import TextDecoder, TextEngine
from armillary.parts.kv_cache import KVCache
from support.engines import TextByText
from support.models import VARIANTS, build

PROMPT = [9, 3, 33, 21, 8]


@pytest.fixture
def decoder():
    return TextByText(build(VARIANTS["plain"]))


def test_prompts_are_computed_alone_and_steps_together(decoder):
    texts = TextEngine(decoder).texts([9, 9, 9])
    texts.begin([[5, 17], [40], [3]])
    texts.step([1, 2, 3])
    texts.keep([2, 0])
    texts.step([4, 5])
    assert decoder.taken == [[[5, 17]], [[40]], [[3]], [[1], [2], [3]], [[4], [5]]]
    assert [text.tokens for text in decoder.texts] == [[5, 17, 1, 5], [40, 2], [3, 3, 4]]


def test_each_text_has_the_length_that_it_was_given(decoder):
    lengths = []
    make = decoder.new_cache
    decoder.new_cache = lambda **options: lengths.append(options) or make(**options)
    TextEngine(decoder).texts([9, 7])
    assert [options["rotary_length"] for options in lengths] == [9, 7]


@pytest.mark.parametrize(
    ("prompt", "computed"),
    [
        ([*PROMPT, 4], [4]),
        (PROMPT, [8]),
        (PROMPT[:3], [33]),
        ([9, 3, 33, 60, 8], [60, 8]),
        ([7], [7]),
    ],
    ids=["longer", "same", "prefix", "edited", "other"],
)
def test_what_a_cache_shares_with_a_prompt_is_not_computed_again(decoder, prompt, computed):
    engine = TextEngine(decoder)
    cache = engine.new_cache()
    (first,) = engine.texts([9], cache).begin([PROMPT])
    (again,) = engine.texts([9], cache).begin([prompt])
    assert decoder.taken == [[PROMPT], [computed]]
    assert cache.tokens == prompt
    # One token's products may be added up in another order than those of five.
    assert np.allclose(first, again, rtol=0, atol=1e-12) == (prompt == PROMPT)


class Known:
    """Earlier prompts, of which one begins with what is asked for; notes what is kept."""

    def __init__(self, held):
        self.held, self.kept = held, []

    def find(self, prompt, empty):
        return self.held or empty

    def keep(self, cache):
        self.kept.append(list(cache.tokens))


def test_what_is_known_of_a_prompt_is_not_computed_again(decoder):
    held = decoder.new_cache()
    decoder.take([held], [PROMPT])
    known = Known(held)
    engine = TextEngine(decoder, known)
    texts = engine.texts([9])
    texts.begin([[*PROMPT, 4, 5]])
    texts.step([6])
    assert decoder.taken[1:] == [[[4, 5]], [[6]]]
    assert known.kept == [[*PROMPT, 4, 5]], "a prompt, before its text goes on"


def test_a_cache_that_is_brought_is_left_alone(decoder):
    known = Known(None)
    engine = TextEngine(decoder, known)
    engine.texts([9], engine.new_cache()).begin([PROMPT])
    assert known.kept == []


def test_a_torch_cache_is_refused_even_when_it_is_empty(decoder):
    with pytest.raises(TypeError, match="KVCache is not of this engine; make one with new_cache"):
        TextEngine(decoder).texts([9], KVCache(decoder.config))


def test_decoders_are_told_apart_by_what_they_can_do(decoder):
    assert isinstance(decoder, TextDecoder)
    assert not isinstance(decoder.decoder, TextDecoder)
