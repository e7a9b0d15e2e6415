"""Summaries and comparisons → tables of words, for the page and the card.

A head is a word and its kind: "n" for numbers, "n wrap" for those whose interval may stand below
them, "any" for what may break anywhere, "" for words.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from armillary.evaluation.comparison import Comparison, Difference, Family
from armillary.evaluation.records import Setting
from armillary.evaluation.summary import LossAt, Rate, Summary
from armillary.evaluation.telling import (
    counted,
    drawn_by,
    names_of,
    number,
    percent,
    perplexity,
    points,
    rate_with_bounds,
    with_bounds,
)
from armillary.evaluation.verdict import (
    Gain,
    effective_of,
    short_differences,
    short_name,
    side_of,
    variants,
)

Head = tuple[str, str]
SHARES = {"exact", "first", "accuracy", "normalised accuracy"}


@dataclass(frozen=True)
class Model:
    """A cell that names the model at a place of the list."""

    place: int
    name: str

    def __str__(self) -> str:
        return self.name


Cell = str | Model


@dataclass(frozen=True)
class Table:
    """Rows of cells under heads."""

    heads: Sequence[Head]
    rows: Sequence[Sequence[Cell]]


def models_of(summaries: Sequence[Summary]) -> list[Model]:
    """The models as cells."""
    return [Model(*each) for each in enumerate(names_of([s.run for s in summaries]))]


# In short


def overview(
    summaries: Sequence[Summary], gains: Sequence[Gain], comparison: Comparison | None
) -> Table:
    """A row for each model: what it is, what it gains, to where it answers, what it costs."""
    models = models_of(summaries)
    by_name = {each.model: each for each in gains}
    short = short_differences(comparison)
    heads = [
        ("model", ""),
        ("rule", ""),
        ("window", "n"),
        ("longest context over cropping, nats per token", "n wrap"),
        *([(f"{short_name(short.values())} over {models[0]}'s", "n wrap")] if short else []),
        *((f"{variant} to", "n") for variant in variants(summaries)),
    ]
    rows = []
    for model, summary in zip(models, summaries, strict=True):
        gain = by_name.get(model.name)
        row: list[Cell] = [
            model,
            told(summary.run.model.get("rule")),
            _window(summary),
            "–" if gain is None else with_bounds(gain.over, signed=True),
        ]
        if short:
            lost = short.get(model.place)
            row.append("–" if lost is None else with_bounds(lost.difference, signed=True))
        row += [_length(summary, variant) for variant in variants(summaries)]
        rows.append(row)
    return Table(heads, rows)


def _window(summary: Summary) -> str:
    run = summary.run
    if run.window == run.original_window:
        return f"{run.window:,}"
    return f"{run.original_window:,} → {run.window:,}"


def _length(summary: Summary, variant: str) -> str:
    held = effective_of(summary, variant)
    if held is None:
        return "–"
    return "no length" if held.length is None else f"{held.length:,}"


def effective(summaries: Sequence[Summary]) -> Table:
    """Each effective length with what it was held against."""
    rows: list[tuple[str, Model, str, str, str, str]] = [
        (
            each.variant,
            model,
            "none" if each.length is None else f"{each.length:,}",
            f"{each.longest_tried:,}",
            rate_with_bounds(each.short),
            percent(each.bar),
        )
        for model, summary in zip(models_of(summaries), summaries, strict=True)
        for each in summary.effective
    ]
    heads = [
        ("questions", ""),
        ("model", ""),
        ("hold to, tokens", "n"),
        ("tried to", "n"),
        ("right at the shortest", "n"),
        ("bar", "n"),
    ]
    order = variants(summaries)
    rows.sort(key=lambda row: order.index(row[0]))
    return Table(heads, rows)


# Losses


def losses(summaries: Sequence[Summary], curves: Sequence[Sequence[LossAt]], at: str) -> Table:
    """Every loss of curves, with its perplexity, interval and counts."""
    paired = any(each.over_crop for curve in curves for each in curve)
    rows = [
        (each.at, model.place, _loss_row(each, model, paired))
        for model, curve in zip(models_of(summaries), curves, strict=True)
        for each in curve
    ]
    heads = [
        (at, "n"),
        ("model", ""),
        ("nats per token", "n"),
        ("perplexity", "n"),
        *([("over cropping", "n")] if paired else []),
        ("tokens", "n"),
        (drawn_by([s.run for s in summaries]), "n"),
    ]
    return Table(heads, [row for _, _, row in sorted(rows, key=lambda each: each[:2])])


def _loss_row(each: LossAt, model: Model, paired: bool) -> list[Cell]:
    over = "–" if each.over_crop is None else with_bounds(each.over_crop, signed=True)
    return [
        f"{each.at:,}",
        model,
        with_bounds(each.loss),
        perplexity(each.loss.value),
        *([over] if paired else []),
        f"{each.tokens:,}",
        f"{each.loss.count:,}",
    ]


# Questions


def rates(summaries: Sequence[Summary], variant: str) -> Table:
    """Every rate of one kind of question; columns in which nothing varies are left out."""
    found = [
        (model, each)
        for model, summary in zip(models_of(summaries), summaries, strict=True)
        for each in summary.rates
        if each.variant == variant
    ]
    found.sort(key=lambda pair: (*_order(pair[1]), pair[0].place))
    columns: list[tuple[Head, list[Cell]]] = [
        (("tokens", "n"), [f"{each.length:,}" for _, each in found]),
        (("depth", "n"), ["" if r.depth is None else percent(r.depth) for _, r in found]),
        (("distractors", "n"), [_whole(r.distractors) for _, r in found]),
        (("hops", "n"), [_whole(r.hops) for _, r in found]),
        (("model", ""), [model for model, _ in found]),
        (("right", "n"), [counted(each.exact) for _, each in found]),
        (("share", "n"), [rate_with_bounds(each.exact) for _, each in found]),
        (
            ("likeliest of the candidates", "n"),
            ["" if r.first is None else rate_with_bounds(r.first) for _, r in found],
        ),
        (("by chance", "n"), ["" if r.chance is None else percent(r.chance) for _, r in found]),
        (
            ("nats that the fact gives", "n"),
            ["" if r.gain is None else with_bounds(r.gain, 2, signed=True) for _, r in found],
        ),
    ]
    kept = [(head, cells) for head, cells in columns if any(map(str, cells))]
    return Table([head for head, _ in kept], [*zip(*(cells for _, cells in kept), strict=True)])


def _order(rate: Rate) -> tuple[float, ...]:
    unset = (rate.distractors, rate.hops, rate.depth)
    return (sum(each is not None for each in unset), rate.length, *(each or 0 for each in unset))


def _whole(value: int | None) -> str:
    return "" if value is None else f"{value:,}"


# Short texts


def short(summaries: Sequence[Summary], comparison: Comparison | None = None) -> Table:
    """Loss on short texts and short tasks, by model, and paired with the first one's."""
    rows: list[tuple[Cell, ...]] = []
    models = models_of(summaries)
    beside = _beside(comparison)
    for model, summary in zip(models, summaries, strict=True):
        if summary.short_loss:
            loss = summary.short_loss
            paired = beside.get((model.place, None), "–")
            told = with_bounds(loss)
            rows.append(("loss, nats per token", model, told, paired, "–", f"{loss.count:,}"))
    for task in dict.fromkeys(each.task for s in summaries for each in s.short_tasks):
        for model, summary in zip(models, summaries, strict=True):
            rows += [
                (
                    task,
                    model,
                    rate_with_bounds(each.accuracy),
                    beside.get((model.place, task), "–"),
                    "–" if each.normalised is None else rate_with_bounds(each.normalised),
                    f"{each.accuracy.count:,}",
                )
                for each in summary.short_tasks
                if each.task == task
            ]
    heads = [
        ("what", ""),
        ("model", ""),
        ("measured", "n"),
        (f"paired with {models[0]}", "n"),
        ("by log-probability per byte", "n"),
        ("instances", "n"),
    ]
    kept = [i for i in range(len(heads)) if i != 3 or comparison is not None]
    if all(row[4] == "–" for row in rows):
        kept.remove(4)
    return Table([heads[i] for i in kept], [[row[i] for i in kept] for row in rows])


def _beside(comparison: Comparison | None) -> dict[tuple[int, str | None], str]:
    """The differences of short loss (no task) and of accuracies, by the model's place."""
    if comparison is None:
        return {}
    return {
        (
            comparison.names.index(each.model),
            each.task if each.measure == "accuracy" else None,
        ): f"{_value_with_bounds(each)}{'' if side_of(each) == 'open' else ' ' + side_of(each)}"
        for each in comparison.differences
        if each.measure in ("short loss", "accuracy")
    }


# Comparison


def differences(comparison: Comparison, summaries: Sequence[Summary], family: Family) -> Table:
    """What was measured, with how far each model is from the first; * for what is real."""
    models = models_of(summaries)[1:]
    cells: dict[tuple[str, str], dict[str, Difference]] = {}
    for each in comparison.differences:
        if each.family == family and each.p is not None and each.measure in _IN_SHORT:
            key = (_measured(each), "" if each.at is None else f"{each.at:,}")
            cells.setdefault(key, {})[each.model] = each
    measured = list(dict.fromkeys(what for what, _ in cells))
    rows = [
        [what, at, *(_difference(found.get(name)) for name in comparison.names[1:])]
        for (what, at), found in sorted(cells.items(), key=lambda each: measured.index(each[0][0]))
    ]
    heads = [("measured", ""), ("tokens", "n"), *((str(model), "n") for model in models)]
    if not any(at for _, at in cells):
        return Table([heads[0], *heads[2:]], [[row[0], *row[2:]] for row in rows])
    return Table(heads, rows)


_IN_SHORT = {
    *("loss", "key-token loss", "loss over cropping", "short loss"),
    *("exact", "accuracy", "normalised accuracy"),
}


def _measured(each: Difference) -> str:
    if each.family == "loss":
        return each.measure
    what = each.variant or each.task
    return what if each.measure in ("exact", "accuracy") else f"{what}, {each.measure}"


def _difference(each: Difference | None) -> str:
    if each is None:
        return "–"
    value = each.difference.value
    text = points(value) if each.measure in SHARES else number(value, signed=True)
    side = side_of(each)
    return text if side == "open" else f"{text} {side}"


def all_differences(comparison: Comparison, summaries: Sequence[Summary]) -> Table:
    """Every difference with its interval and p."""
    models = dict(zip(comparison.names, models_of(summaries), strict=True))
    rows = [
        (
            models[each.model],
            _measured(each) if each.family == "loss" else f"{_measured(each)}, {each.measure}",
            "" if each.at is None else f"{each.at:,}",
            _value(each, each.first),
            _value(each, each.other),
            _value_with_bounds(each),
            "–" if each.adjusted is None else _p(each.adjusted),
            f"{each.pairs:,}",
            each.verdict if each.p is not None else "not tested",
        )
        for each in comparison.differences
    ]
    heads = [
        ("model", ""),
        ("measured", ""),
        ("tokens", "n"),
        (f"{models[comparison.names[0]]}", "n"),
        ("this model", "n"),
        ("difference", "n"),
        ("p, corrected", "n"),
        ("pairs", "n"),
        ("shown", ""),
    ]
    return Table(heads, rows)


def _value(each: Difference, value: float) -> str:
    return percent(value) if each.measure in SHARES else number(value)


def _value_with_bounds(each: Difference) -> str:
    if each.measure not in SHARES:
        return with_bounds(each.difference, signed=True)
    of = each.difference
    return f"{points(of.value)} ({points(of.low)} to {points(of.high)})"


def _p(value: float) -> str:
    return "< 0.001" if value < 0.001 else number(value)


def unpaired(comparison: Comparison) -> Table:
    """What could not be compared, and why."""
    heads = [("model", ""), ("task", ""), ("rows", "n"), ("why", "")]
    rows = [
        (each.model, each.task, f"{each.count:,}", _REASONS.get(each.reason, each.reason))
        for each in comparison.unpaired
    ]
    return Table(heads, rows)


_REASONS: dict[str, str] = {
    "missing": "of one of the two models alone",
    "other task version": "another version of the task",
    "other prompt": "other tokens were asked",
}


# Provenance


def provenance(summaries: Sequence[Summary]) -> Iterator[tuple[str, Table]]:
    """What all models have in common, what differs, and the tasks' settings."""
    models = models_of(summaries)
    facts = [
        {
            "name": summary.run.name,
            **{key: told(value) for key, value in summary.run.model.items()},
            "window": f"{summary.run.window:,}",
            "old window": f"{summary.run.original_window:,}",
            "seed": str(summary.run.seed),
        }
        for summary in summaries
    ]
    keys = list(dict.fromkeys(key for each in facts for key in each))
    alike = [key for key in keys if len({each.get(key) for each in facts}) == 1]
    if alike:
        title = "The model" if len(models) == 1 else "What all models share"
        yield title, Table([("", ""), ("", "any")], [(key, facts[0][key]) for key in alike])
    apart = [key for key in keys if key not in alike]
    if apart:
        heads = [("", ""), *((str(model), "any") for model in models)]
        rows = [(key, *(each.get(key, "–") for each in facts)) for key in apart]
        yield "What is each model's own", Table(heads, rows)
    for model, summary in zip(models, summaries, strict=True):
        if summary.run.plan:
            whose = "" if len(models) == 1 else f" for {model}"
            rows = [(key, told(value)) for key, value in summary.run.plan.items()]
            yield f"What the budget of time made of it{whose}", Table([("", ""), ("", "any")], rows)
    settings: dict[tuple[str, str, str], list[str]] = {}
    for model, summary in zip(models, summaries, strict=True):
        for task, chosen in summary.run.tasks.items():
            for key, value in chosen.items():
                settings.setdefault((task, key, told(value)), []).append(model.name)
    if settings:
        rows = [
            (*key, "" if len(who) == len(models) else ", ".join(who))
            for key, who in settings.items()
        ]
        heads = [("task", ""), ("setting", ""), ("value", "any"), ("of", "")]
        if not any(row[-1] for row in rows):
            heads, rows = heads[:-1], [row[:-1] for row in rows]
        yield "How the tasks were set", Table(heads, rows)


def told(value: Setting) -> str:
    """A setting as a person reads it."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "–"}[value]
    return f"{value:,}" if isinstance(value, int) else f"{value}"
