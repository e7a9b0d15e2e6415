"""results.jsonl reads back as it was written, and notices whatever was changed in it."""

import math
import random
from dataclasses import replace

import numpy as np
import pytest

from armillary.errors import UserError
from armillary.evaluation.records import ChoiceRow, LossRow, QuestionRow
from armillary.evaluation.results import (
    FILE,
    ResultsFile,
    cells_done,
    header_of,
    read_results,
)
from support.evaluations import a_run

LOSS = LossRow("perplexity", "0:64", "ab12", "döc\udc80", 64, 32, "key", 32, 0.1 + 0.2)
QUESTION = QuestionRow(
    "retrieval",
    "3",
    "cd34",
    "passkey",
    64,
    {"depth": 0.25, "distractors": 4, "word": None, "near": True},
    -1e-9,
    -12.0,
    True,
    0,
    5,
)
CHOICE = ChoiceRow("hellaswag", "7", "ef56", False, None, (-1.0, -2.5), 1)
CELLS = {"a/1": [LOSS, QUESTION], "b/1": [CHOICE], "b/2": []}
RUN = a_run(tasks={"retrieval": {"version": 1, "depths": "0, 0.5"}}, plan={"minutes": 10.0})


def write(directory, cells=CELLS, run=RUN):
    with ResultsFile(directory, run, list(CELLS)) as file:
        for key, rows in cells.items():
            file.append(key, rows)
    return directory / FILE


def test_what_was_written_is_read(tmp_path):
    write(tmp_path)
    assert read_results(tmp_path) == (RUN, [LOSS, QUESTION, CHOICE])
    assert cells_done(tmp_path) == tuple(CELLS)
    assert header_of(tmp_path) == RUN


def test_the_same_gives_the_same_bytes(tmp_path):
    one, other = tmp_path / "one", tmp_path / "other"
    one.mkdir()
    other.mkdir()
    assert write(one).read_bytes() == write(other).read_bytes()


def test_numbers_that_json_has_not_and_numpys_are_kept(tmp_path):
    odd = replace(QUESTION, logprob=-math.inf, control=np.float64(math.inf), exact=np.bool_(True))
    lost = replace(LOSS, nats=math.nan, tokens=np.int64(3))
    write(tmp_path, {"a/1": [odd, lost]})
    _, (first, second) = read_results(tmp_path)
    assert (first.logprob, first.control, first.exact) == (-math.inf, math.inf, True)
    assert math.isnan(second.nats)
    assert type(second.tokens) is int


def test_a_file_is_gone_on_with_after_its_last_whole_cell(tmp_path):
    """Wherever the bytes end: after the header, every such file becomes the whole one."""
    (tmp_path / "whole").mkdir()
    whole = write(tmp_path / "whole").read_bytes()
    header = whole.index(b"\n") + 1
    for end in range(header, len(whole), 7):
        (tmp_path / FILE).write_bytes(whole[:end])
        _, rows = read_results(tmp_path)
        assert rows == [LOSS, QUESTION, CHOICE][: len(rows)]
        with ResultsFile(tmp_path, RUN, list(CELLS)) as file:
            for key in list(CELLS)[len(file.rows) :]:
                file.append(key, CELLS[key])
        assert (tmp_path / FILE).read_bytes() == whole, end


def test_a_flipped_bit_is_noticed_wherever_it_is(tmp_path):
    """But in the last line's end, which makes of that line one that was not finished."""
    whole = write(tmp_path).read_bytes()
    draw = random.Random(0)
    for _ in range(400):
        data = bytearray(whole)
        place = draw.randrange(len(whole) - 1)
        data[place] ^= 1 << draw.randrange(8)
        (tmp_path / FILE).write_bytes(bytes(data))
        with pytest.raises(UserError, match=rf"{FILE}: line \d") as raised:
            read_results(tmp_path)
        assert "\n" not in str(raised.value)


def test_another_cells_name_is_noticed_where_there_are_no_rows(tmp_path):
    path = write(tmp_path)
    path.write_bytes(path.read_bytes().replace(b'"cell": "b/2"', b'"cell": "b/3"'))
    with pytest.raises(UserError, match="line 7: the lines up to here are not those"):
        read_results(tmp_path)


def test_a_line_that_is_gone_or_doubled_is_noticed(tmp_path):
    lines = write(tmp_path).read_bytes().splitlines(keepends=True)
    for number in range(1, len(lines) - 1):
        (tmp_path / FILE).write_bytes(b"".join(lines[:number] + lines[number + 1 :]))
        with pytest.raises(UserError):
            read_results(tmp_path)
        (tmp_path / FILE).write_bytes(b"".join(lines[: number + 1] + lines[number:]))
        with pytest.raises(UserError):
            read_results(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "it has no whole line"),
        (b"prose\n", "line 1: is not JSON"),
        (b'{"kind": "step", "step": 3}\n', "line 1: is not the beginning of a file of results"),
        (b'{"kind": "run", "format": 2}\n', "line 1: is of format 2; 1 is read"),
        (b'{"kind": "run", "format": 1, "name": "x"}\n', "line 1: is not as it was written"),
    ],
)
def test_a_foreign_file_is_refused(tmp_path, text, message):
    (tmp_path / FILE).write_bytes(text)
    with pytest.raises(UserError, match=message):
        read_results(tmp_path)
    with pytest.raises(UserError, match=message):
        write(tmp_path)
    assert (tmp_path / FILE).read_bytes() == text


def test_an_empty_directory_says_what_writes_there(tmp_path):
    with pytest.raises(UserError, match=r"holds no results\.jsonl; armillary evaluate writes it"):
        read_results(tmp_path)
    assert header_of(tmp_path) is None


@pytest.mark.parametrize(
    ("run", "said"),
    [
        (replace(RUN, seed=1), "seed is 0 there, 1 here"),
        (replace(RUN, name="other"), 'name is "tiny" there, "other" here'),
        (replace(RUN, model={**RUN.model, "rule": "yarn"}), 'model.rule is null there, "yarn"'),
        (replace(RUN, tasks={}), "tasks.retrieval.version is 1 there, left out here"),
        (replace(RUN, plan={"minutes": 5.0}), "plan.minutes is 10.0 there, 5.0 here"),
    ],
)
def test_another_evaluation_is_not_gone_on_with(tmp_path, run, said):
    before = write(tmp_path).read_bytes()
    with pytest.raises(UserError, match="is of another evaluation") as raised:
        write(tmp_path, {}, run)
    assert said in str(raised.value)
    assert (tmp_path / FILE).read_bytes() == before


def test_cells_that_are_not_those_to_do_are_refused(tmp_path):
    write(tmp_path)
    with (
        pytest.raises(UserError, match="its cells are not those"),
        ResultsFile(tmp_path, RUN, ["b/1"]),
    ):
        pass


def test_an_entry_of_another_kind_is_named(tmp_path):
    path = write(tmp_path, {})
    row = b'{"kind": "choice", "cell": "b/1", "task": "t", "instance": "1", "prompt": "", '
    rest = b'"correct_normalised": null, "logprobs": [1.0, "x"], "answer": 1}\n'
    path.write_bytes(path.read_bytes() + row + b'"correct": 1, ' + rest)
    with pytest.raises(UserError, match="line 2: correct must be bool, found 1"):
        read_results(tmp_path)
    path.write_bytes(path.read_bytes().replace(b'"correct": 1', b'"correct": true'))
    with pytest.raises(UserError, match=r"line 2: logprobs must be tuple\[float"):
        read_results(tmp_path)
