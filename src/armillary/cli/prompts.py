"""`armillary prompts`: what generate keeps of long prompts, and how to be rid of it."""

from typing import Annotated

import typer

from armillary.cli._options import Debug, Json, print_json
from armillary.wording import bytes_text


def prompts(
    clear: Annotated[bool, typer.Option("--clear", help="Remove all of it.")] = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Say what is kept of long prompts: where, how many, how much.

    Examples:
      armillary prompts
      armillary prompts --clear

    generate keeps what it computes of prompts of 256 tokens and more, the text included, in files
    that are yours alone, and goes on from there when a prompt begins alike. With
    --no-prompt-cache, or ARMILLARY_PROMPT_CACHE=0 in the environment, it neither keeps nor reads.
    """
    from armillary.checkpoints.locate import prompt_directory
    from armillary.files import as_user_error

    folder = prompt_directory()
    with as_user_error(folder):
        files = sorted(folder.iterdir()) if folder.is_dir() else []
        sizes = [file.stat().st_size for file in files if file.suffix == ".safetensors"]
        if clear:
            for file in files:
                file.unlink(missing_ok=True)
    facts = {"path": str(folder), "prompts": len(sizes), "bytes": sum(sizes), "cleared": clear}
    if json:
        print_json(facts)
        return
    print(folder)
    count = f"{len(sizes)} prompt{'' if len(sizes) == 1 else 's'}, {bytes_text(sum(sizes))}"
    print(f"  {count}{', removed' if clear else ''}")
