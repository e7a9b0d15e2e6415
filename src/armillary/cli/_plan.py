"""`armillary train --plan`: what a run would need of each process's memory, and if it fits."""

import os
import re
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from armillary.cli._options import print_json
from armillary.errors import UserError
from armillary.wording import bytes_text

if TYPE_CHECKING:
    from armillary.training.memory import Change, MemoryPlan
    from armillary.training.run_config import RunConfig

Facts = dict[str, Any]

_POWERS = {"k": 1, "m": 2, "g": 3, "t": 4}
_MOMENTS = {
    "loss": ("loss", "logits of a chunk, beside all activations"),
    "last_layer": ("last layer", "the backward pass begins, with all activations"),
    "first_layer": ("first layer", "it ends, with all layers' gradients"),
    "update": ("update", "the embedding's gradient, and the optimiser's step"),
}
_NOT_COUNTED = (
    "not counted: the program and the CUDA context (about 1 GB), workspaces of kernels, what the "
    "allocator holds unused (5 to 10 %), validation and samples"
)


def show_plan(
    run: str, config: "RunConfig", ranks: int | None, memory: str | None, json: bool
) -> None:
    """Print what the run would need on so many processes with so much memory each.

    Left out, `ranks` is what `parallel` names, and `memory` that of the device here. Raises
    UserError for sizes that do not divide, and for a memory that is none.
    """
    from armillary.training.memory import least_ranks, plan, to_fit
    from armillary.training.setup import open_model

    if memory is None:
        there, config = _memory_here(config), _as_here(config)
    else:
        there = parse_bytes(memory)
    decoder = open_model(config).decoder
    ranks = ranks or least_ranks(config)
    planned = plan(config, decoder, ranks)
    changes = () if planned.peak <= there else to_fit(config, decoder, ranks, there)
    facts = plan_facts(run, planned, there, changes)
    if json:
        print_json(facts)
    else:
        print("\n".join(plan_lines(facts)))


def parse_bytes(text: str) -> int:
    """80GB, 80 GiB, 512MB → bytes. Raises UserError for anything else."""
    found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)\s*([kmgt])(i?)b", text.strip(), re.IGNORECASE)
    if found is None or not float(found[1]):
        raise UserError(f"--memory {text}: must be a number and its unit, such as 80GB or 24GiB")
    return int(float(found[1]) * (1024 if found[3] else 1000) ** _POWERS[found[2].lower()])


def _memory_here(config: "RunConfig") -> int:
    """Of the GPU, where the run would take one, else of the machine."""
    import torch

    from armillary.training.setup import device_of

    try:
        device = device_of(config)
    except UserError as error:
        raise UserError(f"{error}; to plan for another machine, say --memory 80GB") from error
    if device == "cuda":
        return int(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _as_here(config: "RunConfig") -> "RunConfig":
    """With the type that products would be computed in on this machine."""
    from armillary.training.setup import device_of, precision_of

    precision = precision_of(config, device_of(config))
    train = config.train.model_copy(update={"precision": precision})
    return config.model_copy(update={"train": train})


def plan_facts(run: str, plan: "MemoryPlan", memory: int, changes: "tuple[Change, ...]") -> Facts:
    """All that a plan says, as plain JSON values; bytes are those of one process."""
    from armillary.training.memory import ITEMS, MOMENTS

    return {
        "run": run,
        "ranks": plan.sizes.world,
        "parallel": asdict(plan.sizes),
        "precision": plan.precision,
        "parameters": plan.parameters,
        "trained_parameters": plan.trained_parameters,
        "rows": plan.rows,
        "length": plan.length,
        "micro_batches": plan.micro_batches,
        "tokens_per_step": plan.tokens_per_step,
        "flops_per_token": plan.flops_per_token,
        "items": {
            item: {
                **{moment: plan.at(moment, item) for moment in MOMENTS},
                "terms": [
                    {"name": term.name, **{moment: term.at(moment) for moment in MOMENTS}}
                    for term in plan.terms
                    if term.item == item
                ],
            }
            for item in ITEMS
        },
        "sum": {moment: plan.at(moment) for moment in MOMENTS},
        "moment": plan.moment,
        "peak": plan.peak,
        "memory": memory,
        "fits": plan.peak <= memory,
        "changes": [
            {
                "settings": [_option(setting) for setting in change.settings],
                "peak": change.plan.peak,
            }
            for change in changes
        ],
    }


def _option(setting: str) -> str:
    return setting if setting.startswith("--") else f"--set {setting}"


def plan_lines(facts: Facts) -> list[str]:
    """The same for a person."""
    return [*_work_lines(facts), "", *_table_lines(facts), "", *_verdict_lines(facts)]


def _work_lines(facts: Facts) -> list[str]:
    sizes = " × ".join(f"{name} {size}" for name, size in facts["parallel"].items() if size > 1)
    parameters, trained = facts["parameters"], facts["trained_parameters"]
    training = "" if trained == parameters else f", of which {trained:,} train"
    passes, rows = facts["micro_batches"], facts["rows"]
    return [
        f"{facts['run']}: processes {facts['ranks']:,}{sizes and f' = {sizes}'}",
        f"{parameters:,} parameters{training}, products in {facts['precision']}",
        f"{facts['tokens_per_step']:,} tokens a step, of a process {passes:,} × {rows:,} rows of "
        f"{facts['length']:,}",
        f"{facts['flops_per_token'] / 1e9:,.3g} GFLOP to train on a token",
    ]


def _table_lines(facts: Facts) -> list[str]:
    """Items with their terms, in a unit in which the peak has few digits."""
    scale, unit = next(
        (scale, unit)
        for scale, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
        if facts["peak"] >= scale or unit == "kB"
    )
    rows = [(f"{unit} of a process", [heading for heading, _ in _MOMENTS.values()])]

    def add(name: str, counts: Facts) -> None:
        numbers = [counts[moment] / scale for moment in _MOMENTS]
        rows.append((name, [f"{number:,.2f}" if number else "–" for number in numbers]))

    for item, counts in facts["items"].items():
        add(item, counts)
        for term in counts["terms"]:
            add(f"  {term['name']}", term)
    add("sum", facts["sum"])
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:{width}}" + "".join(f"{cell:>13}" for cell in cells) for name, cells in rows]
    meanings = [f"{heading}: {meaning}" for heading, meaning in _MOMENTS.values()]
    return [*lines, "", *meanings]


def _verdict_lines(facts: Facts) -> list[str]:
    peak, memory = facts["peak"], facts["memory"]
    told = f"{bytes_text(peak)} of {bytes_text(memory)}"
    if facts["fits"]:
        return [f"fits: {told}, {bytes_text(memory - peak)} are left", _NOT_COUNTED]
    changes = [
        f"  {' '.join(change['settings'])} makes it {bytes_text(change['peak'])}"
        for change in facts["changes"]
    ]
    remedies = changes or ["  no setting makes it fit; take a smaller model or shorter rows"]
    return [
        f"does not fit: {told}, {bytes_text(peak - memory)} too much",
        *remedies,
        _NOT_COUNTED,
    ]
