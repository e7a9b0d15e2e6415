import numpy as np
import pytest

from armillary.errors import UserError
from armillary.evaluation.composition import check_words, draw, gaps, generator, overlay, place


def test_random_numbers_depend_on_every_value() -> None:
    def first(*of: object) -> float:
        return float(generator(*of).random())

    assert first("a", 1, 2.5) == first("a", 1, 2.5)
    assert (
        len({first("a", 1), first("a", 2), first("b", 1), first("a", "1"), first("a", 1, 0)}) == 5
    )


def test_gaps_are_what_is_not_taken() -> None:
    assert gaps(9, []) == [range(9)]
    found = gaps(40, [range(14, 20), range(10), range(20, 24), range(37, 40)])
    assert [len(gap) for gap in found] == [0, 4, 0, 13, 0]
    assert found[1] == range(10, 14)


def test_nothing_is_placed_over_anything() -> None:
    """In a text that is nearly full, many times: an error in the borders would show."""
    taken = [range(10), range(14, 20), range(37, 40)]
    reached, orders = set(), set()
    for seed in range(80):
        starts = place(gaps(40, taken), 4, 4, generator(seed))
        used = [at for part in taken for at in part] + [s + at for s in starts for at in range(4)]
        assert len(set(used)) == len(used)
        assert max(used) < 40
        reached.update(used)
        orders.add(tuple(np.argsort(starts)))
    assert reached == set(range(40))
    assert len(orders) > 12


def test_blocks_may_fill_all_there_is() -> None:
    assert sorted(place([range(6), range(8, 11)], 3, 3, generator(0))) == [0, 3, 8]


def test_no_room_is_an_error() -> None:
    with pytest.raises(UserError, match="room for 2 of 3 facts of 4 tokens"):
        place([range(7), range(10, 14)], 3, 4, generator(0))


def test_what_is_laid_over_a_text_moves_nothing() -> None:
    text = np.arange(10)
    assert overlay(text, [(0, (70,)), (8, (71, 72))]) == (70, 1, 2, 3, 4, 5, 6, 7, 71, 72)
    assert (text == np.arange(10)).all()


def test_words_are_drawn_once_each() -> None:
    assert sorted(draw(range(5, 25), 20, generator(0))) == list(range(5, 25))
    with pytest.raises(UserError, match="retrieval: 20 different words"):
        check_words("retrieval", range(20), 20)
    check_words("retrieval", range(20), 19)
