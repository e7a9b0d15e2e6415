"""A workplace is found again after a run that was stopped, and gives its target its place."""

import pytest

from armillary import resumable
from armillary.errors import UserError
from armillary.resumable import Workplace, workplace_of


class Stopped(BaseException):
    """What nobody catches: it leaves files as a killed process leaves them."""


@pytest.fixture(autouse=True)
def notes_at_once(monkeypatch):
    monkeypatch.setattr(resumable, "_BETWEEN_NOTES", 1)


def write(place, parts, asked, stop_at=None):
    def chunks(name, data):
        asked.append(name)
        if name == stop_at:
            yield data[:2]
            raise Stopped
        yield data

    with place.open(place.written) as segments:
        for name, data in parts.items():
            segments.put(name, len(data), chunks(name, data))


PARTS = {"a": b"first", "b": b"second", "c": b"third!!"}


def test_a_file_goes_on_after_the_segments_that_were_written(tmp_path):
    target, asked, over = tmp_path / "file", [], []
    with pytest.raises(Stopped), Workplace(target, "key") as place:
        write(place, PARTS, asked, stop_at="c")
    assert not target.exists()
    asked.clear()
    with Workplace(target, "key", over.append) as place:
        write(place, PARTS, asked)
        place.finish()
    assert asked == ["c"]
    assert over == [11]
    assert target.read_bytes() == b"firstsecondthird!!"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_file_that_was_finished_is_not_written_again(tmp_path):
    target, asked = tmp_path / "file", []
    with Workplace(target, "key") as place:
        write(place, PARTS, asked)
    asked.clear()
    with Workplace(target, "key") as place:
        write(place, PARTS, asked)
        assert place.written.read_bytes() == b"firstsecondthird!!"
    assert asked == []


def test_under_another_key_everything_begins_anew(tmp_path):
    target, asked = tmp_path / "file", []
    with pytest.raises(Stopped), Workplace(target, "key") as place:
        write(place, PARTS, asked, stop_at="c")
    asked.clear()
    with Workplace(target, "another") as place:
        write(place, PARTS, asked)
    assert asked == ["a", "b", "c"]


def test_what_is_noted_but_not_there_is_written_again(tmp_path):
    """As after a loss of power."""
    target, asked = tmp_path / "file", []
    with pytest.raises(Stopped), Workplace(target, "key") as place:
        write(place, PARTS, asked, stop_at="c")
    (begun,) = workplace_of(target).glob(".file.begun")
    begun.write_bytes(begun.read_bytes()[:7])
    asked.clear()
    with Workplace(target, "key") as place:
        write(place, PARTS, asked)
        assert place.written.read_bytes() == b"firstsecondthird!!"
    assert asked == ["a", "b", "c"]


def test_strays_of_small_files_are_removed(tmp_path):
    target = tmp_path / "folder"
    with Workplace(target, "key") as place:
        place.written.mkdir()
        (place.written / ".config.json.0a1b2c3d.partial").write_bytes(b"{")
        (place.written / "config.json").write_bytes(b"{}")
    with Workplace(target, "key") as place:
        assert [path.name for path in place.written.iterdir()] == ["config.json"]


def test_two_at_once_are_refused(tmp_path):
    with (
        Workplace(tmp_path / "file", "key"),
        pytest.raises(UserError, match="by another process"),
        Workplace(tmp_path / "file", "key"),
    ):
        pass


def test_what_has_come_to_be_meanwhile_is_not_replaced(tmp_path):
    target = tmp_path / "file"
    with Workplace(target, "key") as place:
        write(place, PARTS, [])
        target.write_bytes(b"theirs")
        with pytest.raises(UserError, match="meanwhile"):
            place.finish()
    assert target.read_bytes() == b"theirs"


def test_a_segment_of_another_size_is_a_fault(tmp_path):
    with Workplace(tmp_path / "file", "key") as place, place.open(place.written) as segments:
        with pytest.raises(ValueError, match="a: 3 bytes were given, 4 needed"):
            segments.put("a", 4, [b"abc"])
        segments.put("b", 0, [])
