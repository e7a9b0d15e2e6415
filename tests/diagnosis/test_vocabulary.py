"""A tokenizer is held against ids, the embedding, and what the configuration says of beginnings."""

from dataclasses import replace

import numpy as np
import pytest

from armillary.checkpoints import open_checkpoint
from armillary.diagnosis.vocabulary import check_beginning, check_vocabulary, kinship
from support import faults


class Words:
    """A tokenizer of words in two spellings, each a token."""

    def __init__(self, count):
        letters = "abcdefghijklmnopqrstuvwxyz"
        words = [a + b + c for a in letters for b in letters for c in letters][:count]
        self.tokens = [word.encode() for word in words] + [b" " + word.encode() for word in words]
        self.vocab_size = len(self.tokens)

    def token_bytes(self, token):
        return self.tokens[token]

    def is_special(self, _token):
        return False


def embedding(count, seed=0):
    """Spellings of a word near each other."""
    rng = np.random.default_rng(seed)
    meaning = rng.normal(size=(count, 16))
    return np.concatenate([meaning, meaning + 0.5 * rng.normal(size=(count, 16))]).astype("f4")


def test_spellings_are_kin_under_the_right_ids_and_strangers_under_others():
    numbers = embedding(300)
    assert kinship(Words(300), numbers).share > 0.95
    shuffled = np.random.default_rng(1).permutation(numbers)
    assert kinship(Words(300), shuffled).share == pytest.approx(0.5, abs=0.1)


def test_a_handful_of_words_gives_no_verdict(learned):
    assert kinship(Words(50), embedding(50)) is None
    checks, findings = check_vocabulary(learned, learned.tensors["embedding.weight"].to_float32())
    assert findings == []
    assert {check.name: check.holds for check in checks}["spellings"] is None


def test_more_ordinary_tokens_than_the_model_knows_are_another_models(learned):
    """Added control tokens beyond the embedding are usual, and no fault of their own."""
    config = learned.config.model_copy(update={"vocab_size": 100})
    small = learned.tensors["embedding.weight"].to_float32()[:100]
    _, findings = check_vocabulary(replace(learned, config=config), small)
    assert findings[0].code == "tokenizer"
    assert "up to 258" in findings[0].fault


def test_a_beginning_that_only_the_configuration_names_is_missing(learned, tmp_path):
    """cases.md 100: BOS missing without a word."""
    check, findings = check_beginning(learned)
    assert check.holds
    assert findings == []
    target = faults.as_huggingface(learned, tmp_path, "F32")

    def without(entries):
        del entries["bos_token"]
        entries["add_bos_token"] = False

    faults.changed_json(target / "tokenizer_config.json", without)
    check, (finding,) = check_beginning(open_checkpoint(target))
    assert check.holds is False
    assert finding.fault.startswith("BOS is missing")


def test_two_beginnings_that_differ_are_told(learned):
    other = replace(learned, generation={**learned.generation, "bos_token_id": 2})
    _, (finding,) = check_beginning(other)
    assert "1 (<|im_start|>) to the tokenizer, and 2 (<|im_end|>)" in finding.fault
