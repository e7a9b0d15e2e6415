import numpy as np
import pytest

from armillary.errors import UserError
from armillary.evaluation.composition import check_words, draw, generator, overlay, place


def test_random_numbers_depend_on_every_value() -> None:
    def first(*of: object) -> float:
        return float(generator(*of).random())

    assert first("a", 1, 2.5) == first("a", 1, 2.5)
    assert (
        len({first("a", 1), first("a", 2), first("b", 1), first("a", "1"), first("a", 1, 0)}) == 5
    )


def test_nothing_is_placed_over_anything() -> None:
    """In a text that is nearly full, many times: an error in the borders would show."""
    reached = set()
    for seed in range(60):
        taken = [range(10), range(14, 20), range(37, 40)]
        starts = place(40, taken, [4, 7, 3], generator(seed))
        parts = [*taken, *(range(s, s + n) for s, n in zip(starts, [4, 7, 3], strict=True))]
        used = [at for part in parts for at in part]
        assert len(set(used)) == len(used)
        assert max(used) < 40
        reached.update(used)
    assert reached == set(range(40))


def test_a_block_may_fill_all_there_is() -> None:
    assert place(6, [], [6], generator(0)) == [0]


def test_no_room_is_an_error() -> None:
    with pytest.raises(UserError, match="have no room for 2 facts"):
        place(10, [range(4, 6)], [4, 5], generator(0))


def test_what_is_laid_over_a_text_moves_nothing() -> None:
    text = np.arange(10)
    assert overlay(text, [(0, (70,)), (8, (71, 72))]) == (70, 1, 2, 3, 4, 5, 6, 7, 71, 72)
    assert (text == np.arange(10)).all()


def test_words_are_drawn_once_each() -> None:
    assert sorted(draw(range(5, 25), 20, generator(0))) == list(range(5, 25))
    with pytest.raises(UserError, match="retrieval: 20 different words"):
        check_words("retrieval", range(20), 20)
    check_words("retrieval", range(20), 19)
