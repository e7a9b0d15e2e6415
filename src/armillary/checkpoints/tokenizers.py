"""What a TOKENIZER means: a model's, a tokenizer.json or its directory. No weights are read."""

from pathlib import Path

from armillary.checkpoints.download import Progress
from armillary.checkpoints.locate import locate
from armillary.errors import UserError
from armillary.tokenizer import Tokenizer


def open_tokenizer(name: str, *, progress: Progress | None = None) -> Tokenizer:
    """Read the tokenizer that `name` means, fetching its model when it is not here.

    Raises UserError when there is none.
    """
    path = Path(name).expanduser()
    if path.suffix == ".json" and path.is_file():
        return Tokenizer.from_file(path)
    if not (path / "tokenizer.json").is_file():
        path = locate(name, progress=progress)
    if (path / "tokenizer.json").is_file():
        return Tokenizer.from_file(path / "tokenizer.json")

    from armillary.checkpoints import open_checkpoint

    tokenizer = open_checkpoint(path).tokenizer
    if tokenizer is None:
        raise UserError(f"{name}: holds no tokenizer; name a tokenizer.json or another model")
    return tokenizer
