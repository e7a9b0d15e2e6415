from dataclasses import replace

import numpy as np
import pytest

from armillary.errors import UserError
from armillary.evaluation.composition import generator
from armillary.evaluation.filler import PIECE, filler
from armillary.evaluation.vocabulary import TaskTokens

WORDS = TaskTokens.of_size(60)
PROSE = replace(WORDS, prose=tuple(int(i) for i in generator("text").integers(0, 60, 40 * PIECE)))


@pytest.mark.parametrize("tokens", [WORDS, PROSE])
@pytest.mark.parametrize("length", [0, 1, 77, 5000])
def test_length_is_exact_and_what_is_forbidden_never_stands(tokens, length: int) -> None:
    found = filler(tokens, length, {20, 31}, generator(1))
    assert found.shape == (length,)
    assert not np.isin(found, [20, 31]).any()


def test_what_is_forbidden_would_otherwise_stand_there() -> None:
    for tokens in (WORDS, PROSE):
        assert np.isin(filler(tokens, 5000, (), generator(1)), [20, 31]).any()


@pytest.mark.parametrize("tokens", [WORDS, PROSE])
def test_the_random_numbers_alone_decide(tokens) -> None:
    assert (
        filler(tokens, 500, {20}, generator(1)) == filler(tokens, 500, {20}, generator(1))
    ).all()
    assert (
        filler(tokens, 500, {20}, generator(1)) != filler(tokens, 500, {20}, generator(2))
    ).any()


def test_prose_stays_in_its_order_and_starts_again_at_its_end() -> None:
    text = np.array(PROSE.prose)
    found = filler(PROSE, 3 * len(text), (), generator(3))
    start = next(at for at in range(len(text)) if (found[: len(text)] == np.roll(text, -at)).all())
    assert start % PIECE == 0
    assert (found == np.tile(np.roll(text, -start), 3)).all()


def test_nothing_left_to_take_is_an_error() -> None:
    with pytest.raises(UserError, match="none is left"):
        filler(WORDS, 5, WORDS.words, generator(1))
    with pytest.raises(UserError, match="give more text"):
        filler(PROSE, 5, range(60), generator(1))
    with pytest.raises(UserError, match="give more text"):
        filler(replace(PROSE, prose=PROSE.prose[:20]), 5, (), generator(1))
