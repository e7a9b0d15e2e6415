"""How much memory tensors take while something runs, counted operation by operation.

Deterministic, unlike the process's own size: what an operation gives back is counted from then on
until its storage is freed or emptied. What a kernel uses inside is not seen.
"""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class TensorMemory(TorchDispatchMode):
    """A context whose `peak` is the most bytes that tensors made in it held at one time.

    `before` are tensors that are there already, and of which operations give views. Of a DTensor
    it is this process's part that counts.
    """

    def __init__(self, before: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.peak = 0
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()
        self._before = weakref.WeakSet(map(_storage, before))

    @property
    def held(self) -> int:
        """Bytes that these tensors hold now."""
        return sum(storage.nbytes() for storage in self._known)

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if not isinstance(leaf, torch.Tensor) or leaf.device.type == "meta":
                continue
            if _storage(leaf) not in self._before:
                self._known.add(_storage(leaf))
        self.peak = max(self.peak, self.held)
        return result


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()
