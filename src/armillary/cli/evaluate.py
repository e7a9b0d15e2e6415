"""`armillary evaluate`: what a model is worth at a length, with intervals."""

from pathlib import Path
from typing import Annotated

import typer

from armillary.cli._options import Debug, IgnoreKey, Json, Model
from armillary.cli._sampling import Device, Dtype
from armillary.errors import UserError

_ASKED, _TEXT, _MODEL = "What is asked", "Text", "Loading"
_MOST = 1 << 24


def evaluate(
    model: Model,
    *,
    out: Annotated[
        Path,
        typer.Option(
            "--out",
            "-o",
            metavar="DIR",
            help="Where results go; an unfinished evaluation there is gone on with.",
            show_default=False,
        ),
    ],
    minutes: Annotated[
        float | None,
        typer.Option(
            metavar="M",
            min=0.01,
            max=1e6,
            help="Ask no more than fits into this time, and say what was left out.",
            show_default=False,
        ),
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,…",
            help="perplexity, retrieval, reasoning, induction (these four when left out), short; "
            "or one of the short tasks: lambada, hellaswag, arc_easy, arc_challenge, piqa.",
            rich_help_panel=_ASKED,
            show_default=False,
        ),
    ] = None,
    lengths: Annotated[
        str | None,
        typer.Option(
            metavar="N,…",
            help="Tokens of context (default: from an eighth of the original window to all of the "
            "window, by doublings).",
            rich_help_panel=_ASKED,
            show_default=False,
        ),
    ] = None,
    windows: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            max=_MOST,
            help="Stretches of text that losses are measured on (16).",
            rich_help_panel=_ASKED,
            show_default=False,
        ),
    ] = None,
    instances: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            max=_MOST,
            help="Contexts for each place of a grid of questions (4).",
            rich_help_panel=_ASKED,
            show_default=False,
        ),
    ] = None,
    depths: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            max=1024,
            help="Places of a fact between the beginning and the end of a context (11; fewer where "
            "lengths below 512 are asked, as of the next two).",
            rich_help_panel=_ASKED,
            show_default=False,
        ),
    ] = None,
    distractors: Annotated[
        str | None,
        typer.Option(
            metavar="N,…",
            help="Records beside the one that is asked for (15); below the number of depths each "
            "costs several contexts.",
            rich_help_panel=_ASKED,
            show_default=False,
        ),
    ] = None,
    hops: Annotated[
        str | None,
        typer.Option(
            metavar="N,…",
            help="Steps of reasoning (1,2,4).",
            rich_help_panel=_ASKED,
            show_default=False,
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            max=_MOST,
            help="Questions of each short task (500).",
            rich_help_panel=_ASKED,
            show_default=False,
        ),
    ] = None,
    seed: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=0,
            max=2**31 - 1,
            help="The same seed asks the same.",
            rich_help_panel=_ASKED,
        ),
    ] = 0,
    text: Annotated[
        list[str] | None,
        typer.Option(
            "--text",
            metavar="SOURCE",
            help="Long documents: files, directories, patterns, python-stdlib, hub:owner/name (may "
            "be repeated; default: python-stdlib, which every machine has); or prepared data, such "
            "as OUT/data of a training run, of which the held-out documents are taken.",
            rich_help_panel=_TEXT,
            show_default=False,
        ),
    ] = None,
    reach: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            max=_MOST,
            help="Take text that goes back so far, to compare with a model of this window on the "
            "same tokens.",
            rich_help_panel=_TEXT,
            show_default=False,
        ),
    ] = None,
    keys_from: Annotated[
        Path | None,
        typer.Option(
            metavar="RESULTS",
            help="Take the key tokens that another evaluation chose, so that losses on them can be "
            "compared; left out, each model chooses its own.",
            rich_help_panel=_TEXT,
            show_default=False,
        ),
    ] = None,
    short_data: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Where lambada.jsonl, hellaswag.jsonl … lie; fetched when left out.",
            rich_help_panel=_TEXT,
            show_default=False,
        ),
    ] = None,
    original_window: Annotated[
        int | None,
        typer.Option(
            metavar="L",
            min=1,
            max=_MOST,
            help="The window before it was extended, which cropping crops to (default: what the "
            "rule says, else the window).",
            rich_help_panel=_MODEL,
            show_default=False,
        ),
    ] = None,
    server: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Ask an OpenAI-compatible server that scores prompts (vLLM); MODEL is then whose "
            "tokenizer it has. $ARMILLARY_SERVER_KEY is sent where it is set.",
            rich_help_panel=_MODEL,
            show_default=False,
        ),
    ] = None,
    server_model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="The model as the server calls it (default: the one that it serves).",
            rich_help_panel=_MODEL,
            show_default=False,
        ),
    ] = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    ignore_key: IgnoreKey = None,
    figures: Annotated[
        bool,
        typer.Option(
            "--figures/--no-figures",
            help="Draw the page's figures as PNGs too (some seconds).",
            rich_help_panel="Output",
        ),
    ] = True,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure what a model makes of long contexts: losses, retrieval, reasoning, with intervals.

    Examples:
      armillary evaluate smollm2-135m --out results/base --minutes 10
      armillary evaluate smollm2-16k --out results/yarn --text novel.txt --lengths 2048,8192,16384
      armillary evaluate smollm2-135m --out results/short --tasks lambada,hellaswag --limit 100
      armillary compare results/base results/yarn

    The same command goes on where it was stopped, with the same results.
    """
    from armillary.cli._evaluating import Wish, run_evaluation

    run_evaluation(
        Wish(
            model=model,
            out=out,
            minutes=minutes,
            tasks=words("--tasks", tasks),
            lengths=numbers("--lengths", lengths, least=2),
            windows=windows,
            instances=instances,
            depths=depths,
            distractors=numbers("--distractors", distractors, least=0),
            hops=numbers("--hops", hops, least=1),
            limit=limit,
            seed=seed,
            text=tuple(text or ()),
            reach=reach,
            keys_from=keys_from,
            short_data=short_data,
            original_window=original_window,
            server=server,
            server_model=server_model,
            dtype=dtype,
            device=device,
            ignore_keys=tuple(ignore_key or ()),
            figures=figures,
        ),
        json=json,
    )


def words(option: str, text: str | None) -> tuple[str, ...] | None:
    """Return the parts of a list with commas. Raises UserError for an empty one."""
    if text is None:
        return None
    parts = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    if "" in parts:
        raise UserError(f"{option} {text!r}: must be names with commas between them")
    return parts


def numbers(option: str, text: str | None, *, least: int) -> tuple[int, ...] | None:
    """Return the whole numbers of a list with commas, in order. Raises UserError for others."""
    if text is None:
        return None
    parts = words(option, text) or ()
    if not all(part.isascii() and part.isdigit() and least <= int(part) <= _MOST for part in parts):
        raise UserError(
            f"{option} {text!r}: must be whole numbers of at least {least}, with commas between"
        )
    return tuple(sorted({int(part) for part in parts}))
