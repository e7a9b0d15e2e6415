"""Tables say what the summaries and the comparison say, every row of it."""

from dataclasses import replace

from armillary.evaluation import tables
from armillary.evaluation.records import Run
from armillary.evaluation.summary import Estimate, LossAt, Summary
from armillary.evaluation.verdict import gains_of
from support.summaries import RULES, comparison, summaries


def words(table):
    return [[str(cell) for cell in row] for row in table.rows]


def test_a_row_has_as_many_cells_as_the_table_has_heads():
    several, compared = summaries(), comparison()
    made = [
        tables.overview(several, gains_of(several, compared), compared),
        tables.overview(several, gains_of(several), None),
        tables.effective(several),
        tables.losses(several, [s.by_context for s in several], "tokens"),
        tables.losses(several, [s.by_position for s in several], "from"),
        tables.rates(several, "passkey"),
        tables.rates(several, "pointer-chase"),
        tables.short(several),
        tables.differences(compared, several, "loss"),
        tables.all_differences(compared, several),
        tables.unpaired(compared),
        *(table for _, table in tables.provenance(several)),
    ]
    for table in made:
        assert all(len(row) == len(table.heads) for row in table.rows)


def test_the_overview_has_gain_price_and_lengths():
    several, compared = summaries(), comparison()
    rows = words(tables.overview(several, gains_of(several, compared), compared))
    trade = compared.trades[3]
    gain, short = trade.gain.difference, trade.short.difference
    assert rows[4][:3] == ["llama3", "llama3", "256 → 1,024"]
    assert rows[4][3] == f"−{-gain.value:.3f} (−{-gain.low:.3f} to −{-gain.high:.3f})"
    assert rows[4][4].startswith(f"+{short.value:.3f} (")
    lengths = [f"{each.length:,}" for each in several[4].effective]
    assert rows[4][5:] == lengths
    assert rows[0][4] == "–"  # nothing is set beside itself


def test_every_loss_is_there_with_its_perplexity():
    several = summaries()
    rows = words(tables.losses(several, [s.by_context for s in several], "tokens"))
    assert len(rows) == 25
    assert [row[1] for row in rows[:5]] == list(RULES)
    assert [row[0] for row in rows[::5]] == ["64", "128", "256", "512", "1,024"]
    entry = several[1].by_context[4]
    row = next(row for row in rows if row[:2] == ["1,024", "linear"])
    assert row[2].startswith(f"{entry.loss.value:.3f} (")
    assert row[3] == f"{2.718281828459045**entry.loss.value:.1f}"
    assert row[5:] == [f"{entry.tokens:,}", "12"]


def test_losses_of_one_document_have_no_interval_and_absurd_ones_no_perplexity():
    odd = LossAt(64, Estimate(800.0, float("-inf"), float("inf"), 1), 5, None)
    summary = Summary(Run("m", {}, 64, 64, 0), by_context=(odd,))
    ((_, _, loss, perplexity, *_),) = words(tables.losses([summary], [summary.by_context], "at"))
    assert loss == "800.000 (one text gives no interval)"
    assert perplexity == "∞"


def test_every_rate_is_there_once_and_empty_columns_are_not():
    several = summaries()
    for variant in ("passkey", "pointer-chase", "induction"):
        rates = [each for s in several for each in s.rates if each.variant == variant]
        table = tables.rates(several, variant)
        assert len(table.rows) == len(rates)
        heads = [head for head, _ in table.heads]
        assert ("depth" in heads) == (variant == "passkey")
        assert ("hops" in heads) == (variant == "pointer-chase")
        assert "distractors" not in heads
        right = sorted(f"{round(r.exact.value * r.exact.count)} of {r.exact.count}" for r in rates)
        assert sorted(row[heads.index("right")] for row in table.rows) == right


def test_differences_are_called_what_the_comparison_calls_them():
    compared, several = comparison(), summaries()
    rows = {tuple(row[:2]): row[2:] for row in words(tables.differences(compared, several, "loss"))}
    for each in compared.differences:
        if each.family == "loss" and each.p is not None:
            cell = rows[each.measure, "" if each.at is None else f"{each.at:,}"]
            told = cell[compared.names.index(each.model) - 1]
            assert ("better" in told) == (each.verdict == "better")
            assert ("worse" in told) == (each.verdict == "worse")
            assert f"{abs(each.difference.value):.3f}" in told
    assert len(tables.all_differences(compared, several).rows) == len(compared.differences)


def test_shares_differ_in_points_of_a_hundred():
    compared, several = comparison(), summaries()
    rows = words(tables.differences(compared, several, "short tasks"))
    each = next(d for d in compared.differences if d.task == "piqa" and d.measure == "accuracy")
    row = next(row for row in rows if row[0] == "piqa")
    assert row[1].split()[0] == f"{100 * each.difference.value:+.1f}".replace("-", "−")


def test_short_texts_are_paired_with_the_first_models():
    compared, several = comparison(), summaries()
    rows = words(tables.short(several, compared))
    short = compared.trades[0].short
    assert rows[0][:2] == ["loss, nats per token", "none"]
    assert rows[0][3] == "–"
    assert rows[1][3].startswith(f"+{short.difference.value:.3f} (")
    assert rows[1][3].endswith(") worse")
    accuracy = next(row for row in rows if row[:2] == ["piqa", "linear"])
    difference = next(
        d
        for d in compared.differences
        if (d.task, d.model, d.measure) == ("piqa", "linear", "accuracy")
    )
    told = f"{100 * difference.difference.value:+.1f}".replace("-", "−")
    assert accuracy[3].startswith(told)


def test_provenance_is_whole():
    several = summaries()
    told = dict(tables.provenance(several))
    assert list(told) == [
        "What all models share",
        "What is each model's own",
        "How the tasks were set",
    ]
    shared = dict(words(told["What all models share"]))
    assert shared["parameters"] == "5,303,040"
    assert shared["seed"] == "7"
    own = {row[0]: row[1:] for row in words(told["What is each model's own"])}
    assert own["weights"] == [each.run.model["weights"] for each in several]
    assert ["perplexity", "lengths", "64, 128, 256, 512, 1024"] in words(
        told["How the tasks were set"]
    )


def test_what_a_budget_made_of_the_grid_is_told():
    one = summaries()[0]
    planned = replace(one, run=replace(one.run, plan={"minutes": 10.0, "instances": 4}))
    title = "What the budget of time made of it"
    assert words(dict(tables.provenance([planned]))[title]) == [
        ["minutes", "10.0"],
        ["instances", "4"],
    ]
    assert f"{title} for none" in dict(tables.provenance([planned, summaries()[1]]))


def test_losses_that_are_drawn_by_stretch_count_stretches():
    one = summaries()[0]
    settings = {"perplexity": {"intervals": "by stretch"}}
    few = replace(one, run=replace(one.run, tasks=settings))
    assert tables.losses([one], [one.by_context], "at").heads[-1][0] == "documents"
    assert tables.losses([few], [few.by_context], "at").heads[-1][0] == "stretches"


def test_settings_that_differ_say_whose_they_are():
    one, other = summaries()[:2]
    changed = replace(other.run, tasks={"induction": {"version": 2}})
    rows = words(
        dict(tables.provenance([one, replace(other, run=changed)]))["How the tasks were set"]
    )
    assert ["induction", "version", "1", "none"] in rows
    assert ["induction", "version", "2", "linear"] in rows
