"""`armillary prepare`: text or chats → token shards to train on."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from armillary.cli._options import Debug, Json, print_json
from armillary.wording import bytes_text

if TYPE_CHECKING:
    from armillary.data.prepared import Facts

BARS = 40


def prepare(
    source: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE",
            help="Files, directories, patterns ('texts/**/*.txt'), python-stdlib, or "
            "hub:owner/name (also /configuration, @revision behind it).",
            show_default=False,
        ),
    ],
    *,
    tokenizer: Annotated[
        str,
        typer.Option(
            "--tokenizer",
            "-t",
            metavar="T",
            help="A model (as for generate), a tokenizer.json or its directory.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path,
        typer.Option("--out", "-o", metavar="DIR", help="Where to.", show_default=False),
    ],
    field: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Key of JSON lines, or column of a table, that holds the text, or of chats the "
            "list of messages; text or messages when left out.",
            rich_help_panel="Reading",
            show_default=False,
        ),
    ] = None,
    format: Annotated[
        Literal["auto", "text", "jsonl", "parquet", "chat"],
        typer.Option(
            metavar="FORMAT",
            help="text (a file is a document), jsonl or parquet; auto goes by the name's ending. "
            "chat: JSON lines or Parquet of chats, written by the tokenizer's template; only "
            "what the assistant says is learned.",
            rich_help_panel="Reading",
        ),
    ] = "auto",
    strict: Annotated[
        bool,
        typer.Option(
            "--strict",
            help="Stop at the first thing that cannot be used, instead of counting it.",
            rich_help_panel="Reading",
        ),
    ] = False,
    validation: Annotated[
        float,
        typer.Option(
            metavar="SHARE",
            help="Share of the documents that is held out.",
            rich_help_panel="Writing",
        ),
    ] = 0.01,
    seed: Annotated[
        int,
        typer.Option(
            metavar="N", help="Decides which documents are held out.", rich_help_panel="Writing"
        ),
    ] = 0,
    end_token: Annotated[
        str | None,
        typer.Option(
            "--end-token",
            metavar="TOKEN",
            help="The control token after each document (after a chat, where its template writes "
            "none); the tokenizer's end token if left out.",
            rich_help_panel="Writing",
            show_default=False,
        ),
    ] = None,
    shard_tokens: Annotated[
        int,
        typer.Option(
            "--shard-tokens",
            metavar="N",
            help="Tokens after which a shard is closed; an interrupted run repeats one at most.",
            rich_help_panel="Writing",
        ),
    ] = 1 << 26,
    workers: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Processes; one for each core when left out. The output is the same with any.",
            rich_help_panel="Running",
            show_default=False,
        ),
    ] = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Turn text or chats into token shards, split into training and validation by document.

    Examples:
      armillary prepare python-stdlib --tokenizer smollm2-135m --out data/stdlib
      armillary prepare texts 'more/**/*.txt.gz' -t tokenizer.json -o data/texts
      armillary prepare crawl.jsonl.zst --field body -t smollm2-135m -o data/crawl
      armillary prepare chats.jsonl --format chat -t smollm2-135m -o data/chats

    An interrupted run, however it ended, goes on when the same command is run again.
    """
    from armillary.cli._preparation import PreparationProgress
    from armillary.cli._tokenizer import load_tokenizer
    from armillary.data.preparation import prepare as run

    loaded = load_tokenizer(tokenizer)
    with PreparationProgress() as progress:
        try:
            facts = run(
                source,
                loaded,
                out,
                field=field,
                format=format,
                validation=validation,
                seed=seed,
                end_token=end_token,
                shard_tokens=shard_tokens,
                workers=workers,
                strict=strict,
                progress=progress.report,
            )
        except KeyboardInterrupt:
            print("full shards are kept; the same command goes on from them", file=sys.stderr)
            raise
    if json:
        print_json({"path": str(out), **facts.model_dump()})
    else:
        _print(out, facts)


def _print(out: Path, facts: "Facts") -> None:
    print(out)
    print(f"  read        {facts.source_files:,} files, {bytes_text(facts.source_bytes)}")
    for name, split in facts.splits.items():
        print(
            f"  {name:<10}  {split.documents:,} documents, {split.tokens:,} tokens of "
            f"{facts.dtype}, {split.bytes / split.tokens:.2f} bytes per token"
            + ("" if split.learned is None else f", {split.learned / split.tokens:.1%} learned")
        )
    if "validation" not in facts.splits and facts.settings.validation:
        print("  validation  no document fell to it; raise --validation or change --seed")
    _print_lengths(facts.lengths)
    for reason, skipped in facts.skipped.items():
        print(f"  skipped     {skipped.count:,} × {reason}")
        for example in skipped.examples:
            print(f"                {example.id}: {example.detail}")


def _print_lengths(lengths: dict[str, int]) -> None:
    print("  documents by tokens")
    starts, largest = [int(start) for start in lengths], max(lengths.values())
    width = len(f"{2 * max(starts) - 1:,}")
    start = min(starts)
    while start <= max(starts):
        count = lengths.get(str(start), 0)
        bar = "█" * -(-BARS * count // largest)
        print(f"    {start:>{width},} – {2 * start - 1:<{width},}  {count:>9,}  {bar}".rstrip())
        start *= 2
