"""A rule goes on the layers that it is for, with what was said of it, or is refused in one line."""

import pytest

from armillary.config import DecoderConfig, RotaryConfig
from armillary.errors import ConfigError
from armillary.extension.rules import RULES, RuleOptions, extend, kept_notices
from armillary.rope_scaling import (
    NTK,
    DynamicNTK,
    Llama3,
    LongRoPE,
    PositionInterpolation,
    YaRN,
)
from support.models import config, layer

LISTS = {"short_factors": (1.0,) * 5, "long_factors": (1.0, 1.5, 2.0, 3.0, 4.0)}


def scaled(rule, **entries):
    return config(*[layer(rotary={"scaling": rule})] * 2, **entries)


def rule_of(extension, number=0):
    return extension.config.layers[number].attention.rotary.scaling


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("linear", {}, PositionInterpolation(4.0)),
        ("ntk", {}, NTK(4.0)),
        ("dynamic", {}, DynamicNTK(4.0, 64)),
        ("yarn", {}, YaRN(4.0, 64)),
        ("llama3", {}, Llama3(4.0, 64)),
        ("longrope", LISTS, LongRoPE((1.0,) * 5, (1.0, 1.5, 2.0, 3.0, 4.0), 4.0, 64)),
        (
            "yarn",
            {"beta_fast": 8.0, "beta_slow": 2.0, "truncate": False, "attention_factor": 0.5},
            YaRN(4.0, 64, 8.0, 2.0, False, 0.5),
        ),
        ("llama3", {"low": 0.5, "high": 2.0}, Llama3(4.0, 64, 0.5, 2.0)),
        ("yarn", {"original_window": 32}, YaRN(8.0, 32)),
        ("linear", {"original_window": 32}, PositionInterpolation(8.0)),
    ],
)
def test_a_rule_carries_what_was_said_and_else_the_windows(name, options, expected):
    extension = extend(config(), 256, name, RuleOptions(**options))
    assert [rule_of(extension, i) for i in (0, 1)] == [expected, expected]
    assert extension.config.max_positions == 256
    assert (extension.rule, extension.notices) == (expected, ())


def test_nothing_but_rule_and_window_changes():
    before = config()
    after = extend(before, 256, "yarn").config
    plain = [
        {**entry["attention"]["rotary"], "scaling": None} for entry in after.to_dict()["layers"]
    ]
    assert plain[0] == {**before.layers[0].attention.rotary.model_dump(), "scaling": None}
    back = after.model_copy(update={"layers": before.layers, "max_positions": 64})
    assert back == before


def test_no_rule_lengthens_the_window_alone():
    extension = extend(config(), 256, "none")
    assert extension.config == config(max_positions=256)
    assert extension.rule is None


def test_a_factor_that_is_given_wins_over_the_windows_and_both_are_said():
    """Case 33."""
    extension = extend(config(), 80, "yarn", RuleOptions(factor=4.0))
    assert rule_of(extension) == YaRN(4.0, 64)
    assert extension.notices == (
        "factor 4 × 64 positions is 256, not the target 80; the factor is used as it stands",
    )


def test_layers_that_read_no_further_keep_window_and_frequencies():
    """A layer whose window is wider than the old one meets new distances, the others do not."""
    local, wide = (layer(attention={"window": window}) for window in (64, 65))
    extension = extend(config(local, layer(), wide, local), 256, "yarn")
    kinds = [each.attention.rotary.scaling.kind for each in extension.config.layers]
    assert kinds == ["default", "yarn", "yarn", "default"]
    assert [each.attention.window for each in extension.config.layers] == [64, None, 65, 64]
    assert kept_notices(extension.kept) == (
        "layers 0, 3: window of 64 and frequencies are kept, since nothing further is read",
    )


def test_layers_of_other_bases_and_widths_get_the_rule_on_their_own():
    """Partial rotation: frequencies are those of the rotated channels alone."""
    other = layer(rotary={"base": 1e4, "d_rotary": 6})
    extension = extend(config(layer(), other, layer(attention={"rotary": None})), 256, "llama3")
    rotary = [each.attention.rotary for each in extension.config.layers]
    assert [(r.base, r.d_rotary, r.scaling.kind) for r in rotary[:2]] == [
        (100.0, 10, "llama3"),
        (1e4, 6, "llama3"),
    ]
    assert rotary[2] is None


def refused(model: DecoderConfig, to: int, name: str, **options) -> str:
    with pytest.raises(ConfigError) as error:
        extend(model, to, name, RuleOptions(**options))
    return str(error.value)


@pytest.mark.parametrize("name", RULES)
def test_a_target_that_is_not_above_the_window_is_refused(name):
    for to in (64, 63):
        assert f"target {to} is not above the model's window of 64" in refused(config(), to, name)


@pytest.mark.parametrize("name", RULES)
def test_a_learned_table_is_refused(name):
    learned = config(layer(attention={"rotary": None}), position_table="learned")
    assert "learned position table of 64 rows" in refused(learned, 256, name)


def test_positions_that_do_not_rotate_take_no_rule():
    sinusoidal = config(layer(attention={"rotary": None}), position_table="sinusoidal")
    assert "take --rule none" in refused(sinusoidal, 256, "yarn")
    assert extend(sinusoidal, 256, "none").config.max_positions == 256
    local = config(layer(attention={"window": 8}))
    assert "no layer rotates and reads beyond the window of 64" in refused(local, 256, "yarn")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("yarn", {"factor": 0.5}, "--factor 0.5: a window grows by a factor of 1 or more"),
        ("yarn", {"factor": float("nan")}, "--factor nan: a window grows"),
        ("linear", {"original_window": 512}, "--original-window 512 is above the target 256"),
        ("yarn", {"original_window": 0}, "--original-window 0: must be at least 1"),
        ("llama3", {"beta_fast": 8.0}, "--beta-fast: the rule llama3 has no such option"),
        ("none", {"factor": 2.0}, "--factor: the rule none has no such option"),
        ("yarn", {"low": 1.0}, "--low: the rule yarn has no such option"),
        ("yarn", {"over": "replace"}, "--over replace: the model carries no rule yet"),
        ("yarn", {"beta_slow": 40.0}, "beta_fast is 32.0 and beta_slow 40.0"),
        ("llama3", {"low": 4.0}, "high_freq_factor is 4.0 and low_freq_factor 4.0"),
        ("longrope", {}, "give --short-factors FILE"),
        ("longrope", {"short_factors": (1.0,) * 5}, "give --long-factors FILE"),
        ("longrope", LISTS | {"long_factors": (1.0,) * 4}, "5 entries and long_factor 4"),
        (
            "longrope",
            {"short_factors": (1.0,) * 4, "long_factors": (1.0,) * 4},
            "4 factors for 5 channel pairs",
        ),
    ],
)
def test_what_a_rule_cannot_do_is_refused(name, options, message):
    assert message in refused(config(), 256, name, **options)


def test_a_factor_over_a_factor_must_be_said_and_both_numbers_are():
    """Llama 3.1's window is twice what its factor says, so the two readings differ."""
    model = scaled(Llama3(8.0, 16), max_positions=256)
    assert refused(model, 512, "llama3") == (
        "the model already carries llama3 with factor 8 over 16 positions; say which is meant: "
        "--over replace gives factor 32, --over multiply gives factor 16"
    )
    assert rule_of(extend(model, 512, "llama3", RuleOptions(over="replace"))) == Llama3(32.0, 16)
    assert rule_of(extend(model, 512, "llama3", RuleOptions(over="multiply"))) == Llama3(16.0, 16)
    three = RuleOptions(over="multiply", factor=3.0)
    assert rule_of(extend(model, 512, "llama3", three)) == Llama3(24.0, 16)


def test_multiplying_keeps_the_other_settings_and_says_so():
    model = scaled(YaRN(4.0, 16, beta_fast=8.0, explicit_attention_factor=0.7))
    extension = extend(model, 128, "yarn", RuleOptions(over="multiply", beta_slow=2.0))
    assert rule_of(extension) == YaRN(8.0, 16, 8.0, 2.0, explicit_attention_factor=0.7)
    assert extension.notices == (
        "the model's own attention factor 0.7 is kept; --attention-factor gives another",
    )


def test_another_rule_replaces_and_cannot_multiply():
    model = scaled(PositionInterpolation(4.0))
    assert "its factor cannot be multiplied into yarn" in refused(
        model, 128, "yarn", over="multiply"
    )
    message = refused(model, 128, "yarn", over="replace")
    assert "linear with factor 4, which does not say the window before it" in message
    said = RuleOptions(over="replace", original_window=16)
    assert rule_of(extend(model, 128, "yarn", said)) == YaRN(8.0, 16)
    assert "--original-window goes with --over replace" in refused(
        model, 128, "linear", over="multiply", original_window=16
    )


def test_the_lists_of_longrope_cannot_be_multiplied():
    model = scaled(LongRoPE((1.0,) * 5, (2.0,) * 5, 4.0, 16))
    assert "say --over replace" in refused(model, 128, "longrope", over="multiply", **LISTS)
    made = rule_of(extend(model, 128, "longrope", RuleOptions(over="replace", **LISTS)))
    assert (made.factor, made.original_window, made.long_factor[4]) == (8.0, 16, 4.0)


def test_no_rule_keeps_the_one_that_is_carried():
    model = scaled(YaRN(4.0, 16))
    assert extend(model, 128, "none").config == scaled(YaRN(4.0, 16), max_positions=128)


def test_layers_under_different_rules_are_refused():
    model = config(layer(rotary={"scaling": YaRN(4.0, 16)}), layer())
    assert "layers carry different rules, yarn (layer 0), default (layer 1)" in refused(
        model, 128, "yarn"
    )


def test_the_rotary_settings_are_validated():
    assert isinstance(rule_of(extend(config(), 256, "ntk")), NTK)
    narrow = config(layer(rotary=RotaryConfig(d_rotary=2).model_dump(exclude={"scaling"})))
    assert "needs at least 4 rotary channels" in refused(narrow, 256, "ntk")
