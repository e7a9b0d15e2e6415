"""Named arrays ↔ a decoder's parameters.

Every parameter is filled once, by the tensor of its own name and shape; anything else is an error.
Knows the names and shapes that the decoder declares, and nothing of where the arrays come from.
"""

from collections.abc import Callable, Iterator, Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from armillary.checkpoints.parameters import check_filled
from armillary.checkpoints.tensors import StoredTensor, TensorToWrite
from armillary.config import DecoderConfig
from armillary.decoder import Decoder

ENCODINGS: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
}


def build_filled(
    config: DecoderConfig,
    tensors: Mapping[str, StoredTensor],
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    allow_missing: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Decoder:
    """A decoder whose parameters are the stored tensors, brought to `dtype`.

    Beside the decoder itself only about a MiB is held at a time. Parameters that no tensor fills
    are an error, or with `allow_missing` NaN, so that nobody takes them for weights. `progress`
    is called with the parameters filled and their count.
    Raises CheckpointError for missing, extra or misshapen tensors, naming them.
    """
    with torch.device("meta"):
        decoder = Decoder(config)
    wanted = dict(decoder.named_parameters())
    check_filled(
        {name: tuple(parameter.shape) for name, parameter in wanted.items()},
        tensors,
        allow_missing=allow_missing,
    )
    for done, (name, parameter) in enumerate(wanted.items(), start=1):
        if name in tensors:
            filled = read(tensors[name], dtype, device)
        else:
            filled = torch.full(parameter.shape, float("nan"), dtype=dtype, device=device)
        module, _, attribute = name.rpartition(".")
        setattr(decoder.get_submodule(module), attribute, nn.Parameter(filled))
        if progress is not None:
            progress(done, len(wanted))
    return decoder.eval()


def read(tensor: StoredTensor, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """A stored tensor in another type, converted by blocks of rows.

    Converting is left to NumPy: torch would wake its threads for every block.
    """
    result = torch.empty(tensor.shape, dtype=dtype, device="cpu")
    target = result.reshape(-1).view(torch.uint8).numpy()
    start = 0
    for chunk in tensor.encoded(ENCODINGS[dtype]):
        target[start : start + chunk.nbytes] = chunk
        start += chunk.nbytes
    return result.to(device)


def to_write(decoder: Decoder) -> Iterator[TensorToWrite]:
    """What a writer needs of each parameter, in its own type; bytes are made when due."""
    for name, parameter in decoder.named_parameters():
        shape = tuple(parameter.shape)
        yield TensorToWrite(name, ENCODINGS[parameter.dtype], shape, _chunks(parameter))


def _chunks(parameter: Tensor) -> Iterator[NDArray[np.uint8]]:
    data = parameter.detach().cpu().contiguous()
    yield data.reshape(-1).view(torch.uint8).numpy()
