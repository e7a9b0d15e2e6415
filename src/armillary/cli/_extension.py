"""What `armillary extend` prints: a plan as tables or facts, and what came of applying a rule."""

import json as json_module
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from armillary.cli._options import one_line, output_console, print_json
from armillary.errors import UserError
from armillary.wording import bytes_text, count_text, duration_text

if TYPE_CHECKING:
    from rich.table import Table

    from armillary.config import DecoderConfig
    from armillary.extension.apply import Applied
    from armillary.extension.plan import ExtensionPlan, GroupChange, RulePlan
    from armillary.extension.rules import RuleName, RuleOptions

Facts = dict[str, Any]
_MOST_BYTES = 1 << 20


def read_factors(path: Path | None) -> tuple[float, ...] | None:
    """Read a JSON list of numbers. Raises UserError for anything else."""
    if path is None:
        return None
    from armillary.strict_yaml import read_text

    try:
        numbers = json_module.loads(read_text(path))
    except ValueError as error:
        raise UserError(f"{path}: is not JSON: {error}") from error
    if not isinstance(numbers, list) or not all(type(n) in (int, float) for n in numbers):
        raise UserError(f"{path}: must be a JSON list of numbers, one for each channel pair")
    return tuple(float(n) for n in numbers)


def show_plan(
    model: str,
    config: "DecoderConfig",
    to: int,
    rule: "RuleName | None",
    options: "RuleOptions",
    dtype: str,
    figure: Path | None,
    json: bool,
) -> None:
    """Print a plan, and draw it where a file is named."""
    from armillary.extension.machine import this_machine
    from armillary.extension.plan import plan

    planned = plan(
        config, to=to, rule=rule, options=options, dtype=dtype, machine=this_machine(dtype)
    )
    if figure is not None:
        from armillary.extension.figure import draw_frequencies

        draw_frequencies(planned, figure)
    if json:
        print_json(plan_facts(model, planned))
        return
    console = output_console()
    console.print(f"{model}: window {planned.window:,} → {to:,}", style="bold")
    for heading, table in _sections(planned):
        console.print(f"\n{heading}", style="bold")
        console.print(table)
    console.print(f"\n{_verdict(planned)}")
    if figure is not None:
        console.print(f"figure: {figure}")


def _verdict(planned: "ExtensionPlan") -> str:
    best = planned.recommended
    name = "" if best is None else f"recommended: {_rule_text(best)}\n"
    return f"{name}{planned.why}\nto beat: {planned.baseline}"


def plan_facts(model: str, planned: "ExtensionPlan") -> Facts:
    """All that a plan says, as plain JSON values."""
    best, needs = planned.recommended, planned.needs
    return {
        "model": model,
        "window": planned.window,
        "target": planned.target,
        "carries": None if planned.carries is None else asdict(planned.carries),
        "rules": [_rule_facts(each) for each in planned.rules],
        "recommended": None if best is None else {"rule": best.name, "over": best.over},
        "why": planned.why,
        "kept_layers": [i for group in planned.kept for i in group.layers],
        "base_bounds": [
            {
                "layers": list(bound.group.layers),
                "base": bound.base,
                "smallest_base": bound.smallest,
            }
            for bound in planned.bounds
        ],
        "needs": {
            "dtype": needs.dtype,
            "weights_bytes": needs.weights,
            "cache_bytes": needs.cache,
            "activations_bytes": needs.activations,
            "total_bytes": needs.total,
            "flops": needs.flops,
            "device": None if needs.machine is None else needs.machine.device,
            "memory_bytes": None if needs.machine is None else needs.machine.memory,
            "flops_per_second": None if needs.machine is None else needs.machine.flops,
            "fits": needs.fits,
            "seconds": needs.seconds,
        },
        "baseline": planned.baseline,
    }


def _rule_facts(each: "RulePlan") -> Facts:
    return {
        "rule": each.name,
        "over": each.over,
        "settings": None if each.rule is None else asdict(each.rule),
        "refused": each.refused,
        "notices": list(each.notices),
        "unseen_pairs": each.unseen,
        "change_in_short_texts": each.change_in_short_texts,
        "change_in_long_texts": each.change_in_long_texts,
        "layers": [_group_facts(part) for part in each.changes],
    }


def _group_facts(part: "GroupChange") -> Facts:
    change, group = part.change, part.group
    return {
        "layers": list(group.layers),
        "window": group.window,
        "base": group.rotary.base,
        "d_rotary": group.rotary.d_rotary,
        "attention_factor": change.attention_factor,
        "pairs": [
            {
                "pair": i,
                "frequency": float(change.before[i]),
                "wavelength": float(change.wavelengths[i]),
                "turns": float(change.turns[i]),
                "new_frequency": float(change.after[i]),
                "new_wavelength": float(change.new_wavelengths[i]),
                "new_turns": float(change.new_turns[i]),
                "unseen": bool(change.unseen[i]),
            }
            for i in range(len(change.before))
        ],
    }


def _sections(planned: "ExtensionPlan") -> "Iterator[tuple[str, Table]]":
    shown = planned.recommended or next((r for r in planned.rules if r.changes), None)
    if shown is not None:
        for part in shown.changes:
            layers = _layers(part.group.layers)
            heading = f"channel pairs of {layers}, before and after {_rule_text(shown)}"
            yield heading, _pairs_table(part)
    if planned.rules:
        yield "rules", _rules_table(planned)
    yield f"a prompt of {planned.target:,} tokens", _needs_table(planned)


def _pairs_table(part: "GroupChange") -> "Table":
    change = part.change
    table = _table(
        "pair",
        "wavelength",
        f"turns in {change.window:,}",
        "new wavelength",
        f"turns in {change.target:,}",
        "slowed",
        "angles never trained",
    )
    for i in range(len(change.before)):
        table.add_row(
            f"{i}",
            f"{change.wavelengths[i]:,.5g}",
            f"{change.turns[i]:,.3g}",
            f"{change.new_wavelengths[i]:,.5g}",
            f"{change.new_turns[i]:,.3g}",
            f"{change.before[i] / change.after[i]:.3g} ×",
            "yes" if change.unseen[i] else "–",
        )
    return table


def _rules_table(planned: "ExtensionPlan") -> "Table":
    table = _table(
        "rule",
        "unseen pairs",
        "change in short texts",
        "in long texts",
        "attention factor",
        "",
    )
    for each in planned.rules:
        mark = "recommended" if each is planned.recommended else ""
        if each.refused is not None:
            table.add_row(_name(each), "–", "–", "–", "–", one_line(each.refused))
            continue
        factors = {f"{part.change.attention_factor:.4g}" for part in each.changes}
        table.add_row(
            _rule_text(each),
            f"{each.unseen}",
            f"{each.change_in_short_texts:,.3g} turns",
            f"{each.change_in_long_texts:,.3g} turns",
            ", ".join(sorted(factors)),
            "; ".join(filter(None, [mark, *each.notices])),
        )
    return table


def _needs_table(planned: "ExtensionPlan") -> "Table":
    from rich.table import Table

    needs, machine = planned.needs, planned.needs.machine
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(min_width=26)
    table.add_column()
    for name, count in (
        (f"weights in {needs.dtype}", needs.weights),
        (f"cache in {needs.dtype}", needs.cache),
        ("activations, in chunks", needs.activations),
        ("memory in all", needs.total),
    ):
        table.add_row(f"  {name}", bytes_text(count))
    if machine is not None:
        fits = "fits" if needs.fits else "does not fit"
        table.add_row("  on this machine", f"{fits} into {bytes_text(machine.memory)}")
    table.add_row("  work", f"{count_text(needs.flops)}FLOP")
    if machine is not None and needs.seconds is not None:
        speed = f"at {machine.flops / 1e9:,.0f} GFLOP/s, a matrix product's on {machine.device}"
        table.add_row("  time, at least", f"{duration_text(needs.seconds)} {speed}")
    for bound in planned.bounds:
        needed = "none up to 1e12" if bound.smallest is None else f"{bound.smallest:,.3g}"
        table.add_row(
            f"  base of {_layers(bound.group.layers)}",
            f"{bound.base:,.10g}; unscaled it would have to be {needed} to keep near keys apart "
            "from far ones",
        )
    return table


def _table(*headings: str) -> "Table":
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="left" if number in (0, 6) or not heading else "right")
    return table


def _name(each: "RulePlan") -> str:
    return each.name if each.over is None else f"{each.name}, {each.over}"


def _rule_text(each: "RulePlan") -> str:
    factor = getattr(each.rule, "factor", None)
    return _name(each) if factor is None else f"{_name(each)}, factor {factor:g}"


def _layers(indices: tuple[int, ...]) -> str:
    from armillary.diagnosis.size import ranges_text

    return f"layer{'s' if len(indices) > 1 else ''} {ranges_text(indices)}"


def show_applied(applied: "Applied", json: bool) -> None:
    """Print what was written and what reading it back has shown."""
    extension = applied.extension
    rule = extension.rule
    if json:
        print_json(
            {
                "path": str(applied.path),
                "format": applied.format,
                "window": extension.config.max_positions,
                "rule": None if rule is None else asdict(rule),
                "changed_layers": [i for group in extension.changed for i in group.layers],
                "verified": [asdict(each) for each in applied.verified],
                "notices": list(applied.notices),
            }
        )
        return
    print(applied.path)
    factor = "" if rule is None else f", factor {rule.factor:g}"  # type: ignore[union-attr]
    print(f"  window      {extension.config.max_positions:,}")
    print(f"  rule        {'none' if rule is None else rule.kind}{factor}")
    print(f"  format      {applied.format}")
    for each in applied.verified:
        lengths = " and ".join(f"{length:,}" for length in each.lengths)
        exact = "exactly" if not each.difference else f"to {each.difference:.1g} of themselves"
        print(
            f"  read back   {_layers(each.layers)}: the frequencies of {each.pairs} pairs are "
            f"{exact} the planned ones, for texts of {lengths}"
        )
    for notice in applied.notices:
        print(f"  note        {one_line(notice)}")
