"""Each plot says its message, holds the summary's numbers, and keeps the models' looks."""

import math
from dataclasses import replace
from xml.etree import ElementTree as ET

import pytest

from armillary.charts.lines import Chart
from armillary.evaluation import plots
from armillary.evaluation.records import Run
from armillary.evaluation.summary import Estimate, LossAt, Rate, Summary
from armillary.evaluation.verdict import gains_of
from support.summaries import RULES, changes, comparison, summaries
from support.svg import of_class


def drawn(kind, *arguments):
    return {each.name: each for each in kind(*arguments)}


def everything():
    several = summaries()
    gains = gains_of(several, comparison())
    return [
        *plots.effective_plots(several),
        *plots.loss_plots(several, gains),
        *plots.length_plots(several),
        *plots.heat_plots(several, "passkey"),
        *plots.factor_plots(several),
        *plots.short_plots(several),
        *plots.frequency_plot(several, changes()),
    ]


def test_a_curve_holds_each_loss_and_its_interval():
    several = summaries()
    shown = drawn(plots.loss_plots, several, ())["loss-by-context"].shown
    for series, summary in zip(shown.series, several, strict=True):
        assert series.points == [(each.at, each.loss.value) for each in summary.by_context]
        assert series.bounds == [(each.loss.low, each.loss.high) for each in summary.by_context]
    (crop,) = shown.rules
    assert crop == (several[0].by_context[2].loss.value, "none cropped to 256")
    assert shown.marks == [(256, "old window 256")]


def test_differences_are_zero_at_the_old_window_and_keep_the_good_ones_in_sight():
    shown = drawn(plots.loss_plots, summaries(), ())["loss-over-cropping"].shown
    assert all((256, 0.0) in series.points for series in shown.series)
    low, high = shown.span
    best = shown.series[-1]
    assert all(low < y < high for _, y in best.points)
    assert not all(low < y < high for _, y in shown.series[0].points)


def test_one_model_alone_has_all_in_sight():
    shown = drawn(plots.loss_plots, summaries()[-1:], ())["loss-over-cropping"].shown
    assert shown.span is None


def test_messages_are_those_of_the_numbers():
    titles = {each.name: each.title for each in everything()}
    assert titles["loss-by-context"] == (
        "With 1,024 tokens yarn and llama3 predict better than none cropped to 256 tokens"
    )
    assert titles["effective-passkey"] == (
        "passkey holds longest, to 512 tokens, with yarn and llama3"
    )
    assert titles["passkey-by-length"] == "passkey in 1,024 tokens: most right by llama3 (90 %)"
    assert titles["short-loss"] == "Loss on short texts: 2.921 (none) to 4.122 (linear)"
    assert titles["frequencies"] == (
        "Of 16 channel pairs, 11 to 16 turn at another speed than in training"
    )


def test_a_message_claims_no_gain_that_is_not_shown():
    run = Run("m", {}, 1024, 256, 0)
    open_ = Estimate(-0.01, -0.03, 0.01, 12)
    loss = Estimate(2.0, 1.9, 2.1, 12)
    summary = Summary(run, by_context=(LossAt(256, loss, 9, None), LossAt(1024, loss, 9, open_)))
    title = drawn(plots.loss_plots, [summary], gains_of([summary]))["loss-by-context"].title
    assert title == "With 1,024 tokens nothing is shown to be better than cropped to 256"


def test_a_model_looks_the_same_everywhere():
    looks: dict[str, set[int]] = {name: set() for name in RULES}
    for plot in everything():
        if isinstance(plot.shown, Chart):
            for series in plot.shown.series:
                if series.look == "measured":
                    looks[series.name].add(series.number)
        elif isinstance(plot.shown, tuple):
            for bar in plot.shown:
                looks[bar.name].add(bar.number)
    assert looks == {name: {place} for place, name in enumerate(RULES)}


def test_all_plots_are_well_formed():
    drawings = [plots.as_svg(each) for each in everything()]
    assert all(ET.fromstring(svg).get("viewBox") for svg in drawings)
    names = [each.name for each in everything()]
    assert len(set(names)) == len(names)


def test_a_heat_map_has_counts_and_intervals_under_the_pointer():
    several = summaries()
    last = [*plots.heat_plots(several, "passkey")][-1]
    rate = next(
        each
        for each in several[-1].rates
        if (each.variant, each.length, each.depth) == ("passkey", 1024, 0.75)
    )
    right = round(rate.exact.value * 12)
    title = last.shown.cells[3, 4].title
    assert title.splitlines()[:2] == [
        "1,024 tokens, depth 75 %",
        f"{right} of 12 right: {100 * right / 12:.0f} % "
        f"({100 * rate.exact.low:.0f} to {100 * rate.exact.high:.0f})",
    ]
    assert "by chance 20 %" in title
    assert "the fact gives its answer +" in title
    assert last.shown.border == 3
    svg = ET.fromstring(plots.as_svg(last))
    assert title in [cell.find("title").text for cell in of_class(svg, "cell")]


def test_rates_and_bars_hold_the_summaries_values():
    several = summaries()
    shown = drawn(plots.length_plots, several)["passkey-by-length"].shown
    bars = drawn(plots.short_plots, several)["short-piqa"].shown
    reach = drawn(plots.effective_plots, several)["effective-passkey"].shown
    for place, summary in enumerate(several):
        totals = [
            each
            for each in summary.rates
            if each.variant == "passkey" and plots.factors_of(each) == ()
        ]
        points = [(each.length, 100 * each.exact.value) for each in totals]
        assert shown.series[place].points == points
        low = [100 * each.exact.low for each in totals]
        assert [bounds[0] for bounds in shown.series[place].bounds] == low
        accuracy = next(each.accuracy for each in summary.short_tasks if each.task == "piqa")
        assert (bars[place].value, bars[place].bounds[1]) == (accuracy.value, accuracy.high)
        held = summary.effective[0]
        assert (reach[place].value, reach[place].reach) == (held.length, held.longest_tried)


def test_hops_are_told_apart_from_depths_and_totals():
    names = set(drawn(plots.factor_plots, summaries()))
    assert names == {"pointer-chase-hops-256", "pointer-chase-hops-1024"}
    shown = drawn(plots.factor_plots, summaries())["pointer-chase-hops-1024"].shown
    assert [x for x, _ in shown.series[0].points] == [1, 2, 3, 4]


def test_distractors_are_drawn_where_they_vary():
    rate = Rate("passkey", 512, None, 4, None, Estimate(0.5, 0.3, 0.7, 20), None, None, None)
    more = replace(rate, distractors=16)
    summary = Summary(Run("m", {}, 512, 512, 0), rates=(rate, more))
    plot = drawn(plots.factor_plots, [summary])["passkey-distractors-512"]
    assert plot.title == "passkey with 16 distractors in 512 tokens: 10 of 20 right"


def test_frequencies_that_did_not_change_are_not_drawn():
    several = summaries()
    plot = drawn(plots.frequency_plot, several, changes())["frequencies"]
    assert [each.name for each in plot.shown.series] == ["as trained", *list(RULES)[1:]]
    assert drawn(plots.frequency_plot, several[:1], changes()[:1]) == {}
    assert drawn(plots.frequency_plot, several, [None] * 5) == {}
    assert drawn(plots.frequency_plot, several, ()) == {}


def test_a_loss_without_interval_is_drawn_without_one():
    alone = Estimate(3.0, -math.inf, math.inf, 1)
    summary = Summary(Run("m", {}, 512, 512, 0), by_context=(LossAt(512, alone, 9, None),))
    summary = replace(summary, short_loss=alone)
    for plot in [*plots.loss_plots([summary], ()), *plots.short_plots([summary])]:
        svg = plots.as_svg(plot)
        assert "inf" not in svg
        assert ET.fromstring(svg).get("viewBox")


@pytest.mark.parametrize("count", [1, 2, 5])
def test_nothing_is_drawn_of_what_was_not_measured(count):
    nothing = [Summary(each.run) for each in summaries()[:count]]
    kinds = (plots.effective_plots, plots.length_plots, plots.factor_plots, plots.short_plots)
    assert [plot for kind in kinds for plot in kind(nothing)] == []
    assert [*plots.loss_plots(nothing, ())] == []
