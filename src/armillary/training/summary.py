"""A page about a run, made from its log alone: what came of it, curves, numbers, texts, settings.

The page stands alone: no script, nothing from a network. Whatever text the log holds is escaped.
"""

from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import yaml

from armillary import page
from armillary.charts.bars import Bar, bar_chart
from armillary.charts.lines import Chart, Series, line_chart, smoothed
from armillary.charts.svg import Point
from armillary.files import write_atomically
from armillary.training.events import StepDone
from armillary.training.history import History
from armillary.training.log import read_log
from armillary.training.run_config import explain
from armillary.wording import bytes_text, count_text, duration_text, loss_text

TEMPLATE = Path(__file__).with_name("summary.html.jinja")
_MOST_ROWS = 100


def write_summary(log_path: Path, out_html: Path) -> None:
    """Write the page of a log. Raises UserError for what is no log, and when it cannot write."""
    html = render(History.of(read_log(log_path)))
    with write_atomically(out_html) as file:
        file.write(html.encode())


def render(history: History) -> str:
    """Return the page as HTML."""
    return page.render(TEMPLATE, _contents(history))


def _contents(history: History) -> dict[str, Any]:
    config = history.start.config if history.start else {}
    flat = dict(_flat(config))
    by_default = _defaults()
    rows = _step_rows(history)
    return {
        "name": config.get("out", "without a start"),
        "what": _what(history, flat),
        "outcome": _outcome(history),
        "model": history.end.model if history.end else None,
        "comparison": [(title, page.ready(svg)) for title, svg in _comparison(history)],
        "facts": list(_facts(history)),
        "figures": [(title, page.ready(svg)) for title, svg in _figures(history, flat) if svg],
        "validation_heads": [
            ("after step", "n"),
            ("nats per token", "n"),
            ("bits per byte", "n"),
            ("seconds", "n"),
            ("", ""),
        ],
        "validations": _validation_rows(history),
        "step_heads": [
            ("step", "n"),
            ("loss, nats per token", "n"),
            ("learning rate", "n"),
            ("gradient norm", "n"),
            ("tokens/s", "n"),
            ("tokens so far", "n"),
            ("", ""),
        ],
        "steps": rows,
        "logged": len(history.steps),
        "milestones": [
            (step, list(samples))
            for step, samples in groupby(history.samples, key=lambda sample: sample.step)
        ],
        "notices": history.notices,
        "resumed_at": history.resumed_at,
        "checkpoint_heads": [("after step", "n"), ("where", "any"), ("seconds", "n")],
        "checkpoints": [
            (f"{each.step:,}", each.path, f"{each.seconds:.1f}") for each in history.checkpoints
        ],
        "setting_heads": [("key", ""), ("value", "any"), ("by default", "any")],
        "settings": [_setting(key, value, by_default) for key, value in flat.items()],
        "chosen": [_setting(*each, by_default) for each in _chosen(config, by_default)],
        "yaml": yaml.safe_dump(config, sort_keys=False, allow_unicode=True),
    }


# Words


def _what(history: History, flat: Mapping[str, Any]) -> str:
    start = history.start
    if start is None:
        return "The log holds no start of a run, so nothing is known of its model and its text."
    checkpoint = flat.get("model.checkpoint")
    size = f"{count_text(start.parameters)} parameters"
    if flat.get("lora.rank") is not None:
        subject = (
            f"Adapters of {count_text(start.trained_parameters)} parameters "
            f"(rank {flat['lora.rank']}) on {checkpoint} ({size}) were trained"
        )
    elif checkpoint is not None:
        subject = f"{checkpoint} ({size}) was trained further"
    else:
        subject = f"A new decoder of {size} was trained"
    epochs = ""
    if start.epoch_steps > 0 and history.step:
        epochs = f", {history.step / start.epoch_steps:.2g} epochs"
    step = _whole(f"{start.rows:,} × {start.length:,} tokens")
    return (
        f"{subject} on {_text_source(flat)} for {history.step:,} steps of {step}{epochs}, "
        f"in {_whole(duration_text(history.seconds))}."
    )


def _text_source(flat: Mapping[str, Any]) -> str:
    sources = [str(source) for source in flat.get("data.sources") or ()]
    if not sources:
        return str(flat.get("data.prepared") or "prepared text")
    shown = ", ".join(sources[:3])
    return f"{shown} and {len(sources) - 3} more" if len(sources) > 3 else shown


def _outcome(history: History) -> str:
    last, best, end = history.last_validation, history.better_validation, history.end
    sentence = "Its loss on held-out text was not measured"
    if last is not None:
        sentence = (
            f"On held-out text it comes to {loss_text(last.bits_per_byte)} bits per byte "
            f"({loss_text(last.loss)} nats per token)"
        )
        compressors = end.compressors if end else {}
        needs = [f"{_whole(name)} needs {loss_text(bits)}" for name, bits in compressors.items()]
        sentence += f"; on the same text {' and '.join(needs)}" if needs else ""
        if best is not None:
            sentence += (
                f"; its best was {loss_text(best.loss)} nats per token after step {best.step:,}"
            )
    if history.steps and last is None:
        sentence += f"; the training loss ended at {_ends(_loss(history))[1]} nats per token"
    return sentence + _ending(history)


def _ending(history: History) -> str:
    start, end = history.start, history.end
    if end is not None and end.reason == "finished":
        return "."
    planned = f" of {start.steps:,}" if start else ""
    if end is not None:
        return f". It was stopped after step {end.step:,}{planned} ({end.reason})."
    return f". The log ends after step {history.step:,}{planned}: the run goes on, or was killed."


def _facts(history: History) -> Iterator[tuple[str, str, str]]:
    """Yield label, value and what more there is to say."""
    start, last = history.start, history.last_validation
    if last is not None:
        yield "Held-out text", f"{loss_text(last.bits_per_byte)}", "bits per byte"
        yield "Validation loss", f"{loss_text(last.loss)}", "nats per token"
    planned = f"of {start.steps:,}" if start else ""
    skipped = f"{history.skipped:,} skipped" if history.skipped else ""
    yield "Steps", f"{history.step:,}", ", ".join(filter(None, [planned, skipped]))
    yield "Tokens", count_text(history.tokens), ""
    yield "Time", duration_text(history.seconds), ""
    if history.tokens_per_second is not None:
        yield "Speed", f"{history.tokens_per_second:,.0f}", "tokens per second"
    if history.utilisation is not None:
        ceiling = f"of {start.peak_flops / 1e9:,.0f} GFLOP/s" if start else ""
        if start is not None and start.processes > 1:
            ceiling += " a process"
        yield "Utilisation", _percent(history.utilisation), ceiling
    if history.memory is not None:
        each = "a process" if start and start.processes > 1 else ""
        yield "Peak memory", bytes_text(history.memory), each
    if start is not None:
        many = f", {start.processes} processes" if start.processes > 1 else ""
        yield "Computed in", start.precision, f"on {start.device}{many}"


def _whole(words: str) -> str:
    """Keep words on one line."""
    return words.replace(" ", "\N{NO-BREAK SPACE}")


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


# Figures


def _figures(history: History, flat: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield titles that say a figure's one message, and the figures."""
    title = _loss_title(history)
    yield title, line_chart(_loss_chart(history), title)
    title = _rate_title(history)
    yield title, line_chart(_rate_chart(history), title)
    title = _norm_title(history)
    yield title, line_chart(_norm_chart(history, flat), title)
    title = _speed_title(history)
    yield title, line_chart(_speed_chart(history), title)


def _comparison(history: History) -> Iterator[tuple[str, str]]:
    last, end = history.last_validation, history.end
    if last is None or end is None or not end.compressors or last.bits_per_byte <= 0:
        return
    bits = last.bits_per_byte
    name, best = min(end.compressors.items(), key=lambda item: item[1])
    title = f"The model does not do better on unseen text than {_whole(name)}"
    if bits < best:
        fewer = _percent(1 - bits / best)
        title = f"The model needs {fewer} fewer bits for unseen text than {_whole(name)}"
    bars = [
        Bar(name, value, f"{loss_text(value)} bits per byte", number)
        for name, value, number in [
            ("this model", bits, 0),
            *((name, value, None) for name, value in end.compressors.items()),
        ]
    ]
    yield title, bar_chart(bars, title)


def _loss(history: History) -> list[Point]:
    return smoothed(_points(history, "loss"), max(1, len(history.steps) // 20))


def _points(history: History, name: str) -> list[Point]:
    return [(step.step, getattr(step, name)) for step in history.steps if step.skipped is None]


def _ends(points: list[Point]) -> tuple[str, str]:
    return loss_text(points[0][1]), loss_text(points[-1][1])


def _loss_title(history: History) -> str:
    validated = [(each.step, each.loss) for each in history.validations]
    best = history.best_validation
    kind, points = ("Validation", validated) if len(validated) > 1 else ("Training", _loss(history))
    if not points:
        return "Loss"
    first, last = points[0][1], points[-1][1]
    if best is not None and kind == "Validation" and last > 1.005 * best.loss:
        return (
            f"Validation loss was lowest after step {best.step:,}, at {loss_text(best.loss)}, and "
            f"rose to {loss_text(last)} nats per token since"
        )
    went = "fell" if last < first else "went"
    return f"{kind} loss {went} from {loss_text(first)} to {loss_text(last)} nats per token"


def _loss_chart(history: History) -> Chart:
    validated = [(each.step, each.loss) for each in history.validations]
    series = [
        Series("training", _points(history, "loss"), "faint"),
        Series("its running mean", _loss(history), "line"),
        Series("validation", validated, "points"),
    ]
    return Chart("step", "nats per token", series)


def _rate_title(history: History) -> str:
    points = _points(history, "learning_rate")
    if not points:
        return "Learning rate"
    (_, first), (_, last) = points[0], points[-1]
    peak_step, peak = max(points, key=lambda point: point[1])
    if peak == min(rate for _, rate in points):
        return f"The learning rate stayed at {peak:.2g}"
    title = f"The learning rate rose to {peak:.2g} by step {peak_step:,}"
    if first == peak:
        title = f"The learning rate began at {peak:.2g}"
    return title if last == peak else f"{title} and came down to {100 * last / peak:.2g} % of it"


def _rate_chart(history: History) -> Chart:
    points = _points(history, "learning_rate")
    return Chart("step", "learning rate", [Series("learning rate", points, "line")], from_zero=True)


def _norm_title(history: History) -> str:
    skipped = history.skipped
    told = "no step was skipped"
    if skipped:
        told = f"{skipped:,} step{' was' if skipped == 1 else 's were'} skipped"
    norms = sorted(norm for _, norm in _points(history, "gradient_norm"))
    if not norms:
        return f"Gradients: {told}"
    return f"The gradient norm was {norms[len(norms) // 2]:.2f} in the median; {told}"


def _norm_chart(history: History, flat: Mapping[str, Any]) -> Chart:
    skips = [(step.step, 0.0) for step in history.steps if step.skipped is not None]
    clip = flat.get("train.clip")
    series = [
        Series("gradient norm", _points(history, "gradient_norm"), "line"),
        Series("skipped step", skips, "crosses"),
    ]
    rules = [(float(clip), f"clipped at {clip:g}")] if clip else []
    return Chart("step", "norm of all gradients", series, rules, logarithmic=True)


def _speed_title(history: History) -> str:
    speed, share = history.tokens_per_second, history.utilisation
    if speed is None:
        return "Speed"
    title = f"{speed:,.0f} tokens per second in the median"
    return title if share is None else f"{title}, {_percent(share)} of what the machine can do"


def _speed_chart(history: History) -> Chart:
    points = _points(history, "tokens_per_second")
    return Chart("step", "tokens per second", [Series("speed", points, "line")], from_zero=True)


# Tables


def _validation_rows(history: History) -> list[tuple[str, ...]]:
    best = history.best_validation
    return [
        (
            f"{each.step:,}",
            loss_text(each.loss),
            loss_text(each.bits_per_byte),
            f"{each.seconds:.1f}",
            "best" if each is best else "",
        )
        for each in history.validations
    ]


def _step_rows(history: History) -> list[tuple[str, ...]]:
    """Every step that was skipped, and of the others at most _MOST_ROWS, evenly."""
    made = [step for step in history.steps if step.skipped is None]
    every = -(-len(made) // _MOST_ROWS) or 1
    shown = [*made[::-1][::every], *(step for step in history.steps if step.skipped is not None)]
    return [_step_row(step) for step in sorted(shown, key=lambda step: step.step)]


def _step_row(step: StepDone) -> tuple[str, ...]:
    skipped = {"nonfinite": "skipped: no numbers", "no_targets": "skipped: nothing to learn"}
    return (
        f"{step.step:,}",
        loss_text(step.loss),
        f"{step.learning_rate:.3g}",
        f"{step.gradient_norm:.3f}",
        f"{step.tokens_per_second:,.0f}",
        f"{step.tokens:,}",
        "" if step.skipped is None else skipped.get(step.skipped, f"skipped: {step.skipped}"),
    )


# Settings


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _defaults() -> dict[str, str]:
    """Each key's default as YAML; "" where it must be given."""
    return {key: default for key, _, default, _ in explain()}


def _chosen(
    config: Mapping[str, Any], by_default: Mapping[str, str], prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """Yield the settings that differ from their defaults, and the sections that need not be."""
    for name, value in config.items():
        key = f"{prefix}{name}"
        default = by_default.get(key, "")
        if isinstance(value, dict):
            if default == "null":
                yield key, "as follows"
            yield from _chosen(value, by_default, f"{key}.")
        elif yaml.safe_load(default) != value:  # what must be given has no default
            yield key, value


def _setting(key: str, value: Any, by_default: Mapping[str, str]) -> tuple[str, str, str]:
    return key, _told(value), by_default.get(key, "") or "–"


def _told(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=10**9)
    return text.removesuffix("...\n").strip()
