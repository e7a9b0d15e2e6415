"""Entries are read by type, and none is passed over."""

import pytest

from armillary.errors import ConfigError
from armillary.strict_dict import StrictDict


def test_entries_are_returned_by_type():
    entries = StrictDict({"n": 3, "x": 2, "s": "a", "l": [1, 2.5]}, "f.json")
    assert entries.take("n", int) == 3
    assert isinstance(entries.take("x", float), float)
    assert entries.take("s", (int, str)) == "a"
    assert entries.take_list("l", float) == [1.0, 2.5]
    assert entries.take_optional("absent", int) is None
    assert entries.take("absent", int, 7) == 7
    entries.finish()


@pytest.mark.parametrize(
    ("value", "kind", "found"),
    [
        (True, int, "bool True"),
        (True, float, "bool True"),
        (1.0, int, "float 1.0"),
        ("3e-4", float, "str '3e-4'"),
        (3, str, "int 3"),
        ([1], dict, r"list \[1\]"),
    ],
)
def test_the_wrong_type_is_named_with_file_and_key(value, kind, found):
    with pytest.raises(ConfigError, match=rf"f\.json: 'k' must be {kind.__name__}, not {found}"):
        StrictDict({"k": value}, "f.json").take("k", kind)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 10**400])
def test_a_number_must_be_finite(value):
    with pytest.raises(ConfigError, match="'k' must be a finite number"):
        StrictDict({"k": value}, "f.json").take("k", float)


def test_an_int_has_64_bits():
    assert StrictDict({"k": 2**63 - 1}, "f.json").take("k", int) == 2**63 - 1
    with pytest.raises(ConfigError, match="'k' is 9223372036854775808, beyond 64 bits"):
        StrictDict({"k": 2**63}, "f.json").take("k", int)


def test_an_item_of_the_wrong_type_is_named():
    with pytest.raises(ConfigError, match=r"'l\[1\]' must be int, not str 'a'"):
        StrictDict({"l": [1, "a"]}, "f.json").take_list("l", int)


def test_null_counts_as_absent():
    entries = StrictDict({"k": None}, "f.json")
    assert "k" not in entries
    assert entries.take("k", int, 4) == 4
    with pytest.raises(ConfigError, match="'k' is missing"):
        entries.take("k", int)
    StrictDict({"never_asked": None}, "f.json").finish()


def test_an_unread_key_is_an_error_that_names_the_nearest():
    entries = StrictDict({"rope_tehta": 1.0, "max_length": 5}, "f.json")
    entries.take("max_length", int)
    entries.take("rope_theta", float, None)
    with pytest.raises(ConfigError, match=r"unknown key 'rope_tehta' \(did you mean 'rope_theta'"):
        entries.finish()


def test_looking_does_not_count_as_reading():
    entries = StrictDict({"k": 1}, "f.json")
    assert "k" in entries
    with pytest.raises(ConfigError, match="'k'"):
        entries.finish()


def test_finish_covers_sections():
    entries = StrictDict({"scaling": {"factor": 2, "fudge": 1}}, "f.json")
    assert entries.section("scaling").take("factor", float) == 2.0
    with pytest.raises(ConfigError, match=r"f\.json: scaling: unknown key 'fudge'"):
        entries.finish()


def test_ignored_keys_count_as_read():
    entries = StrictDict({"a": 1, "b": 2}, "f.json")
    entries.ignore("a", "b", "c")
    entries.finish()
