"""`armillary diff`: the first step of the first layer at which two models part."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from armillary.cli._options import (
    Debug,
    IgnoreKey,
    Json,
    Model,
    one_line,
    output_console,
    print_json,
)

if TYPE_CHECKING:
    from armillary.checkpoints.checkpoint import Checkpoint
    from armillary.diagnosis.parting import StepDifference
    from armillary.diagnosis.weight_difference import WeightDifference

Type = Literal["float32", "float64", "bfloat16", "float16"]
_TYPES = "float32, float64, bfloat16 or float16"
_MOST_TOKENS = 4096


def diff(
    model: Model,
    other: Annotated[
        str | None,
        typer.Argument(
            metavar="OTHER",
            help="The model to set against it; itself when left out (in another library or type).",
            show_default=False,
        ),
    ] = None,
    *,
    library: Annotated[
        Literal["armillary", "transformers"],
        typer.Option(
            "--with",
            metavar="LIBRARY",
            help="What runs the other: armillary, or transformers where it is installed.",
            rich_help_panel="Models",
        ),
    ] = "armillary",
    dtype: Annotated[
        Type,
        typer.Option(metavar="TYPE", help=f"Number type: {_TYPES}.", rich_help_panel="Models"),
    ] = "float32",
    other_dtype: Annotated[
        Type | None,
        typer.Option(
            metavar="TYPE",
            help="That of the other; the same when left out.",
            rich_help_panel="Models",
            show_default=False,
        ),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A text to run; English prose when left out.",
            rich_help_panel="Input",
            show_default=False,
        ),
    ] = None,
    tokens: Annotated[
        int,
        typer.Option(
            metavar="T",
            min=1,
            max=_MOST_TOKENS,
            help="How many tokens of it.",
            rich_help_panel="Input",
        ),
    ] = 48,
    tolerance: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            min=0.0,
            help="Relative difference of a step in the first layer that counts as rounding; by "
            "the number types when left out.",
            rich_help_panel="Output",
            show_default=False,
        ),
    ] = None,
    json: Json = False,
    ignore_key: IgnoreKey = None,
    debug: Debug = False,
) -> None:
    """Run two models on one input and name the first step of the first layer where they part.

    Examples:
      armillary diff my-model my-model.gguf
      armillary diff my-model --with transformers --dtype float64
      armillary diff my-model --other-dtype bfloat16
      armillary diff my-model converted --json

    Exit code 0 when they are the same up to rounding, 1 when they part, 2 when one cannot be run.
    """
    from armillary.cli._model import read_checkpoint
    from armillary.diagnosis.parting import differences, first_parting, tolerance_of
    from armillary.diagnosis.probe_text import first_tokens, read_texts

    ignored = tuple(ignore_key or ())
    one = read_checkpoint(model, ignored)
    second = one if other is None else read_checkpoint(other, ignored)
    theirs = dtype if other_dtype is None else other_dtype
    (first_text, *_) = read_texts(text)
    ids = first_tokens(one, first_text, tokens)
    notes = _notes(one, second, first_text, tokens)
    allowed = tolerance
    if allowed is None:
        encodings = (_encodings(one), _encodings(second))
        # transformers turns by angles in float32, whatever the model's type.
        rounded = "float32" if library == "transformers" and theirs == "float64" else theirs
        allowed = tolerance_of((dtype, rounded), encodings)
    found = differences(
        _run(one, "armillary", dtype, ids), _run(second, library, theirs, ids), allowed
    )
    parting = first_parting(found)
    unexplained = _unexplained(one, second)
    facts = {
        "model": model,
        "other": other or model,
        "with": library,
        "dtypes": [dtype, theirs],
        "tokens": len(ids),
        "parts": None if parting is None else parting.to_dict(),
        "weights": None if unexplained is None else unexplained.to_dict(),
        "steps": [step.to_dict() for step in found],
        "notes": notes,
    }
    if json:
        print_json(facts)
    else:
        _print(facts, found, parting, unexplained)
    if parting is not None or unexplained is not None:
        raise typer.Exit(1)


def _encodings(checkpoint: "Checkpoint") -> set[str]:
    return {tensor.encoding for tensor in checkpoint.tensors.values() if len(tensor.shape) > 1}


def _unexplained(one: "Checkpoint", second: "Checkpoint") -> "WeightDifference | None":
    """The first tensor that differs by more than the encodings of two files explain."""
    from armillary.diagnosis.weight_difference import first_unexplained, weight_differences

    if _encodings(one) == _encodings(second) or _layouts(one) != _layouts(second):
        return None  # the steps tell as much, or the rows of Q and K lie in another order
    return first_unexplained(weight_differences(one.tensors, second.tensors))


def _layouts(checkpoint: "Checkpoint") -> list[str | None]:
    rotations = [getattr(layer.attention, "rotary", None) for layer in checkpoint.config.layers]
    return [None if rotary is None else rotary.layout for rotary in rotations]


def _run(checkpoint: "Checkpoint", library: str, dtype: str, ids: list[int]) -> Any:
    import torch

    from armillary.diagnosis.peer_trace import load_peer, trace_peer
    from armillary.diagnosis.trace import trace_decoder
    from armillary.errors import UserError
    from armillary.weights import build_filled

    tokens, kind = torch.tensor([ids]), getattr(torch, dtype)
    if library == "transformers":
        if checkpoint.format == "armillary":
            raise UserError(
                f"{checkpoint.source}: is in armillary's own format, which transformers does not "
                "read; convert it to huggingface first"
            )
        return trace_peer(load_peer(checkpoint.source, kind), tokens)
    return trace_decoder(build_filled(checkpoint.config, checkpoint.tensors, dtype=kind), tokens)


def _notes(one: "Checkpoint", second: "Checkpoint", text: str, count: int) -> list[str]:
    """What differs before anything is computed: the configuration, the tokens of the text."""
    from armillary.checkpoints.huggingface import first_difference
    from armillary.diagnosis.probe_text import first_tokens

    notes = []
    ours, theirs = one.config.to_dict(), second.config.to_dict()
    if ours != theirs:
        notes.append(f"the configurations differ, first in {first_difference(ours, theirs)}")
    if second.tokenizer is not None and one.tokenizer is not None:
        same = first_tokens(one, text, count) == first_tokens(second, text, count)
        if not same:
            notes.append("the tokenizers make other tokens of the text; both run the first's")
    return notes


def _print(
    facts: dict[str, Any],
    found: "list[StepDifference]",
    parting: "StepDifference | None",
    unexplained: "WeightDifference | None",
) -> None:
    console = output_console()
    if unexplained is not None:
        said = (
            f"the weights part at {unexplained.name}, row {unexplained.row}: "
            f"{unexplained.relative:.2g} of its size apart, "
            f"{unexplained.explained:.2g} is explained by the encodings"
        )
    elif parting is None:
        said = f"the same up to rounding, in all {len(found)} steps"
    else:
        said = (
            f"they part at {parting.name}: {parting.relative:.2g} of its size apart, "
            f"{parting.most:.2g} at most"
        )
    console.print(said, style="bold", soft_wrap=True)
    runs = " and ".join(facts["dtypes"])
    console.print(
        f"{facts['model']}, {facts['other']} ({facts['with']}): {facts['tokens']} tokens in {runs}",
        soft_wrap=True,
    )
    for note in facts["notes"]:
        console.print(f"note: {one_line(note)}", soft_wrap=True)
    console.print(_table(found, parting))


_AROUND = 20


def _table(found: "list[StepDifference]", parting: "StepDifference | None") -> Any:
    """The steps around the parting, or the last of each layer."""
    from rich import box
    from rich.table import Table

    if parting is None:
        shown = [step for step in found if step.layer is None or step.step == "output"]
    else:
        at = found.index(parting)
        shown = found[max(0, at - _AROUND) : at + _AROUND]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("step", no_wrap=True)
    for name in ("largest difference", "relative", "rounding may make"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    for step in shown:
        numbers = (f"{value:.2e}" for value in (step.most, step.relative, step.tolerance))
        table.add_row(step.name, *numbers, "parts" if step.parts else "")
    return table
