"""`armillary inspect`: what a model is made of, and what it costs."""

import itertools
import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from armillary.cli._model import read_model
from armillary.cli._options import Debug, IgnoreKey, Json, one_line, output_console, print_json
from armillary.wording import bytes_text

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from armillary.checkpoints.checkpoint import Checkpoint
    from armillary.config import AttentionConfig, DecoderConfig
    from armillary.diagnosis.size import LayerGroup, Step

Facts = dict[str, Any]
Lines = list[tuple[str, str]]

FLOPS_FORMULA = (
    "2 × parameters that are multiplied with (the head, no table that is looked up) "
    "+ 4·h·d_h·n in each layer, n = positions read"
)


_MOST = 1 << 40  # sequences, or tokens of one; their products stay numbers that can be printed


def inspect(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A configuration (.yaml, .json), an alias (smollm2-135m), a directory, a .gguf "
            "file, or a Hub repository (owner/name).",
            show_default=False,
        ),
    ],
    *,
    batch: Annotated[
        int,
        typer.Option(metavar="B", min=1, max=_MOST, help="Sequences.", rich_help_panel="Sizes"),
    ] = 1,
    length: Annotated[
        int | None,
        typer.Option(
            metavar="T",
            min=1,
            max=_MOST,
            help="Tokens of a sequence; the model's window when left out.",
            rich_help_panel="Sizes",
            show_default=False,
        ),
    ] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16", "float64"],
        typer.Option(
            metavar="TYPE",
            help="Number type of the cache: float32, bfloat16, float16 or float64.",
            rich_help_panel="Sizes",
        ),
    ] = "float32",
    json: Json = False,
    ignore_key: IgnoreKey = None,
    debug: Debug = False,
) -> None:
    """Show a model's layers step by step, and count: parameters, bytes, FLOPs.

    Examples:
      armillary inspect smollm2-135m
      armillary inspect smollm2-135m --length 2048 --dtype bfloat16
      armillary inspect examples/one-layer.yaml --batch 2 --length 3
      armillary inspect smollm2-135m --json

    Matrices are shown (in, out), as in x·W; files hold them (out, in).
    """
    config, checkpoint = read_model(model, tuple(ignore_key or ()))
    facts = _facts(model, config, batch, length or config.max_positions, dtype)
    if checkpoint is not None:
        facts |= _checkpoint_facts(checkpoint)
    if json:
        print_json(facts)
    else:
        _print(facts)


def _facts(model: str, config: "DecoderConfig", batch: int, length: int, dtype: str) -> Facts:
    """All that a configuration says, as plain JSON values."""
    from armillary.diagnosis import size

    groups = size.layer_groups(config, batch, length)
    outside = size.outer_steps(config, batch, length)
    window = config.max_positions
    parameters = size.parameter_count(config)
    forward = size.forward_flops(config, length)
    return {
        "model": model,
        "n_layers": config.n_layers,
        "d_model": config.d_model,
        "vocab_size": config.vocab_size,
        "window": window,
        "batch": batch,
        "length": length,
        "layers": [_layer_facts(group) for group in groups],
        "outside": [_step_facts(step) for step in outside],
        "parameters": {
            "layers": sum(group.parameters for group in groups),
            "outside": sum(step.parameters for step in outside),
            "total": parameters,
            # Of experts, those that a token picks.
            "active": size.active_parameters(config),
        },
        "weights_bytes": {
            name: parameters * size.BYTES_OF[name] for name in ("float32", "bfloat16")
        },
        "cache": {
            "dtype": dtype,
            "bytes_first_token": size.cache_bytes_per_token(config, dtype),
            "bytes_last_token": size.cache_bytes_per_token(config, dtype, window),
            "bytes_window": size.cache_bytes(config, dtype, window),
            "bytes_batch": size.cache_bytes(config, dtype, length, batch),
        },
        "flops": {
            "multiplied_parameters": size.multiplied_parameters(config),
            "attention": size.attention_flops(config, length),
            "forward_per_token": forward,
            "training_per_token": 3 * forward,
            "formula": FLOPS_FORMULA,
        },
        "positions": {
            "table": config.position_table,
            "attention": list(_attention_facts(config, length)),
        },
    }


def _layer_facts(group: "LayerGroup") -> Facts:
    return {
        "indices": list(group.indices),
        "steps": [_step_facts(step) for step in group.steps],
        "parameters_each": group.parameters_each,
        "parameters": group.parameters,
    }


def _step_facts(step: "Step") -> Facts:
    return {
        "step": step.name,
        "weights": [
            {
                "name": weight.name,
                "shape": list(weight.written_shape),
                "stored_shape": list(weight.shape),
            }
            for weight in step.weights
        ],
        "outputs": [{"name": output.name, "shape": list(output.shape)} for output in step.outputs],
        "parameters": step.parameters,
    }


def _attention_facts(config: "DecoderConfig", length: int) -> Iterator[Facts]:
    """What layers read and how they rotate, once for each combination that occurs."""
    alike: dict[tuple[object, ...], list[int]] = {}
    for index, layer in enumerate(config.layers):
        attention = layer.attention
        alike.setdefault((attention.window, attention.rotary, attention.d_head), []).append(index)
    for indices in alike.values():
        attention = config.layers[indices[0]].attention
        yield {
            "layers": indices,
            "window": attention.window,
            "rotary": _rotary_facts(attention, length),
        }


def _rotary_facts(attention: "AttentionConfig", length: int) -> Facts | None:
    rotary = attention.rotary
    if rotary is None:
        return None
    slowest = rotary.scaling.frequencies(rotary.base, rotary.d_rotary, length).min()
    return {
        "base": rotary.base,
        "layout": rotary.layout,
        "d_rotary": rotary.d_rotary,
        "d_head": attention.d_head,
        "rule": rotary.scaling.kind,
        "factor": getattr(rotary.scaling, "factor", None),
        "original_window": getattr(rotary.scaling, "original_window", None),
        "attention_factor": rotary.scaling.attention_factor(),
        "longest_wavelength": 2 * math.pi / float(slowest),
    }


def _checkpoint_facts(checkpoint: "Checkpoint") -> Facts:
    """What only a file says: its encodings and its tokenizer."""
    encodings: dict[str, int] = {}
    for tensor in checkpoint.tensors.values():
        encodings[tensor.encoding] = encodings.get(tensor.encoding, 0) + tensor.nbytes
    facts: Facts = {
        "source": str(checkpoint.source),
        "format": checkpoint.format,
        "notices": checkpoint.notices,
        "stored_bytes": dict(sorted(encodings.items(), key=lambda entry: -entry[1])),
        "tokenizer": None,
    }
    tokenizer = checkpoint.tokenizer
    if tokenizer is not None:
        names = {number: text for text, number in tokenizer.special_tokens.items()}
        bos = tokenizer.bos_id
        facts["tokenizer"] = {
            "vocab_size": tokenizer.vocab_size,
            "bos": None if bos is None else {"id": bos, "text": names.get(bos)},
            "eos": [{"id": number, "text": names.get(number)} for number in tokenizer.eos_ids],
            "chat_template": tokenizer.chat_template is not None,
        }
    return facts


def _print(facts: Facts) -> None:
    """Tables for a person: as wide as the terminal; without one, a line for each row."""
    console = output_console()
    console.print(
        f"{facts['model']}: layers {facts['n_layers']}, d_model {facts['d_model']}, "
        f"vocabulary {facts['vocab_size']:,}, window {facts['window']:,}",
        style="bold",
    )
    if "source" in facts:
        console.print(f"{facts['source']} ({facts['format']})", soft_wrap=True)
        for notice in facts["notices"]:
            console.print(f"note: {one_line(notice)}")
    for heading, table in _sections(facts, console):
        console.print(f"\n{heading}", style="bold")
        console.print(table)


def _sections(facts: Facts, console: "Console") -> "Iterator[tuple[str, Table]]":
    from armillary.diagnosis.size import layers_text

    parameters = facts["parameters"]
    for group in facts["layers"]:
        heading = f"{layers_text(group['indices'])} ({len(group['indices'])} ×)"
        sum_line = ("sum of one layer", group["parameters_each"])
        yield heading, _steps_table(group["steps"], sum_line, console)
    sum_line = ("sum outside the layers", parameters["outside"])
    yield "outside the layers", _steps_table(facts["outside"], sum_line, console)
    yield "parameters", _pairs_table(_parameter_lines(facts))
    yield "memory", _pairs_table(_memory_lines(facts))
    yield (
        f"work for a token that reads {facts['length']:,} positions",
        _pairs_table(_work_lines(facts["flops"])),
    )
    positions = facts["positions"]
    for attention in positions["attention"]:
        heading = f"positions, {layers_text(attention['layers'])}"
        yield heading, _pairs_table(_position_lines(positions["table"], attention))
    if facts.get("tokenizer"):
        yield "tokenizer", _pairs_table(_tokenizer_lines(facts["tokenizer"]))


def _steps_table(steps: list[Facts], sum_line: tuple[str, int], console: "Console") -> "Table":
    """Shapes stand beside each other where that fits, else one below the other."""
    from rich.measure import Measurement

    table = _steps_table_with(", ", steps, sum_line)
    wanted = Measurement.get(console, console.options.update(width=10_000), table).maximum
    return table if wanted <= console.width else _steps_table_with("\n", steps, sum_line)


def _steps_table_with(separator: str, steps: list[Facts], sum_line: tuple[str, int]) -> "Table":
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_footer=True, pad_edge=False)
    table.add_column("step", footer=sum_line[0])
    table.add_column("weights", no_wrap=True)
    table.add_column("output", no_wrap=True)
    table.add_column("parameters", footer=f"{sum_line[1]:,}", justify="right", no_wrap=True)
    for step in steps:
        table.add_row(
            step["step"],
            _shapes_text((("", weight["shape"]) for weight in step["weights"]), separator) or "–",
            _shapes_text(((out["name"], out["shape"]) for out in step["outputs"]), separator),
            f"{step['parameters']:,}" if step["parameters"] else "–",
        )
    return table


def _shapes_text(named_shapes: Iterable[tuple[str, list[int]]], separator: str) -> str:
    """Equal shapes beside each other are counted: three (2, 3, 8)."""
    counts = {1: "", 2: "two ", 3: "three ", 4: "four "}
    return separator.join(
        f"{name and f'{name} '}{counts[len(list(alike))]}{tuple(shape)}"
        for (name, shape), alike in itertools.groupby(named_shapes)
    )


def _pairs_table(lines: Lines) -> "Table":
    from rich.table import Table

    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(min_width=26)
    table.add_column()
    for name, value in lines:
        table.add_row(f"  {name}", value)
    return table


def _parameter_lines(facts: Facts) -> Lines:
    from armillary.diagnosis.size import layers_text

    lines = [
        (
            layers_text(group["indices"]),
            f"{len(group['indices'])} × {group['parameters_each']:,} = {group['parameters']:,}",
        )
        for group in facts["layers"]
    ]
    lines += [(step["step"], f"{step['parameters']:,}") for step in facts["outside"]]
    total, active = (facts["parameters"][name] for name in ("total", "active"))
    lines.append(("total", f"{total:,}"))
    return lines if active == total else [*lines, ("active for a token", f"{active:,}")]


def _memory_lines(facts: Facts) -> Lines:
    lines = []
    if "stored_bytes" in facts:
        stored = facts["stored_bytes"]
        by_encoding = ", ".join(f"{name} {bytes_text(count)}" for name, count in stored.items())
        lines.append(("weights in the file", f"{_bytes(sum(stored.values()))}: {by_encoding}"))
    for name, count in facts["weights_bytes"].items():
        lines.append((f"weights in {name}", _bytes(count)))
    cache, window = facts["cache"], facts["window"]
    lines.append(
        (f"cache in {cache['dtype']}", f"{cache['bytes_first_token']:,} bytes for each token")
    )
    if cache["bytes_last_token"] != cache["bytes_first_token"]:
        lines.append(
            ("", f"{cache['bytes_last_token']:,} for each once the windows of layers are full")
        )
    lines.append(("", f"{_bytes(cache['bytes_window'])} for the window of {window:,}"))
    if (facts["batch"], facts["length"]) != (1, window):
        lines.append(
            ("", f"{_bytes(cache['bytes_batch'])} for {facts['batch']:,} × {facts['length']:,}")
        )
    return lines


def _work_lines(flops: Facts) -> Lines:
    return [
        (
            "forward",
            f"{flops['forward_per_token']:,} FLOPs = 2 × {flops['multiplied_parameters']:,} + "
            f"{flops['attention']:,}",
        ),
        ("training, about 3 ×", f"{flops['training_per_token']:,} FLOPs"),
        ("formula", flops["formula"]),
    ]


def _position_lines(table: str | None, attention: Facts) -> Lines:
    window, rotary = attention["window"], attention["rotary"]
    lines = [
        ("read", "all up to its own" if window is None else f"the last {window:,}, its own too")
    ]
    if table is not None:
        lines.append(("position table", table))
    if rotary is None:
        return [*lines, ("rotary", "none")]
    rule = "none" if rotary["rule"] == "default" else rotary["rule"]
    if rotary["factor"] is not None:
        rule += f", factor {rotary['factor']:g}"
    if rotary["original_window"] is not None:
        rule += f", original window {rotary['original_window']:,}"
    return [
        *lines,
        ("rotary base", f"{rotary['base']:,.10g}"),
        ("rotated channels", f"{rotary['d_rotary']} of {rotary['d_head']}, {rotary['layout']}"),
        ("scaling rule", rule),
        ("attention factor", f"{rotary['attention_factor']:.7g}"),
        ("longest wavelength", f"{rotary['longest_wavelength']:,.0f} positions"),
    ]


def _tokenizer_lines(tokenizer: Facts) -> Lines:
    bos = [tokenizer["bos"]] if tokenizer["bos"] else []
    return [
        ("vocabulary", f"{tokenizer['vocab_size']:,}"),
        ("BOS", ", ".join(map(_token_text, bos)) or "none"),
        ("EOS", ", ".join(map(_token_text, tokenizer["eos"])) or "none"),
        ("chat template", "yes" if tokenizer["chat_template"] else "no"),
    ]


def _token_text(token: Facts) -> str:
    return f"{token['id']}" if token["text"] is None else f"{token['id']} {token['text']!r}"


def _bytes(count: int) -> str:
    return f"{count:,} bytes ({bytes_text(count)})" if count >= 1000 else bytes_text(count)
