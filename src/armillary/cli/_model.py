"""What a MODEL is of which only the configuration is needed: its file, or a checkpoint."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from armillary.checkpoints.checkpoint import Checkpoint
    from armillary.config import DecoderConfig


def read_model(
    model: str, ignore_keys: tuple[str, ...]
) -> "tuple[DecoderConfig, Checkpoint | None]":
    """Return the configuration of a .yaml or .json file, or of a checkpoint, and that too.

    A checkpoint is fetched when it is not here. Raises UserError for what cannot be read.
    """
    if model.endswith((".yaml", ".yml", ".json")):
        return _read_config(model), None
    checkpoint = read_checkpoint(model, ignore_keys)
    return checkpoint.config, checkpoint


def read_checkpoint(model: str, ignore_keys: tuple[str, ...]) -> "Checkpoint":
    """Return what a name means, fetched when it is not here. Raises UserError."""
    from armillary.checkpoints import open_checkpoint
    from armillary.checkpoints.locate import locate
    from armillary.cli._progress import TransferProgress

    with TransferProgress() as progress:
        path = locate(model, progress=progress.report)
    return open_checkpoint(path, ignore_keys=ignore_keys)


def _read_config(path: str) -> "DecoderConfig":
    from armillary.config import DecoderConfig
    from armillary.errors import ConfigError

    try:
        return DecoderConfig.load(path)
    except ConfigError as error:
        if Path(path).name != "config.json" or not Path(path).exists():
            raise
        # The name that checkpoints of other libraries give to a file in a form of their own.
        raise ConfigError(f"{error}; name a checkpoint by its directory") from error
