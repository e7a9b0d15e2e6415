"""`armillary extend`: plan a longer window, and write a model that has it."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from armillary.cli._model import read_checkpoint, read_model
from armillary.cli._options import Debug, IgnoreKey, Json
from armillary.errors import UserError

_MOST = 1 << 24  # tokens


def extend(
    action: Annotated[
        Literal["plan", "apply", "search"],
        typer.Argument(metavar="plan|apply|search", help="What to do.", show_default=False),
    ],
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="An alias (smollm2-135m), a directory, a .gguf file, or a Hub repository "
            "(owner/name); for plan also a configuration (.yaml, .json).",
            show_default=False,
        ),
    ] = None,
    *,
    to: Annotated[
        int | None,
        typer.Option(
            "--to",
            metavar="N",
            min=1,
            max=_MOST,
            help="The window to have, in tokens.",
            show_default=False,
        ),
    ] = None,
    rule: Annotated[
        Literal["none", "linear", "ntk", "dynamic", "yarn", "llama3", "longrope"] | None,
        typer.Option(
            metavar="RULE",
            help="none, linear, ntk, dynamic, yarn, llama3 or longrope; plan shows all of them "
            "when left out.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="DIR",
            help="apply: where to; what armillary saved there before is replaced. search: the "
            "JSON file of divisors.",
            show_default=False,
        ),
    ] = None,
    factor: Annotated[
        float | None,
        typer.Option(
            metavar="S",
            help="By how much the window grows; target / original window when left out.",
            rich_help_panel="Rule",
            show_default=False,
        ),
    ] = None,
    over: Annotated[
        Literal["replace", "multiply"] | None,
        typer.Option(
            metavar="HOW",
            help="Where the model carries a rule already: replace it, or multiply its factor.",
            rich_help_panel="Rule",
            show_default=False,
        ),
    ] = None,
    original_window: Annotated[
        int | None,
        typer.Option(
            metavar="L",
            min=1,
            help="The window before any rule; the model's own when left out.",
            rich_help_panel="Rule",
            show_default=False,
        ),
    ] = None,
    beta_fast: Annotated[
        float | None,
        typer.Option(
            metavar="TURNS",
            help="yarn: pairs that turn this often in the original window stay (32).",
            rich_help_panel="Rule",
            show_default=False,
        ),
    ] = None,
    beta_slow: Annotated[
        float | None,
        typer.Option(
            metavar="TURNS",
            help="yarn: pairs that turn no more than this are interpolated (1).",
            rich_help_panel="Rule",
            show_default=False,
        ),
    ] = None,
    truncate: Annotated[
        bool | None,
        typer.Option(
            "--truncate/--no-truncate",
            help="yarn: round the ends of the ramp to whole pairs (yes).",
            rich_help_panel="Rule",
            show_default=False,
        ),
    ] = None,
    attention_factor: Annotated[
        float | None,
        typer.Option(
            metavar="A",
            help="yarn, longrope: what cos and sin are multiplied by; the rule's own formula when "
            "left out.",
            rich_help_panel="Rule",
            show_default=False,
        ),
    ] = None,
    low: Annotated[
        float | None,
        typer.Option(
            metavar="TURNS",
            help="llama3: pairs that turn less than this are interpolated (1).",
            rich_help_panel="Rule",
            show_default=False,
        ),
    ] = None,
    high: Annotated[
        float | None,
        typer.Option(
            metavar="TURNS",
            help="llama3: pairs that turn more than this stay (4).",
            rich_help_panel="Rule",
            show_default=False,
        ),
    ] = None,
    short_factors: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="longrope: a JSON list of divisors, one a channel pair, for texts within the "
            "original window.",
            rich_help_panel="Rule",
            show_default=False,
        ),
    ] = None,
    long_factors: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="longrope: the same for longer texts.",
            rich_help_panel="Rule",
            show_default=False,
        ),
    ] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16", "float64"] | None,
        typer.Option(
            metavar="TYPE",
            help="Number type of the weights: float32, bfloat16, float16 or float64. Left out, "
            "plan counts float32, and apply keeps what it finds (quantised weights as float32).",
            rich_help_panel="Output",
            show_default=False,
        ),
    ] = None,
    format: Annotated[
        Literal["auto", "huggingface", "armillary"],
        typer.Option(
            metavar="FORMAT",
            help="apply: huggingface or armillary; auto takes the first where it can say it all.",
            rich_help_panel="Output",
        ),
    ] = "auto",
    figure: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="plan: draw the frequencies before and after (.svg or .png).",
            rich_help_panel="Output",
            show_default=False,
        ),
    ] = None,
    adapt: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN.yaml",
            help="apply: train the model under its rule, as this file says; --explain tells every "
            "key. The same command goes on with what was interrupted.",
            rich_help_panel="Adapt",
            show_default=False,
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Replace a setting of RUN.yaml, such as train.lr=1e-5 (may be repeated).",
            rich_help_panel="Adapt",
            show_default=False,
        ),
    ] = None,
    explain: Annotated[
        bool,
        typer.Option(
            "--explain",
            help="apply: print every key of RUN.yaml with its type, default and meaning, and stop.",
            rich_help_panel="Adapt",
        ),
    ] = False,
    text: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="search: a text that was not trained on, longer than the window to have.",
            rich_help_panel="Search",
            show_default=False,
        ),
    ] = None,
    evaluations: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=3,
            max=1 << 20,
            help="search: how many divisors are measured (128); with more, the same command goes "
            "on.",
            rich_help_panel="Search",
            show_default=False,
        ),
    ] = None,
    population: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=2,
            max=1 << 12,
            help="search: how many are kept of a generation, and how many are made of them (16).",
            rich_help_panel="Search",
            show_default=False,
        ),
    ] = None,
    passages: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            max=1 << 12,
            help="search: passages of the text, as long as the window, that losses are taken on "
            "(4).",
            rich_help_panel="Search",
            show_default=False,
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=0,
            help="search: decides what is drawn (0).",
            rich_help_panel="Search",
            show_default=False,
        ),
    ] = None,
    json: Json = False,
    ignore_key: IgnoreKey = None,
    debug: Debug = False,
) -> None:
    """Plan a longer window, or write a model that has one.

    Examples:
      armillary extend plan smollm2-135m --to 32768
      armillary extend plan smollm2-135m --to 32768 --rule llama3 --figure pairs.svg
      armillary extend apply smollm2-135m --to 32768 --rule yarn --out smollm2-32k
      armillary extend apply my-model --to 65536 --rule yarn --over multiply -o my-model-64k
      armillary extend apply smollm2-135m --to 16384 --rule yarn -o smollm2-16k --adapt run.yaml
      armillary extend search smollm2-135m --to 16384 --text novel.txt -o factors.json

    apply writes the rule, reads it back and compares the frequencies. It changes no weight,
    unless with --adapt. search looks for the divisors of the rule longrope.
    """
    if explain:
        from armillary.cli._adaptation import show_keys

        show_keys(json)
        return
    if model is None or to is None:
        raise UserError(f"extend {action} needs {'a MODEL' if model is None else '--to N'}")
    if adapt is None and settings:
        raise UserError("--set replaces settings of a file; say which: --adapt RUN.yaml")
    _check_of_search(
        action,
        text=text,
        evaluations=evaluations,
        population=population,
        passages=passages,
        seed=seed,
    )
    from armillary.cli import _extension
    from armillary.extension.rules import RuleOptions

    options = RuleOptions(
        factor=factor,
        original_window=original_window,
        beta_fast=beta_fast,
        beta_slow=beta_slow,
        attention_factor=attention_factor,
        truncate=truncate,
        low=low,
        high=high,
        short_factors=_extension.read_factors(short_factors),
        long_factors=_extension.read_factors(long_factors),
        over=over,
    )
    ignored = tuple(ignore_key or ())
    if action == "plan":
        if out is not None or format != "auto" or adapt is not None:
            raise UserError("--out and --format go with extend apply, and so does --adapt")
        if rule is None and options != RuleOptions(over=over):
            raise UserError("options of a rule go with one; say which: --rule yarn")
        config, checkpoint = read_model(model, ignored)
        planned = _extension.make_plan(config, to, rule, options, dtype or "float32")
        if figure is not None:
            from armillary.extension.figure import draw_frequencies

            draw_frequencies(planned, figure)
        _extension.show_plan(model, planned, checkpoint, json)
        return
    if figure is not None:
        raise UserError("--figure goes with extend plan")
    if action == "search":
        if rule not in (None, "longrope") or adapt is not None or dtype is not None:
            raise UserError(
                "extend search is for the rule longrope, in float32, and trains nothing; leave out "
                "--rule, --dtype and --adapt"
            )
        from armillary.cli import _search

        _search.run(
            model,
            read_checkpoint(model, ignored),
            text,
            out,
            to=to,
            options=options,
            evaluations=evaluations or 128,
            population=population or 16,
            passages=passages or 4,
            seed=seed or 0,
            json=json,
        )
        return
    if out is None or rule is None:
        missing = "--out DIR" if out is None else "--rule RULE (extend plan recommends one)"
        raise UserError(f"extend apply needs {missing}")
    if adapt is not None:
        from armillary.cli import _adaptation

        _adaptation.run(
            read_checkpoint(model, ignored),
            out,
            adapt,
            settings or [],
            json,
            to=to,
            rule=rule,
            options=options,
            format=format,
            dtype=dtype,
        )
        return
    from armillary.extension.apply import apply

    applied = apply(
        read_checkpoint(model, ignored),
        out,
        to=to,
        rule=rule,
        options=options,
        format=format,
        dtype=dtype,
    )
    _extension.show_applied(applied, json)


def _check_of_search(action: str, **options: object) -> None:
    for name, value in options.items():
        if value is not None and action != "search":
            raise UserError(f"--{name} goes with extend search")
