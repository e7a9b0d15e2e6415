"""Gates hold a stage's model against the unextended one, on the same texts and the same facts."""

import dataclasses

import pytest

from armillary.checkpoints import open_checkpoint, write_huggingface
from armillary.evaluation.records import LossRow, QuestionRow
from armillary.evaluation.results import read_results
from armillary.evaluation.vocabulary import TaskTokens
from armillary.extension.adapt_config import GateSettings
from armillary.extension.gates import Gates, retrieval, short_loss
from armillary.weights import to_write
from support.datasets import made_up
from support.tiny_model import tiny_model


def losses(nats, tokens=10):
    return {
        f"text {n}": LossRow("short-loss", f"text {n}", "", f"{n}", 11, 1, "short", tokens, value)
        for n, value in enumerate(nats)
    }


BEFORE = [20.0, 45.0, 31.0, 38.0, 25.0, 52.0, 29.0, 33.0]  # they differ by far more than below


def after(rises):
    return losses([value + rise for value, rise in zip(BEFORE, rises, strict=True)])


@pytest.mark.parametrize(
    ("rises", "tolerance", "passed"),
    [
        ([0.0] * 8, 0.0, True),
        ([-1.0, -0.9, -1.1, -1.0, -0.8, -1.2, -1.0, -1.0], 0.0, True),
        ([0.5, -0.5, 0.4, -0.4, 0.6, -0.6, 0.5, -0.4], 0.0, True),  # nothing that is real
        ([1.0, 0.9, 1.1, 1.0, 0.8, 1.2, 1.0, 1.0], 0.0, False),
        ([1.0, 0.9, 1.1, 1.0, 0.8, 1.2, 1.0, 1.0], 0.11, True),
        ([1.0, 0.9, 1.1, 1.0, 0.8, 1.2, 1.0, 1.0], 0.05, False),
    ],
)
def test_the_short_loss_is_back_when_its_paired_difference_reaches_the_tolerance(
    rises, tolerance, passed
):
    """Unpaired, texts differ so much that a rise of a tenth of a nat would never show."""
    gate = short_loss(losses(BEFORE), after(rises), tolerance, seed=0)
    assert gate.passed is passed
    assert "8 short texts" in gate.said


def questions(right, count, length=64, candidates=8):
    return [
        QuestionRow(
            "retrieval", str(n), "", "key-value", length, {}, -1.0, None, True, rank, candidates
        )
        for n, rank in enumerate([0] * right + [3] * (count - right))
    ]


@pytest.mark.parametrize(
    ("before", "after", "passed"),
    [
        ((44, 44), (44, 44), True),
        ((44, 44), (43, 44), True),
        ((44, 44), (38, 44), False),
        ((21, 21), (21, 21), False),  # so few cannot show that 85 % are kept
        ((30, 44), (40, 44), True),
        ((30, 44), (20, 44), False),
        ((8, 44), (3, 44), None),  # 18 % where chance finds 12.5 %
    ],
)
def test_retrieval_has_to_keep_its_share_unless_there_was_none(before, after, passed):
    gate = retrieval(questions(*before), questions(*after), 0.85, window=64, length=256)
    assert gate.passed is passed
    if passed is None:
        assert gate.said.startswith("cannot be asked: 18% of 44 in the original's own window of 64")
    else:
        assert "found at 256 tokens" in gate.said


@pytest.fixture
def gates(tmp_path):
    """A model that was never trained, with a window of 512, and documents that it has not seen."""
    lm = tiny_model(tmp_path / "tokenizer", max_positions=512)
    write_huggingface(tmp_path / "model", lm.config, to_write(lm.decoder), lm.tokenizer)
    documents = [[*range(3 + n, 40 + n), 2] * 15 for n in range(6)]
    held_out = made_up(tmp_path / "data", documents)
    made = Gates(
        GateSettings(short_texts=4, questions=6, long_texts=3),
        seed=1,
        original=open_checkpoint(tmp_path / "model"),
        tokenizer=lm.tokenizer,
        held_out=held_out,
        folder=tmp_path / "unextended",
    )
    vars(made)["_tokens"] = TaskTokens.of_size(lm.tokenizer.vocab_size)  # bytes are no words
    return made, tmp_path


def test_a_model_is_measured_on_the_same_texts_and_facts_as_the_unextended_one(gates):
    """The same model twice: nothing lost, and nothing to find where nothing was found."""
    made, directory = gates
    held = made.measure(made.original, made.original, 512, directory / "again")
    short, found = held.gates
    assert short.passed is True
    assert "+0.0000 (95 %: +0.0000 to +0.0000)" in short.said
    assert found.passed is None
    assert "where chance finds" in found.said
    (_, ours), (_, theirs) = (read_results(directory / d) for d in ("again/adapted", "unextended"))
    assert [row for row in ours if getattr(row, "task", "") != "perplexity"] == theirs
    assert sum(isinstance(row, LossRow) for row in theirs) == 4
    assert sum(isinstance(row, QuestionRow) for row in ours) == 11  # whole contexts
    short_texts, long_texts = held.losses
    assert short_texts.unextended == short_texts.rule_alone == short_texts.adapted
    assert long_texts.what == "at 512 tokens"
    assert long_texts.unextended == pytest.approx(long_texts.adapted, abs=1e-6)


def test_what_is_measured_is_not_measured_again_unless_something_else_is_asked(gates):
    made, directory = gates
    asked = []
    counting = dataclasses.replace(made, progress=lambda _, p: asked.append(p.cell))
    vars(counting)["_tokens"] = made._tokens
    counting.measure(made.original, made.original, 512, directory / "again")
    cells = [cell for cell in asked if cell is not None]
    # Unextended, cropped, under the rule alone, adapted.
    assert len(cells) == (4 + 1) + 3 + (4 + 3) + (4 + 1 + 3)
    asked.clear()
    counting.measure(made.original, made.original, 512, directory / "again")
    assert asked == [None] * 4
    other = dataclasses.replace(
        counting, settings=GateSettings(short_texts=5, questions=6, long_texts=3)
    )
    vars(other)["_tokens"] = made._tokens
    other.measure(made.original, made.original, 512, directory / "again")
    assert len([cell for cell in asked if cell is not None]) == (5 + 1) + (5 + 3) + (5 + 1 + 3)
