"""Summaries → what is drawn of them: a title that says the message, and the data of a chart.

How it is drawn is another's: `charts` for the page, matplotlib for files. Series have the numbers
of their models, so that a model looks the same in all of them.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from armillary.charts.bars import Bar, bar_chart
from armillary.charts.heat import HeatCell, HeatMap, heat_map
from armillary.charts.lines import Bounds, Chart, Series, line_chart
from armillary.diagnosis.frequencies import FrequencyChange
from armillary.evaluation.summary import EffectiveLength, Estimate, LossAt, Rate, Summary
from armillary.evaluation.telling import (
    counted,
    few,
    joined,
    names_of,
    number,
    percent,
    perplexity,
    rate_with_bounds,
    tokens,
    with_bounds,
)
from armillary.evaluation.verdict import Gain, effective_of, variants

Bars = tuple[Bar, ...]
_LIMIT = 4  # over how many times the best model's difference a picture of differences reaches


@dataclass(frozen=True)
class Plot:
    """Something to draw. `name` is fit for a file's."""

    name: str
    title: str
    shown: Chart | HeatMap | Bars


def as_svg(plot: Plot) -> str:
    """Return a plot as an SVG element for a page; "" when there is nothing to draw."""
    if isinstance(plot.shown, Chart):
        return line_chart(plot.shown, plot.title)
    if isinstance(plot.shown, HeatMap):
        return heat_map(plot.shown, plot.title)
    return bar_chart(plot.shown, plot.title)


# Losses


def loss_plots(summaries: Sequence[Summary], gains: Sequence[Gain]) -> Iterator[Plot]:
    """Loss by context, over cropping, of key tokens, and by position."""
    names = names_of([each.run for each in summaries])
    curves = [each.by_context for each in summaries]
    if any(curves):
        yield Plot(
            "loss-by-context",
            _context_title(gains, summaries),
            _by_context(names, summaries, curves),
        )
    over = [tuple(each for each in curve if each.over_crop) for curve in curves]
    if any(over):
        yield Plot(
            "loss-over-cropping",
            _over_title(names, summaries, over),
            _over_cropping(names, summaries, over),
        )
    keys = [each.key_tokens for each in summaries]
    if any(keys):
        title = _last_title("Tokens that far context tells of", names, keys)
        yield Plot("key-tokens", title, _by_context(names, summaries, keys))
    positions = [each.by_position for each in summaries]
    if any(positions):
        title = _last_title("In the last positions", names, positions)
        yield Plot("loss-by-position", title, _by_position(names, summaries, positions))


def _by_context(
    names: Sequence[str], summaries: Sequence[Summary], curves: Sequence[Sequence[LossAt]]
) -> Chart:
    first = summaries[0].run.original_window
    crop = next((each for each in curves[0] if each.at == first), None)
    beyond = any(each.at > first for curve in curves for each in curve)
    rules = []
    if crop is not None and beyond:
        name = "cropped" if len(names) == 1 else f"{names[0]} cropped"
        rules = [(crop.loss.value, f"{name} to {first:,}")]
    return Chart(
        "tokens of context",
        "nats per token",
        _loss_series(names, curves),
        rules,
        _windows(summaries, curves),
        doubling=True,
        also=("perplexity", perplexity),
    )


def _loss_series(names: Sequence[str], curves: Sequence[Sequence[LossAt]]) -> list[Series]:
    return [
        Series(
            name,
            [(each.at, each.loss.value) for each in curve],
            "measured",
            place,
            [_bounds(each.loss) for each in curve],
        )
        for place, (name, curve) in enumerate(zip(names, curves, strict=True))
    ]


def _bounds(estimate: Estimate, times: float = 1.0) -> Bounds:
    return estimate.low * times, estimate.high * times


def _windows(
    summaries: Sequence[Summary], curves: Sequence[Sequence[LossAt]]
) -> list[tuple[float, str]]:
    """The old window, where all have the same and something was measured beyond it."""
    windows = {each.run.original_window for each in summaries}
    at = [each.at for curve in curves for each in curve]
    if len(windows) == 1 and min(at) < (window := windows.pop()) < max(at):
        return [(window, f"old window {window:,}")]
    return []


def _context_title(gains: Sequence[Gain], summaries: Sequence[Summary]) -> str:
    if not gains:
        longest = max(each.at for s in summaries for each in s.by_context)
        return f"Loss of the same text under up to {longest:,} tokens of context"
    longest = max(each.at for each in gains)
    better = [each.model for each in gains if each.side == "better" and each.at == longest]
    against = gains[-1].against
    if not better:
        return f"With {longest:,} tokens nothing is shown to be better than {against}"
    who = few(better, len(gains))
    verb = "predicts" if len(better) == 1 else "predict"
    than = against if against.startswith("cropped") else f"{against} tokens"
    return f"With {longest:,} tokens {who} {verb} better than {than}"


def _over_cropping(
    names: Sequence[str], summaries: Sequence[Summary], over: Sequence[Sequence[LossAt]]
) -> Chart:
    series = []
    for place, (name, summary, curve) in enumerate(zip(names, summaries, over, strict=True)):
        at = {each.at: each.over_crop for each in curve if each.over_crop}
        if at:  # at the old window, cropping is what is done
            at[summary.run.original_window] = Estimate(0.0, 0.0, 0.0, 0)
        drawn = sorted(at.items())
        points = [(length, each.value) for length, each in drawn]
        intervals = [_bounds(each) for _, each in drawn]
        series.append(Series(name, points, "measured", place, intervals))
    values = [[y for _, y in each.points if math.isfinite(y)] for each in series]
    limit = _LIMIT * min((max(map(abs, own)) for own in values if own), default=0.0)
    low, high = (end(y for own in values for y in own) for end in (min, max))
    span = None
    if limit and high > limit:
        span = (1.2 * max(min(low, -0.1 * limit), -limit), limit)
    return Chart(
        "tokens of context",
        "nats per token over cropping",
        series,
        [(0.0, "as cropped")],
        _windows(summaries, over),
        doubling=True,
        span=span,
    )


def _over_title(
    names: Sequence[str], summaries: Sequence[Summary], over: Sequence[Sequence[LossAt]]
) -> str:
    at = max(each.at for curve in over for each in curve)
    last = [
        (each.over_crop, name)
        for name, curve in zip(names, over, strict=True)
        for each in curve
        if each.at == at and each.over_crop
    ]
    windows = {each.run.original_window for each in summaries}
    old = f"{windows.pop():,}" if len(windows) == 1 else "the old window"
    told = f"{at:,} tokens instead of {old}"
    if len(last) == 1:
        return f"{told}: {with_bounds(last[0][0], signed=True)} nats per token"
    best, worst = (end(last, key=lambda each: each[0].value) for end in (min, max))
    low, high = (number(each[0].value, signed=True) for each in (best, worst))
    if low == high:
        return f"{told}: {low} nats per token for all"
    return f"{told}: {low} nats per token for {best[1]}, {high} for {worst[1]}"


def _last_title(subject: str, names: Sequence[str], curves: Sequence[Sequence[LossAt]]) -> str:
    at = max(each.at for curve in curves for each in curve)
    last = [
        (each.loss.value, name)
        for name, curve in zip(names, curves, strict=True)
        for each in curve
        if each.at == at
    ]
    best, name = min(last)
    where = f"at {at:,} tokens" if "far" in subject else f"from {at:,} on"
    told = f"{subject}, {where}: {number(best)} nats each"
    if len(last) > 1:
        worst, other = max(last)
        told += f" for {name}, {number(worst)} for {other}"
    return told


def _by_position(
    names: Sequence[str], summaries: Sequence[Summary], curves: Sequence[Sequence[LossAt]]
) -> Chart:
    return Chart(
        "position in the context",
        "nats per token",
        _loss_series(names, curves),
        marks=_windows(summaries, curves),
        also=("perplexity", perplexity),
    )


# Questions


def effective_plots(summaries: Sequence[Summary]) -> Iterator[Plot]:
    """To which length questions are answered: by kind for one model, by model for several."""
    names = names_of([each.run for each in summaries])
    if len(summaries) == 1 and summaries[0].effective:
        bars = [_effective_bar(each.variant, each, 0) for each in summaries[0].effective]
        yield Plot("effective", _range_of_lengths(summaries[0].effective), tuple(bars))
        return
    for variant in variants(summaries):
        held = [(place, effective_of(each, variant)) for place, each in enumerate(summaries)]
        bars = [_effective_bar(names[place], each, place) for place, each in held if each]
        if bars:
            yield Plot(f"effective-{variant}", _effective_title(variant, summaries), tuple(bars))


def _effective_bar(name: str, held: EffectiveLength, place: int) -> Bar:
    title = (
        f"{name}: {rate_with_bounds(held.short)} at the shortest length; holds to "
        f"{tokens(held.length)}, tried to {held.longest_tried:,}"
    )
    words = f"{held.length or 0:,} of {held.longest_tried:,}"
    return Bar(name, held.length or 0, words, place, None, float(held.longest_tried), title)


def _range_of_lengths(effective: Sequence[EffectiveLength]) -> str:
    def told(length: int) -> str:
        kinds = joined(each.variant for each in effective if (each.length or 0) == length)
        return f"{tokens(length or None)} ({kinds})"

    lengths = [each.length or 0 for each in effective]
    if min(lengths) == max(lengths):
        return f"Questions hold to {tokens(lengths[0] or None)}"
    return f"Questions hold to {told(max(lengths))} at most, to {told(min(lengths))} at least"


def _effective_title(variant: str, summaries: Sequence[Summary]) -> str:
    names = names_of([each.run for each in summaries])
    lengths = {
        name: held.length
        for name, each in zip(names, summaries, strict=True)
        if (held := effective_of(each, variant)) is not None
    }
    longest = max((length for length in lengths.values() if length), default=None)
    if longest is None:
        return f"{variant} holds at no length"
    who = [name for name, length in lengths.items() if length == longest]
    return f"{variant} holds longest, to {longest:,} tokens, with {few(who, len(lengths))}"


def length_plots(summaries: Sequence[Summary]) -> Iterator[Plot]:
    """Of each kind of question: rates by length."""
    names = names_of([each.run for each in summaries])
    for variant in variants(summaries):
        totals = _rates_of(summaries, variant, ())
        lengths = sorted({each.length for own in totals for each in own})
        if len(lengths) < 2:
            continue
        last = [[each for each in own if each.length == lengths[-1]] for own in totals]
        title = f"{variant} in {lengths[-1]:,} tokens: {_most(names, last)}"
        points = [[(each.length, each.exact) for each in own] for own in totals]
        marks = _old_window(summaries, lengths)
        chart = _rates_chart(names, points, "tokens of context", marks, doubling=True)
        yield Plot(f"{variant}-by-length", title, chart)


def heat_plots(summaries: Sequence[Summary], variant: str) -> Iterator[Plot]:
    """Of one kind of question: each model's rates by length and depth."""
    names = names_of([each.run for each in summaries])
    for place, own in enumerate(_rates_of(summaries, variant, ("depth",))):
        if own:
            heat = _heat(own, summaries[place].run.original_window)
            yield Plot(f"{variant}-heat-{place + 1}", _heat_title(names[place], own), heat)


def factor_plots(summaries: Sequence[Summary]) -> Iterator[Plot]:
    """Rates by hops and by distractors, for each kind of question and length."""
    names = names_of([each.run for each in summaries])
    for variant in variants(summaries):
        for factor in ("hops", "distractors"):
            split = _rates_of(summaries, variant, (factor,))
            for length in sorted({each.length for own in split for each in own}):
                here = [[each for each in own if each.length == length] for own in split]
                yield _factor_plot(names, variant, factor, length, here)


def _rates_of(
    summaries: Sequence[Summary], variant: str, factors: tuple[str, ...]
) -> list[list[Rate]]:
    """Each model's rates that are split by these factors alone."""
    return [
        [each for each in s.rates if each.variant == variant and factors_of(each) == factors]
        for s in summaries
    ]


def factors_of(rate: Rate) -> tuple[str, ...]:
    """What the questions of a rate share, beside their length."""
    return tuple(
        name for name in ("depth", "distractors", "hops") if getattr(rate, name) is not None
    )


def _factor_plot(
    names: Sequence[str], variant: str, factor: str, length: int, rates: Sequence[Sequence[Rate]]
) -> Plot:
    points = [[(float(getattr(each, factor)), each.exact) for each in own] for own in rates]
    most = max(x for own in points for x, _ in own)
    hardest = [[each for each in own if getattr(each, factor) == most] for own in rates]
    title = f"{variant} with {most:g} {factor} in {length:,} tokens: {_most(names, hardest)}"
    chart = _rates_chart(names, points, factor, (), doubling=False)
    return Plot(f"{variant}-{factor}-{length}", title, chart)


def _old_window(summaries: Sequence[Summary], lengths: Sequence[int]) -> list[tuple[float, str]]:
    windows = {each.run.original_window for each in summaries}
    if len(windows) == 1 and lengths[0] < (window := windows.pop()) < lengths[-1]:
        return [(window, f"old window {window:,}")]
    return []


def _most(names: Sequence[str], rates: Sequence[Sequence[Rate]]) -> str:
    """Who answers most; each model has a rate, or was not asked."""
    shares = {name: own[0].exact for name, own in zip(names, rates, strict=True) if own}
    if len(shares) == 1:
        (only,) = shares.values()
        return f"{counted(only)} right"
    most = max(each.value for each in shares.values())
    if most == 0:
        return "nothing right by any model"
    who = [name for name, each in shares.items() if each.value == most]
    return f"most right by {few(who, len(shares))} ({percent(most)})"


def _rates_chart(
    names: Sequence[str],
    rates: Sequence[Sequence[tuple[float, Estimate]]],
    x_label: str,
    marks: Sequence[tuple[float, str]],
    doubling: bool,
) -> Chart:
    series = [
        Series(
            name,
            [(x, 100 * each.value) for x, each in own],
            "measured",
            place,
            [_bounds(each, 100) for _, each in own],
        )
        for place, (name, own) in enumerate(zip(names, rates, strict=True))
    ]
    return Chart(
        x_label,
        "right answers, %",
        series,
        marks=marks,
        doubling=doubling,
        whiskers=True,
        span=(-4.0, 104.0),
    )


def _heat(rates: Sequence[Rate], window: int) -> HeatMap:
    lengths = sorted({each.length for each in rates})
    depths = sorted({each.depth for each in rates if each.depth is not None})
    cells = {
        (depths.index(each.depth), lengths.index(each.length)): HeatCell(
            each.exact.value, number(100 * each.exact.value, 0), _cell_title(each)
        )
        for each in rates
        if each.depth is not None
    }
    inside = sum(length <= window for length in lengths)
    return HeatMap(
        "tokens of context",
        "depth; right answers in %",
        [f"{length:,}" for length in lengths],
        [percent(depth) for depth in depths],
        cells,
        inside,
        f"old window {window:,}",
    )


def _cell_title(rate: Rate) -> str:
    told = [
        f"{rate.length:,} tokens, depth {percent(rate.depth or 0.0)}",
        f"{counted(rate.exact)} right: {rate_with_bounds(rate.exact)}",
    ]
    if rate.first is not None and rate.chance is not None:
        told.append(
            f"likeliest of the candidates: {rate_with_bounds(rate.first)}, by chance "
            f"{percent(rate.chance)}"
        )
    if rate.gain is not None:
        told.append(f"the fact gives its answer {with_bounds(rate.gain, 2, signed=True)} nats")
    return "\n".join(told)


def _heat_title(name: str, rates: Sequence[Rate]) -> str:
    worst = min(rates, key=lambda each: each.exact.value)
    if worst.exact.value == 1:
        return f"{name}: all right at every length and depth"
    where = f"{worst.length:,} tokens, depth {percent(worst.depth or 0.0)}"
    return f"{name}: fewest right at {where} ({counted(worst.exact)})"


# Short texts


def short_plots(summaries: Sequence[Summary]) -> Iterator[Plot]:
    """What became of short texts: their loss, and each short task."""
    names = names_of([each.run for each in summaries])
    losses = [(place, each.short_loss) for place, each in enumerate(summaries) if each.short_loss]
    if losses:
        bars = tuple(
            Bar(
                names[place],
                loss.value,
                number(loss.value),
                place,
                _finite(loss),
                title=f"{names[place]}: {with_bounds(loss)}, {loss.count:,} texts",
            )
            for place, loss in losses
        )
        values = {names[place]: loss.value for place, loss in losses}
        yield Plot("short-loss", _range_title("Loss on short texts", values, number), bars)
    if len(summaries) == 1 and summaries[0].short_tasks:
        tasks = summaries[0].short_tasks
        values = {each.task: each.accuracy.value for each in tasks}
        bars = tuple(_rate_bar(each.task, each.accuracy, 0) for each in tasks)
        yield Plot("short-tasks", _range_title("Short tasks right", values, percent), bars)
        return
    for task in dict.fromkeys(each.task for s in summaries for each in s.short_tasks):
        found = {
            place: each.accuracy
            for place, s in enumerate(summaries)
            for each in s.short_tasks
            if each.task == task
        }
        bars = tuple(_rate_bar(names[place], rate, place) for place, rate in found.items())
        values = {names[place]: rate.value for place, rate in found.items()}
        yield Plot(f"short-{task}", _range_title(f"{task} right", values, percent), bars)


def _rate_bar(name: str, rate: Estimate, place: int) -> Bar:
    title = f"{name}: {counted(rate)} right, {rate_with_bounds(rate)}"
    bounds = (rate.low, rate.high)
    return Bar(name, rate.value, percent(rate.value), place, bounds, None, title)


def _finite(estimate: Estimate) -> Bounds | None:
    return _bounds(estimate) if math.isfinite(estimate.high - estimate.low) else None


def _range_title(subject: str, values: Mapping[str, float], text: Callable[[float], str]) -> str:
    low, high = min(values, key=values.__getitem__), max(values, key=values.__getitem__)
    if low == high:
        return f"{subject}: {text(values[low])}"
    return f"{subject}: {text(values[low])} ({low}) to {text(values[high])} ({high})"


# Frequencies


def frequency_plot(
    summaries: Sequence[Summary], changes: Sequence[FrequencyChange | None]
) -> Iterator[Plot]:
    """Each channel pair's wavelength before and after, of the models whose rule is known."""
    names = names_of([each.run for each in summaries])
    known = [
        (place, each)
        for place, each in enumerate(changes)
        if each is not None and (each.before != each.after).any()
    ]
    if not known:
        return
    first = known[0][1]
    before = Series("as trained", list(enumerate(map(float, first.wavelengths))), "reference")
    after = [
        Series(names[place], list(enumerate(map(float, each.new_wavelengths))), "measured", place)
        for place, each in known
    ]
    windows = dict.fromkeys([first.window, *(each.target for _, each in known)])
    chart = Chart(
        "channel pair",
        "wavelength, positions",
        [before, *after],
        [(window, f"{window:,} positions") for window in windows],
        logarithmic=True,
    )
    changed = [int((each.before != each.after).sum()) for _, each in known]
    pairs = len(first.before)
    most = f"{min(changed)} to {max(changed)}" if len(set(changed)) > 1 else f"{changed[0]}"
    title = f"Of {pairs} channel pairs, {most} turn at another speed than in training"
    yield Plot("frequencies", title, chart)
