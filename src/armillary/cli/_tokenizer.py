"""What a TOKENIZER on the command line means, fetched with progress where it is not here."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from armillary.tokenizer import Tokenizer


def load_tokenizer(name: str) -> "Tokenizer":
    """Read the tokenizer that `name` means. Raises UserError when there is none."""
    from armillary.checkpoints.tokenizers import open_tokenizer
    from armillary.cli._progress import TransferProgress

    with TransferProgress() as progress:
        return open_tokenizer(name, progress=progress.report)
