"""`armillary convert`: a model in another format, read back and compared before it stands."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from armillary.cli._options import Debug, IgnoreKey, Json, Model


def convert(
    model: Model,
    target: Annotated[
        Path,
        typer.Argument(
            metavar="TARGET",
            help="What to write: a name that ends in .gguf for a GGUF file, else a directory. "
            "Nothing of that name may be there.",
            show_default=False,
        ),
    ],
    *,
    to: Annotated[
        Literal["huggingface", "gguf", "armillary"],
        typer.Option(
            "--to",
            metavar="FORMAT",
            help="huggingface (transformers and most others read it), gguf (llama.cpp) or "
            "armillary (holds every decoder).",
            show_default=False,
        ),
    ],
    dtype: Annotated[
        Literal[
            "float64",
            "float32",
            "float16",
            "bfloat16",
            "q8_0",
            "q6_k",
            "q5_k",
            "q4_k",
            "q5_1",
            "q5_0",
            "q4_1",
            "q4_0",
        ]
        | None,
        typer.Option(
            metavar="TYPE",
            help="Number type of the weights: float32, float16, bfloat16, float64; also q8_0, "
            "q6_k, q5_k, q4_k, q5_1, q5_0, q4_1, q4_0 where the format holds blocks. As stored "
            "when not given.",
            show_default=False,
        ),
    ] = None,
    shard_size: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Cut a directory's weights into files of at most this size, such as 5GB or 500MB.",
            show_default=False,
        ),
    ] = None,
    json: Json = False,
    ignore_key: IgnoreKey = None,
    debug: Debug = False,
) -> None:
    """Write a model in another format, and prove that it is the same one.

    Examples:
      armillary convert my-model my-model.gguf --to gguf --dtype float16
      armillary convert model.gguf my-model --to huggingface --shard-size 5GB
      armillary convert Llama-2-7b llama-2-7b --to huggingface

    MODEL may also be a directory of Meta's (params.json, consolidated.00.pth). What was written is
    read back: frequencies, attention factor and logits on both sides of the original window are
    compared before it stands, and noted in its manifest. A run that was stopped goes on.
    """
    from armillary.cli._converting import Wish, run

    wish = Wish(
        model=model,
        target=target,
        to=to,
        dtype=dtype,
        shard_size=shard_size,
        ignore_keys=tuple(ignore_key or ()),
    )
    run(wish, json=json)
