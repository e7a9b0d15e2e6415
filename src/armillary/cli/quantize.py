"""`armillary quantize`: a smaller copy of a model, with what it costs."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from armillary.cli._options import Debug, IgnoreKey, Json, Model

_LOSS = "What it costs"


def quantize(
    model: Model,
    *,
    to: Annotated[
        Literal["q8_0", "q6_k", "q5_k", "q4_k", "q4_1", "q4_0", "bf16"],
        typer.Option(
            "--to",
            metavar="TYPE",
            help="q8_0 (8.5 bits a weight), q6_k (6.6), q5_k (5.5), q4_k (4.5), q4_1 (5), "
            "q4_0 (4.5) or bf16 (16).",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            "--out",
            "-o",
            metavar="PATH",
            help="A GGUF file when it ends in .gguf, else a directory in our own format.",
            show_default=False,
        ),
    ],
    max_loss: Annotated[
        float | None,
        typer.Option(
            metavar="NATS",
            min=0.0,
            help="Write nothing when the loss on the text rises by more than this.",
            rich_help_panel=_LOSS,
            show_default=False,
        ),
    ] = None,
    text: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SOURCE",
            help="Text to measure on: a file, a directory, python-stdlib (the default), or what "
            "else evaluate takes (may be repeated).",
            rich_help_panel=_LOSS,
            show_default=False,
        ),
    ] = None,
    windows: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=0,
            max=1 << 16,
            help="Stretches of text to measure on; 0 measures nothing.",
            rich_help_panel=_LOSS,
        ),
    ] = 16,
    length: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=2,
            max=1 << 20,
            help="Tokens of a stretch; the model's window where that is shorter.",
            rich_help_panel=_LOSS,
        ),
    ] = 512,
    json: Json = False,
    ignore_key: IgnoreKey = None,
    debug: Debug = False,
) -> None:
    """Write a copy of a model with fewer bits a weight, and say what that costs.

    Examples:
      armillary quantize my-model --to q8_0 --out my-model-q8.gguf
      armillary quantize my-model --to q4_0 --out my-model-q4 --max-loss 0.05 --text novel.txt
      armillary quantize owner/name --to bf16 --out model.gguf --windows 0

    The copy is written, read back and compared with the model before it stands.
    """
    from armillary.cli._quantizing import Wish, run

    wish = Wish(
        model=model,
        target=to,
        out=out,
        max_loss=max_loss,
        text=tuple(text or ()),
        windows=windows,
        length=length,
        ignore_keys=tuple(ignore_key or ()),
    )
    run(wish, json=json)
