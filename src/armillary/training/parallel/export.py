"""A trained model written by all ranks: each assembles and writes its share of the tensors.

One tensor is whole at a time, on each rank; no rank ever holds the model. The ranks write into one
directory, so it must be on a file system that they share.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.tensor import DTensor

from armillary.checkpoints import save_armillary, write_huggingface
from armillary.checkpoints.families import Family
from armillary.checkpoints.tensors import TensorToWrite
from armillary.config import DecoderConfig
from armillary.decoder import Decoder
from armillary.files import Writer, sha256, write_directory_atomically
from armillary.training.ranks import gather, n_ranks, on_every_rank, on_first_rank, rank
from armillary.weights import ENCODINGS

if TYPE_CHECKING:
    from armillary.tokenizer import Tokenizer


def export_huggingface(
    directory: Path,
    decoder: Decoder,
    tokenizer: "Tokenizer | None" = None,
    generation: Mapping[str, Any] | None = None,
    *,
    config: DecoderConfig | None = None,
    family: Family | None = None,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int | None = None,
) -> None:
    """`write_huggingface` on all ranks at once; weights in `dtype`, or as they are.

    `config` is written in place of the decoder's own, such as one without dropout.
    To be called by every rank. Raises UserError for a decoder that the family cannot express, and
    when a rank cannot write; then all of them end so, and nothing is left.
    """
    assembly = _Assembly(decoder, dtype)
    write_huggingface(
        directory,
        config or decoder.config,
        assembly.tensors(),
        tokenizer,
        generation,
        family=family,
        max_shard_bytes=max_shard_bytes,
        writer=_writer(assembly),
    )


def export_armillary(
    directory: Path,
    decoder: Decoder,
    tokenizer: "Tokenizer | None" = None,
    generation: Mapping[str, Any] | None = None,
    *,
    config: DecoderConfig | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """`save_armillary` on all ranks at once, for any decoder; otherwise as `export_huggingface`."""
    assembly = _Assembly(decoder, dtype)
    save_armillary(
        directory,
        config or decoder.config,
        assembly.tensors(),
        tokenizer,
        generation,
        writer=_writer(assembly),
    )


class _Assembly:
    """The tensors of a decoder, made whole one after the other on all ranks in step.

    A rank that is asked for a tensor goes through those before it, which others write.
    """

    def __init__(self, decoder: Decoder, dtype: torch.dtype | None) -> None:
        self.dtype = dtype
        # A file has wide numbers first: in another order ranks would wait for each other's tensors.
        named = sorted(decoder.named_parameters(), key=lambda pair: -self._type(pair[1]).itemsize)
        self.named = dict(named)
        self.left = iter(self.named.items())

    def _type(self, parameter: Tensor) -> torch.dtype:
        return parameter.dtype if self.dtype is None else self.dtype

    def tensors(self) -> list[TensorToWrite]:
        """What a writer needs of each; the bytes are there when it asks for them in this order."""
        return [
            TensorToWrite(
                name, ENCODINGS[self._type(parameter)], tuple(parameter.shape), self._chunks(name)
            )
            for name, parameter in self.named.items()
        ]

    def _chunks(self, name: str) -> Iterator[NDArray[np.uint8]]:
        for other, parameter in self.left:
            tensor = _whole(parameter)
            if other == name:
                data = tensor.to("cpu", self._type(parameter)).contiguous()
                yield data.reshape(-1).view(torch.uint8).numpy()
                return
        raise ValueError(f"{name} was asked for after a later tensor")

    def finish(self) -> None:
        """Go through what is left, in which the others wait for this rank, failed or not."""
        for _name, parameter in self.left:
            _whole(parameter)


@torch.no_grad()
def _whole(parameter: Tensor) -> Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach()


def _writer(assembly: _Assembly) -> Writer:
    """This rank among those that write; what one of them raises ends all."""

    @contextmanager
    def directory(path: Path) -> Iterator[Path]:
        checksums: dict[str, str] = {}
        failure: Exception | None = None

        def report() -> None:
            if failure is not None:
                raise failure

        with ExitStack() as stack:
            partial = on_first_rank(
                lambda: stack.enter_context(write_directory_atomically(path, checksums))
            )
            try:
                yield partial
            except Exception as error:
                failure = error
            assembly.finish()
            on_every_rank(report)
            for of_rank in gather(on_every_rank(lambda: _some_checksums(partial))):
                checksums.update(of_rank)
            on_first_rank(stack.close)

    return Writer(rank(), n_ranks(), directory)


def _some_checksums(directory: Path) -> dict[str, str]:
    """Of this rank's share of the files, whoever wrote them."""
    files = sorted(path.name for path in directory.iterdir())
    return {name: sha256(directory / name) for name in files[rank() :: n_ranks()]}
