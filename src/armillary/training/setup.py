"""A run's settings → what the loop works on: tokenizer, batches, and a decoder with its weights.

Everything that a run can be refused for, but for a machine that is too small, is found here, before
the first step.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from armillary.checkpoints import Checkpoint, open_checkpoint
from armillary.checkpoints.locate import locate
from armillary.checkpoints.tokenizers import open_tokenizer
from armillary.config import DecoderConfig, MixtureConfig
from armillary.data import PackedBatches, TokenDataset, prepare
from armillary.data.bpe import train_bpe
from armillary.data.mixture import Mixture
from armillary.data.preparation import Progress as PreparationProgress
from armillary.data.prepared import VALIDATION, read_prepared
from armillary.data.skipping import Skip
from armillary.data.sources import find_sources
from armillary.data.texts import Texts
from armillary.decoder import Decoder
from armillary.errors import ConfigError, UserError
from armillary.files import write_directory_atomically
from armillary.tokenizer import Tokenizer
from armillary.training.lora import add_lora
from armillary.training.parallel.ranks import Ranks
from armillary.training.precision import Compute
from armillary.training.run_config import RunConfig
from armillary.weights import build_filled, read

TOKENIZER, DATA = "tokenizer", "data"
Weights = Callable[[str], Tensor]
Transferred = Callable[[str, int, int | None], None]


@dataclass(frozen=True)
class Progress:
    """Whom to tell how far the preparation of a run is."""

    transferred: Transferred | None = None
    prepared: Callable[[PreparationProgress], None] | None = None


@dataclass(frozen=True)
class Opened:
    """What is known before any data is prepared: the decoder, and the checkpoint it comes from."""

    decoder: DecoderConfig
    source: Checkpoint | None


@dataclass(frozen=True)
class Work:
    """What a run works on.

    `weights` gives the decoder's where it is on the meta device (see `parallelise`). `generation`
    is what the checkpoint that is gone on from says of sampling and end tokens.
    """

    decoder: Decoder
    weights: Weights | None
    tokenizer: Tokenizer
    train: PackedBatches
    validation: PackedBatches | None
    generation: Mapping[str, Any]
    notices: tuple[str, ...]


def open_model(config: RunConfig, progress: Progress | None = None) -> Opened:
    """Find out which decoder is to be trained. Raises UserError in one line."""
    told = (progress or Progress()).transferred
    model = config.model
    source: Checkpoint | None = None
    if model.checkpoint is not None:
        source = open_checkpoint(locate(model.checkpoint, progress=told))
        decoder = source.config
    elif model.decoder is not None:
        decoder = DecoderConfig.load(model.decoder)
    else:
        assert model.uniform is not None  # the settings hold that there is one of the three
        decoder = DecoderConfig.uniform(
            vocab_size=_vocab_size(config, told),
            max_positions=config.data.length,
            **model.uniform.model_dump(),
        )
    if model.dropout is not None:
        decoder = with_dropout(decoder, model.dropout)
    _check_balance(config, decoder)
    adapters = config.adapters()
    if adapters is not None:  # patterns that match nothing are told before data is prepared
        with torch.device("meta"):
            add_lora(Decoder(decoder), adapters)
    return Opened(decoder, source)


def _check_balance(config: RunConfig, decoder: DecoderConfig) -> None:
    own = config.train
    mixtures = [w for w in (x.feedforward for x in decoder.layers) if isinstance(w, MixtureConfig)]
    if own.balance_loss and not mixtures:
        raise ConfigError(
            f"train.balance_loss is {own.balance_loss}, but the model has no experts; set it to 0"
        )
    if own.balance_rate and not any(mixture.router.selection_bias for mixture in mixtures):
        raise ConfigError(
            f"train.balance_rate is {own.balance_rate}, but no router of the model has a "
            "selection_bias to move; set it to 0, or balance_loss in its place"
        )


def _vocab_size(config: RunConfig, told: Transferred | None) -> int:
    """The vocabulary that a new decoder is made for."""
    data = config.data
    if data.prepared is not None:
        return read_prepared(Path(data.prepared)).vocab_size
    if data.vocab_size is not None:
        return data.vocab_size
    assert data.tokenizer is not None  # the settings hold that there is one of the three
    return open_tokenizer(data.tokenizer, progress=told).vocab_size


def with_dropout(decoder: DecoderConfig, dropout: float) -> DecoderConfig:
    """The same decoder with dropout on embeddings and on what its layers add."""
    layers = tuple(layer.model_copy(update={"dropout": dropout}) for layer in decoder.layers)
    return decoder.model_copy(update={"layers": layers, "input_dropout": dropout})


def prepare_run(
    config: RunConfig, opened: Opened, ranks: Ranks, progress: Progress | None = None
) -> Work:
    """Get everything ready; the main process prepares data, the others wait and open it.

    Raises UserError in one line for what cannot be found, read, used or brought together.
    """
    notices = [] if opened.source is None else list(opened.source.notices)
    tokenizer, directory = _text(config, opened.source, ranks, progress or Progress())
    if tokenizer.vocab_size > opened.decoder.vocab_size:
        raise UserError(
            f"the data's tokens go up to {tokenizer.vocab_size - 1}, the model knows "
            f"{opened.decoder.vocab_size}; use the model's own tokenizer, or a larger vocabulary"
        )
    reached = config.data.length if config.data.skip is None else config.data.skip.to
    if reached > opened.decoder.max_positions:
        notices.append(
            f"rows reach {reached} positions, beyond the model's window of "
            f"{opened.decoder.max_positions}"
        )
    train, validation = _batches(config, directory, tokenizer, ranks)
    if validation is None:
        notices.append(
            "no document is held out, so there is no validation; "
            "prepare with a larger share of validation"
        )
    decoder, weights = _decoder(config, opened, ranks)
    return Work(
        decoder=decoder,
        weights=weights,
        tokenizer=tokenizer,
        train=train,
        validation=validation,
        generation={} if opened.source is None else dict(opened.source.generation),
        notices=tuple(notices),
    )


def _text(
    config: RunConfig, source: Checkpoint | None, ranks: Ranks, progress: Progress
) -> tuple[Tokenizer, Path]:
    """The tokenizer, and the directory of prepared data."""
    data, out = config.data, Path(config.out)
    if data.prepared is not None:
        directory = Path(data.prepared)
        known = _tokenizer(config, source, progress)
        return known or TokenDataset(directory, tokenizer=known).tokenizer, directory
    directory = out / DATA
    # The others find what the main process has made.
    if not ranks.is_main:
        ranks.barrier()
    tokenizer = _tokenizer(config, source, progress)
    assert tokenizer is not None  # the settings hold that sources come with one
    prepare(
        data.sources,
        tokenizer,
        directory,
        field=data.field,
        format=data.format,
        validation=data.validation,
        seed=config.seed,
        end_token=data.end_token,
        workers=data.workers,
        progress=progress.prepared if ranks.is_main else None,
    )
    if ranks.is_main:
        ranks.barrier()
    return tokenizer, directory


def _tokenizer(
    config: RunConfig, source: Checkpoint | None, progress: Progress
) -> Tokenizer | None:
    data = config.data
    if data.vocab_size is not None:
        return _learned_tokenizer(config, data.vocab_size, progress)
    if data.tokenizer is not None:
        return open_tokenizer(data.tokenizer, progress=progress.transferred)
    if source is not None and source.tokenizer is None and data.prepared is None:
        raise UserError(f"{source.source}: has no tokenizer; name one as data.tokenizer")
    return None if source is None else source.tokenizer


def _learned_tokenizer(config: RunConfig, size: int, progress: Progress) -> Tokenizer:
    """A vocabulary learned from the sources, once: a run that goes on finds it."""
    directory, data = Path(config.out) / TOKENIZER, config.data
    if (directory / "tokenizer.json").is_file():
        return Tokenizer.from_file(directory / "tokenizer.json")
    files = find_sources(data.sources, _plain_format(config))
    told = progress.transferred
    texts = Texts(
        files,
        field=data.field or "text",
        progress=None if told is None else lambda done, total: told("vocabulary", done, total),
    )
    tokenizer = train_bpe(texts, size)
    directory.parent.mkdir(parents=True, exist_ok=True)
    with write_directory_atomically(directory) as partial:
        tokenizer.save(partial)
    return tokenizer


def _batches(
    config: RunConfig, directory: Path, tokenizer: Tokenizer, ranks: Ranks
) -> tuple[PackedBatches, PackedBatches | None]:
    data = config.data

    def batches(
        split: str, rows: int, mixture: Mixture | None = None, skip: Skip | None = None
    ) -> PackedBatches:
        return PackedBatches(
            TokenDataset(directory, split, tokenizer=tokenizer),
            length=data.length,
            batch_size=rows,
            seed=config.seed,
            mode=data.mode,
            mixture=mixture,
            skip=skip,
            rank=ranks.data_rank,
            ranks=ranks.data_ranks,
        )

    train = batches("train", config.train.batch_size, config.mixture(), config.skip())
    if VALIDATION not in read_prepared(directory).splits:
        return train, None
    return train, batches(VALIDATION, config.validation.batch_size * ranks.data_ranks)


def _decoder(config: RunConfig, opened: Opened, ranks: Ranks) -> tuple[Decoder, Weights | None]:
    """The decoder with float32 weights, read or drawn from the seed.

    Of several processes none holds all of them: it is on the meta device then, and with it comes
    what gives each weight. Adapters stand beside weights that are there.
    """
    source, std = opened.source, config.model.init_std
    generator = torch.Generator(ranks.device).manual_seed(config.seed)
    if source is not None and (ranks.world == 1 or config.lora is not None):
        decoder = build_filled(opened.decoder, source.tensors, device=ranks.device)
        return decoder.train(), None
    with torch.device("meta"):
        decoder = Decoder(opened.decoder).train()
    if ranks.world == 1 or config.lora is not None:
        decoder = decoder.to_empty(device=ranks.device)
        decoder.initialise(std, generator)
        return decoder, None
    if source is not None:
        return decoder, lambda name: read(source.tensors[name], torch.float32)
    shapes = {name: parameter.shape for name, parameter in decoder.named_parameters()}

    def drawn(name: str) -> Tensor:
        whole = torch.empty(shapes[name], device=ranks.device)
        decoder.draw(name, whole, std, generator)
        return whole

    return decoder, drawn


def device_of(config: RunConfig) -> str:
    """The type of device that a run computes on. Raises UserError for one that is not there."""
    name = config.train.device
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return torch.zeros(1, device=name).device.type
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0].partition(". ")[0]
        raise UserError(f"train.device: {name!r} cannot be used: {reason}") from error


def precision_of(config: RunConfig, device: str) -> Compute:
    """The type that products are computed in."""
    asked = config.train.precision
    if asked == "auto":
        return "bfloat16" if _is_built_for_bfloat16(device) else "float32"
    return asked


def _is_built_for_bfloat16(device: str) -> bool:
    if device == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    features = torch.cpu.get_capabilities()
    return any(features.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16"))


def _plain_format(config: RunConfig) -> Literal["auto", "text", "jsonl", "parquet"]:
    """The format of sources that hold plain text."""
    if config.data.format == "chat":
        raise UserError("data.vocab_size: a vocabulary has no chat template; name a tokenizer")
    return config.data.format
