"""SmolLM2 on LAMBADA and HellaSwag: our verdicts beside lm-eval's, instance by instance.

The first 500 instances of each (20 with --quick), in float32 on the processor. lm-eval drives
transformers with the same weights, by its own tasks: over HellaSwag's own rows, which it cleans up
itself. An instance agrees when every verdict does (acc, and acc_norm where there are choices).
Times are of the whole evaluation, once each; the machine should be quiet.
"""

import json
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import armillary
from armillary.checkpoints import write_huggingface
from armillary.evaluation.decoder_scorer import DecoderScorer
from armillary.evaluation.records import ChoiceRow
from armillary.evaluation.short import ShortTasks
from armillary.evaluation.short_data import packaged_files, read_questions
from armillary.language_model import LanguageModel
from armillary.weights import to_write
from protocol import Row, finish, note, parser

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.peer_llama import load_peer
from support.peer_lm_eval import lm_eval_answers, lm_eval_tasks

PEER = "lm-eval"
TASKS = ("lambada", "hellaswag")


def compare(lm: LanguageModel, limit: int, scratch: Path) -> Iterator[Row]:
    """Both evaluations of each task, and how they compare."""
    model = peer_of(lm, scratch / "model")
    files = {"lambada": lambada_rows(limit, scratch), "hellaswag": packaged_files()["hellaswag"]}
    theirs = lm_eval_tasks(files, scratch / "lm-eval")
    for task, (name, configured) in zip(TASKS, theirs.items(), strict=True):
        started = time.perf_counter()
        rows = ours(lm, task, limit)
        our_seconds = time.perf_counter() - started
        started = time.perf_counter()
        (answers,) = lm_eval_answers(model, {name: configured}, limit).values()
        their_seconds = time.perf_counter() - started
        yield from compared(task, rows, answers)
        yield Row(
            f"{task}: {limit} instances",
            our_seconds,
            PEER,
            their_seconds,
            "s",
            higher_is_better=False,
        )


def ours(lm: LanguageModel, task: str, limit: int) -> list[ChoiceRow]:
    """Our rows of a task."""
    short = ShortTasks.read(lm.tokenizer, [task], limit=limit)
    scorer = DecoderScorer(lm.decoder)
    rows: list[ChoiceRow] = []
    for cell in short.cells():
        rows += [row for row in short.run(cell, scorer) if isinstance(row, ChoiceRow)]
        note(f"{task}: {len(rows)} of {limit} instances are ours")
    return rows


def compared(task: str, rows: Sequence[ChoiceRow], answers: Sequence[Any]) -> Iterator[Row]:
    """Accuracies, and the instances on which all verdicts agree."""
    differ, farthest = 0, 0.0
    for row, answer in zip(rows, answers, strict=True):
        theirs = [float(choice[0][0]) for choice in answer["resps"]]
        apart = max(abs(a - b) for a, b in zip(row.logprobs, theirs, strict=True))
        farthest = max(farthest, apart)
        verdicts = row.correct, row.correct_normalised
        normalised = answer.get("acc_norm")
        if verdicts != (bool(answer["acc"]), None if normalised is None else bool(normalised)):
            differ += 1
            note(f"{row.instance} differs: ours {verdicts} {row.logprobs}, lm-eval's {theirs}")
    count = len(rows)
    note(f"{task}: log-probabilities differ by {farthest:.2g} nats at most")
    found = 100 * sum(row.correct for row in rows) / count
    yield Row(f"{task}: acc", found, PEER, mean(answers, "acc"), "%")
    if rows[0].correct_normalised is not None:
        found = 100 * sum(bool(row.correct_normalised) for row in rows) / count
        yield Row(f"{task}: acc_norm", found, PEER, mean(answers, "acc_norm"), "%")
    yield Row(f"{task}: instances that agree", count - differ, PEER, count, "", goal=1.0)


def mean(answers: Sequence[Any], metric: str) -> float:
    """A metric of lm-eval's in per cent."""
    return 100 * sum(float(answer[metric]) for answer in answers) / len(answers)


def lambada_rows(limit: int, scratch: Path) -> Path:
    """The data set's rows, put together again from our questions."""
    questions = read_questions("lambada", limit=limit)
    rows = [{"text": f"{each.context} {each.choices[0]}"} for each in questions]
    path = scratch / "lambada.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def peer_of(lm: LanguageModel, directory: Path) -> Any:
    """lm-eval's model over transformers, with the same weights and tokenizer."""
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoTokenizer

    weights = list(to_write(lm.decoder))
    write_huggingface(directory, lm.config, weights, lm.tokenizer, {"eos_token_id": lm.eos_ids})
    model = load_peer(directory, torch.float32)
    return HFLM(pretrained=model, tokenizer=AutoTokenizer.from_pretrained(directory), batch_size=1)


def run(arguments: Namespace) -> list[Row]:
    """All rows."""
    lm = armillary.load("smollm2-135m", dtype="float32", device="cpu")
    with tempfile.TemporaryDirectory() as scratch:
        return list(compare(lm, 20 if arguments.quick else 500, Path(scratch)))


if __name__ == "__main__":
    given = parser(__doc__).parse_args()
    finish(run(given), given)
