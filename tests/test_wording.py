"""Numbers are told so that a person can take them in, right up to where a unit ends."""

import math

import pytest

from armillary.wording import (
    bytes_text,
    clock_text,
    count_text,
    duration_text,
    escaped,
    loss_text,
)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 bytes"),
        (999, "999 bytes"),
        (1000, "1.0 kB"),
        (98_362_432, "98.4 MB"),
        (7 * 10**12, "7.0 TB"),
        (8 * 10**15, "8000.0 TB"),
    ],
)
def test_bytes_are_told_in_powers_of_ten(count, text):
    assert bytes_text(count) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0"),
        (9999, "9,999"),
        (9999.7, "10.0 k"),
        (12_345, "12.3 k"),
        (999_499, "999 k"),
        (999_500, "1.00 M"),
        (134_515_008, "135 M"),
        (9_994_000, "9.99 M"),
        (9_996_000, "10.0 M"),
        (99_960_000, "100 M"),
        (1_070_000_000, "1.07 B"),
        (15e12, "15.0 T"),
        (15e15, "15,000 T"),
    ],
)
def test_counts_have_three_digits_once_they_are_large(count, text):
    assert count_text(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(-2, "0:00:00"), (59.9, "0:00:59"), (450, "0:07:30"), (90061, "25:01:01")]
)
def test_a_clock_counts_hours_without_end(seconds, text):
    assert clock_text(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min 0 s"),
        (3599.4, "59 min 59 s"),
        (3599.6, "1 h 0 min"),
        (86_369, "23 h 59 min"),
        (86_380, "1 d 0 h"),
        (200_000, "2 d 8 h"),
    ],
)
def test_a_duration_has_its_two_largest_units(seconds, text):
    assert duration_text(seconds) == text


def test_a_loss_that_is_no_number_is_called_so():
    assert [loss_text(x) for x in (1.23456, math.nan, math.inf)] == [
        "1.235",
        "no number",
        "no number",
    ]


def test_control_characters_become_escapes_and_spaces_stay():
    assert escaped("\x1b[2J\x00\ud800\u202e\r") == "\\x1b[2J\\x00\\ud800\\u202e\\r"
    kept = "a\tö\n\u00a0\u3000字"
    assert escaped(kept) == kept
