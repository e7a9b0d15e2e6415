"""Divisors are tried on the model's own weights, and cost what the rules they stand for cost."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from armillary.checkpoints import open_checkpoint, write_huggingface
from armillary.errors import ConfigError, UserError
from armillary.extension.loss_at_length import LongRoPETarget, LossAtLength, passages
from armillary.extension.rules import RuleOptions, extend
from armillary.weights import to_write
from support.tiny_model import tiny_model

TEXT = "Every sphere has its own time to come back, and turns slowly around another. " * 12


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    lm = tiny_model(directory / "tokenizer", max_positions=64)
    write_huggingface(directory / "model", lm.config, to_write(lm.decoder), lm.tokenizer)
    return open_checkpoint(directory / "model"), lm


def measured(source, **options):
    checkpoint, lm = source
    target = LongRoPETarget(checkpoint.config, 256, RuleOptions(**options))
    return LossAtLength.of(checkpoint, target, passages(lm.tokenizer, TEXT, 256, 3))


@pytest.mark.parametrize("rule", ["linear", "ntk", "yarn"])
def test_a_start_costs_what_its_rule_costs_under_the_same_attention_factor(source, rule):
    planned = extend(source[0].config, 256, rule)
    fitness = measured(source, attention_factor=planned.rule.attention_factor())
    divisors = fitness.target.starts()[rule]
    assert fitness(divisors) == pytest.approx(fitness.under(planned.config), abs=1e-6)
    others = {name: fitness(f) for name, f in fitness.target.starts().items()}
    assert len({round(value, 4) for value in others.values()}) == 3  # they are told apart


def test_it_is_the_cross_entropy_of_all_tokens_but_the_first(source):
    _, lm = source
    fitness = measured(source)
    divisors = fitness.target.starts()["yarn"]
    config = fitness.target.rule(divisors)
    total = []
    for ids in fitness.ids:
        fitness_model = type(lm.decoder)(config)
        fitness_model.load_state_dict(lm.decoder.state_dict())
        with torch.no_grad():
            logits = fitness_model.eval()(torch.from_numpy(ids)[None])[0]
        total.append(F.cross_entropy(logits[:-1], torch.from_numpy(ids[1:])))
    assert fitness(divisors) == pytest.approx(float(torch.stack(total).mean()), abs=1e-5)


def test_what_is_tried_leaves_the_model_as_it_was(source):
    fitness = measured(source)
    before = fitness.under(source[0].config.model_copy(update={"max_positions": 256}))
    fitness(fitness.target.starts()["linear"])
    after = fitness.under(source[0].config.model_copy(update={"max_positions": 256}))
    assert before == after


def test_a_model_that_carries_a_rule_is_searched_from_its_original_window(source):
    carrying = extend(source[0].config, 128, "yarn").config
    target = LongRoPETarget(carrying, 256, RuleOptions(over="replace"))
    assert target.factor == 4.0
    plain = LongRoPETarget(source[0].config, 256, RuleOptions())
    assert target.starts() == plain.starts()
    with pytest.raises(ConfigError, match="say which is meant"):
        LongRoPETarget(carrying, 256, RuleOptions()).starts()


def test_passages_are_spread_over_the_text_and_begin_as_a_text_does(source):
    _, lm = source
    ids = passages(lm.tokenizer, TEXT, 256, 3)
    assert ids.shape == (3, 256)
    whole = lm.tokenizer.encode(TEXT, bos=False)
    begin = lm.tokenizer.begin([])
    own = 256 - len(begin)
    assert ids[0].tolist() == [*begin, *whole[:own]]
    assert ids[-1].tolist() == [*begin, *whole[-own:]]
    assert passages(lm.tokenizer, TEXT, 256, 100).shape[0] == len(whole) // own


def test_a_text_that_is_too_short_is_refused_with_both_numbers(source):
    with pytest.raises(UserError, match="the text has 5 tokens, and a passage takes"):
        passages(source[1].tokenizer, "short", 256, 1)


def test_the_same_text_has_the_same_checksum(source):
    assert measured(source).checksum == measured(source).checksum
    other = np.roll(measured(source).ids, 1)
    assert LossAtLength(None, None, other).checksum != measured(source).checksum
