"""Questions out of files, with the prompts, choices and answers that lm-eval makes of them."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from armillary.errors import UserError
from armillary.evaluation import short_data
from armillary.evaluation.short_data import TASKS, Question, read_questions

ROWS: dict[str, dict[str, Any]] = {
    "lambada": {"text": "A fox  saw the moon"},
    "hellaswag": {
        "activity_label": "Making tea",
        "ctx_a": "[header] How to make tea [title] Boil. [step] Use  a pot.",
        "ctx_b": "the COOK",
        "endings": ["pours. [substeps] Then  rests.", "[substeps] sits.", " a [title] b\n"],
        "label": "1",
    },
    "arc_easy": {
        "question": "What melts?",
        "choices": {"text": ["stone", "ice", "air"], "label": ["1", "2", "3"]},
        "answerKey": "2",
    },
    "arc_challenge": {
        "question": "What burns?",
        "choices": {"text": ["wood", "sand"], "label": ["A", "B"]},
        "answerKey": "A",
    },
    "piqa": {"goal": "To cut bread", "sol1": "use a knife", "sol2": "use a cloud", "label": 0},
}
QUESTIONS = {
    "lambada": Question("A fox  saw the", ("moon",), 0),
    "hellaswag": Question(
        "Making tea: How to make tea. Boil. Use a pot. The cook",
        ("pours. Then rests.", " sits.", "a. b"),
        1,
    ),
    "arc_easy": Question("Question: What melts?\nAnswer:", ("stone", "ice", "air"), 1),
    "arc_challenge": Question("Question: What burns?\nAnswer:", ("wood", "sand"), 0),
    "piqa": Question("Question: To cut bread\nAnswer:", ("use a knife", "use a cloud"), 0),
}


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("task", TASKS)
def test_a_line_becomes_the_question_that_lm_eval_asks(task, tmp_path):
    write(tmp_path / f"{task}.jsonl", ROWS[task])
    assert read_questions(task, directory=tmp_path) == (QUESTIONS[task],)


def test_the_first_ones_are_taken_and_the_rest_is_not_read(tmp_path):
    """As lm-eval's --limit does it; the broken line after them is not reached."""
    rows = [{"text": f"{number} is a number"} for number in range(5)]
    with gzip.open(tmp_path / "lambada.jsonl.gz", "wt") as file:
        file.write("\n".join(map(json.dumps, rows)) + "\n\n{broken\n")
    questions = read_questions("lambada", directory=tmp_path, limit=3)
    assert [question.context for question in questions] == ["0 is a", "1 is a", "2 is a"]
    with pytest.raises(UserError, match=r"lambada\.jsonl\.gz:7: is not JSON"):
        read_questions("lambada", directory=tmp_path)


@pytest.mark.parametrize(
    ("task", "row", "message"),
    [
        ("lambada", {"txt": "a b"}, r"jsonl:1: has no field 'text'; its fields are: txt"),
        ("lambada", {"text": 5}, "is not a question"),
        ("lambada", {"text": "ends with a space "}, "a choice is empty"),
        ("hellaswag", ROWS["hellaswag"] | {"label": ""}, "is not a question"),
        ("hellaswag", ROWS["hellaswag"] | {"endings": ["[only]", "b"]}, "a choice is empty"),
        ("hellaswag", ROWS["hellaswag"] | {"label": 3}, "number 3 of 3 choices"),
        ("arc_easy", ROWS["arc_easy"] | {"answerKey": "B"}, "is not a question"),
        ("piqa", ROWS["piqa"] | {"sol2": None}, "a choice is no text"),
        ("piqa", ROWS["piqa"] | {"label": -1}, "number -1 of 2 choices"),
        ("piqa", [1], "must hold a JSON object"),
    ],
)
def test_what_is_no_question_is_named_with_file_and_line(task, row, message, tmp_path):
    write(tmp_path / f"{task}.jsonl", row)
    with pytest.raises(UserError, match=message):
        read_questions(task, directory=tmp_path)


def test_what_is_not_there_is_named(tmp_path):
    with pytest.raises(UserError, match=r"holds none of piqa\.jsonl, piqa\.jsonl\.gz"):
        read_questions("piqa", directory=tmp_path)
    with pytest.raises(UserError, match="'pika' is no short task; they are lambada, hellaswag"):
        read_questions("pika")
    (tmp_path / "piqa.jsonl").touch()
    with pytest.raises(UserError, match="there is no question of piqa"):
        read_questions("piqa", directory=tmp_path)
    (tmp_path / "piqa.jsonl.gz").touch()
    with pytest.raises(UserError, match=r"both piqa\.jsonl and piqa\.jsonl\.gz; keep one"):
        read_questions("piqa", directory=tmp_path)


def test_sizes_are_bounded_before_memory_is_taken(tmp_path, monkeypatch):
    """A line of a gigabyte of zeros is a megabyte of gzip."""
    with gzip.open(tmp_path / "lambada.jsonl.gz", "wb", compresslevel=1) as file:
        file.write(b" " * (short_data.LINE_LIMIT + 1))
    with pytest.raises(UserError, match=r"gz:1: the line has more than 1048576 bytes"):
        read_questions("lambada", directory=tmp_path)
    write(tmp_path / "piqa.jsonl", ROWS["piqa"], ROWS["piqa"])
    monkeypatch.setattr(short_data, "TEXT_LIMIT", 80)
    assert len(read_questions("piqa", directory=tmp_path, limit=1)) == 1
    with pytest.raises(UserError, match="piqa: the questions are more than 80 characters"):
        read_questions("piqa", directory=tmp_path)


def test_damaged_compression_is_named(tmp_path):
    whole = gzip.compress(json.dumps(ROWS["lambada"]).encode() + b"\n")
    (tmp_path / "lambada.jsonl.gz").write_bytes(whole[:-5])
    with pytest.raises(UserError, match=r"lambada\.jsonl\.gz: is damaged"):
        read_questions("lambada", directory=tmp_path)


@pytest.mark.download
def test_the_packages_questions_are_whole_and_cleaned_as_lm_eval_cleans_them():
    questions = {task: read_questions(task) for task in TASKS}
    assert {task: len(found) for task, found in questions.items()} == {
        "lambada": 5153,
        "hellaswag": 10042,
        "arc_easy": 2376,
        "arc_challenge": 1172,
        "piqa": 1838,
    }
    first = {task: found[0] for task, found in questions.items()}
    assert first["lambada"].context.startswith("In my palm is a clear stone, and inside it")
    assert first["lambada"].choices == ("signs",)
    assert first["hellaswag"].context == "Roof shingle removal: A man is sitting on a roof. He"
    assert first["hellaswag"].choices[3] == "starts pulling up roofing on a roof."
    assert first["hellaswag"].answer == 3
    assert first["arc_easy"].context.startswith("Question: Which statement best explains why")
    assert first["arc_challenge"].context.startswith("Question: An astronomer observes that")
    assert first["piqa"].context.startswith("Question: How do I ready a guinea pig cage")
    # The package's own requests say "frowned upon. Understand" here.
    assert "frowned upon.. Understand" in questions["hellaswag"][-1].choices[0]
