"""The decoder over weights that stay in their file: each is read when it is used, block by block.

A pass holds the activations and about a MiB of weights, whatever the model. Meant for a few tokens:
each pass reads the whole file once.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from armillary.checkpoints.tensors import StoredTensor
from armillary.config import DecoderConfig
from armillary.decoder import Decoder

Rows = Callable[[StoredTensor, int, int], NDArray[np.float32]]
"""Rows start ≤ i < stop of a tensor, as they are computed with."""


def stored_rows(tensor: StoredTensor, start: int, stop: int) -> NDArray[np.float32]:
    """As they are stored."""
    return tensor.rows(start, stop)


@torch.no_grad()
def logits(
    config: DecoderConfig,
    tensors: Mapping[str, StoredTensor],
    tokens: Sequence[int],
    positions: Sequence[int],
    *,
    length: int,
    rows: Rows = stored_rows,
) -> NDArray[np.float32]:
    """Logits of tokens at positions, which may be far apart, in a text of `length`: (T, V).

    Computed in float32. Raises KeyError for a parameter without a tensor.
    """
    with torch.device("meta"):
        decoder = Decoder(config).eval()
    reading = _Reading(
        {id(parameter): tensors[name] for name, parameter in decoder.named_parameters()}, rows
    )
    with reading:
        found: Tensor = decoder(
            torch.tensor([list(tokens)]),
            positions=torch.tensor(list(positions)),
            rotary_length=length,
        )
    return np.asarray(found[0].numpy())


class _Reading(TorchFunctionMode):
    """A context in which operations on parameters without memory read them from their tensors.

    `stored` has the tensor of each parameter by its `id`. Products and tables, the large ones, are
    read by blocks; what else is asked of a parameter gets it whole.
    """

    def __init__(self, stored: Mapping[int, StoredTensor], rows: Rows) -> None:
        super().__init__()
        self._stored, self._rows = stored, rows

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        del types
        given = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name == "__get__":  # its shape or type, which it has
            return func(*args, **given)
        second = self._stored.get(id(args[1])) if len(args) > 1 else None
        if name == "linear" and second is not None:
            bias = args[2] if len(args) > 2 else given.get("bias")
            return self._linear(args[0], second, self._filled(bias))
        if name == "embedding" and second is not None and not given.get("max_norm"):
            return self._embedding(args[0], second)
        first = self._stored.get(id(args[0])) if args else None
        if name == "__getitem__" and first is not None and type(args[1]) is int:
            return torch.from_numpy(self._rows(first, args[1], args[1] + 1)[0])
        return func(
            *(self._filled(value) for value in args),
            **{key: self._filled(value) for key, value in given.items()},
        )

    def _linear(self, x: Tensor, weight: StoredTensor, bias: Tensor | None) -> Tensor:
        """x (..., d) → (..., n), some rows of the weight (n, d) at a time."""
        out = x.new_empty(*x.shape[:-1], weight.shape[0])
        for start, stop in weight.row_blocks():
            part = torch.from_numpy(self._rows(weight, start, stop))
            out[..., start:stop] = F.linear(x, part)
        weight.release()
        return out if bias is None else out + bias

    def _embedding(self, tokens: Tensor, table: StoredTensor) -> Tensor:
        """tokens (...) → their rows, (..., d)."""
        found = [self._rows(table, token, token + 1) for token in tokens.flatten().tolist()]
        return torch.from_numpy(np.concatenate(found)).view(*tokens.shape, -1)

    def _filled(self, value: Any) -> Any:
        """A parameter as numbers; anything else as it is."""
        tensor = self._stored.get(id(value))
        if tensor is None:
            return value
        parts = [self._rows(tensor, start, stop) for start, stop in tensor.row_blocks()]
        tensor.release()
        return torch.from_numpy(np.concatenate(parts).reshape(tensor.shape))
