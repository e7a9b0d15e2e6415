"""Every source gives the same documents, apart from each other, and counts what it passes over."""

import gzip
import json
import os
import sys
import types

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from armillary.data import records
from armillary.data.documents import Document, Skipped
from armillary.data.sources import find_sources, read_source
from armillary.errors import UserError

PACK = {
    "": lambda data: data,
    ".gz": gzip.compress,
    ".zst": lambda data: zstandard.ZstdCompressor().compress(data),
}


def read(*arguments, format="auto", **options):
    sources = find_sources([str(argument) for argument in arguments], format)
    return [event for source in sources for event in read_source(source, **options)]


def reasons(events):
    return [(event.id, event.reason) for event in events if isinstance(event, Skipped)]


def texts(events):
    return [event.text for event in events if isinstance(event, Document)]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty working directory, so that names are short."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(path, data=b"text\n"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


# Which files are meant


def test_a_directory_gives_its_files_below_sorted_and_without_hidden_ones(here):
    for name in ("b.txt", "a/z.md", "a/b/c", ".git/x", "a/.hidden", "B.txt"):
        write(here / "tree" / name)
    names = [source.name for source in find_sources(["tree"])]
    assert names == ["tree/B.txt", "tree/b.txt", "tree/a/z.md", "tree/a/b/c"]


def test_patterns_go_into_directories_and_a_file_meant_twice_is_read_once(here):
    for name in ("a.txt", "t/b.txt", "t/u/c.txt", "t/u/d.md"):
        write(here / name)
    names = [source.name for source in find_sources(["t/u/c.txt", "**/*.txt", "t"])]
    assert names == ["t/u/c.txt", "a.txt", "t/b.txt", "t/u/d.md"]


def test_links_to_directories_are_not_followed_round_in_circles(here):
    write(here / "t" / "a.txt")
    (here / "t" / "again").symlink_to(here / "t")
    assert [source.name for source in find_sources(["t"])] == ["t/a.txt"]


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("missing.txt", "missing.txt: no such file or directory; the aliases are: python-stdlib"),
        ("no/such/thing", "no/such/thing: no such file or directory"),
        ("*.nothing", "*.nothing: holds no files"),
        ("empty", "empty: holds no files"),
        ("t.parquet.gz", "t.parquet.gz: Parquet inside gzip"),
    ],
)
def test_an_argument_that_means_nothing_is_refused(here, argument, message):
    (here / "empty").mkdir()
    write(here / "t.parquet.gz")
    with pytest.raises(UserError) as error:
        find_sources([argument])
    assert str(error.value).startswith(message)


def test_the_standard_library_is_there_without_tests_and_installed_packages():
    names = [source.name for source in find_sources(["python-stdlib"])]
    assert "python-stdlib/json/decoder.py" in names
    assert "python-stdlib/unittest/case.py" in names
    assert len(names) > 400
    assert len(set(names)) == len(names)
    for part in ("/test/", "/tests/", "site-packages", "/idle_test/", "_sysconfigdata", ".pyc"):
        assert not [name for name in names if part in name]
    assert names == [source.name for source in find_sources(["python-stdlib"])]


def test_a_name_that_is_no_utf8_is_read_and_named_with_escapes(here):
    (here / "t").mkdir()
    try:
        with open(os.fsencode(here / "t") + b"/\xff.txt", "wb") as file:
            file.write(b"text")
    except OSError:
        pytest.skip("the file system takes UTF-8 names only")
    assert read("t") == [Document("t/\\xff.txt", "text")]


# Text files


@pytest.mark.parametrize("ending", PACK)
def test_a_text_file_is_one_document_to_the_byte(here, ending):
    text = "one\r\ntwo\n\n é 🦙 \x00 end"
    write(here / f"a.txt{ending}", PACK[ending](text.encode()))
    assert read("a.txt" + ending) == [Document(f"a.txt{ending}", text)]


def test_a_byte_order_mark_is_no_text(here):
    write(here / "a.txt", b"\xef\xbb\xbfhello")
    assert texts(read("a.txt")) == ["hello"]


@pytest.mark.parametrize(
    ("data", "reason"),
    [(b"", "empty"), (b" \n\t\n", "empty"), (b"good \xff bad", "invalid UTF-8")],
)
def test_a_text_file_that_is_no_document_is_skipped_with_the_reason(here, data, reason):
    write(here / "a.txt", data)
    write(here / "b.txt")
    events = read(here)
    assert [event.reason for event in events if isinstance(event, Skipped)] == [reason]
    assert texts(events) == ["text\n"]


def test_the_place_of_an_invalid_byte_is_named(here):
    write(here / "a.txt", b"x" * 30 + b"\n" + b"y" * 20 + b"\xff")
    (*_, last) = read("a.txt", limit=40)
    assert last == Skipped("a.txt", "invalid UTF-8", "at byte 51")


@pytest.mark.parametrize("limit", [16, 17, 40, 10_000])
def test_a_long_document_comes_in_parts_cut_at_line_ends_or_between_characters(here, limit):
    text = "é🦙é" * 30 + "\n" + "line of text\n" * 20 + "ü" * 33
    write(here / "a.txt", text.encode())
    write(here / "a.jsonl", json.dumps({"text": text}).encode())
    for name, place in (("a.txt", "a.txt"), ("a.jsonl", "a.jsonl:1")):
        events = read(name, limit=limit)
        assert "".join(texts(events)) == text
        assert {event.id for event in events} == {place}
        assert [event.part for event in events] == list(range(len(events)))
        assert [event.last for event in events] == [False] * (len(events) - 1) + [True]
        assert all(len(event.text.encode()) <= limit for event in events)
    if limit == 40:
        assert "line of text\n" * 3 in texts(events)


@pytest.mark.parametrize("ending", [".gz", ".zst"])
@pytest.mark.parametrize("damage", ["cut", "flipped", "no such format"])
def test_damaged_compression_is_skipped_with_the_reason(here, ending, damage):
    data = bytearray(PACK[ending](os.urandom(5000).hex().encode()))
    if damage == "cut":
        del data[-100:]
    elif damage == "flipped":
        data[len(data) // 2] ^= 0xFF
        if ending == ".zst":
            data[0] ^= 0xFF  # Zstandard's frames have no checksum unless asked for
    else:
        data[:] = b"this is plain text"
    write(here / f"a.txt{ending}", bytes(data))
    assert reasons(read(f"a.txt{ending}")) == [(f"a.txt{ending}", "damaged compression")]


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_several_members_in_one_compressed_file_are_read_as_one(here, ending):
    write(here / f"a.txt{ending}", PACK[ending](b"one ") + PACK[ending](b"two"))
    assert texts(read(f"a.txt{ending}")) == ["one two"]


def test_how_much_is_read_is_told(here):
    write(here / "a.txt", b"x" * 3_000_000)
    shares = []
    list(read_source(find_sources(["a.txt"])[0], moved=shares.append))
    assert shares == sorted(shares)
    assert shares[0] < 0.5
    assert shares[-1] == 1.0


# Records


LINES = [
    json.dumps({"text": "first", "other": 1}).encode(),
    b'{"text": "no end',
    b"",
    b'{"txt": "x"}',
    b'{"text": 5}',
    b'{"text": "\xff"}',
    b'{"text": "  "}',
    b'["text"]',
    b'{"text": "\\ud800"}',
    b"[" * 100_000,
    b'{"text": ' + b"9" * 5000 + b"}",
    json.dumps({"text": "last é"}).encode(),
]


@pytest.mark.parametrize("ending", PACK)
def test_json_lines_count_what_is_wrong_line_by_line(here, ending):
    name = f"a.jsonl{ending}"
    write(here / name, PACK[ending](b"\n".join(LINES)))
    events = read(name)
    documents = [event for event in events if isinstance(event, Document)]
    assert documents == [Document(f"{name}:1", "first"), Document(f"{name}:12", "last é")]
    assert reasons(events) == [
        (f"{name}:2", "broken JSON"),
        (f"{name}:3", "empty"),
        (f"{name}:4", "no field 'text'"),
        (f"{name}:5", "field is no text"),
        (f"{name}:6", "invalid UTF-8"),
        (f"{name}:7", "empty"),
        (f"{name}:8", "broken JSON"),
        (f"{name}:9", "invalid Unicode"),
        (f"{name}:10", "broken JSON"),
        (f"{name}:11", "broken JSON"),
    ]
    assert "the fields are: txt" in events[3].detail


def test_the_field_and_the_format_can_be_named(here):
    write(here / "c4.json.gz", gzip.compress(b'{"body": "a"}\n{"body": "b"}\n'))
    assert texts(read("c4.json.gz", format="jsonl", field="body")) == ["a", "b"]


def test_a_line_beyond_the_limit_is_passed_over_and_the_next_one_is_read(here, monkeypatch):
    monkeypatch.setattr(records, "LINE_LIMIT", 1_000_000)
    lines = [b'{"text": "a"}', b'{"text": "' + b"x" * 3_000_000 + b'"}', b'{"text": "b"}']
    write(here / "a.jsonl", b"\n".join(lines))
    events = read("a.jsonl")
    assert texts(events) == ["a", "b"]
    assert reasons(events) == [("a.jsonl:2", "line too long")]


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_lines_before_the_damage_are_kept(here, ending):
    lines = b"".join(
        json.dumps({"text": os.urandom(40).hex()}).encode() + b"\n" for _ in range(9999)
    )
    write(here / f"a.jsonl{ending}", PACK[ending](lines)[:-9000])
    events = read(f"a.jsonl{ending}")
    assert 10 < len(texts(events)) < 9999
    ((place, reason),) = reasons(events)
    assert (place, reason) == (f"a.jsonl{ending}:{len(events)}", "damaged compression")


@pytest.mark.parametrize("kind", ["string", "large_string", "dictionary"])
@pytest.mark.parametrize("codec", ["none", "gzip", "zstd"])
def test_parquet_gives_a_document_a_row(here, kind, codec):
    column = pyarrow.array([*(f"text {n}" for n in range(200)), None, "", "é"])
    if kind == "dictionary":
        column = column.dictionary_encode()
    elif kind == "large_string":
        column = column.cast(pyarrow.large_string())
    table = pyarrow.table({"n": list(range(203)), "text": column})
    pyarrow.parquet.write_table(table, "a.parquet", compression=codec, row_group_size=70)
    events = read("a.parquet")
    assert texts(events) == [*(f"text {n}" for n in range(200)), "é"]
    assert reasons(events) == [("a.parquet:201", "field is no text"), ("a.parquet:202", "empty")]
    assert events[-1].id == "a.parquet:203"


def test_parquet_names_its_columns_where_the_field_is_missing(here):
    pyarrow.parquet.write_table(pyarrow.table({"body": ["x"]}), "a.parquet")
    (event,) = read("a.parquet")
    assert (event.reason, event.detail) == ("no field 'text'", "the fields are: body")
    assert texts(read("a.parquet", field="body")) == ["x"]


def test_one_invalid_text_in_parquet_costs_one_row(here):
    column = pyarrow.array([b"good", b"\xff\xfe", b"fine"]).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), "a.parquet")
    events = read("a.parquet")
    assert texts(events) == ["good", "fine"]
    assert reasons(events) == [("a.parquet:2", "invalid UTF-8")]


def test_damaged_parquet_is_skipped_with_the_reason(here):
    pyarrow.parquet.write_table(pyarrow.table({"text": ["x"] * 1000}), "a.parquet")
    data = (here / "a.parquet").read_bytes()
    write(here / "a.parquet", data[:-20])
    assert reasons(read("a.parquet")) == [("a.parquet:1", "damaged Parquet")]


# Chats


SAID = [{"role": "user", "content": "é?"}, {"role": "assistant", "content": "yes"}]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.jsonl.gz", "a.txt.zst"])
def test_lines_of_any_file_may_be_chats(here, name):
    lines = [{"messages": SAID}, {"messages": "text"}, {"text": "x"}, {"messages": SAID[1:]}]
    data = "\n".join(map(json.dumps, lines)).encode()
    ending = os.path.splitext(name)[1]
    write(here / name, PACK.get(ending, PACK[""])(data))
    events = read(name, format="chat", field="messages", chats=True)
    assert list(map(json.loads, texts(events))) == [SAID, SAID[1:]]
    assert reasons(events) == [(f"{name}:2", "not a chat"), (f"{name}:3", "no field 'messages'")]


def test_parquet_may_hold_chats_and_one_fault_costs_one_row(here):
    """Also where lists hold a text that is no UTF-8, and keys that only some messages have."""
    kind = pyarrow.list_(
        pyarrow.struct({"role": pyarrow.string(), "content": pyarrow.string(), "name": "string"})
    )
    flat = pyarrow.array([b"hello", b"\xff", b"bye"]).view(pyarrow.string())
    roles = pyarrow.array(["user", "user", "assistant"])
    said = pyarrow.StructArray.from_arrays(
        [roles, flat, pyarrow.array([None, None, "x"])], fields=list(kind.value_type)
    )
    column = pyarrow.ListArray.from_arrays(pyarrow.array([0, 1, 2, 2, 3]), said)
    pyarrow.parquet.write_table(pyarrow.table({"messages": column}), "a.parquet")
    events = read("a.parquet", format="chat", field="messages", chats=True)
    assert list(map(json.loads, texts(events))) == [
        [{"role": "user", "content": "hello"}],
        [{"role": "assistant", "content": "bye", "name": "x"}],
    ]
    assert reasons(events) == [("a.parquet:2", "invalid UTF-8"), ("a.parquet:3", "not a chat")]


def test_a_data_set_of_the_hub_may_hold_chats(monkeypatch):
    library = types.SimpleNamespace(load_dataset=lambda *_, **__: [{"messages": SAID}])
    monkeypatch.setitem(sys.modules, "datasets", library)
    events = read("hub:owner/name", format="chat", field="messages", chats=True)
    assert list(map(json.loads, texts(events))) == [SAID]


def test_the_standard_library_holds_no_chats():
    with pytest.raises(UserError, match="python-stdlib: holds no chats"):
        find_sources(["python-stdlib"], "chat")


# What has to be installed


@pytest.mark.parametrize(
    ("name", "library", "extra"),
    [("a.txt.zst", "zstandard", "data"), ("a.parquet", "pyarrow", "data")],
)
def test_a_missing_library_is_named_with_what_installs_it(here, monkeypatch, name, library, extra):
    monkeypatch.setitem(sys.modules, library, None)
    write(here / name)
    with pytest.raises(UserError, match=rf'{library}: pip install "armillary\[{extra}\]"'):
        read(name)


def test_the_hub_needs_the_datasets_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r'datasets: pip install "armillary\[hub\]"'):
        read("hub:owner/name")


def test_a_data_set_of_the_hub_is_streamed(monkeypatch):
    """The library is a stand-in that notes what it is asked for."""
    asked = []

    def load_dataset(*arguments, **options):
        asked.append((arguments, options))
        return iter([{"body": "a"}, {"body": None}, {"body": "b"}])

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    events = read("hub:owner/name/part@v1", field="body")
    assert asked == [
        (("owner/name", "part"), {"split": "train", "revision": "v1", "streaming": True})
    ]
    assert [event.id for event in events] == [f"hub:owner/name/part@v1:{n}" for n in (1, 2, 3)]
    assert texts(events) == ["a", "b"]
    assert reasons(events) == [("hub:owner/name/part@v1:2", "field is no text")]


def test_a_stream_of_the_hub_that_breaks_off_is_no_end(monkeypatch):
    def rows():
        yield {"text": "a"}
        raise ConnectionError("reset by peer")

    library = types.SimpleNamespace(load_dataset=lambda *_, **__: rows())
    monkeypatch.setitem(sys.modules, "datasets", library)
    with pytest.raises(UserError, match=r"hub:o/n: cannot be read: reset by peer; run it again"):
        read("hub:o/n")


def test_a_hub_name_without_an_owner_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace())
    with pytest.raises(UserError, match="hub:owner/name"):
        read("hub:name")
