"""Words that do not fit lose their middle, not their ends."""

from armillary.charts.svg import fitted, width_of


def test_what_fits_is_left_alone():
    assert fitted("yarn", width_of("yarn")) == "yarn"


def test_the_middle_goes_first():
    shorter = fitted("runs/demo/checkpoints/yarn-4x", 15 * 7.1)
    assert shorter == "runs/de…arn-4x"
    assert width_of(shorter) <= 15 * 7.1
    assert fitted("abc", 0) == "…"


def test_wide_letters_need_twice_the_room():
    assert width_of("模型") == width_of("abcd")
