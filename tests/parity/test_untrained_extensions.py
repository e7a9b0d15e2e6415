"""SmolLM2 under rules that it was never trained on loses what their plans foresee, and no more."""

import pytest
import torch

import armillary
from armillary.decoder import Decoder
from armillary.evaluation.decoder_scorer import DecoderScorer
from armillary.evaluation.records import QuestionRow
from armillary.evaluation.retrieval import Retrieval
from armillary.evaluation.vocabulary import TaskTokens
from armillary.extension.plan import plan
from armillary.extension.rules import RuleName, extend

pytestmark = pytest.mark.download

FACTOR = 4


@pytest.fixture(scope="module")
def smollm2() -> armillary.LanguageModel:
    return armillary.load("smollm2-135m", dtype="float32")


def answers(model: armillary.LanguageModel, rule: RuleName | None) -> list[QuestionRow]:
    """Key-value questions in a context far shorter than the window."""
    config = model.config
    if rule is not None:
        config = extend(config, FACTOR * config.max_positions, rule).config
    with torch.device("meta"):
        decoder = Decoder(config)
    decoder.load_state_dict(model.decoder.state_dict(), assign=True)
    task = Retrieval(
        TaskTokens.of_tokenizer(model.tokenizer),
        lengths=(256,),
        depths=(0.0, 0.25, 0.5, 0.75, 1.0),
        distractors=(7,),
        variants=("key-value",),
        instances=1,
        value_tokens=2,
    )
    rows = [row for cell in task.cells() for row in task.run(cell, DecoderScorer(decoder))]
    return [row for row in rows if isinstance(row, QuestionRow)]


def share_first(rows: list[QuestionRow]) -> float:
    return sum(row.rank == 0 for row in rows) / len(rows)


def test_answers_go_with_the_turns_that_a_rule_moves_short_texts_by(
    smollm2: armillary.LanguageModel,
) -> None:
    """Position interpolation moves angles by hundreds of turns, llama3 by one, none at all."""
    target = FACTOR * smollm2.config.max_positions
    moved = {
        each.name: each.change_in_short_texts for each in plan(smollm2.config, to=target).rules
    }
    assert moved["linear"] > 100
    assert moved["llama3"] < 10
    plain, llama3, linear = (answers(smollm2, rule) for rule in (None, "llama3", "linear"))
    chance = 1 / linear[0].candidates
    assert share_first(plain) == share_first(llama3) == 1
    assert share_first(linear) <= 3 * chance

    def gain(rows: list[QuestionRow]) -> float:
        return sum(row.logprob - (row.control or 0) for row in rows) / len(rows)

    assert gain(plain) > 10
    assert gain(llama3) > 10
    assert gain(linear) < gain(plain) / 4
