"""A section of a model card, in Markdown: what the window is, how it was measured, and the limits.

It is to be read beside a checkpoint, by people who have nothing else. Whatever text it is given is
shown as text.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

from armillary.evaluation import tables
from armillary.evaluation.comparison import Comparison
from armillary.evaluation.summary import Summary
from armillary.evaluation.telling import joined, names_of
from armillary.evaluation.verdict import gains_of, variants, verdict
from armillary.files import write_atomically
from armillary.wording import escaped

_SPECIAL = str.maketrans({each: f"\\{each}" for each in "\\`*_[]|#"} | {"<": "&lt;", "&": "&amp;"})


def write_card(
    path: Path,
    summaries: Sequence[Summary],
    comparison: Comparison | None = None,
    *,
    commands: Sequence[str] = (),
) -> None:
    """Write the section; see `card`. Raises UserError when it cannot write."""
    text = card(summaries, comparison, commands=commands)
    with write_atomically(path) as file:
        file.write(text.encode())


def card(
    summaries: Sequence[Summary],
    comparison: Comparison | None = None,
    *,
    commands: Sequence[str] = (),
) -> str:
    """Return the section as Markdown; arguments as for `write_report`."""
    return "\n".join(_lines(summaries, comparison, commands)) + "\n"


def _lines(
    summaries: Sequence[Summary], comparison: Comparison | None, commands: Sequence[str]
) -> Iterator[str]:
    shown, not_shown = verdict(summaries, comparison)
    yield from ("## Context window", "", _plain(shown), "", _plain(not_shown))
    yield from ("", "### What it is", "")
    for name, summary in zip(names_of([each.run for each in summaries]), summaries, strict=True):
        yield f"- {_what(name, summary)}"
    gains = gains_of(summaries, comparison)
    yield from ("", "### In short", "", *_table(tables.overview(summaries, gains, comparison)))
    curves = [each.by_context for each in summaries]
    if any(curves):
        yield from ("", "### Loss of the same text under growing context", "")
        yield from _table(tables.losses(summaries, curves, "tokens of context"))
    if variants(summaries):
        yield from ("", "### Effective length", "", *_table(tables.effective(summaries)))
    retained = tables.short(summaries, comparison)
    if retained.rows:
        yield from ("", "### Short texts", "", *_table(retained))
    if commands:
        yield from ("", "### How to reproduce", "", *(f"    {each}" for each in commands))
    yield from ("", "### Limits", "", *(f"- {each}" for each in _limits(summaries)))


def _what(name: str, summary: Summary) -> str:
    run = summary.run
    window = f"a window of {run.window:,} tokens"
    if run.window != run.original_window:
        window = f"its window of {run.original_window:,} tokens extended to {run.window:,}"
    facts = [
        f"{_plain(key)} {_plain(tables.told(value))}"
        for key, value in run.model.items()
        if value is not None
    ]
    told = f"; {joined(facts)}" if facts else ""
    return f"{_plain(name)}: {window}{told}"


def _table(table: tables.Table) -> Iterator[str]:
    yield _row([head for head, _ in table.heads])
    yield _row(["---:" if kind.startswith("n") else "---" for _, kind in table.heads], plain=False)
    for row in table.rows:
        yield _row([str(cell) for cell in row])


def _row(cells: Sequence[str], plain: bool = True) -> str:
    return f"| {' | '.join(_plain(cell) if plain else cell for cell in cells)} |"


def _plain(text: str) -> str:
    """Return a text that Markdown shows as it is, on one line."""
    return escaped(" ".join(text.split())).translate(_SPECIAL)


def _limits(summaries: Sequence[Summary]) -> Iterator[str]:
    yield (
        "Intervals are of 95 %. They tell how far chance in the choice of texts and questions "
        "reaches, not how other kinds of text or question would come out."
    )
    if any(each.by_context for each in summaries):
        yield (
            "Losses compare the same target tokens under every length of context, and are set "
            "against cropping to the old window. A loss that does not rise shows that a longer "
            "context does no harm; that it is used is shown by questions alone."
        )
    if any(each.rates for each in summaries):
        yield (
            "Questions are synthetic, and scored by forcing the answer. Answering them at a length "
            "is needed for real tasks at that length, and not enough."
        )
    if not any(each.short_tasks or each.short_loss for each in summaries):
        yield "What became of short texts was not measured."
