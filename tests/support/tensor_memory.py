"""How much memory tensors take while something runs, counted operation by operation.

Deterministic, unlike the process's own size: what an operation gives back is counted from then on
until its storage is freed. What a kernel uses inside is not seen.
"""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class TensorMemory(TorchDispatchMode):
    """A context whose `peak` is the most bytes that tensors made in it held at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._held = 0
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()

    def know(self, tensors: Iterable[torch.Tensor]) -> None:
        """Leave out tensors that were there before: operations give views of them."""
        self._known.update(tensor.untyped_storage() for tensor in tensors)

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._count(leaf.untyped_storage())
        self.peak = max(self.peak, self._held)
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage not in self._known:
            self._known.add(storage)
            self._held += storage.nbytes()
            weakref.finalize(storage, self._free, storage.nbytes())

    def _free(self, size: int) -> None:
        self._held -= size
