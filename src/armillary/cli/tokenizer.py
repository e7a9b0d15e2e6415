"""`armillary tokenizer train`: a vocabulary of one's own."""

from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from armillary.cli._options import Debug, Json, print_json
from armillary.wording import bytes_text


def tokenizer(
    action: Annotated[
        Literal["train"], typer.Argument(metavar="train", help="What to do.", show_default=False)
    ],
    source: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE",
            help="Files, directories, patterns or python-stdlib, as for armillary prepare.",
            show_default=False,
        ),
    ],
    *,
    vocab_size: Annotated[
        int,
        typer.Option(
            "--vocab-size",
            "-n",
            metavar="N",
            help="Ids in all: control tokens, 256 bytes, and what is learnt.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            "--out",
            "-o",
            metavar="DIR",
            help="Where to; what this command wrote there before is replaced.",
            show_default=False,
        ),
    ],
    special: Annotated[
        list[str] | None,
        typer.Option(
            "--special",
            metavar="TEXT",
            help="A control token (may be repeated). The first one ends a text; <|endoftext|> "
            "when none is given.",
            rich_help_panel="Vocabulary",
            show_default=False,
        ),
    ] = None,
    min_frequency: Annotated[
        int,
        typer.Option(
            "--min-frequency",
            metavar="N",
            min=1,
            help="How often two tokens must stand side by side to become one.",
            rich_help_panel="Vocabulary",
        ),
    ] = 2,
    field: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Key of JSON lines, or column of a table, that holds the text.",
            rich_help_panel="Reading",
        ),
    ] = "text",
    format: Annotated[
        Literal["auto", "text", "jsonl", "parquet"],
        typer.Option(
            metavar="FORMAT",
            help="text, jsonl or parquet; auto goes by the name's ending.",
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
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Learn a byte-level BPE vocabulary from text; any text comes back from it as it was.

    Examples:
      armillary tokenizer train python-stdlib --vocab-size 4096 --out stdlib-4k
      armillary tokenizer train texts -n 8192 -o texts-8k --special '<|end|>'

    The same text gives the same vocabulary.
    """
    from armillary.cli._progress import TransferProgress
    from armillary.data.bpe import END_OF_TEXT, train_bpe
    from armillary.data.sources import find_sources
    from armillary.data.texts import Texts
    from armillary.files import write_directory_atomically

    files = find_sources(source, format)
    with TransferProgress() as progress:
        reading = Texts(
            files, field=field, strict=strict, progress=partial(progress.report, "reading")
        )
        made = train_bpe(
            reading,
            vocab_size,
            specials=special or [END_OF_TEXT],
            min_frequency=min_frequency,
        )
    with write_directory_atomically(out) as directory:
        made.save(directory)
    facts = {
        "path": str(out),
        "vocab_size": made.vocab_size,
        "special_tokens": made.special_tokens,
        "documents": reading.documents,
        "bytes": reading.bytes,
        "skipped": reading.tally.model_dump()["skipped"],
    }
    if json:
        print_json(facts)
        return
    print(out)
    fewer = ""
    if made.vocab_size < vocab_size:
        fewer = f", not {vocab_size:,}: no other pair occurs {min_frequency} times"
    print(f"  vocabulary  {made.vocab_size:,}{fewer}")
    print(f"  controls    {', '.join(made.special_tokens)}")
    print(f"  read        {reading.documents:,} documents, {bytes_text(reading.bytes)}")
    for reason, skipped in reading.tally.skipped.items():
        print(f"  skipped     {skipped.count:,} × {reason}")
        for example in skipped.examples:
            print(f"                {example.id}: {example.detail}")
