"""What a TOKENIZER on the command line means: a model's, a tokenizer.json or its directory."""

from pathlib import Path
from typing import TYPE_CHECKING

from armillary.errors import UserError

if TYPE_CHECKING:
    from armillary.tokenizer import Tokenizer


def load_tokenizer(name: str) -> "Tokenizer":
    """Read the tokenizer that `name` means. No weights are read for it.

    Raises UserError when there is none.
    """
    from armillary.tokenizer import Tokenizer

    path = Path(name).expanduser()
    if path.suffix == ".json" and path.is_file():
        return Tokenizer.from_file(path)
    if (path / "tokenizer.json").is_file():
        return Tokenizer.from_file(path / "tokenizer.json")

    from armillary.checkpoints import open_checkpoint
    from armillary.checkpoints.locate import locate
    from armillary.cli._progress import TransferProgress

    with TransferProgress() as progress:
        path = locate(name, progress=progress.report)
    if (path / "tokenizer.json").is_file():
        return Tokenizer.from_file(path / "tokenizer.json")
    tokenizer = open_checkpoint(path).tokenizer
    if tokenizer is None:
        raise UserError(f"{name}: holds no tokenizer; name a tokenizer.json or another model")
    return tokenizer
