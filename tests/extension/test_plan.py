"""A plan's numbers are those of extension.md §1 and its advice follows from them."""

import dataclasses

import numpy as np
import pytest

from armillary.config import DecoderConfig
from armillary.diagnosis.size import cache_bytes, parameter_count, prefill_flops
from armillary.errors import ConfigError, UserError
from armillary.extension.machine import Machine, this_machine
from armillary.extension.plan import plan
from armillary.extension.rules import RULES, RuleOptions
from armillary.rope_scaling import AnyRopeScaling, DynamicNTK, Llama3, LongRoPE, YaRN
from support.models import config, layer

LISTS = RuleOptions(
    short_factors=(1.0,) * 32, long_factors=tuple(1 + 3 * i / 31 for i in range(32))
)


def model(
    scaling: AnyRopeScaling | None = None, window: int = 2048, base: float = 1e4, width: int = 64
) -> DecoderConfig:
    """The table's model: d = 64, b = 1e4, L = 2048."""
    return DecoderConfig.uniform(
        vocab_size=61,
        d_model=48,
        n_layers=2,
        n_heads=2,
        d_head=width,
        d_ff=24,
        max_positions=window,
        rope_base=base,
        rope_scaling=scaling,
    )


def by_name(planned):
    return {
        each.name if each.over is None else (each.name, each.over): each for each in planned.rules
    }


# θ[0], θ[1], θ[16], θ[31], their sum, af: extension.md §1.
TABLE = {
    "none": (1, 0.7498942, 1.0e-2, 1.3335215e-4, 3.9979082, 1),
    "linear": (0.25, 0.1874736, 2.5e-3, 3.3338038e-5, 0.9994771, 1),
    "ntk": (1, 0.7170983, 4.8894426e-3, 3.3338034e-5, 3.5347125, 1),
    "dynamic": (1, 0.6903452, 2.6611020e-3, 1.0257858e-5, 3.2293802, 1),
    "yarn": (1, 0.7498942, 5.3846152e-3, 3.3338038e-5, 3.9306857, 1.1386294),
    "llama3": (1, 0.7498942, 8.1487326e-3, 3.3338038e-5, 3.9781673, 1),
    "longrope": (1, 0.6837270, 3.9240508e-3, 3.3338038e-5, 3.2592146, 1.0871146),
}


@pytest.mark.parametrize("name", TABLE)
def test_the_frequencies_of_each_rule_are_the_table_s(name):
    options = LISTS if name == "longrope" else None
    (rule,) = plan(model(), to=8192, rule=name, options=options).rules
    (part,) = rule.changes
    *pairs, total, factor = TABLE[name]
    assert part.change.after[[0, 1, 16, 31]] == pytest.approx(pairs, rel=3e-7)
    assert part.change.after.sum() == pytest.approx(total, rel=3e-7)
    assert part.change.attention_factor == pytest.approx(factor, rel=1e-7)
    assert part.change.before.sum() == pytest.approx(TABLE["none"][4], rel=3e-7)


def test_every_rule_is_there_with_what_it_costs():
    planned = plan(model(), to=8192)
    rules = by_name(planned)
    assert tuple(rules) == RULES
    assert {name: rule.unseen for name, rule in rules.items()} == {
        "none": 11,
        "linear": 0,
        "ntk": 10,
        "dynamic": 0,
        "yarn": 0,
        "llama3": 0,
        "longrope": 0,
    }
    assert rules["dynamic"].change_in_short_texts == 0
    assert rules["dynamic"].change_in_long_texts == pytest.approx(30.2, abs=0.05)
    assert "give --short-factors FILE" in rules["longrope"].refused


def test_yarn_is_recommended_with_the_numbers_that_say_why():
    planned = plan(model(), to=8192)
    assert planned.recommended is by_name(planned)["yarn"]
    assert planned.why.startswith(
        "11 of 32 channel pairs complete no turn in 2,048 positions, so beyond that they meet "
        "angles that were never trained; yarn slows pairs by up to 4 times, leaves 9 as they are "
    )
    assert planned.baseline == "the same text cropped to its last 2,048 tokens"


def test_a_target_within_the_window_needs_no_rule():
    planned = plan(model(), to=2048)
    assert (planned.rules, planned.recommended) == ((), None)
    assert planned.why == "2,048 positions are within the window of 2,048: no rule is needed."


def test_without_unseen_angles_the_reason_says_so():
    """At base 10 every pair turns often in 64 positions."""
    planned = plan(model(window=64, base=10.0, width=10), to=256)
    assert planned.recommended.name == "yarn"
    assert planned.why.startswith("All 5 channel pairs complete a turn in 64 positions")


def test_a_rule_that_is_carried_goes_on_and_both_readings_are_shown():
    """As in Llama 3.1 the window is twice what factor says. Multiplying moves fewer angles."""
    llama = model(Llama3(8.0, 64), window=1024, width=32)
    planned = plan(llama, to=2048)
    rules = by_name(planned)
    assert rules["llama3", "replace"].rule == Llama3(32.0, 64)
    assert rules["llama3", "multiply"].rule == Llama3(16.0, 64)
    assert planned.recommended is rules["llama3", "multiply"]
    assert planned.why.startswith("The model carries llama3 already. 10 of 16 channel pairs")
    assert ("yarn", "multiply") not in rules
    assert planned.carries == Llama3(8.0, 64)
    said = plan(llama, to=2048, rule="llama3", options=RuleOptions(over="replace"))
    assert [each.over for each in said.rules] == ["replace"]


def test_a_dynamic_rule_is_no_reason_to_go_on_with_it():
    """It is put on weights that were never trained under it."""
    planned = plan(model(DynamicNTK(2.0, 2048)), to=8192)
    assert (planned.recommended.name, planned.recommended.over) == ("yarn", "replace")


def test_what_a_longer_window_changes_is_held_against_what_was_trained():
    """Before is the carried rule in its own window, not the unscaled table."""
    planned = plan(
        model(YaRN(2.0, 1024)), to=4096, rule="yarn", options=RuleOptions(over="multiply")
    )
    (part,) = planned.rules[0].changes
    assert np.array_equal(part.change.before, YaRN(2.0, 1024).frequencies(1e4, 64, 1))
    assert np.array_equal(part.change.after, YaRN(4.0, 1024).frequencies(1e4, 64, 1))
    assert part.change.unseen.sum() == 0


def test_what_was_trained_is_what_the_old_window_s_length_asks_for():
    """Under longrope, past its original window, that is the long list."""
    rule = LongRoPE((1.0,) * 5, (2.0,) * 5, 4.0, 16)
    planned = plan(config(layer(rotary={"scaling": rule})), to=128, rule="none")
    (part,) = planned.rules[0].changes
    assert np.array_equal(part.change.before, rule.frequencies(100.0, 10, 17))
    assert part.change.change_in_short_texts == 0


def test_lists_of_two_lengths_move_short_texts_by_the_short_one():
    rule = LongRoPE((1.0,) * 5, (2.0,) * 5, 4.0, 16)
    scaled = config(layer(rotary={"scaling": rule}), max_positions=16)
    lists = RuleOptions(short_factors=(1.0,) * 5, long_factors=(4.0,) * 5, over="replace")
    (planned,) = plan(scaled, to=64, rule="longrope", options=lists).rules
    assert planned.change_in_short_texts == 0 < planned.change_in_long_texts


def test_layers_that_rotate_in_other_ways_are_planned_on_their_own():
    local = layer(attention={"window": 4})
    partial = layer(rotary={"d_rotary": 4, "base": 1e4})
    planned = plan(config(layer(), local, partial), to=256, rule="yarn")
    (rule,) = planned.rules
    assert [part.group.layers for part in rule.changes] == [(0,), (2,)]
    assert [len(part.change.before) for part in rule.changes] == [5, 2]
    assert [group.layers for group in planned.kept] == [(1,)]
    assert [bound.base for bound in planned.bounds] == [100.0, 1e4]


def test_without_layers_that_reach_there_is_nothing_to_scale():
    planned = plan(config(layer(attention={"window": 8})), to=256)
    assert (planned.recommended.name, planned.bounds) == ("none", ())
    assert planned.why.startswith("No layer rotates and reads beyond 64 positions")


def test_what_cannot_be_planned_is_refused():
    with pytest.raises(ConfigError, match="--beta-fast: the rule llama3"):
        plan(model(), to=8192, rule="llama3", options=RuleOptions(beta_fast=3.0))
    learned = config(layer(attention={"rotary": None}), position_table="learned")
    with pytest.raises(UserError, match="learned position table ends at 64"):
        plan(learned, to=65)


def test_needs_are_those_of_the_sizes_and_the_machine():
    machine = Machine("cpu", memory=10_000_000, flops=1e6)
    needs = plan(model(), to=8192, dtype="bfloat16", machine=machine).needs
    assert needs.weights == 2 * parameter_count(model())
    assert needs.cache == cache_bytes(model(), "bfloat16", 8192)
    assert needs.total == needs.weights + needs.cache + needs.activations
    assert needs.seconds == pytest.approx(prefill_flops(model(), 8192) / 1e6)
    assert needs.fits is False
    large = dataclasses.replace(machine, memory=needs.total)
    assert plan(model(), to=8192, dtype="bfloat16", machine=large).needs.fits is True
    alone = plan(model(), to=8192).needs
    assert (alone.fits, alone.seconds) == (None, None)


def test_this_machine_has_memory_and_speed():
    machine = this_machine("float32")
    assert machine.memory > 1 << 28
    assert machine.flops > 1e6


def test_what_is_said_of_a_carried_rule_leaves_the_others_and_none_alone():
    carried = model(Llama3(8.0, 64), window=1024, width=32)
    rules = by_name(plan(carried, to=2048, options=RuleOptions(over="multiply")))
    assert rules["none"].refused is None
    assert rules["llama3", "multiply"].rule == Llama3(16.0, 64)
    assert "say --over replace" in rules["yarn", "multiply"].refused
    rules = by_name(plan(model(), to=8192, options=RuleOptions(over="replace")))
    assert "the model carries no rule yet" in rules["yarn", "replace"].refused
