"""Numbers are said with their signs and intervals, and what is none is said to be none."""

import math

from armillary.evaluation.records import Run
from armillary.evaluation.summary import Estimate
from armillary.evaluation.telling import (
    bounds,
    counted,
    few,
    joined,
    names_of,
    number,
    percent,
    perplexity,
    points,
    rate_with_bounds,
    with_bounds,
)


def run(name):
    return Run(name, {}, 1024, 256, 0)


def test_words_are_joined_as_people_join_them():
    assert [joined("abc"[:n]) for n in range(4)] == ["", "a", "a and b", "a, b and c"]


def test_signs_are_as_wide_as_each_other_and_nothing_is_minus_zero():
    assert number(-0.0214, signed=True) == "−0.021"
    assert number(0.0214, signed=True) == "+0.021"
    assert number(-0.0001, signed=True) == "0.000"
    assert number(-0.0001) == "0.000"
    assert number(1234.5, 1) == "1,234.5"
    assert [number(each) for each in (math.nan, math.inf, -math.inf)] == ["no number", "∞", "−∞"]


def test_intervals_are_said():
    assert with_bounds(Estimate(2.15, 2.1, 2.2, 9)) == "2.150 (2.100 to 2.200)"
    assert rate_with_bounds(Estimate(0.85, 0.64, 0.948, 20)) == "85 % (64 to 95)"
    assert counted(Estimate(0.85, 0.64, 0.948, 20)) == "17 of 20"
    assert points(-0.075) == "−7.5"
    assert percent(0.4) == "40 %"


def test_perplexity_is_the_exponential_of_the_loss():
    assert [perplexity(loss) for loss in (0.0, 2.302585, 5.0, 8.0, 800.0)] == [
        "1.00",
        "10.00",
        "148.4",
        "2,981",
        "∞",
    ]


def test_one_text_gives_no_interval():
    assert bounds(Estimate(2.0, -math.inf, math.inf, 1)) == "one text gives no interval"


def test_names_are_short_and_different():
    path = "a/very/long/path/to/some/checkpoint"
    assert names_of([run("yarn"), run(path), run("yarn")]) == ("yarn (1)", "checkpoint", "yarn (2)")
    (name,) = names_of([run("x" * 30 + "y" * 30)])
    assert len(name) <= 26
    assert name.startswith("xxx")
    assert name.endswith("yyy")


def test_long_names_lose_what_they_share_and_keep_what_tells_them_apart():
    names = [f"experiments/2026/llama-{rule}-adapted-400" for rule in ("yarn", "ntk", "yarn")]
    assert names_of([run(name) for name in names]) == ("…yarn… (1)", "…ntk…", "…yarn… (2)")
    paths = ["runs/a/long/way/off/none/model", "runs/a/long/way/off/ntk-4x/model"]
    assert names_of([run(path) for path in paths]) == ("…none…", "…ntk-4x…")


def test_a_name_within_another_is_kept_whole():
    names = names_of([run("runs/of/one/long/evening"), run("runs/of/one/long/evening/step-400")])
    assert len(set(names)) == 2
    assert all(names)


def test_a_few_models_are_named_and_many_are_counted():
    assert few(["a"], 1) == "a"
    assert few(["a", "b"], 2) == "all models"
    assert few(["a", "b"], 3) == "a and b"
    assert few("abcd", 9) == "4 of 9 models"
