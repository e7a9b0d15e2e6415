"""The activation of a feed-forward network, alone or times the other half of a gated unit."""

from armillary.engine.kernel import Address, Kernel, Live, Number, Size, kernel
from armillary.engine.kernels.common import floats, share
from armillary.engine.kernels.elementary import ACTIVATIONS


def activation(name: str) -> Kernel:
    """gate ← act(gate), times `up` where there is one. Shared out by columns, as products are.

    A gated unit is act(min(gate, limit)) · (up between ±limit + up_offset).
    """
    act = ACTIVATIONS[name]

    def activation(
        thread: int,
        threads: int,
        gate: Address,
        up: Address,
        stride: Size,
        n: Size,
        limit: Number,
        up_offset: Number,
        rows: Live,
    ) -> None:
        first, last = share(n, thread, threads)
        for row in range(rows):
            g, u = floats(gate + row * stride), floats(up + row * stride)
            if up:
                for i in range(first, last):
                    bounded = max(min(u[i], limit), -limit)
                    g[i] = act(min(g[i], limit)) * (bounded + up_offset)
            else:
                for i in range(first, last):
                    g[i] = act(g[i])

    return kernel(activation, name)
