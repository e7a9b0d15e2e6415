"""The options of `generate` and `chat` that concern loading and sampling, and what they come to."""

from contextlib import nullcontext
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any

import typer

from armillary.cli._options import one_line, progress_console

if TYPE_CHECKING:
    from armillary.language_model import LanguageModel

_SAMPLING = "Sampling"
_LOADING = "Loading"

MaxTokens = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Tokens to generate at most (default: 256, or what the window leaves).",
        rich_help_panel=_SAMPLING,
        show_default=False,
    ),
]
Temperature = Annotated[
    float | None,
    typer.Option(
        metavar="T",
        help="0 takes the likeliest token; higher is more varied (default: the model's, else 1).",
        rich_help_panel=_SAMPLING,
        show_default=False,
    ),
]
TopK = Annotated[
    int | None,
    typer.Option(
        metavar="K",
        help="Choose among the K likeliest tokens; 0 among all.",
        rich_help_panel=_SAMPLING,
        show_default=False,
    ),
]
TopP = Annotated[
    float | None,
    typer.Option(
        metavar="P",
        help="Choose among the likeliest tokens that together reach P.",
        rich_help_panel=_SAMPLING,
        show_default=False,
    ),
]
MinP = Annotated[
    float | None,
    typer.Option(
        metavar="P",
        help="Leave out tokens less likely than P times the likeliest.",
        rich_help_panel=_SAMPLING,
        show_default=False,
    ),
]
RepetitionPenalty = Annotated[
    float | None,
    typer.Option(
        metavar="X",
        help="Above 1 makes tokens that were there before less likely.",
        rich_help_panel=_SAMPLING,
        show_default=False,
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="The same seed gives the same text.",
        rich_help_panel=_SAMPLING,
        show_default=False,
    ),
]
Stop = Annotated[
    list[str] | None,
    typer.Option(
        metavar="TEXT",
        help="End before this text (may be repeated).",
        rich_help_panel=_SAMPLING,
        show_default=False,
    ),
]
Speculate = Annotated[
    bool,
    typer.Option(
        "--speculate",
        help="Guess from the text itself what comes next: the same text, sooner where it repeats.",
        rich_help_panel=_SAMPLING,
    ),
]
Draft = Annotated[
    str | None,
    typer.Option(
        metavar="MODEL",
        help="Guess with a smaller model of the same vocabulary: the same text, sooner.",
        rich_help_panel=_SAMPLING,
        show_default=False,
    ),
]
Engine = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="numba computes on the CPU and starts at once, torch on any device; auto is numba on "
        "the CPU, else torch.",
        rich_help_panel=_LOADING,
    ),
]
Dtype = Annotated[
    str,
    typer.Option(
        metavar="TYPE",
        help="float32, bfloat16, and with torch float16, float64; auto: torch takes bfloat16 for "
        "files in it, else float32, numba weights as they are stored.",
        rich_help_panel=_LOADING,
    ),
]
CacheType = Annotated[
    str,
    typer.Option(
        metavar="TYPE",
        help="What the numba engine keeps keys and values in: float32, bfloat16 or int8; auto is "
        "float32 where the weights are, else bfloat16.",
        rich_help_panel=_LOADING,
    ),
]
PromptCache = Annotated[
    bool,
    typer.Option(
        "--prompt-cache/--no-prompt-cache",
        envvar="ARMILLARY_PROMPT_CACHE",
        show_envvar=False,
        help="Keep what the numba engine computes of a long prompt in a private file, and go on "
        "from there next time; see armillary prompts.",
        rich_help_panel=_LOADING,
    ),
]
Device = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="cpu, cuda, cuda:1 …; auto is a GPU where there is one.",
        rich_help_panel=_LOADING,
    ),
]


def given(**options: Any) -> dict[str, Any]:
    """Return the options that were given; the others are left to the model."""
    return {name: value for name, value in options.items() if value is not None}


def load_model(
    model: str,
    dtype: str,
    device: str,
    ignore_key: list[str] | None,
    engine: str = "torch",
    cache_type: str = "auto",
    prompt_files: bool = False,
) -> "LanguageModel":
    """Find, fetch if need be, and load a model, with progress and notices on standard error."""
    from armillary.checkpoints.locate import locate
    from armillary.cli._progress import TransferProgress
    from armillary.engine_choice import choose_engine

    chosen = choose_engine(engine, device, dtype, cache_type)
    with TransferProgress() as progress:
        path = locate(model, progress=progress.report)
    console = cache(progress_console)  # made when there is something to say: it takes a moment

    def say(notice: str) -> None:
        line = f"note: {one_line(notice)}"
        console().print(line, markup=False, highlight=False, soft_wrap=True)

    slow = chosen == "torch" and console().is_terminal
    with console().status(f"loading {model}") if slow else nullcontext():
        from armillary.language_model import load

        return load(
            path,
            engine=engine,
            dtype=dtype,
            device=device,
            cache=cache_type,
            ignore_keys=tuple(ignore_key or ()),
            prompt_files=prompt_files,
            notice=say,
        )
