"""A prepared directory is a function of its sources and settings, however it came about."""

import contextlib
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import psutil
import pytest

from armillary.data import TokenDataset, preparation, prepared
from armillary.data.preparation import is_validation, prepare
from armillary.data.prepared import read_prepared, tokenizer_checksum
from armillary.errors import CheckpointError, UserError
from armillary.tokenizer import Tokenizer
from support.tiny_model import tiny_tokenizer
from support.vocabularies import byte_level, sentencepiece


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """Every byte is a token, 3 above its place among the visible characters; <|im_end|> ends."""
    return tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def texts(tmp_path):
    """Two hundred documents of 0 to 299 bytes, in files and in lines."""
    draw = random.Random(7)
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(100):
        text = "".join(draw.choices("abc é\n", k=draw.randrange(1, 200)))
        (folder / f"{number:03d}.txt").write_text(text, encoding="utf-8")
    lines = [{"text": "".join(draw.choices("xyz \n", k=draw.randrange(300)))} for _ in range(100)]
    (folder / "more.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\nbroken\n")
    return folder


def content(directory: Path) -> dict[str, str]:
    return {
        path.relative_to(directory).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def documents(directory: Path, split: str = "train") -> list[list[int]]:
    found = []
    for path in sorted((directory / split).glob("*.tokens.npy")):
        tokens = np.load(path)
        offsets = np.load(path.with_name(path.name.replace("tokens", "offsets")))
        found += [tokens[a:b].tolist() for a, b in pairwise(offsets)]
    return found


def run(texts, tokenizer, out, **options):
    options = {"validation": 0.1, "shard_tokens": 3000, "workers": 1} | options
    sources = texts if isinstance(texts, list) else [str(texts)]
    return prepare(sources, tokenizer, out, **options)


def test_every_document_is_there_once_and_ends_with_the_end_token(tmp_path, texts, tokenizer):
    facts = run(texts, tokenizer, tmp_path / "out")
    (end,) = tokenizer.eos_ids
    found = documents(tmp_path / "out") + documents(tmp_path / "out", "validation")
    assert all(ids[-1] == end and end not in ids[:-1] for ids in found)
    decoded = sorted(tokenizer.decode(ids[:-1]) for ids in found)
    lines = (texts / "more.jsonl").read_text().splitlines()[:-1]
    wanted = [json.loads(line)["text"] for line in lines]
    wanted += [path.read_bytes().decode() for path in texts.glob("*.txt")]
    wanted = sorted(text for text in wanted if text.strip())
    assert decoded == wanted
    assert sum(split.documents for split in facts.splits.values()) == len(wanted)
    assert sum(split.bytes for split in facts.splits.values()) == sum(
        len(text.encode()) for text in wanted
    )


def test_the_facts_count_what_is_there(tmp_path, texts, tokenizer):
    facts = run(texts, tokenizer, tmp_path / "out")
    lengths: dict[str, int] = {}
    for split in prepared.SPLITS:
        found = documents(tmp_path / "out", split)
        assert facts.splits[split].documents == len(found)
        assert facts.splits[split].tokens == sum(map(len, found))
        shards = facts.splits[split].shards
        assert sum(shard.documents for shard in shards) == len(found)
        for ids in found:
            start = str(2 ** (len(ids).bit_length() - 1))
            lengths[start] = lengths.get(start, 0) + 1
    assert facts.lengths == lengths
    assert len(facts.splits["train"].shards) > 3
    assert facts.skipped["broken JSON"].count == 1
    assert facts.skipped["broken JSON"].examples[0].id == f"{texts}/more.jsonl:101"
    assert read_prepared(tmp_path / "out", checksums=True) == facts


def test_documents_are_counted_by_the_source_that_means_them_first(tmp_path, texts, tokenizer):
    """Three arguments, of which the last means all files again; interrupted, the counts hold."""
    sources = [str(texts / "more.jsonl"), str(texts / "00*.txt"), str(texts)]
    whole = run(sources, tokenizer, tmp_path / "whole")
    texts_of = {name: TokenDataset(tmp_path / "whole", name) for name in prepared.SPLITS}
    for name, dataset in texts_of.items():
        counts = whole.splits[name].sources
        assert sum(counts) == len(dataset) == len(dataset.sources)
        for number, source in enumerate(dataset.sources.tolist()):
            is_line = set(tokenizer.decode(dataset[number]).split("<")[0]) <= set("xyz \n")
            assert is_line == (source == 0)
    both = np.add(whole.splits["train"].sources, whole.splits["validation"].sources).tolist()
    assert both == [100, 10, 90]
    interrupted(sources, tokenizer, tmp_path / "out", 2)
    run(sources, tokenizer, tmp_path / "out")
    assert content(tmp_path / "out") == content(tmp_path / "whole")


@pytest.mark.parametrize(
    ("vocab_size", "dtype"),
    [(1, "uint8"), (256, "uint8"), (257, "uint16"), (65536, "uint16"), (65537, "uint32")],
)
def test_tokens_take_the_narrowest_type(vocab_size, dtype):
    assert preparation.narrowest(vocab_size) == dtype


def test_the_output_does_not_depend_on_the_number_of_workers(
    tmp_path, texts, tokenizer, monkeypatch
):
    monkeypatch.setattr(preparation, "_BATCH_DOCUMENTS", 3)  # many more than wait at once
    run(texts, tokenizer, tmp_path / "one", workers=1)
    run(texts, tokenizer, tmp_path / "two", workers=2)
    assert content(tmp_path / "one") == content(tmp_path / "two")


def test_an_empty_directory_is_filled_and_another_one_is_left_alone(tmp_path, texts, tokenizer):
    (tmp_path / "out").mkdir()
    run(texts, tokenizer, tmp_path / "out")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    with pytest.raises(UserError, match="exists and is no prepared data"):
        run(texts, tokenizer, tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.txt").exists()


def test_what_is_there_already_is_returned_and_other_settings_are_refused(
    tmp_path, texts, tokenizer
):
    facts = run(texts, tokenizer, tmp_path / "out")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")}
    assert run(texts, tokenizer, tmp_path / "out") == facts
    with pytest.raises(UserError, match="seed is 0, not 5"):
        run(texts, tokenizer, tmp_path / "out", seed=5)
    with pytest.raises(UserError, match="end_id is 2, not 0"):
        run(texts, tokenizer, tmp_path / "out", end_token="<|endoftext|>")
    (texts / "new.txt").write_text("new")
    with pytest.raises(UserError, match="the sources were 101 files"):
        run(texts, tokenizer, tmp_path / "out")
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")} == before


# Going on after an end


class StopError(Exception):
    pass


def interrupted(texts, tokenizer, out, after, **options):
    """Run until `after` shards are committed."""
    committed = []
    original = preparation.write_json

    def count(path, value):
        original(path, value)
        committed.append(path)
        if len(committed) > after:  # the first one is settings.json
            raise StopError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preparation, "write_json", count)
        with pytest.raises(StopError):
            run(texts, tokenizer, out, **options)


@pytest.mark.parametrize("after", [0, 1, 2, 5])
@pytest.mark.parametrize("limit", [1024, 1 << 20])
def test_an_interrupted_run_goes_on_to_the_same_bytes(tmp_path, texts, tokenizer, after, limit):
    (texts / "long.txt").write_text("a line of it\n" * 400)
    options = {"part_bytes": limit}
    run(texts, tokenizer, tmp_path / "whole", **options)
    out = tmp_path / "out"
    interrupted(texts, tokenizer, out, after, **options)
    assert not out.exists()
    reports = []
    run(texts, tokenizer, out, progress=reports.append, **options)
    assert content(out) == content(tmp_path / "whole")
    if after > 1:
        assert reports[0].tokens >= 3000 * after  # what was committed was not done again
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "texts", "whole"]


def test_a_run_that_is_interrupted_again_and_again_within_one_file_ends_the_same(
    tmp_path, texts, tokenizer
):
    lines = [{"text": f"line {n} " * (n % 50 + 1)} for n in range(200)]
    (texts / "long.jsonl").write_text("\n".join(map(json.dumps, lines)))
    run(texts, tokenizer, tmp_path / "whole")
    out = tmp_path / "out"
    interrupted(texts, tokenizer, out, 2)
    for _ in range(3):  # settings.json is there by now, so so many shards more
        interrupted(texts, tokenizer, out, 1)
    run(texts, tokenizer, out)
    assert content(out) == content(tmp_path / "whole")


def test_a_damaged_shard_and_what_follows_are_made_again(tmp_path, texts, tokenizer):
    run(texts, tokenizer, tmp_path / "whole")
    out = tmp_path / "out"
    interrupted(texts, tokenizer, out, 4)
    shard = tmp_path / ".out.preparing" / "data" / "train" / "00002.tokens.npy"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    run(texts, tokenizer, out)
    assert content(out) == content(tmp_path / "whole")


def test_files_that_a_kill_left_half_written_do_not_get_into_the_output(tmp_path, texts, tokenizer):
    run(texts, tokenizer, tmp_path / "whole")
    out = tmp_path / "out"
    interrupted(texts, tokenizer, out, 2)
    work = tmp_path / ".out.preparing"
    for name in (
        "steps/.00002.json.1234abcd.partial",
        "data/.dataset.json.1234abcd.partial",
        "data/tokenizer/.tokenizer.json.1234abcd.partial",
        "data/train/00002.tokens.partial",
        "data/train/00009.tokens.npy",
    ):
        (work / name).write_bytes(b"half")
    run(texts, tokenizer, out)
    assert content(out) == content(tmp_path / "whole")


def test_an_interrupted_run_is_not_gone_on_with_in_another_way(tmp_path, texts, tokenizer):
    out = tmp_path / "out"
    interrupted(texts, tokenizer, out, 2)
    with pytest.raises(UserError, match=r"other settings: validation is 0\.2, not 0\.1"):
        run(texts, tokenizer, out, validation=0.2)
    (texts / "050.txt").write_text("changed")
    with pytest.raises(UserError, match=r"the sources have changed .* remove .*\.out\.preparing"):
        run(texts, tokenizer, out)


def test_with_nothing_committed_other_settings_simply_begin(tmp_path, texts, tokenizer):
    interrupted(texts, tokenizer, tmp_path / "out", 0)
    assert run(texts, tokenizer, tmp_path / "out", seed=3).settings.seed == 3


def test_two_runs_do_not_work_in_one_place(tmp_path, texts, tokenizer):
    errors = []

    def another(_):
        with pytest.raises(UserError) as error:
            run(texts, tokenizer, tmp_path / "out")
        errors.append(str(error.value))

    run(texts, tokenizer, tmp_path / "out", progress=another)
    assert all("another process is preparing there" in error for error in errors)
    assert errors


PROGRAM = """
from armillary.data import prepare
from armillary.tokenizer import Tokenizer

print("begun")
tokenizer = Tokenizer.from_file("tokenizer/tokenizer.json")
print(prepare(["texts"], tokenizer, "out", validation=0, workers=2).splits["train"])
"""


def test_workers_do_not_run_the_program_that_starts_them_again(tmp_path, texts, tokenizer):
    """A few lines without a guard around them, as one writes them."""
    tokenizer.save(tmp_path / "tokenizer")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, str(program)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("begun") == 1
    assert f"documents={len(documents(tmp_path / 'out'))}" in done.stdout


def test_a_killed_command_goes_on_to_the_same_bytes_and_leaves_no_workers(tmp_path, tokenizer):
    """kill -9 of the real command, with two workers, at a moment when shards are committed."""
    texts = tmp_path / "texts"
    texts.mkdir()
    draw = random.Random(3)
    for number in range(60):
        text = "".join(draw.choices("some words\n", k=20_000))
        (texts / f"{number:02d}.txt").write_text(text)
    tokenizer.save(tmp_path / "tokenizer")
    command = [sys.executable, "-m", "armillary", "prepare", str(texts), "--json"]
    command += ["--tokenizer", str(tmp_path / "tokenizer"), "--shard-tokens", "100000"]
    command += ["--workers", "2", "--out"]
    process = subprocess.Popen(
        [*command, str(tmp_path / "out")],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"ARMILLARY_TEST": "killed"},
    )
    steps = tmp_path / ".out.preparing" / "steps"
    while process.poll() is None and len(list(steps.glob("*.json"))) < 2:
        time.sleep(0.005)
    workers = children(process.pid)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "out").exists(), "it ended before it was killed"
    assert len(list(steps.glob("*.json"))) >= 2
    done = subprocess.run([*command, str(tmp_path / "out")], capture_output=True, check=True)
    assert json.loads(done.stdout)["splits"]["train"]["documents"] > 50
    subprocess.run([*command, str(tmp_path / "whole")], capture_output=True, check=True)
    assert content(tmp_path / "out") == content(tmp_path / "whole")
    assert len(workers) >= 2
    assert [pid for pid in workers if alive(pid)] == []


def children(pid: int) -> list[int]:
    return [process.pid for process in psutil.Process(pid).children(recursive=True)]


def alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def limited(tmp_path, limit: int) -> subprocess.CompletedProcess[str]:
    """Run the command where no file may grow beyond `limit` bytes, as on a full disk."""
    arguments = ["prepare", str(tmp_path / "texts"), "--tokenizer", str(tmp_path / "tokenizer")]
    arguments += ["--out", str(tmp_path / "out"), "--workers", "1", "--shard-tokens", "3000"]
    program = (
        "import resource, sys; from armillary.cli import main\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))\n"
        f"sys.exit(main({arguments!r}))"
    )
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )


def test_a_full_disk_is_one_line_and_can_be_gone_on_after(tmp_path, texts, tokenizer):
    (texts / "long.txt").write_text("a line of it\n" * 4000)
    tokenizer.save(tmp_path / "tokenizer")
    done = limited(tmp_path, 40_000)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"armillary: {tmp_path}/out: cannot be written: File too large; ")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()
    assert limited(tmp_path, 10_000_000).returncode == 0
    run(texts, tokenizer, tmp_path / "whole", validation=0.01)
    different = {"dataset.json", "manifest.json"}  # which name the sources and their checksums
    assert different | content(tmp_path / "out").keys() == content(tmp_path / "whole").keys()
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def test_a_worker_that_dies_is_one_line_that_says_how_to_go_on(
    tmp_path, texts, tokenizer, monkeypatch
):
    monkeypatch.setattr(preparation, "_BATCH_DOCUMENTS", 2)

    def end_a_worker(_):
        for pid in children(os.getpid()):
            # One that was killed at the last report may still be waiting to be buried.
            with contextlib.suppress(psutil.NoSuchProcess):
                if "spawn_main" in " ".join(psutil.Process(pid).cmdline()):
                    os.kill(pid, signal.SIGKILL)

    with pytest.raises(UserError, match="a worker process was ended, .* again to go on"):
        run(texts, tokenizer, tmp_path / "out", workers=2, progress=end_a_worker)
    run(texts, tokenizer, tmp_path / "out")
    run(texts, tokenizer, tmp_path / "whole")
    assert content(tmp_path / "out") == content(tmp_path / "whole")


# What is skipped, what is refused


def test_strict_stops_at_the_first_fault_and_can_be_gone_on_with(tmp_path, texts, tokenizer):
    with pytest.raises(UserError, match=r"more\.jsonl:\d+: (empty|broken JSON): "):
        run(texts, tokenizer, tmp_path / "out", strict=True)
    assert not (tmp_path / "out").exists()
    run(texts, tokenizer, tmp_path / "out")


def test_reasons_are_counted_in_full_and_shown_by_the_first_few(tmp_path, tokenizer):
    """Over several shards, so that examples of different ones are put together."""
    lines = ['{"text": "a few words"}', "broken"] * 9
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    facts = run(tmp_path / "a.jsonl", tokenizer, tmp_path / "out", shard_tokens=30)
    assert len(facts.splits["train"].shards) > 2
    broken = facts.skipped["broken JSON"]
    assert broken.count == 9
    places = [int(example.id.rpartition(":")[2]) for example in broken.examples]
    assert places == [2, 4, 6, 8, 10]


def test_no_documents_at_all_is_an_error_that_says_why(tmp_path, tokenizer):
    (tmp_path / "a.jsonl").write_text('{"body": "x"}\n' * 7)
    with pytest.raises(UserError, match=r"7 × no field 'text', the first at .*a\.jsonl:1 .* body"):
        run(tmp_path / "a.jsonl", tokenizer, tmp_path / "out")
    assert run(tmp_path / "a.jsonl", tokenizer, tmp_path / "out", field="body")


def test_a_document_with_a_fault_late_in_it_is_dropped_as_a_whole(tmp_path, tokenizer):
    """Its first parts have been written by then."""
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "a.txt").write_text("before\n")
    (texts / "b.txt").write_bytes(b"fine so far\n" * 500 + b"\xff")
    (texts / "c.txt").write_text("after\n")
    facts = run(texts, tokenizer, tmp_path / "out", part_bytes=1024, validation=0)
    found = [tokenizer.decode(ids[:-1]) for ids in documents(tmp_path / "out")]
    assert found == ["before\n", "after\n"]
    assert facts.splits["train"].bytes == 13
    path = tmp_path / "out" / "train" / "00000.tokens.npy"
    assert path.stat().st_size == 128 + 2 * facts.splits["train"].tokens  # nothing behind them
    assert facts.skipped["invalid UTF-8"].count == 1


def test_a_step_with_nothing_but_a_dropped_document_leaves_no_shard(tmp_path, tokenizer):
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "a.txt").write_text("x" * 5000)
    (texts / "b.txt").write_bytes(b"fine so far\n" * 500 + b"\xff")
    run(texts, tokenizer, tmp_path / "out", part_bytes=1024, validation=0)
    assert sorted(p.name for p in (tmp_path / "out" / "train").iterdir()) == [
        "00000.offsets.npy",
        "00000.tokens.npy",
    ]


def test_a_long_document_is_one_document_with_one_end(tmp_path, tokenizer):
    text = "line of text\n" * 1000
    (tmp_path / "a.txt").write_text(text)
    run(tmp_path / "a.txt", tokenizer, tmp_path / "parts", part_bytes=1024, validation=0)
    (ids,) = documents(tmp_path / "parts")
    assert tokenizer.decode(ids) == text + "<|im_end|>"


def test_what_the_tokenizer_cannot_encode_is_skipped(tmp_path):
    metadata = byte_level()
    tokens = metadata["tokenizer.ggml.tokens"]
    tokens[tokens.index("Z")] = "unused"
    lacking = Tokenizer.from_gguf(metadata)
    text = "a line\n" * 300
    lines = [{"text": "fine"}, {"text": text + "Z\n" + text}, {"text": "good"}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    facts = run(tmp_path / "a.jsonl", lacking, tmp_path / "out", part_bytes=1024, validation=0)
    (example,) = facts.skipped["cannot be encoded"].examples
    assert example.id.endswith("a.jsonl:2")
    assert "0x5A" in example.detail
    assert [lacking.decode(ids[:-1]) for ids in documents(tmp_path / "out")] == ["fine", "good"]


def test_control_tokens_written_in_a_text_stay_text(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_text("x<|im_end|>y<|endoftext|>")
    run(tmp_path / "a.txt", tokenizer, tmp_path / "out", validation=0)
    (ids,) = documents(tmp_path / "out")
    assert [index for index in ids if tokenizer.is_special(index)] == list(tokenizer.eos_ids)
    assert len(ids) == 26


def test_a_document_begins_as_the_tokenizer_begins_a_text_and_only_once(tmp_path):
    """SentencePiece files ask for BOS; the later parts of a long document have none."""
    with_bos = Tokenizer.from_gguf(sentencepiece(add_bos_token=True))
    (tmp_path / "a.txt").write_text("a b\n" * 1000)
    run(tmp_path / "a.txt", with_bos, tmp_path / "out", part_bytes=1024, validation=0)
    (ids,) = documents(tmp_path / "out")
    assert ids[0] == with_bos.bos_id
    assert ids.count(with_bos.bos_id) == 1
    assert ids.count(with_bos.eos_ids[0]) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"validation": 1.0}, "validation: must be at least 0 and below 1, not 1.0"),
        ({"workers": 0}, "workers: must be at least 1, not 0"),
        ({"part_bytes": 10}, "part_bytes: must be at least 1024, not 10"),
        ({"end_token": "</s>"}, "end token '</s>' is no control token"),
    ],
)
def test_options_out_of_range_are_refused(tmp_path, texts, tokenizer, options, message):
    with pytest.raises(UserError, match=message):
        run(texts, tokenizer, tmp_path / "out", **options)


def test_a_tokenizer_without_an_end_token_needs_one_named(tmp_path, texts, tokenizer):
    tokenizer.save(tmp_path)
    nameless = Tokenizer.from_file(tmp_path / "tokenizer.json", config={})
    assert nameless.eos_ids == ()
    with pytest.raises(UserError, match="--end-token"):
        run(texts, nameless, tmp_path / "out")


# Chats


def some_chats(path, count=120):
    """Chats of one to six messages, some of which are none, have no answer or no field."""
    draw = random.Random(11)
    lines = []
    for number in range(count):
        roles = ["user", "assistant"] * 3
        messages = [
            {"role": role, "content": "".join(draw.choices("ab é\n", k=draw.randrange(40)))}
            for role in roles[: draw.randrange(1, 7)]
        ]
        lines.append(json.dumps({"messages": messages if number % 10 else "nothing"}))
    path.write_text("\n".join(lines) + "\nbroken\n")
    return [json.loads(line)["messages"] for line in lines]


def learned(directory, split="train"):
    """The mask of each document, in order."""
    found = []
    for path in sorted((directory / split).glob("*.tokens.npy")):
        mask = np.zeros(len(np.load(path)) + 1, dtype=int)
        runs = np.load(path.with_name(path.name.replace("tokens", "learned")))
        for start, stop in zip(runs[::2], runs[1::2], strict=True):
            mask[start:stop] = 1
        offsets = np.load(path.with_name(path.name.replace("tokens", "offsets")))
        found += [mask[a:b].tolist() for a, b in pairwise(offsets)]
    return found


def test_chats_are_written_by_the_template_and_only_the_answers_are_learned(tmp_path, tokenizer):
    """By hand for a vocabulary of bytes: between two markers, from the line's end to <|im_end|>."""
    chats = some_chats(tmp_path / "a.jsonl")
    facts = run(tmp_path / "a.jsonl", tokenizer, tmp_path / "out", format="chat", validation=0)
    kept = [chat for chat in chats if chat != "nothing" and len(chat) > 1]
    found, masks = documents(tmp_path / "out"), learned(tmp_path / "out")
    assert len(found) == len(kept) > 60
    assert len(facts.splits["train"].shards) > 2
    for chat, ids, mask in zip(kept, found, masks, strict=True):
        text, wanted = "", []
        for message in chat:
            head = f"<|im_start|>{message['role']}\n"
            text += f"{head}{message['content']}<|im_end|>\n"
            said = message["role"] == "assistant"
            wanted += [0] * (len(head) - len("<|im_start|>") + 1)
            wanted += [int(said)] * (len(message["content"].encode()) + 1) + [0]
        assert tokenizer.decode(ids) == text
        assert mask == wanted
    split = facts.splits["train"]
    assert (split.tokens, split.learned) == (sum(map(len, found)), sum(map(sum, masks)))
    assert {reason: skipped.count for reason, skipped in facts.skipped.items()} == {
        "broken JSON": 1,
        "no answer": sum(len(chat) == 1 for chat in chats),
        "not a chat": 12,
    }
    assert facts.skipped["not a chat"].examples[1].id == f"{tmp_path}/a.jsonl:11"
    assert read_prepared(tmp_path / "out", checksums=True) == facts


def test_interrupted_chats_and_more_workers_give_the_same_bytes(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(preparation, "_BATCH_DOCUMENTS", 3)
    some_chats(tmp_path / "a.jsonl")
    options = {"format": "chat", "shard_tokens": 1000}
    run(tmp_path / "a.jsonl", tokenizer, tmp_path / "whole", **options)
    run(tmp_path / "a.jsonl", tokenizer, tmp_path / "two", workers=2, **options)
    interrupted(tmp_path / "a.jsonl", tokenizer, tmp_path / "out", 3, **options)
    shard = tmp_path / ".out.preparing" / "data" / "train" / "00001.learned.npy"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    run(tmp_path / "a.jsonl", tokenizer, tmp_path / "out", **options)
    names = content(tmp_path / "whole")
    assert names == content(tmp_path / "two") == content(tmp_path / "out")
    assert sum(name.endswith(".learned.npy") for name in names) > 3


def test_another_template_is_noticed(tmp_path, tokenizer):
    some_chats(tmp_path / "a.jsonl")
    options = {"format": "chat", "shard_tokens": 1000}
    run(tmp_path / "a.jsonl", tokenizer, tmp_path / "done", **options)
    interrupted(tmp_path / "a.jsonl", tokenizer, tmp_path / "out", 2, **options)
    other = tiny_tokenizer(tmp_path / "other")
    other.chat_templates["default"] += "{# the same, and yet another #}"
    assert tokenizer_checksum(other) == tokenizer_checksum(tokenizer)
    for name in ("done", "out"):
        with pytest.raises(UserError, match="chat_template_sha256 is '"):
            run(tmp_path / "a.jsonl", other, tmp_path / name, **options)


def test_chats_whose_answers_cannot_be_told_apart_are_counted_with_the_reason(tmp_path):
    """A template that writes the last answer in another way than those before."""
    tokenizer = tiny_tokenizer(tmp_path / "tokenizer")
    tokenizer.chat_templates["default"] = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{% if loop.last and m.role == 'assistant' %}!{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    chats = some_chats(tmp_path / "a.jsonl")
    facts = run(tmp_path / "a.jsonl", tokenizer, tmp_path / "out", format="chat", validation=0)
    lengths = [len(chat) for chat in chats if chat != "nothing"]
    assert facts.splits["train"].documents == lengths.count(2)
    unclear = facts.skipped["answers unclear"]
    assert unclear.count == sum(length > 2 for length in lengths)
    assert unclear.examples[0].detail.startswith("messages[1]: the template writes it, or ")
    with pytest.raises(UserError, match=r"a\.jsonl:\d+: (answers unclear|no answer|not a chat): "):
        run(tmp_path / "a.jsonl", tokenizer, tmp_path / "strict", format="chat", strict=True)


def test_chats_need_a_template_that_is_one(tmp_path):
    some_chats(tmp_path / "a.jsonl")
    tokenizer = tiny_tokenizer(tmp_path / "tokenizer")
    for template, message in (("{% if", "chat template: line 1: "), (None, "has no chat template")):
        tokenizer.chat_templates = {} if template is None else {"default": template}
        with pytest.raises(UserError, match=message):
            run(tmp_path / "a.jsonl", tokenizer, tmp_path / "out", format="chat")


# The split


def test_more_documents_do_not_move_the_others_between_the_splits(tmp_path, texts, tokenizer):
    run(texts, tokenizer, tmp_path / "before")
    for number in range(300):
        (texts / f"0{number:03d}-more.txt").write_text(f"one more: {number}")
    run(texts, tokenizer, tmp_path / "after")
    for split in prepared.SPLITS:
        before = {tuple(ids) for ids in documents(tmp_path / "before", split)}
        assert before < {tuple(ids) for ids in documents(tmp_path / "after", split)}


@pytest.mark.parametrize("named", ["{}", "{}/*", "{}/**/*.*", "file by file"])
def test_another_place_for_all_documents_does_not_move_them_between_the_splits(
    named, tmp_path, tokenizer
):
    whole = {}
    for folder in ("here", "away/from/there"):
        texts = tmp_path / folder
        (texts / "below").mkdir(parents=True)
        for number in range(60):
            folder_of = texts / "below" if number % 2 else texts
            (folder_of / f"{number}.txt").write_text(f"text {number}")
        (texts / "lines.jsonl").write_text("".join(f'{{"text": "{n} a"}}\n' for n in range(60)))
        sources = [named.format(texts)]
        if named == "file by file":
            sources = sorted(str(path) for path in texts.rglob("*.*"))
        prepare(sources, tokenizer, tmp_path / f"{folder}.data", validation=0.3)
        whole[folder] = [documents(tmp_path / f"{folder}.data", split) for split in prepared.SPLITS]
    assert whole["here"] == whole["away/from/there"]
    assert all(len(split) > 10 for split in whole["here"])


def test_the_share_that_is_held_out_is_the_share_asked_for():
    held_out = {n for n in range(20_000) if is_validation(f"text {n}", 1, 0.05)}
    assert 900 < len(held_out) < 1100
    assert held_out < {n for n in range(20_000) if is_validation(f"text {n}", 1, 0.1)}
    other = {n for n in range(20_000) if is_validation(f"text {n}", 2, 0.05)}
    assert len(held_out & other) < 100


# Opening


def test_a_changed_or_missing_file_is_noticed(tmp_path, texts, tokenizer):
    out = tmp_path / "out"
    run(texts, tokenizer, out)
    shard = out / "train" / "00001.tokens.npy"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    read_prepared(out)  # sizes alone are compared unless asked for
    with pytest.raises(CheckpointError, match=r"00001\.tokens\.npy: its SHA-256"):
        read_prepared(out, checksums=True)
    shard.unlink()
    with pytest.raises(CheckpointError, match=r"00001\.tokens\.npy is in the manifest but not"):
        read_prepared(out)


def test_a_directory_that_is_not_prepared_is_refused(tmp_path):
    with pytest.raises(UserError, match="armillary prepare makes one"):
        read_prepared(tmp_path / "nothing")
    with pytest.raises(UserError, match="is no prepared data"):
        read_prepared(tmp_path)


def test_facts_that_are_not_ours_are_refused_by_their_place(tmp_path, texts, tokenizer):
    out = tmp_path / "out"
    run(texts, tokenizer, out)
    facts = json.loads((out / "dataset.json").read_text())
    facts["settings"]["seed"] = "0"
    (out / "manifest.json").unlink()
    (out / "dataset.json").write_text(json.dumps(facts))
    preparation.write_manifest(out)
    with pytest.raises(UserError, match=r"dataset\.json: settings\.seed: "):
        read_prepared(out)


@pytest.mark.parametrize("metadata", [byte_level(), sentencepiece(add_bos_token=True)])
def test_a_tokenizers_checksum_outlives_saving(tmp_path, metadata):
    first = Tokenizer.from_gguf(metadata)
    first.save(tmp_path)
    again = Tokenizer.from_file(tmp_path / "tokenizer.json")
    assert tokenizer_checksum(again) == tokenizer_checksum(first)


def test_a_tokenizers_checksum_tells_apart_what_begins_a_text_and_what_is_in_it(
    tmp_path, tokenizer
):
    tokenizer.save(tmp_path)
    path = tmp_path / "tokenizer.json"
    names = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    plain, begun = (
        Tokenizer.from_file(path, config=names | {"add_bos_token": said}) for said in (False, True)
    )
    others = [Tokenizer.from_gguf(byte_level()), Tokenizer.from_gguf(sentencepiece())]
    assert len({tokenizer_checksum(one) for one in (plain, begun, *others)}) == 4
    assert tokenizer_checksum(plain) == tokenizer_checksum(tokenizer)


# Memory


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak from /proc")
@pytest.mark.parametrize(
    ("kind", "sizes"), [("txt", (1, 12)), ("jsonl", (1, 12)), ("chat", (1, 5))]
)
def test_memory_does_not_grow_with_the_input(tmp_path, tokenizer, kind, sizes):
    """A short file and a long one, in MB: one document, or one a line, in a process each."""
    tokenizer.save(tmp_path / "tokenizer")
    peaks = []
    for megabytes in sizes:
        line = b"words and words " * 60 + b"\n"
        if kind == "jsonl":
            line = json.dumps({"text": line.decode()}).encode() + b"\n"
        elif kind == "chat":
            said = [{"role": role, "content": line.decode()} for role in ("user", "assistant")]
            line = json.dumps({"messages": said}).encode() + b"\n"
        source = tmp_path / f"{megabytes}.{kind}"
        source.write_bytes(line * (megabytes * 1_000_000 // len(line)))
        done = subprocess.run(
            [sys.executable, "-c", PREPARE, source, tmp_path / "tokenizer", f"{source}.out", kind],
            capture_output=True,
            text=True,
            check=True,
        )
        peaks.append(int(done.stdout) * 1024)
    assert peaks[1] - peaks[0] < (4_000_000 if kind == "chat" else 6_000_000)


PREPARE = """
import sys
from armillary.data.preparation import prepare
from armillary.tokenizer import Tokenizer

source, tokenizer, out, kind = sys.argv[1:]
prepare(
    [source],
    Tokenizer.from_file(tokenizer + "/tokenizer.json"),
    out,
    format="chat" if kind == "chat" else "auto",
    workers=1,
    validation=0.0,
    part_bytes=1 << 16,
    shard_tokens=1 << 24,
)
for line in open("/proc/self/status"):
    if line.startswith("VmHWM:"):
        print(line.split()[1])
"""
