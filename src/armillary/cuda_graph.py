"""A step that is launched again and again on a GPU, recorded so that Python is out of the way.

One token's step is hundreds of short kernels, which a GPU ends sooner than Python can launch them.
A CUDA graph launches them all at once. It is taken rather than `torch.compile` with
mode="reduce-overhead", which records the same graph but compiles first: a graph costs two steps
instead of a minute, needs no C compiler and no Triton, and computes what eager torch computes.

Source: PyTorch documentation, "CUDA Graphs": tensors that stay where they are, a warm-up on the
stream that records, no waiting for the device.
"""

from collections.abc import Callable

import torch
from torch import Tensor


def recorded(step: Callable[[], Tensor], device: torch.device) -> Callable[[], Tensor]:
    """The step itself, or on a CUDA device one that runs it from a graph after the first time.

    `step` reads and writes tensors that stay where they are, which the caller fills beforehand, and
    never waits for the device. What it gives holds until it is run again.
    """
    return _Recorded(step, device) if device.type == "cuda" else step


class _Recorded:
    """The first run is an ordinary one and warms up, the second is recorded, all later replay it.

    So a step that is soon of no more use, as when texts leave a batch one after the other, costs
    little.
    """

    def __init__(self, step: Callable[[], Tensor], device: torch.device) -> None:
        self._step, self._device = step, device
        # Libraries keep state by stream: what records has to be what was warmed up.
        self._stream: torch.cuda.Stream | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._out: Tensor | None = None

    def __call__(self) -> Tensor:
        with torch.cuda.device(self._device):
            if self._stream is None:
                return self._warm_up()
            if self._graph is None or self._out is None:
                self._graph, self._out = self._record(self._stream)
            self._graph.replay()
            return self._out

    def _warm_up(self) -> Tensor:
        here = torch.cuda.current_stream()
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(here)
        with torch.cuda.stream(stream):
            out = self._step()
        here.wait_stream(stream)
        out.record_stream(here)
        self._stream = stream
        return out

    def _record(self, stream: torch.cuda.Stream) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile: only this one's calls have to be recordable.
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            out = self._step()
        return graph, out
