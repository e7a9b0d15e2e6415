"""Each rule against published values, against the specification, and through files and back."""

import math
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from armillary import reference
from armillary.config import RotaryConfig
from armillary.errors import ConfigError
from armillary.rope_scaling import (
    NTK,
    DynamicNTK,
    Llama3,
    LongRoPE,
    PositionInterpolation,
    Unscaled,
    YaRN,
    base_frequencies,
    rule_from_huggingface,
    trained_frequencies,
)
from armillary.strict_dict import StrictDict
from support.models import SCALINGS

LONG_LIST = tuple(1 + 3 * i / 31 for i in range(32))


def from_entries(entries, max_positions=4096):
    """Read a file's dict as a loader does; every entry must be used."""
    strict = StrictDict(entries, "config.json: rope_scaling")
    strict.take("rope_theta", float, None)
    rule = rule_from_huggingface(strict, max_positions)
    strict.finish()
    return rule


def reference_rotary(rule, base, d_rotary):
    """The rule as the plain dict that the specification reads."""
    return RotaryConfig(base=base, d_rotary=d_rotary, scaling=rule).model_dump(mode="json")


# --- Published values ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """Values at d = 64, b = 1e4, s = 4, L = 2048, printed to eight digits from float32."""

    rule: object
    theta_0: float
    theta_1: float
    theta_16: float
    theta_31: float
    total: float
    attention_factor: float = 1.0
    length: int = 8192


TABLE = {
    "default": Row(Unscaled(), 1, 0.7498942, 1.0e-2, 1.3335215e-4, 3.9979082),
    "linear": Row(PositionInterpolation(4.0), 0.25, 0.1874736, 2.5e-3, 3.3338038e-5, 0.9994771),
    "ntk": Row(NTK(4.0), 1, 0.7170983, 4.8894426e-3, 3.3338034e-5, 3.5347125),
    "dynamic at 4096": Row(
        DynamicNTK(4.0, 2048), 1, 0.7119551, 4.3575391e-3, 2.6670428e-5, 3.4716146, length=4096
    ),
    "dynamic at 8192": Row(
        DynamicNTK(4.0, 2048), 1, 0.6903452, 2.6611020e-3, 1.0257858e-5, 3.2293802
    ),
    "yarn": Row(YaRN(4.0, 2048), 1, 0.7498942, 5.3846152e-3, 3.3338038e-5, 3.9306857, 1.1386294),
    "yarn, not truncated": Row(
        YaRN(4.0, 2048, truncate=False),
        1,
        0.7498942,
        5.0569717e-3,
        3.3338038e-5,
        3.9270328,
        1.1386294,
    ),
    "llama3": Row(Llama3(4.0, 2048), 1, 0.7498942, 8.1487326e-3, 3.3338038e-5, 3.9781673),
    "longrope": Row(
        LongRoPE((1.0,) * 32, LONG_LIST, 4.0, 2048),
        1,
        0.6837270,
        3.9240508e-3,
        3.3338038e-5,
        3.2592146,
        1.0871146,
        length=2049,
    ),
}


@pytest.mark.parametrize("row", TABLE.values(), ids=TABLE)
def test_the_published_values_come_out_to_their_printed_digits(row):
    theta = row.rule.frequencies(10000.0, 64, row.length)
    assert theta.shape == (32,)
    assert theta.dtype == np.float64
    specified = reference_rotary(row.rule, 10000.0, 64)
    wanted = [row.theta_0, row.theta_1, row.theta_16, row.theta_31, row.total, row.attention_factor]
    for values, factor in (
        (theta, row.rule.attention_factor()),
        (
            reference.rotary_frequencies(specified, row.length),
            reference.rotary_attention_factor(specified),
        ),
    ):
        found = [values[0], values[1], values[16], values[31], values.sum(), factor]
        np.testing.assert_allclose(found, wanted, rtol=3e-7)


def base_behind(theta):
    """The base whose unscaled frequencies these are."""
    return theta[1] ** -len(theta)


def test_ntk_bases_are_the_published_ones():
    assert base_behind(NTK(4.0).frequencies(10000.0, 64, 1)) == pytest.approx(41829.366, rel=1e-7)
    dynamic = DynamicNTK(4.0, 2048)
    assert base_behind(dynamic.frequencies(10000.0, 64, 4096)) == pytest.approx(52664.434)
    assert base_behind(dynamic.frequencies(10000.0, 64, 8192)) == pytest.approx(141213.757)


def test_static_ntk_turns_the_last_pair_at_exactly_a_fourth():
    theta = NTK(4.0).frequencies(10000.0, 64, 1)
    assert theta[0] == 1
    assert theta[-1] == pytest.approx(base_frequencies(10000.0, 64)[-1] / 4, rel=1e-13)


@pytest.mark.parametrize(
    ("length", "base"), [(2048, 10000), (2049, 10009.92), (4096, 30527.74), (8192, 72195.86)]
)
def test_the_dynamic_base_grows_with_the_length_and_returns(length, base):
    """Case 40. The rule keeps nothing, so a long text leaves no trace in the next short one."""
    rule = DynamicNTK(2.0, 2048)
    rule.frequencies(10000.0, 128, 50_000)
    assert base_behind(rule.frequencies(10000.0, 128, length)) == pytest.approx(base, abs=0.006)


@given(
    factor=st.floats(0.1, 100),
    window=st.integers(1, 10_000),
    shorter=st.integers(0, 10_000),
)
def test_dynamic_is_exactly_unscaled_up_to_its_window(factor, window, shorter):
    """Case 41: bit for bit, and never below the base for a length under the window."""
    theta = DynamicNTK(factor, window).frequencies(10000.0, 24, max(window - shorter, 1))
    np.testing.assert_array_equal(theta, base_frequencies(10000.0, 24))


def test_llama_3_1_8b_has_its_published_frequencies():
    """Case 31, too: 29 pairs as trained, 6 blended, 29 divided by 8."""
    theta = Llama3(8.0, 8192).frequencies(5e5, 128, 1)
    np.testing.assert_allclose(
        [theta[28], theta[29], theta[35], theta[63], theta.sum()],
        [3.2114461e-3, 2.1665706e-3, 9.5562122e-5, 3.0689259e-7, 5.3860583],
        rtol=3e-7,
    )
    divisors = base_frequencies(5e5, 128) / theta
    np.testing.assert_array_equal(divisors[:29], 1)
    blended = [1.2075, 1.5534, 2.0263, 2.6945, 3.6843, 5.2573]
    np.testing.assert_allclose(divisors[29:35], blended, atol=5e-5)
    np.testing.assert_allclose(divisors[35:], 8, rtol=1e-15)


def test_llama_3_2_1b_has_its_published_frequencies():
    """Case 31 at d = 64, s = 32."""
    divisors = base_frequencies(5e5, 64) / Llama3(32.0, 8192).frequencies(5e5, 64, 1)
    np.testing.assert_array_equal(divisors[:15], 1)
    np.testing.assert_allclose(divisors[15:18], [1.6513, 3.2923, 9.6667], atol=5e-5)
    np.testing.assert_allclose(divisors[18:], 32, rtol=1e-15)


@pytest.mark.parametrize("edge", ["low", "high"])
def test_llama3_has_no_jump_where_its_regimes_meet(edge):
    """Case 32: pair 5 lies on the edge, or a billionth to either side of it."""
    pair, base, d_rotary, window = 5, 10000.0, 24, 100
    theta = base_frequencies(base, d_rotary)[pair]
    turns = window * theta / (2 * math.pi)
    values = []
    for nudge in (1 - 1e-9, 1, 1 + 1e-9):
        at = {
            "low": {"low_freq_factor": turns * nudge, "high_freq_factor": turns * 4},
            "high": {"low_freq_factor": turns / 4, "high_freq_factor": turns * nudge},
        }[edge]
        rule = Llama3(8.0, window, **at)
        values.append(rule.frequencies(base, d_rotary, 1)[pair])
        specified = reference.rotary_frequencies(reference_rotary(rule, base, d_rotary), 1)
        values.append(specified[pair])
    wanted = theta / 8 if edge == "low" else theta
    np.testing.assert_allclose(values, wanted, rtol=1e-7)


@pytest.mark.parametrize(
    ("base", "d_rotary", "window", "raw", "rounded"),
    [
        (10000.0, 64, 2048, (8.0640, 20.1052), (8, 21)),
        (150000.0, 64, 4096, (8.0928, 17.3980), (8, 18)),
        (10000.0, 32, 256, (0.4196, 6.4402), (0, 7)),
    ],
)
def test_yarn_bounds_are_fractional_unless_truncated(base, d_rotary, window, raw, rounded):
    """Case 34."""
    smooth, stepped = YaRN(4.0, window, truncate=False), YaRN(4.0, window)
    assert smooth.ramp_bounds(base, d_rotary) == pytest.approx(raw, abs=5e-5)
    assert stepped.ramp_bounds(base, d_rotary) == rounded
    assert not np.allclose(
        smooth.frequencies(base, d_rotary, 1), stepped.frequencies(base, d_rotary, 1), rtol=1e-3
    )


def test_yarn_keeps_fast_pairs_and_divides_slow_ones():
    """The ends of the ramp, exactly; a ramp the wrong way round fails here."""
    theta, plain = YaRN(4.0, 2048).frequencies(10000.0, 64, 1), base_frequencies(10000.0, 64)
    np.testing.assert_array_equal(theta[:9], plain[:9])
    np.testing.assert_array_equal(theta[21:], plain[21:] / 4)
    assert (theta[9:21] < plain[9:21]).all()
    assert (theta[9:21] > plain[9:21] / 4).all()


def test_yarn_whose_bounds_coincide_steps_instead_of_dividing_by_zero():
    """Pair 0 turns 10.19 times in the window, just under both betas, so both bounds become 0."""
    rule = YaRN(4.0, 64, beta_fast=12.0, beta_slow=10.3)
    assert rule.ramp_bounds(10000.0, 64) == (0, 0.001)
    plain = base_frequencies(10000.0, 64)
    wanted = np.concatenate([plain[:1], plain[1:] / 4])
    specified = reference_rotary(rule, 10000.0, 64)
    np.testing.assert_array_equal(rule.frequencies(10000.0, 64, 1), wanted)
    np.testing.assert_array_equal(reference.rotary_frequencies(specified, 1), wanted)


@pytest.mark.parametrize(
    ("factor", "attention_factor"),
    [(1, 1.0), (0.5, 1.0), (4, 1.138629), (16, 1.277259), (32, 1.346574), (64, 1.415888)],
)
def test_yarn_attention_factor_grows_with_the_logarithm(factor, attention_factor):
    """Case 36."""
    assert YaRN(factor, 2048).attention_factor() == pytest.approx(attention_factor, abs=5e-7)


@pytest.mark.parametrize(
    ("mscale", "mscale_all_dim", "attention_factor"),
    [
        (None, None, 1.1386294),
        (1.0, 1.0, 1.0),
        (0.707, 0.707, 1.0),
        (0.707, 1.0, 0.9643269),
        (1.0, 0.0, 1.1386294),
        (1.0, None, 1.1386294),
        (None, 1.0, 1.1386294),
    ],
)
def test_yarn_takes_the_ratio_of_its_mscales_only_when_both_are_set(
    mscale, mscale_all_dim, attention_factor
):
    """Case 37: what multiplies cos and sin."""
    rule = YaRN(4.0, 2048, mscale=mscale, mscale_all_dim=mscale_all_dim)
    assert rule.attention_factor() == pytest.approx(attention_factor, abs=5e-8)
    specified = reference.rotary_attention_factor(reference_rotary(rule, 10000.0, 64))
    assert specified == pytest.approx(attention_factor, abs=5e-8)


@pytest.mark.parametrize("rule_class", [YaRN, LongRoPE])
@pytest.mark.parametrize("explicit", [1.0, 0.5])
def test_an_explicit_attention_factor_is_used_as_it_is(rule_class, explicit):
    """Case 36."""
    lists = (
        {"short_factor": (1.0, 1.0), "long_factor": (1.0, 2.0)} if rule_class is LongRoPE else {}
    )
    rule = rule_class(
        factor=64.0, original_window=2048, explicit_attention_factor=explicit, **lists
    )
    assert rule.attention_factor() == explicit
    assert reference.rotary_attention_factor(reference_rotary(rule, 10000.0, 4)) == explicit


def test_longrope_takes_the_long_list_strictly_beyond_its_window():
    rule = LongRoPE((1.0, 2.0), (3.0, 4.0), 4.0, 8)
    plain = base_frequencies(10000.0, 4)
    np.testing.assert_array_equal(rule.frequencies(10000.0, 4, 8), plain / [1, 2])
    np.testing.assert_array_equal(rule.frequencies(10000.0, 4, 9), plain / [3, 4])


def test_longrope_attention_factor_is_one_without_stretch():
    assert LongRoPE((1.0,), (1.0,), 1.0, 2048).attention_factor() == 1
    assert LongRoPE((1.0,), (1.0,), 0.5, 2048).attention_factor() == 1


@pytest.mark.parametrize("kind", [kind for kind in TABLE if kind != "default"])
def test_every_rule_changes_something(kind):
    """Case 24: a scaling that is read and not used would pass every other short test."""
    row = TABLE[kind]
    theta = row.rule.frequencies(10000.0, 64, row.length)
    assert not np.allclose(theta, base_frequencies(10000.0, 64), rtol=1e-3)


# --- Against the specification -------------------------------------------------------------------

KINDS = ["default", "linear", "ntk", "dynamic", "yarn", "llama3", "longrope"]
OPTIONAL_FACTORS = st.none() | st.floats(0.1, 3)


def draw_rule(data, kind):
    """A rule of that kind with parameters of any size, and a rotary width that it fits."""
    d_rotary = 2 * data.draw(st.integers(2, 20), "pairs")
    factor = data.draw(st.floats(0.25, 64), "factor")
    window = data.draw(st.integers(2, 100_000), "window")
    match kind:
        case "default":
            rule = Unscaled()
        case "linear":
            rule = PositionInterpolation(factor)
        case "ntk":
            rule = NTK(factor)
        case "dynamic":
            rule = DynamicNTK(factor, window)
        case "yarn":
            slow, fast = sorted(data.draw(st.tuples(*[st.floats(0.1, 60)] * 2), "betas"))
            rule = YaRN(
                factor,
                window,
                beta_fast=fast,
                beta_slow=slow,
                truncate=data.draw(st.booleans(), "truncate"),
                explicit_attention_factor=data.draw(OPTIONAL_FACTORS, "attention factor"),
                mscale=data.draw(st.none() | st.floats(0, 2), "mscale"),
                mscale_all_dim=data.draw(st.none() | st.floats(0, 2), "mscale_all_dim"),
            )
        case "llama3":
            low, span = data.draw(st.tuples(st.floats(0.1, 10), st.floats(0.1, 30)), "low, span")
            rule = Llama3(factor, window, low, low + span)
        case _:
            divisors = st.lists(st.floats(0.5, 80), min_size=d_rotary // 2, max_size=d_rotary // 2)
            rule = LongRoPE(
                tuple(data.draw(divisors, "short")),
                tuple(data.draw(divisors, "long")),
                factor,
                window,
                data.draw(OPTIONAL_FACTORS, "attention factor"),
            )
    return rule, d_rotary


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60)
@given(st.data(), st.floats(50, 1e7), st.integers(1, 400_000))
def test_each_rule_agrees_with_the_specification(kind, data, base, length):
    """Written twice from the formulas, so that the two check each other."""
    rule, d_rotary = draw_rule(data, kind)
    rotary = reference_rotary(rule, base, d_rotary)
    np.testing.assert_allclose(
        rule.frequencies(base, d_rotary, length),
        reference.rotary_frequencies(rotary, length),
        rtol=1e-11,
    )
    assert rule.attention_factor() == pytest.approx(
        reference.rotary_attention_factor(rotary), rel=1e-14
    )


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60)
@given(st.data(), st.integers(1, 200_000), st.integers(1, 200_000))
def test_two_lengths_share_a_regime_exactly_when_they_share_frequencies(kind, data, one, other):
    rule, d_rotary = draw_rule(data, kind)
    same = np.array_equal(
        rule.frequencies(10000.0, d_rotary, one), rule.frequencies(10000.0, d_rotary, other)
    )
    assert same == (rule.regime(one) == rule.regime(other))


def test_equal_lists_make_one_regime():
    """As for the divisors that a GGUF file brings: no length changes them."""
    rule = LongRoPE((1.0, 2.0), (1.0, 2.0), 4.0, 8)
    assert rule.regime(8) == rule.regime(9)


# --- Files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60)
@given(st.data(), st.floats(50, 1e7))
def test_what_is_written_is_read_back_as_the_same_rule(kind, data, base):
    rule, d_rotary = draw_rule(data, kind)
    entries = rule.to_huggingface(base, d_rotary)
    read = from_entries(entries, max_positions=77)
    if not isinstance(rule, NTK):
        assert entries["rope_theta"] == base
        assert read == rule
    else:  # files have no such type, so the new base stands for it
        assert read == Unscaled()
        np.testing.assert_allclose(
            read.frequencies(entries["rope_theta"], d_rotary, 1),
            rule.frequencies(base, d_rotary, 1),
            rtol=1e-14,
        )


LLAMA3_ENTRIES = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    "names",
    [
        {"rope_type": "llama3"},
        {"type": "llama3"},
        {"type": "llama3", "rope_type": "llama3"},
        {"type": None, "rope_type": "llama3"},
    ],
)
def test_the_old_and_the_new_name_of_a_type_both_count(names):
    """Case 21."""
    assert from_entries(LLAMA3_ENTRIES | names) == Llama3(8.0, 8192, 1.0, 4.0)


def test_two_names_that_disagree_are_an_error():
    """Case 21."""
    with pytest.raises(ConfigError, match="type is 'yarn' but rope_type is 'llama3'"):
        from_entries(LLAMA3_ENTRIES | {"type": "yarn", "rope_type": "llama3"})


def test_no_type_at_all_is_the_unscaled_rule():
    assert from_entries({"rope_theta": 5e5}) == Unscaled()


def test_a_dict_without_a_type_does_not_swallow_a_factor():
    """Else a scaled model would run unscaled."""
    with pytest.raises(ConfigError, match="unknown key 'factor'"):
        from_entries({"factor": 4.0})


@pytest.mark.parametrize("name", ["proportional", "ntk", "mrope", "Yarn"])
def test_an_unknown_type_is_refused_by_name(name):
    with pytest.raises(ConfigError, match=rf"rope_type '{name}' is not known; known are .*yarn"):
        from_entries({"rope_type": name, "factor": 4.0})


WINDOWED = {"factor": 4.0, "original_max_position_embeddings": 1024}
BY_TYPE = {
    "linear": {"factor": 4.0},
    "dynamic": WINDOWED,
    "yarn": WINDOWED,
    "llama3": WINDOWED | {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "longrope": WINDOWED | {"short_factor": [1, 1.5], "long_factor": [2, 3.5]},
    "su": WINDOWED | {"short_factor": [1, 1.5], "long_factor": [2, 3.5]},
}


@pytest.mark.parametrize("name", BY_TYPE)
@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_the_factor_is_used_once_and_the_window_stays(name, key):
    """Case 27: 4 × 1024 is the 4096 that the file already states, under every alias."""
    rule = from_entries({key: name} | BY_TYPE[name], max_positions=4096)
    assert rule.factor == 4
    assert getattr(rule, "original_window", 1024) == 1024


def test_the_factor_in_a_file_wins_over_the_windows():
    """Case 33: 4, not 40960 / 32768."""
    entries = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    assert from_entries(entries, max_positions=40960).factor == 4


@pytest.mark.parametrize("name", ["yarn", "longrope"])
def test_without_a_factor_the_windows_say_it(name):
    entries = {key: value for key, value in BY_TYPE[name].items() if key != "factor"}
    assert from_entries({"type": name} | entries, max_positions=8192).factor == 8


@pytest.mark.parametrize("name", ["yarn", "llama3", "longrope"])
def test_a_missing_original_window_is_an_error_where_a_rule_needs_it(name):
    entries = {
        key: value
        for key, value in BY_TYPE[name].items()
        if key != "original_max_position_embeddings"
    }
    with pytest.raises(ConfigError, match="'original_max_position_embeddings' is missing"):
        from_entries({"rope_type": name} | entries)


def test_dynamic_files_state_the_original_window_as_the_models():
    assert from_entries({"type": "dynamic", "factor": 2.0}, max_positions=2048) == DynamicNTK(
        2.0, 2048
    )


@pytest.mark.parametrize("given_factor", [{"attention_factor": None}, {}])
def test_a_null_attention_factor_is_an_absent_one(given_factor):
    """Case 36."""
    rule = from_entries({"rope_type": "yarn"} | WINDOWED | given_factor)
    assert rule.attention_factor() == pytest.approx(1.138629, abs=5e-7)


def test_every_yarn_entry_is_read():
    """Cases 23, 34, 36 and 37: none of these is passed over."""
    entries = WINDOWED | {
        "rope_type": "yarn",
        "beta_fast": 16,
        "beta_slow": 2,
        "truncate": False,
        "attention_factor": 0.5,
        "mscale": 0.707,
        "mscale_all_dim": 1,
    }
    assert from_entries(entries) == YaRN(4.0, 1024, 16.0, 2.0, False, 0.5, 0.707, 1.0)


def test_an_entry_of_another_rule_is_refused():
    with pytest.raises(ConfigError, match="unknown key 'beta_fast'"):
        from_entries(LLAMA3_ENTRIES | {"rope_type": "llama3", "beta_fast": 32})


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"factor": -1.0}, "YaRN: factor is -1.0; it must be a positive number"),
        ({"factor": "4"}, "'factor' must be float, not str '4'"),
        ({"original_max_position_embeddings": 1024.5}, "must be int, not float 1024.5"),
        ({"beta_fast": 1.0, "beta_slow": 2.0}, "beta_fast is 1.0 and beta_slow 2.0"),
        ({"truncate": 1}, "'truncate' must be bool, not int 1"),
        ({"mscale": -0.5}, "mscale is -0.5; it must be 0 or a positive number"),
        ({"attention_factor": 0.0}, "attention_factor is 0.0; it must be a positive number"),
    ],
)
def test_an_impossible_entry_is_told_with_file_and_value(entries, message):
    with pytest.raises(ConfigError, match=rf"^config\.json: rope_scaling: .*{message}"):
        from_entries({"rope_type": "yarn"} | WINDOWED | entries)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: PositionInterpolation(0.0), "factor is 0.0"),
        (lambda: PositionInterpolation(math.inf), "factor is inf"),
        (lambda: NTK(math.nan), "factor is nan"),
        (lambda: DynamicNTK(2.0, 0), "original_window is 0"),
        (lambda: Llama3(8.0, 64, 4.0, 4.0), "high_freq_factor is 4.0 and low_freq_factor 4.0"),
        (lambda: LongRoPE((1.0,), (1.0, 2.0), 4.0, 64), "has 1 entries and long_factor 2"),
        (lambda: LongRoPE((1.0, 0.0), (1.0, 2.0), 4.0, 64), r"short_factor\[1\] is 0.0"),
        (lambda: LongRoPE((1.0,), (1.0,), 4.0, 1), "original_window is 1"),
        (lambda: LongRoPE((1.0,), (1.0,), 4.0, 64).frequencies(1e4, 4, 1), "1 factors for 2"),
        (lambda: NTK(2.0).frequencies(1e4, 2, 1), "d_rotary is 2"),
        (lambda: NTK(1e300).frequencies(1e4, 4, 1), "too large for a number; lower the factor"),
    ],
)
def test_an_impossible_rule_is_refused(build, message):
    with pytest.raises(ConfigError, match=message):
        build()


# --- Against transformers ------------------------------------------------------------------------

PEER_ENTRIES = {
    "linear": [{"factor": 4.0}],
    # The peer takes M from max_position_embeddings, whatever the dict says of the original one.
    "dynamic": [{"factor": 2.0}, {"factor": 3.5}],
    "yarn": [
        {"factor": 4.0},
        {"factor": 4.0, "truncate": False},
        {"factor": 16.0, "beta_fast": 20.0, "beta_slow": 2.0},
        {"factor": 4.0, "attention_factor": 0.5},
        {"factor": 4.0, "mscale": 0.707, "mscale_all_dim": 1.0},
        {"factor": 4.0, "mscale": 0.707},
    ],
    "llama3": [{"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}],
    "longrope": [
        {
            "factor": 4.0,
            "short_factor": [1 + 0.1 * i for i in range(12)],
            "long_factor": [1 + 0.5 * i for i in range(12)],
        }
    ],
}


@pytest.mark.peer
@pytest.mark.parametrize(
    ("name", "entries"),
    [(name, entries) for name, several in PEER_ENTRIES.items() for entries in several],
)
@pytest.mark.parametrize("length", [100, 512, 513, 4000])
def test_frequencies_equal_those_of_transformers(name, entries, length):
    """24 rotary channels: not 48 / 6, nor a whole head. The peer counts in float32."""
    from transformers import LlamaConfig
    from transformers import modeling_rope_utils as utilities

    needs_window = name in {"yarn", "llama3", "longrope"}
    entries = {"rope_type": name, "rope_theta": 50000.0} | entries
    if needs_window:
        entries["original_max_position_embeddings"] = 512
    peer_config = LlamaConfig(
        hidden_size=48,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=48,
        max_position_embeddings=2048 if needs_window else 512,
        rope_parameters=entries | {"partial_rotary_factor": 0.5},
    )
    theta, factor = utilities.ROPE_INIT_FUNCTIONS[name](peer_config, "cpu", seq_len=length)

    rule = from_entries(entries, max_positions=peer_config.max_position_embeddings)
    np.testing.assert_allclose(rule.frequencies(50000.0, 24, length), theta.numpy(), rtol=2e-6)
    assert rule.attention_factor() == pytest.approx(factor, rel=1e-12)


@pytest.mark.peer
def test_every_type_of_transformers_is_either_known_or_refused():
    from transformers import modeling_rope_utils as utilities

    assert set(utilities.ROPE_INIT_FUNCTIONS) == {*PEER_ENTRIES, "proportional"}


# --- As models know them -------------------------------------------------------------------------


def rounded_once(base: float, d_rotary: int) -> np.ndarray:
    """float32(1 / float32(b^float32(2i/d))), with b^x to 50 digits before it is rounded."""
    from decimal import Decimal, localcontext

    with localcontext() as context:
        context.prec = 50
        result = []
        for i in range(0, d_rotary, 2):
            exponent = Decimal(float(np.float32(i) / np.float32(d_rotary)))
            power = (Decimal(base).ln() * exponent).exp()
            result.append(np.float32(1) / np.float32(float(power)))
    return np.array(result)


@pytest.mark.parametrize("d_rotary", [10, 64, 80, 128])
@pytest.mark.parametrize("base", [100.0, 1e4, 1.3e5, 5e5, 1e6])
def test_trained_frequencies_are_float32_of_each_step(base, d_rotary):
    """The same whatever computes them: each step is rounded to nearest once."""
    trained = trained_frequencies(Unscaled(), base, d_rotary, 1)
    assert trained.dtype == np.float64
    np.testing.assert_array_equal(trained.astype(np.float32), rounded_once(base, d_rotary))
    assert (trained != base_frequencies(base, d_rotary)).any()


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("length", [4, 8, 9, 300])
def test_what_a_rule_makes_of_trained_frequencies_is_exact(name, length):
    rule = SCALINGS[name]
    trained = trained_frequencies(rule, 100.0, 10, length)
    unscaled = trained_frequencies(Unscaled(), 100.0, 10, length)
    exact = rule.frequencies(100.0, 10, length) / base_frequencies(100.0, 10)
    np.testing.assert_allclose(trained / unscaled, exact, rtol=1e-15)
