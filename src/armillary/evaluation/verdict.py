"""What an evaluation shows in one sentence, and what it does not in another.

Nothing is called better or worse whose interval holds 0 (or, where models are compared, whose
corrected p is above 0.05); nothing that was not shown to differ is called equal.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from armillary.evaluation.comparison import Comparison, Difference, Trade
from armillary.evaluation.summary import EffectiveLength, Estimate, LossAt, Summary
from armillary.evaluation.telling import bounds, few, joined, names_of, number

Side = Literal["better", "worse", "open"]
_MOST_NAMED, _MOST_TASKS = 4, 3
_UNIT = " nats per token"


@dataclass(frozen=True)
class Gain:
    """What context beyond the old window is worth to a model, in nats per token (below 0: good).

    `against` says what it is set against, `side` what is shown of it. `own` sets the model against
    itself, cropped: a model that was trained further may gain without reading further.
    """

    model: str
    at: int
    against: str
    over: Estimate
    side: Side
    own: Estimate | None


def verdict(summaries: Sequence[Summary], comparison: Comparison | None = None) -> tuple[str, str]:
    """Say what is shown, and what is not; a sentence each.

    `comparison` is of the same models in the same order. Raises ValueError without a summary.
    """
    if not summaries:
        raise ValueError("a verdict needs a summary at least")
    gains = gains_of(summaries, comparison)
    shown = [*_gained(gains), *_used(summaries), *_held(summaries)]
    if not shown:
        shown = ["Nothing was measured that tells what a longer context is worth"]
    costs = [*_costs(summaries, comparison)]
    missing = joined(
        [*_open(gains), *_of_context(gains), *_unmeasured(summaries, gains), _scope(summaries)]
    )
    told = [*costs, f"not shown is {missing}"]
    return _sentence(shown), _sentence(told)


def gains_of(
    summaries: Sequence[Summary], comparison: Comparison | None = None
) -> tuple[Gain, ...]:
    """The gain of each model that was measured beyond its old window.

    Models of a comparison are set against the first one cropped to its window; without a
    comparison each is set against itself.
    """
    names = names_of([each.run for each in summaries])
    found = []
    for place, (name, summary) in enumerate(zip(names, summaries, strict=True)):
        trade = trade_of(comparison, place)
        entry = beyond(summary)
        own = None if entry is None else entry.over_crop
        if trade is not None and (gain := trade.gain) is not None and gain.at is not None:
            crop = f"{names[0]} cropped to {summaries[0].run.original_window:,}"
            found.append(Gain(name, gain.at, crop, gain.difference, side_of(gain), own))
        elif entry is not None and own is not None:
            crop = f"cropped to {summary.run.original_window:,}"
            if comparison is not None:
                crop = f"{name} {crop}"
            found.append(Gain(name, entry.at, crop, own, _side(own), own))
    return tuple(found)


def beyond(summary: Summary) -> LossAt | None:
    """The loss at the longest context beyond the old window that can be set against cropping."""
    window = summary.run.original_window
    fit = [each for each in summary.by_context if each.at > window and each.over_crop]
    return fit[-1] if fit else None


def trade_of(comparison: Comparison | None, place: int) -> Trade | None:
    """What a comparison says of the model at a place of the list; nothing of the first."""
    return None if comparison is None or place == 0 else comparison.trades[place - 1]


def side_of(difference: Difference) -> Side:
    """What a difference shows, corrected for how many were looked at."""
    told = difference.verdict
    return told if told in ("better", "worse") else "open"


def _side(over: Estimate) -> Side:
    return "better" if over.high < 0 else "worse" if over.low > 0 else "open"


# What is shown


def _gained(gains: Sequence[Gain]) -> Iterator[str]:
    for (at, against), group in _by_place(gains):
        better = sorted((g for g in group if g.side == "better"), key=lambda g: g.over.value)
        worse = sorted((g for g in group if g.side == "worse"), key=lambda g: g.over.value)
        than = f"than {against}" if " cropped" in against else f"than when it is {against}"
        if better:
            text = f"with {at:,} tokens of context {_listed(better, _UNIT)} "
            text += f"{_verb(better, 'predict')} the same text better {than} tokens"
            yield text + (f", {_listed(worse)} worse" if worse else "")
        elif worse:
            text = f"with {at:,} tokens of context no model is shown to predict better {than} "
            yield text + f"tokens, and {_listed(worse, _UNIT)} {_verb(worse, 'predict')} worse"
        else:
            text = f"with {at:,} tokens of context no model is shown to predict better or worse "
            yield f"{text}{than} tokens"


def _by_place(gains: Sequence[Gain]) -> list[tuple[tuple[int, str], list[Gain]]]:
    places: dict[tuple[int, str], list[Gain]] = {}
    for each in gains:
        places.setdefault((each.at, each.against), []).append(each)
    return list(places.items())


def _listed(gains: Sequence[Gain], unit: str = "") -> str:
    named = [
        f"{each.model} ({number(each.over.value, signed=True)}{unit if place == 0 else ''})"
        for place, each in enumerate(gains[:_MOST_NAMED])
    ]
    if len(gains) > _MOST_NAMED:
        named.append(f"{len(gains) - _MOST_NAMED} more")
    return joined(named)


def _verb(many: Sequence[object], verb: str) -> str:
    return verb if len(many) > 1 else f"{verb}s"


def _used(summaries: Sequence[Summary]) -> Iterator[str]:
    """What their own windows are worth to models that were not extended, where it is all there is.

    Cropping to fewer tokens than the window is what the shortest context does.
    """
    if any(beyond(each) for each in summaries):
        return
    for name, each in zip(names_of([s.run for s in summaries]), summaries, strict=True):
        first = each.by_context[0] if each.by_context else None
        if first is not None and first.over_crop and first.at < each.run.original_window:
            less = first.over_crop
            window = f"{each.run.original_window:,}"
            if less.low > 0:
                yield (
                    f"with {window} tokens of context {name} predicts the same text "
                    f"{number(less.value)} nats per token better than with {first.at:,}"
                )
            else:
                yield (
                    f"with {window} tokens of context {name} is not shown to predict better than "
                    f"with {first.at:,}"
                )


def _held(summaries: Sequence[Summary]) -> Iterator[str]:
    """To which length questions are answered, and by whom: the best of each variant."""
    names = names_of([each.run for each in summaries])
    best: dict[tuple[int, tuple[str, ...]], list[str]] = {}
    nobody = []
    for variant in variants(summaries):
        held = [
            (each.length, name)
            for name, summary in zip(names, summaries, strict=True)
            if (each := effective_of(summary, variant)) is not None and each.length is not None
        ]
        if not held:
            nobody.append(variant)
            continue
        longest = max(length for length, _ in held)
        who = tuple(name for length, name in held if length == longest)
        best.setdefault((longest, who), []).append(variant)
    alone = len(summaries) == 1
    parts = [
        f"{joined(told)} to {length:,} tokens" + ("" if alone else f" ({few(who, len(names))})")
        for (length, who), told in sorted(best.items(), reverse=True)[:_MOST_TASKS]
    ]
    if len(best) > _MOST_TASKS:
        parts.append("others to fewer")
    if nobody:
        parts.append(f"{joined(nobody)} at no length")
    if parts:
        yield f"questions are answered: {joined(parts)}"


def variants(summaries: Sequence[Summary]) -> list[str]:
    """The kinds of question that were asked, in the order in which they come first."""
    asked: dict[str, None] = {}
    for summary in summaries:
        asked.update(dict.fromkeys(each.variant for each in summary.effective))
        asked.update(dict.fromkeys(each.variant for each in summary.rates))
    return list(asked)


def effective_of(summary: Summary, variant: str) -> EffectiveLength | None:
    """A model's effective length in a variant."""
    return next((each for each in summary.effective if each.variant == variant), None)


# What it costs, and what is not shown


def _costs(summaries: Sequence[Summary], comparison: Comparison | None) -> Iterator[str]:
    """What short texts lose, set against the first model."""
    names = names_of([each.run for each in summaries])
    lost, kept = [], []
    short = short_differences(comparison)
    for place, difference in short.items():
        side = side_of(difference)
        if side == "worse":
            lost.append((difference.difference.value, names[place]))
        elif side == "open":
            kept.append((difference.difference.high, names[place]))
    what = short_name(short.values())
    if lost:
        worst = sorted(lost, reverse=True)
        shown = [f"{name} {number(value)}" for value, name in worst[:_MOST_NAMED]]
        others = worst[_MOST_NAMED:]
        if others:
            shown.append(f"{len(others)} more up to {number(others[0][0])}")
        yield f"{what} cost {joined(shown)} nats per token beside {names[0]}"
    if kept:
        who = few([name for _, name in kept], len(names) - 1)
        most = number(max(high for high, _ in kept))
        yield f"no harm to {what} is shown for {who} (at most {most} by the interval)"


def short_differences(comparison: Comparison | None) -> dict[int, Difference]:
    """What each model's short texts lose, by the model's place."""
    trades = () if comparison is None else comparison.trades
    return {place: each.short for place, each in enumerate(trades, 1) if each.short is not None}


def short_name(differences: Iterable[Difference]) -> str:
    """What stands for short texts: themselves, or where there were none the shortest contexts."""
    at = {each.at for each in differences if each.measure != "short loss"}
    lengths = " and ".join(f"{length:,}" for length in sorted(each or 0 for each in at))
    return f"contexts of {lengths} tokens" if at else "short texts"


def _open(gains: Sequence[Gain]) -> Iterator[str]:
    undecided = [each for each in gains if each.side == "open"]
    if undecided:
        told = joined(
            f"{each.model} ({bounds(each.over, signed=True)})" for each in undecided[:_MOST_NAMED]
        )
        yield f"a difference from cropping for {told}"


def _of_context(gains: Sequence[Gain]) -> Iterator[str]:
    """Gains that may come of something else than the longer context."""
    told = [
        f"{each.model} ({bounds(each.own, signed=True)} over itself cropped)"
        for each in gains
        if each.side == "better" and each.own is not None and _side(each.own) != "better"
    ]
    if told:
        yield f"that it is the longer context which helps {joined(told[:_MOST_NAMED])}"


def _unmeasured(summaries: Sequence[Summary], gains: Sequence[Gain]) -> Iterator[str]:
    measured = {each.model for each in gains}
    names = names_of([each.run for each in summaries])
    without = [
        name
        for name, each in zip(names, summaries, strict=True)
        if name not in measured and each.run.window > each.run.original_window
    ]
    if without:
        yield f"what text beyond the old window is worth to {joined(without)}"
    if not any(each.short_loss or each.short_tasks for each in summaries):
        yield "what became of short texts"


def _scope(summaries: Sequence[Summary]) -> str:
    documents = max(map(_documents, summaries))
    longest = max(
        [
            *(each.at for s in summaries for each in s.by_context),
            *(each.longest_tried for s in summaries for each in s.effective),
        ],
        default=0,
    )
    other = f"anything on other text than these {documents:,} documents" if documents else ""
    more = f"anything beyond {longest:,} tokens" if longest else ""
    if other and more:
        return f"{other} or beyond {longest:,} tokens"
    return other or more or "anything on long context"


def _documents(summary: Summary) -> int:
    """How many documents losses were measured on; not the stretches that intervals may count."""
    told = summary.run.tasks.get("perplexity", {}).get("documents")
    if summary.by_context and isinstance(told, int):
        return told
    return max((each.loss.count for each in summary.by_context), default=0)


def _sentence(parts: Sequence[str]) -> str:
    text = "; ".join(parts)
    return text[:1].upper() + text[1:] + "."
